"""Histories -> tensors of a request, tensors of a response -> Results. Shared by all four ways to call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trieton_client.errors import InvalidRequestError, row_error
from trieton_client.results import Results

Ids = Sequence[int] | Sequence[str] | np.ndarray
MAX_ID = np.iinfo(np.int64).max


@dataclass(frozen=True)
class ModelFacts:
    """What the client has to know about the served model: asked for once, at the first call."""

    max_batch_size: int
    text_ids: bool

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ModelFacts":
        """From the model's config as JSON (field names of the protobuf)."""
        for entry in config.get("input", []):
            if entry["name"] == "history":
                return cls(int(config["max_batch_size"]), entry["data_type"] == "TYPE_STRING")
        raise InvalidRequestError(f"model {config.get('name')!r} has no input `history`: not a generative retriever")


@dataclass(frozen=True)
class Chunk:
    """One request: at most `max_batch_size` histories, padded to one rectangle.

    Every optional tensor is always there, empty when unused: the server never batches requests with different sets.
    """

    first: int  # place of its first history in the caller's list
    rows: int
    tensors: dict[str, np.ndarray]

    def inputs(self, module: Any) -> list[Any]:
        """As InferInput of `module`, tritonclient.grpc or tritonclient.http."""
        made = []
        for name, array in self.tensors.items():
            datatype = "BYTES" if array.dtype == object else "INT32" if array.dtype == np.int32 else "INT64"
            tensor = module.InferInput(name, array.shape, datatype)
            tensor.set_data_from_numpy(array)
            made.append(tensor)
        return made


@dataclass(frozen=True)
class Call:
    """A checked call: its chunks are made once the model's facts are known."""

    histories: list[Any]
    input_ids: list[Any]
    include: list[Any]
    exclude: list[Any]
    parameters: dict[str, int | str]
    single: bool

    @classmethod
    def checked(
        cls,
        history: Any,
        *,
        input_ids: Any,
        num_results: int,
        beam_width: int | None,
        constraint: str | None,
        include: Any,
        exclude: Any,
    ) -> "Call":
        """Sort the arguments of `retrieve` out. Raises InvalidRequestError naming the argument."""
        given, name = (history, "history") if input_ids is None else (input_ids, "input_ids")
        if (history is None) == (input_ids is None):
            raise InvalidRequestError(
                "expected either history or input_ids, got " + ("none" if given is None else "both")
            )
        single = not _is_nested(given, name)
        rows = [given] if single else list(given)
        parameters: dict[str, int | str] = {"num_results": _integer("num_results", num_results)}
        if beam_width is not None:
            parameters["beam_width"] = _integer("beam_width", beam_width)
        if constraint is not None:
            if not isinstance(constraint, str):
                raise InvalidRequestError(f"constraint: expected text, got {type(constraint).__name__}")
            parameters["constraint"] = constraint
        return cls(
            rows if input_ids is None else [],
            [] if input_ids is None else rows,
            _per_row(include, len(rows), "include", single),
            _per_row(exclude, len(rows), "exclude", single),
            parameters,
            single,
        )

    def chunks(self, facts: ModelFacts) -> list[Chunk]:
        """Raises InvalidRequestError for ids of the wrong kind."""
        rows = max(len(self.histories), len(self.input_ids))
        # One form for one list that all rows share and for one list per row.
        tensors = {
            "history": [_ids("history", ids, facts.text_ids) for ids in self.histories],
            "input_ids": [_tokens(ids) for ids in self.input_ids],
            "include_items": [_ids("include", ids, facts.text_ids) for ids in self.include],
            "exclude_items": [_ids("exclude", ids, facts.text_ids) for ids in self.exclude],
        }
        size = facts.max_batch_size
        chunks = []
        for first in range(0, rows, size):
            count = min(size, rows - first)
            block = {
                name: _rectangle(lists[first : first + count], count, facts.text_ids, name == "input_ids")
                for name, lists in tensors.items()
            }
            chunks.append(Chunk(first, count, block))
        return chunks


