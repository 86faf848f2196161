"""`trieton export`: a Hugging Face checkpoint on disk becomes a retriever."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, err, out, print_json

if TYPE_CHECKING:
    from torch import nn

    from trieton_builder.export import Export


@app.command()
@clean_errors
def export(
    checkpoint: Path = typer.Argument(..., help="Checkpoint folder: T5, GPT-2, Llama, Mistral, Qwen2 or Qwen3."),
    token_map: Path = typer.Option(..., help="JSON: the tokens of each level's codes, end token, prompt template."),
    to: Path = typer.Option(..., "--out", "-o", help="Directory of the retriever."),
    max_items: int | None = typer.Option(None, min=1, help="Newest items of a history in a prompt."),
    max_length: int | None = typer.Option(None, min=1, help="Prompt tokens at most; by default what the items need."),
    normalise: str = typer.Option("vocabulary", help="Log-probabilities over the whole vocabulary, or over the level."),
    dtype: str | None = typer.Option(None, help="float32 (the default), float16 or bfloat16."),
    engine: str = typer.Option("onnx", help="onnx, torch (programs of torch.export), or optimum (take its graphs)."),
    check: bool = typer.Option(True, help="Compare the graphs with PyTorch on random prompts."),
    check_with: Path | None = typer.Option(
        None, help="JSON Lines with prompts of your own (history, input_ids or both) to compare the graphs on."
    ),
    compare_with: Path | None = typer.Option(
        None, help="With --engine optimum: the checkpoint that the graphs were made from, to compare them with."
    ),
    overwrite: bool = typer.Option(False, help="Replace the directory where it exists."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Export a checkpoint to two graphs that read the prompt once for all beams, and compare them with PyTorch.

    Prefix, suffix and end token come from the checkpoint (BOS, EOS) where the token map does not declare them; what was
    taken is printed. With --engine optimum the folder already holds graphs that Optimum exported; they are taken as
    they are.
    """
    from trieton_builder.bundle.protected import refuse_inside
    from trieton_builder.export.declaration import complete, read_declaration
    from trieton_builder.export.said import read_said

    refuse_inside(to)
    declaration = read_declaration(token_map, max_items=max_items)
    _refuse_options_of_another_engine(engine, dtype, check, compare_with, check_with)
    contract = complete(declaration, read_said(checkpoint), normalise=normalise, max_length=max_length)
    prompt = contract.prompt
    shared: dict[str, Any] = {
        "max_length": max_length,
        "normalise": normalise,
        "check_with": check_with,
        "checkpoint": contract.checkpoint,
        "overwrite": overwrite,
    }
    remarks = list(contract.remarks)
    if engine == "optimum":
        from trieton_builder.export.optimum import adopt_optimum

        with err.status("copying and trying the graphs ..."):
            made = adopt_optimum(checkpoint, to, prompt, model=compare_with and _load(compare_with), **shared)
    else:
        from trieton_builder.export import export_retriever
        from trieton_builder.export.weights import left_unread, weight_files

        remarks += [f"{name}: not read" for name in left_unread(checkpoint, weight_files(checkpoint))]
        with err.status("loading the checkpoint ..."):
            model = _load(checkpoint)
        with err.status("exporting and comparing ..."):
            made = export_retriever(model, to, prompt, dtype=dtype or "float32", engine=engine, check=check, **shared)
    size = sum(file.stat().st_size for file in to.iterdir())
    remarks += made.spec.remarks()
    for remark in remarks:
        err.print(f"remark: {remark}")
    if as_json:
        print_json(
            {
                "out": str(to),
                "bytes": size,
                "largest_difference": made.largest_difference,
                "by_company": made.by_company,
                "check_with": made.agreement and asdict(made.agreement),
                "origins": contract.origins,
                "remarks": remarks,
                "retriever": made.spec.to_json(),
            }
        )
        return
    _print(made, contract.origins, f"{to}: {size / 1e6:,.1f} MB")


def _refuse_options_of_another_engine(
    engine: str, dtype: str | None, check: bool, compare_with: Path | None, check_with: Path | None
) -> None:
    if engine == "optimum":
        if dtype is not None or not check:
            raise ValueError(
                "--dtype, --no-check: not for --engine optimum, whose graphs are taken and tried as they are"
            )
        if check_with is not None and compare_with is None:
            raise ValueError(
                "--check-with: with --engine optimum it goes with --compare-with, the model to compare with"
            )
    elif compare_with is not None:
        raise ValueError("--compare-with: only for --engine optimum; other exports are compared with their checkpoint")


def _load(checkpoint: Path) -> "nn.Module":
    from trieton_builder.export import FAMILIES
    from trieton_builder.export.checkpoint import load_checkpoint

    return load_checkpoint(checkpoint, FAMILIES)


def _print(made: "Export", origins: dict[str, str], title: str) -> None:
    from trieton_builder.report.retriever import retriever_facts

    lines = [title, *(f"{name:<12} {text}" for name, text in retriever_facts(made.spec, origins))]
    if made.largest_difference is not None:
        lines.append(f"largest difference of a log-probability from PyTorch: {made.largest_difference:.1e}")
    if made.by_company is not None:
        lines.append(f"largest difference between a prompt alone and among longer ones: {made.by_company:.1e}")
    if made.agreement is not None:
        found = made.agreement
        lines.append(
            f"on your {found.prompts:,} prompts: largest difference {found.largest_difference:.1e}, equal lists of ten "
            f"{found.equal_lists:,} of {found.prompts:,} ({found.equal_lists / found.prompts:.1%})"
        )
        if found.unchecked:
            lines.append(f"{found.unchecked:,} of them have no history, so that the template was not checked by them")
    out.print("\n".join(lines), soft_wrap=True)
