"""`trieton export`: a Hugging Face checkpoint on disk becomes a retriever."""

from pathlib import Path

import typer

from trieton_builder.cli import app
from trieton_builder.cli.common import clean_errors, err, out, print_json


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
    compare_with: Path | None = typer.Option(
        None, help="With --engine optimum: the checkpoint that the graphs were made from, to compare them with."
    ),
    overwrite: bool = typer.Option(False, help="Replace the directory where it exists."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Export a checkpoint to two graphs that read the prompt once for all beams, and compare them with PyTorch.

    With --engine optimum the folder already holds graphs that Optimum exported; they are taken as they are.
    """
    from trieton_builder.bundle.protected import refuse_inside
    from trieton_builder.export import FAMILIES, export_retriever
    from trieton_builder.export.checkpoint import load_checkpoint
    from trieton_builder.export.declaration import read_declaration

    refuse_inside(to)
    prompt = read_declaration(token_map, max_items=max_items)
    if engine == "optimum":
        if dtype is not None or not check:
            raise ValueError(
                "--dtype, --no-check: not for --engine optimum, whose graphs are taken and tried as they are"
            )
        from trieton_builder.export.optimum import adopt_optimum

        with err.status("copying and trying the graphs ..."):
            made = adopt_optimum(
                checkpoint,
                to,
                prompt,
                model=None if compare_with is None else load_checkpoint(compare_with, FAMILIES),
                max_length=max_length,
                normalise=normalise,
                overwrite=overwrite,
            )
    elif compare_with is not None:
        raise ValueError("--compare-with: only for --engine optimum; other exports are compared with their checkpoint")
    else:
        with err.status("loading the checkpoint ..."):
            model = load_checkpoint(checkpoint, FAMILIES)
        with err.status("exporting and comparing ..."):
            made = export_retriever(
                model,
                to,
                prompt,
                max_length=max_length,
                normalise=normalise,
                dtype=dtype or "float32",
                engine=engine,
                check=check,
                overwrite=overwrite,
            )
    size = sum(file.stat().st_size for file in to.iterdir())
    if as_json:
        print_json(
            {
                "out": str(to),
                "bytes": size,
                "largest_difference": made.largest_difference,
                "retriever": made.spec.to_json(),
            }
        )
        return
    levels = " x ".join(map(str, made.spec.token_map.sizes))
    out.print(f"{to}: {made.spec.family}, {made.spec.dtype}, {size / 1e6:,.1f} MB, codes {levels}")
    out.print(f"prompts of up to {made.spec.max_length} tokens, vocabulary {made.spec.vocab_size}")
    if made.largest_difference is not None:
        out.print(f"largest difference of a log-probability from PyTorch: {made.largest_difference:.1e}")
    out.print(f"fingerprint {made.spec.fingerprint}")
