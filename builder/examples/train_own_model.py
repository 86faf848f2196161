"""Train a small GPT-2 on a table of interactions and save everything that `trieton export` and `trieton build` take.

    .venv/bin/python builder/examples/train_own_model.py own

The folder may hold your own items.parquet (item_id, code_0, code_1, ... and boolean columns) and interactions.parquet
(person, item_id, in the order of time). Where they are missing, a shop of 400 items is made up.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import polars as pl
import torch
from transformers import GPT2Config, GPT2LMHeadModel

PAD, BOS, FIRST = 0, 1, 2  # tokens; behind them the codes of level 0, then those of level 1, ...
MAX_ITEMS = 8  # newest items of a history in a prompt


def make_up_a_shop(folder: Path) -> None:
    """400 items on codes 8 x 8 x 8; people stay near what they bought last."""
    rng = np.random.default_rng(0)
    cells = np.sort(rng.choice(8**3, 400, replace=False))
    codes = {f"code_{level}": cells // 8 ** (2 - level) % 8 for level in range(3)}
    items = {"item_id": np.arange(1, 401), **codes, "in_stock": rng.random(400) < 0.8}
    pl.DataFrame(items).write_parquet(folder / "items.parquet")
    walks = (rng.integers(400, size=(300, 1)) + rng.integers(1, 4, (300, 20)).cumsum(1)) % 400
    table = pl.DataFrame({"person": np.repeat(np.arange(300), 20), "item_id": walks.ravel() + 1})
    table.write_parquet(folder / "interactions.parquet")


def train(windows: np.ndarray, vocab_size: int, steps: int) -> GPT2LMHeadModel:
    """Teach every token of the windows, int64 [N, T] with BOS in front, from the tokens before it."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=windows.shape[1], n_embd=64, n_layer=2, n_head=4,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=None,  # the export reads BOS here
    )  # fmt: skip
    model, rng = GPT2LMHeadModel(config), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    for step in range(steps):
        tokens = torch.from_numpy(windows[rng.integers(len(windows), size=64)])
        labels = tokens.masked_fill(tokens == PAD, -100)
        loss = model(input_ids=tokens, attention_mask=(tokens != PAD).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "items.parquet").exists():
        make_up_a_shop(args.folder)
    items = pl.read_parquet(args.folder / "items.parquet")
    bought = pl.read_parquet(args.folder / "interactions.parquet").group_by("person", maintain_order=True).all()

    codes = items.select(pl.col("^code_\\d+$")).to_numpy().astype(np.int64)  # [items, levels]
    sizes = codes.max(axis=0) + 1
    starts = FIRST + np.cumsum(sizes) - sizes
    row_of = dict(zip(items["item_id"], range(len(items)), strict=True))
    windows, samples = [], []
    for history in ([row_of[item] for item in history] for history in bought["item_id"]):
        for end in range(2, len(history) + 1):  # the last item of a window is what the model shall write
            ids = codes[history[max(0, end - 1 - MAX_ITEMS) : end]]
            tokens = [BOS, *(ids + starts).ravel().tolist()]
            windows.append(tokens + [PAD] * (1 + (MAX_ITEMS + 1) * codes.shape[1] - len(tokens)))
        samples.append({"history": ids[:-1].tolist(), "input_ids": tokens[: -codes.shape[1]]})

    train(np.array(windows), int(FIRST + sizes.sum()), args.steps).save_pretrained(args.folder / "checkpoint")
    levels = [{"start": int(start), "size": int(size)} for start, size in zip(starts, sizes, strict=True)]
    declaration = {"token_map": levels, "prompt": {"max_items": MAX_ITEMS}}
    (args.folder / "tokens.json").write_text(json.dumps(declaration))
    (args.folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples[:100]))


if __name__ == "__main__":
    main()