def read_results(response: Any, rows: int, model_version: str) -> list[Results]:
    """One Results per row of tritonclient's InferResult. Raises the first row's error, where the server gives one."""
    names = ("item_ids", "scores", "codes", "num_results", "num_unknown", "certified", "bundle_id")
    ids, scores, codes, counts, unknown, certified, bundle_id = (response.as_numpy(name) for name in names)
    results = []
    errors = response.as_numpy("error")
    for row in range(rows):
        if errors is not None and errors[row, 0]:
            raise row_error(errors[row, 0].decode(errors="replace"), row if rows > 1 else None)
        n = int(counts[row, 0])
        row_ids = ids[row, :n]
        if row_ids.dtype == object:
            row_ids = np.array([value.decode() for value in row_ids], object)
        results.append(
            Results(
                item_ids=row_ids,
                scores=scores[row, :n],
                codes=codes[row, :n],
                num_results=n,
                num_unknown=int(unknown[row, 0]),
                certified=bool(certified[row, 0]),
                bundle_id=bundle_id[row, 0].decode(),
                model_version=model_version,
            )
        )
    return results


def _is_nested(values: Any, name: str) -> bool:
    if isinstance(values, np.ndarray):
        if values.ndim not in (1, 2):
            raise InvalidRequestError(f"{name}: expected one list or a list of lists, got shape {values.shape}")
        return values.ndim == 2
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise InvalidRequestError(f"{name}: expected a list of ids, got {type(values).__name__}")
    return bool(values) and not isinstance(values[0], str | bytes) and isinstance(values[0], Sequence | np.ndarray)


def _per_row(values: Any, rows: int, name: str, single: bool) -> list[Any]:
    """One list per row, from nothing, from one list for all rows, or from one list per row."""
    if values is None:
        return []
    if isinstance(values, set | frozenset):
        values = sorted(values)
    if not _is_nested(values, name):
        if len(values) == 0 and name == "include":
            raise InvalidRequestError("include: an empty list allows nothing; leave it out to allow everything")
        return [values] * rows
    if single or len(values) != rows:
        raise InvalidRequestError(f"{name}: expected one list, or one per history ({rows}), got {len(values)} lists")
    if name == "include" and any(len(row) == 0 for row in values):
        raise InvalidRequestError("include: an empty list allows nothing; leave that history out")
    return list(values)


def _ids(name: str, values: Any, text: bool) -> np.ndarray:
    """int64 [n], or UTF-8 bytes as an object array [n]."""
    if text:
        encoded = np.empty(len(values), object)
        for place, value in enumerate(values):
            if not isinstance(value, str | bytes) or not value:
                raise InvalidRequestError(f"{name}: this catalogue's item ids are strings, got {value!r} at {place}")
            encoded[place] = value.encode() if isinstance(value, str) else value
        return encoded
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype == np.uint64 and array.max() > MAX_ID):
        raise InvalidRequestError(f"{name}: this catalogue's item ids are 64-bit integers, got {array.flat[0]!r}, ...")
    array = array.astype(np.int64, copy=False)
    if (array == -1).any():
        raise InvalidRequestError(f"{name}: -1 is not an item id, it marks padding")
    return array


def _tokens(values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise InvalidRequestError("input_ids: expected a list of tokens, integers of at least 0 that fit 32 bits")
    return array.astype(np.int32, copy=False)


def _rectangle(lists: list[np.ndarray], rows: int, text: bool, tokens: bool) -> np.ndarray:
    """The lists as one array [rows, longest], padded with -1 or the empty string; [rows, 0] for none."""
    if rows == 1 and lists:
        return lists[0].reshape(1, -1)
    width = max(map(len, lists), default=0)
    if text and not tokens:
        block = np.full((rows, width), b"", object)
    else:
        block = np.full((rows, width), -1, np.int32 if tokens else np.int64)
    for row, values in enumerate(lists):
        block[row, : len(values)] = values
    return block


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidRequestError(f"{name}: expected an integer, got {value!r}")
    return int(value)
