"""Models that others exported with Optimum: they run too, but their graphs know no beams.

    model.onnx                                                 decoder-only, with past_key_values
    encoder_model.onnx, decoder_model_merged.onnx              encoder-decoder, both branches in one graph
    encoder_model.onnx, decoder_model.onnx, decoder_with_past_model.onnx

A beam is one more row of the batch to such a graph, so the prompt's keys and values stand once per beam: memory and the
time to move them grow with the beam width. `trieton export` from the checkpoint avoids that.
"""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from trieton.retriever.onnx import DEFAULT_THREADS, host, open_session

LOG = logging.getLogger("trieton")
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class OptimumEngine:
    """The engine protocol of `trieton.retriever` over graphs in Optimum's layout. Safe to call from several threads."""

    def __init__(self, folder: Path, *, normalise: str, threads: int | None = None, device: str | None = None):
        """Load the graphs and say in the log what they cost.

        Raises:
            ValueError: graphs are missing or lack an input that is needed.
        """
        threads = threads or DEFAULT_THREADS
        self._normalise = normalise
        self._device = device or "cpu"
        self._encoder = self._first = None
        if (folder / "encoder_model.onnx").is_file():
            self._encoder = open_session(folder / "encoder_model.onnx", threads, self._device)
            merged = folder / "decoder_model_merged.onnx"
            with_past = merged if merged.is_file() else folder / "decoder_with_past_model.onnx"
            self._decoder = open_session(with_past, threads, self._device)
            if not merged.is_file():
                self._first = open_session(folder / "decoder_model.onnx", threads, self._device)
            self._start = _start_token(folder)
        else:
            self._decoder = open_session(folder / "model.onnx", threads, self._device)
        self._inputs = {value.name: value for value in self._decoder.get_inputs()}
        self._past = [name for name in self._inputs if name.startswith("past_key_values.")]
        needed = [] if self._encoder else ["position_ids"]  # without it a graph counts padding as positions
        missing = [name for name in needed if name not in self._inputs] + ([] if self._past else ["past_key_values"])
        if missing:
            raise ValueError(f"{folder}: the decoder graph has no input {missing[0]}; export it again with a cache")
        sizes = [self._inputs[name].shape for name in self._past]
        numbers = sum(shape[1] * shape[3] for shape in sizes if isinstance(shape[1], int) and isinstance(shape[3], int))
        LOG.warning(
            "%s: graphs in Optimum's layout know no beams: every beam holds the prompt's keys and values of its own, "
            "about %.1f kB per prompt token and beam; `trieton export` from the checkpoint holds them once per request",
            folder,
            numbers * 4 / 1e3,
        )

    def prefill(
        self, input_ids: np.ndarray, attention_mask: np.ndarray, level_tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, "OptimumState"]:
        """int64 [B, S], int64 [B, S], int64 [W] -> logits float32 [B, 1, W], log_z float32 [B, 1], state."""
        batch = len(input_ids)
        feeds: dict[str, np.ndarray] = {}
        last = np.zeros(batch, np.int64)
        if self._encoder is not None:
            hidden = self._encoder.run(None, {"input_ids": input_ids, "attention_mask": attention_mask})[0]
            feeds = {"encoder_hidden_states": hidden, "encoder_attention_mask": attention_mask}
            feeds["input_ids"] = np.full((batch, 1), self._start, np.int64)
        else:
            last = attention_mask.sum(axis=1) - 1
            positions = np.maximum(attention_mask.cumsum(axis=1) - 1, 0)
            feeds = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions}
        if self._first is None:
            feeds |= {name: self._empty(name, batch) for name in self._past}
            feeds["use_cache_branch"] = np.zeros(1, np.bool_)
        found = _run(self._first or self._decoder, feeds)
        logits = found.pop("logits")[np.arange(batch), last][:, None]
        own, crossed = _by_owner(found)
        hidden = {name: feeds[name] for name in ("encoder_hidden_states",) if name in feeds}
        state = OptimumState(own, {**crossed, **hidden}, attention_mask)
        return *self._columns(logits, level_tokens), state

    def decode(
        self, state: "OptimumState", input_ids: np.ndarray, parents: np.ndarray, level_tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """int64 [B, M], int64 [B, M], int64 [W] -> logits float32 [B, M, W], log_z float32 [B, M]; grows `state`."""
        batch, beams = input_ids.shape
        rows = (np.arange(batch)[:, None] * state.parents + parents).ravel()
        mask, shared = state.for_beams(beams)
        feeds = {"input_ids": input_ids.reshape(-1, 1), "use_cache_branch": np.ones(1, np.bool_), **shared}
        feeds |= {name: values[rows] for name, values in state.own.items()}
        if self._encoder is not None:
            feeds["encoder_attention_mask"] = mask
        else:
            ones = np.ones((len(mask), state.decoded + 1), np.int64)
            feeds["attention_mask"] = np.concatenate([mask, ones], axis=1)
            feeds["position_ids"] = mask.sum(axis=1, keepdims=True) + state.decoded
        found = _run(self._decoder, feeds)
        logits = found.pop("logits")[:, -1].reshape(batch, beams, -1)
        state.own, _ = _by_owner(found)
        state.parents = beams
        state.decoded += 1
        return self._columns(logits, level_tokens)

    def beams(self, table: np.ndarray, codes: Any, parents: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens `table[codes]` and parents int64 [B, M], dead beams at the first of each."""
        return table.take(host(codes), mode="clip"), np.maximum(host(parents), 0).astype(np.int64, copy=False)

    def _columns(self, logits: np.ndarray, level_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits [B, M, V] of the level's tokens, and the log-normaliser [B, M]."""
        logits = logits.astype(np.float32, copy=False)
        columns = logits[..., level_tokens]
        whole = columns if self._normalise == "level" else logits
        top = whole.max(axis=-1, keepdims=True)
        return columns, np.log(np.exp(whole - top).sum(axis=-1)) + top[..., 0]

    def _empty(self, name: str, batch: int) -> np.ndarray:
        value = self._inputs[name]
        heads, dim = value.shape[1], value.shape[3]
        if not isinstance(heads, int) or not isinstance(dim, int):
            raise ValueError(f"{name}: expected fixed heads and head size in the graph, got shape {value.shape}")
        return np.zeros((batch, heads, 0, dim), _TYPES[value.type])


class OptimumState:
    """Keys and values of one batch.

    Attributes:
        own: what each beam has of its own and grows, [B * parents, H, t, D]; with the prompt's in a decoder-only model.
        shared: what belongs to the prompt and stays, [B, ...]: the encoder's keys, values and hidden states.
        mask: of the prompt, int64 [B, S].
        parents: beams per request in `own`.
        decoded: tokens behind the prompt.
    """

    def __init__(self, own: dict[str, np.ndarray], shared: dict[str, np.ndarray], mask: np.ndarray):
        self.own, self.shared, self.mask = own, shared, mask
        self.parents, self.decoded = 1, 0
        self._beams, self._copies = 1, (mask, shared)

    def for_beams(self, beams: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """`mask` and `shared` with a copy for each beam, [B * beams, ...]; copied when the beam width changes."""
        if beams != self._beams:
            copies = {name: np.repeat(values, beams, axis=0) for name, values in self.shared.items()}
            self._beams, self._copies = beams, (np.repeat(self.mask, beams, axis=0), copies)
        return self._copies


def _by_owner(found: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs `present.*` as inputs `past_key_values.*`: those that grow, and those of the encoder, which stay."""
    past = {name.replace("present.", "past_key_values.", 1): values for name, values in found.items()}
    own = {name: values for name, values in past.items() if ".encoder." not in name}
    return own, {name: values for name, values in past.items() if ".encoder." in name}


def _run(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    wanted = {value.name for value in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    given = {name: values for name, values in feeds.items() if name in wanted}
    return dict(zip(names, session.run(names, given), strict=True))


def _start_token(folder: Path) -> int:
    """What the decoder starts with: config.json says it, or else generation_config.json."""
    name = "decoder_start_token_id"
    try:
        files = [folder / file for file in ("config.json", "generation_config.json") if (folder / file).is_file()]
        found = [token for file in files if (token := json.loads(file.read_text()).get(name)) is not None]
        token = found[0]
    except (OSError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{folder / 'config.json'}: expected {name} ({error})") from None
    if type(token) is not int:
        raise ValueError(f"{folder / 'config.json'}: {name}: expected an integer, got {token!r}")
    return token
