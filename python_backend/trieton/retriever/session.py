"""The exported retriever behind one small protocol: prefill a batch of prompts, then decode level by level.

    retriever/prefill.onnx    prompt -> keys/values of the prompt and the logits of level 0
    retriever/decode.onnx     one token per beam -> logits of the next level and the grown suffix
    retriever/retriever.json  the spec: vocabulary, token map, prompt template, engine, fingerprint

Beams are the query axis of the attention over the prompt, so the prompt's keys/values stand once per request whatever
the beam width; only the suffix, a handful of tokens, follows the beams when they are reordered.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trieton.retriever.bls import BlsEngine
from trieton.retriever.onnx import OnnxEngine
from trieton.retriever.optimum import OptimumEngine
from trieton.retriever.spec import PromptTemplate, RetrieverSpec, TokenMap

__all__ = ["Engine", "PromptTemplate", "Retriever", "RetrieverSpec", "Session", "TokenMap"]


class Engine(Protocol):
    """What runs the two graphs. `state` is the engine's own: the keys/values of one batch."""

    def prefill(
        self, input_ids: np.ndarray, attention_mask: np.ndarray, level_tokens: np.ndarray
    ) -> tuple[Any, Any, Any]:
        """int64 [B, S], int64 [B, S], int64 [W] -> logits float32 [B, 1, W], log_z float32 [B, 1], state."""

    def decode(self, state: Any, input_ids: Any, parents: Any, level_tokens: np.ndarray) -> tuple[Any, Any]:
        """int64 [B, M], int64 [B, M], int64 [W] -> logits float32 [B, M, W], log_z float32 [B, M]; grows `state`."""

    def beams(self, table: np.ndarray, codes: Any, parents: Any) -> tuple[Any, Any]:
        """What `decode` takes, from a kernel's codes and parents [B, M]: `table[codes]` and parents, -1 becoming 0."""


class Retriever:
    """A retriever that is ready to run. Safe to use from several threads; each `Session` belongs to one."""

    def __init__(self, spec: RetrieverSpec, engine: Engine):
        self.spec = spec
        self.engine = engine
        self.columns = spec.token_map.columns

    @classmethod
    def open(cls, folder: str | Path, *, threads: int | None = None, device: str | None = None) -> "Retriever":
        """Load the retriever that `trieton export` wrote.

        Args:
            threads: threads of one operator on the CPU, at best cores / instances; None lets the engine choose.
            device: "cpu" or "cuda"; None takes the accelerator where the engine can use one.

        Raises:
            ValueError: the folder does not hold a usable retriever; names the file.
        """
        folder = Path(folder)
        spec = RetrieverSpec.load(folder)
        if spec.engine == "torch":
            from trieton.retriever.torch_export import (
                TorchEngine,  # torch costs seconds to import and ONNX Runtime needs none
            )

            return cls(spec, TorchEngine.open(folder, threads=threads, device=device))
        if spec.engine == "bls":
            return cls(spec, BlsEngine(folder))
        if spec.engine == "optimum":
            return cls(spec, OptimumEngine(folder, normalise=spec.normalise, threads=threads, device=device))
        return cls(spec, OnnxEngine(folder, threads=threads, device=device))

    def start(self, prompts: Sequence[np.ndarray]) -> "Session":
        """Prefill a batch of prompts, each int [S_b] of any length up to `spec.max_length`.

        Raises:
            ValueError: names the request whose prompt is empty, too long or has a token outside the vocabulary.
        """
        return Session(self, *self.padded(prompts))

    def padded(self, prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Prompts of any lengths as one batch: input_ids and attention_mask, int64 [B, S]. Raises as `start` does."""
        rows = [self.spec.check_prompt(prompt, f"request {b}") for b, prompt in enumerate(prompts)]
        if not rows:
            raise ValueError("prompts: expected at least one, got none")
        input_ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        attention_mask = np.zeros_like(input_ids)
        for b, row in enumerate(rows):
            input_ids[b, : len(row)] = row
            attention_mask[b, : len(row)] = 1
        return input_ids, attention_mask


class Session:
    """One batch on its way down the levels: the `next_logits` of `trieton.search.beam.beam_search`."""

    def __init__(self, retriever: Retriever, input_ids: np.ndarray, attention_mask: np.ndarray):
        self._retriever, self._engine, self._columns = retriever, retriever.engine, retriever.columns
        self._input_ids, self._attention_mask = input_ids, attention_mask
        self._level = 0
        *self._first, self._state = self._engine.prefill(input_ids, attention_mask, self._columns[0])

    def __call__(self, level: int, codes: Any, parents: Any) -> tuple[Any, Any]:
        """Logits of `level` for every beam. Levels are asked for in order, each once.

        Args:
            codes: int [B, M'], what each beam chose at the level before; -1 for a dead beam; None at level 0.
            parents: int [B, M'], its place among the beams before; -1 for a dead beam; None at level 0.

        Returns:
            logits float32 [B, M', W] over the codes of the level, with one more column, the end code's, at every level
            but the first where the retriever has an end token; and log_z float32 [B, M'], the log-normaliser of the
            distribution that the logits belong to. Rows of dead beams hold some finite numbers.

        Raises:
            ValueError: a level out of order.
        """
        if level != self._level:
            raise ValueError(f"session: expected level {self._level} next, got {level}; start a new session to go back")
        self._level += 1
        if level == 0:
            return self._first[0], self._first[1]
        # A dead beam takes part with the first code and parent, because a batch has one shape; nobody reads its row.
        tokens, parents = self._engine.beams(self._columns[level - 1], codes, parents)
        return self._engine.decode(self._state, tokens, parents, self._columns[level])

    def restart(self, requests: np.ndarray) -> "Session":
        """A session at level 0 for some of the requests, int64 ascending. Their prompts are read again."""
        mask = self._attention_mask[requests]
        length = int(mask.sum(axis=1).max())
        return Session(self._retriever, self._input_ids[requests, :length], mask[:, :length])
