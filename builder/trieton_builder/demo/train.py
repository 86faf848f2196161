"""Training of the demo's retriever: a small T5 that reads a person's last films and writes the codes of the next."""

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor, nn
from trieton.retriever.session import PromptTemplate, TokenMap

from trieton_builder.catalogue.semantic_ids import SemanticIds
from trieton_builder.demo.movielens import MovieLens
from trieton_builder.export.quiet import no_bars
from trieton_builder.files.whole_directory import whole_directory

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

PAD, START, FIRST_CODE = 0, 1, 2  # tokens; the codes of all levels follow
RECORD = "training.json"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the trained weights besides the data. Steps, never seconds: a clock has no part in it."""

    steps: int = 2000
    batch: int = 64
    history: int = 10
    targets: int = 4  # films after the history that one encoder pass learns from
    d_model: int = 64
    d_kv: int = 16
    heads: int = 4
    d_ff: int = 256
    layers: int = 2
    dropout: float = 0.1
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup: int = 100
    clip: float = 1.0
    seed: int = 0


def demo_prompt(ids: SemanticIds, recipe: Recipe) -> PromptTemplate:
    """The tokens of the last `recipe.history` films, nothing around them."""
    return PromptTemplate(TokenMap.contiguous(ids.codebook_sizes, first=FIRST_CODE), max_items=recipe.history)


def train_retriever(
    data: MovieLens,
    ids: SemanticIds,
    out_dir: str | Path,
    *,
    recipe: Recipe | None = None,
    progress: Progress | None = None,
) -> bool:
    """Train on the training part of `data` and save a Hugging Face checkpoint (safetensors) in `out_dir`.

    A checkpoint that the same data, semantic IDs, recipe and libraries made is kept; another one is replaced.

    Returns:
        Whether it was trained; False where the checkpoint was there.
    """
    recipe, out_dir = recipe or Recipe(), Path(out_dir)
    fingerprint = _fingerprint(data, ids, recipe)
    if _recorded(out_dir) == fingerprint:
        return False
    # One thread: sums come out the same whatever the number of cores, and matrices this small gain little from a second
    # one, which on a busy machine costs ten times the step in waiting.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = _train(data, ids, recipe, progress)
    finally:
        torch.set_num_threads(threads)
    with whole_directory(out_dir, overwrite=True, mark=RECORD) as partial:
        with no_bars():
            model.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps({"fingerprint": fingerprint, "recipe": asdict(recipe)}, indent=1))
    return True


def load_model(folder: str | Path) -> "T5ForConditionalGeneration":
    """The model that `train_retriever` saved, in evaluation mode."""
    from transformers import T5ForConditionalGeneration

    with no_bars():
        return T5ForConditionalGeneration.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()


def new_model(ids: SemanticIds, recipe: Recipe) -> "T5ForConditionalGeneration":
    """The untrained model; its weights depend on torch's random state."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=FIRST_CODE + sum(ids.codebook_sizes),
        d_model=recipe.d_model,
        d_kv=recipe.d_kv,
        d_ff=recipe.d_ff,
        num_layers=recipe.layers,
        num_heads=recipe.heads,
        dropout_rate=recipe.dropout,
        pad_token_id=PAD,
        decoder_start_token_id=START,
        eos_token_id=None,
    )
    return T5ForConditionalGeneration(config)


def _train(data: MovieLens, ids: SemanticIds, recipe: Recipe, progress: Progress | None) -> nn.Module:
    torch.manual_seed(recipe.seed)
    model = new_model(ids, recipe).train()
    optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)

    def rate(step: int) -> float:
        if step < recipe.warmup:
            return (step + 1) / recipe.warmup
        done = (step - recipe.warmup) / max(recipe.steps - recipe.warmup, 1)
        return 0.5 * (1 + float(np.cos(np.pi * done)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    windows = _Windows(data, ids, recipe)
    task = progress.add_task("training", total=recipe.steps, loss="") if progress else None
    for step in range(recipe.steps):
        loss = model_loss(model, *windows.batch(step))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        schedule.step()
        if progress and task is not None:
            progress.update(task, advance=1, description=f"training (loss {loss.item():.2f})")
    return model.eval()


def model_loss(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the targets.

    One encoder pass teaches all targets of its history: their tokens stand in one decoder row, where a block-diagonal
    causal mask keeps each target from seeing the others. Relative positions make that the same as separate rows.

    Args:
        input_ids, attention_mask: int64 [B, S].
        labels: int64 [B, T, L], tokens of T targets; -100 where there is no target.
    """
    count, levels = labels.shape[1:]
    start = torch.full_like(labels[..., :1], START)
    decoder_ids = torch.cat([start, labels[..., :-1].clamp(min=PAD)], dim=-1).flatten(1)
    inside = torch.block_diag(*[torch.ones(levels, levels).tril()] * count).bool()
    mask = torch.zeros(inside.shape).masked_fill(~inside, torch.finfo(torch.float32).min)
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        decoder_input_ids=decoder_ids,
        decoder_attention_mask=mask.expand(len(labels), 1, -1, -1),
        use_cache=False,
    ).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class _Windows:
    """Batches of (history, next films), every place of every training history once per pass, in a shuffled order."""

    def __init__(self, data: MovieLens, ids: SemanticIds, recipe: Recipe):
        prompt = demo_prompt(ids, recipe)
        self.recipe = recipe
        self.tokens = np.stack(  # [num_items, L]
            [prompt.token_map.tokens(level, column) for level, column in enumerate(ids.codes.T)], axis=1
        )
        # All histories in one array, each behind `history` and before `targets` empty places: a window is one slice.
        empty = -1
        parts, starts = [], []
        place = 0
        for history in data.histories:
            parts += [np.full(recipe.history, empty), history, np.full(recipe.targets, empty)]
            starts.append(place + np.arange(1, len(history)))
            place += recipe.history + len(history) + recipe.targets
        self.films = np.concatenate(parts)
        self.starts = np.concatenate(starts)  # first place of each window
        rng = np.random.default_rng(recipe.seed)
        passes = -(-recipe.steps * recipe.batch // len(self.starts))
        self.order = np.concatenate([rng.permutation(len(self.starts)) for _ in range(passes)])

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """input_ids int64 [B, history * L], attention_mask the same, labels int64 [B, targets, L]."""
        recipe = self.recipe
        starts = self.starts[self.order[step * recipe.batch :][: recipe.batch]]
        films = self.films[starts[:, None] + np.arange(recipe.history + recipe.targets)]
        seen, wanted = films[:, : recipe.history], films[:, recipe.history :]
        mask = np.repeat(seen >= 0, self.tokens.shape[1], axis=1)
        input_ids = np.where(mask, self.tokens[seen].reshape(len(films), -1), PAD)
        labels = np.where(wanted[..., None] >= 0, self.tokens[wanted], -100)
        return torch.from_numpy(input_ids), torch.from_numpy(mask.astype(np.int64)), torch.from_numpy(labels)


def _fingerprint(data: MovieLens, ids: SemanticIds, recipe: Recipe) -> str:
    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    digest.update(f"torch {version('torch')}, transformers {version('transformers')}".encode())
    for array in (np.array(ids.codebook_sizes), ids.codes, *data.histories):
        digest.update(np.ascontiguousarray(array, np.int64).tobytes() + b";")
    return digest.hexdigest()


def _recorded(folder: Path) -> str | None:
    try:
        record = json.loads((folder / RECORD).read_text())
        return record["fingerprint"] if (folder / "model.safetensors").is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
