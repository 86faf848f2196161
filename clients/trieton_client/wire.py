"""Histories -> requests, responses -> Results. Shared by all four ways to call."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trieton_client.errors import ClientError, InvalidRequestError, row_error
from trieton_client.options import checked_headers
from trieton_client.results import Results

Ids = Sequence[int] | Sequence[str] | np.ndarray
Parameters = dict[str, int | str | bool]
INT64 = np.iinfo(np.int64)


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
    """One request: at most `max_batch_size` histories with one constraint, padded to one rectangle.

    Every optional tensor is always there, empty when unused: the server never batches requests with different sets.
    """

    places: tuple[int, ...]  # of its histories in the caller's list
    tensors: dict[str, np.ndarray]
    parameters: Parameters
    single: bool = True

    @property
    def rows(self) -> int:
        return len(self.places)

    def inputs(self, module: Any) -> list[Any]:
        """As InferInput of `module`, tritonclient.grpc or tritonclient.http."""
        made = []
        for name, array in self.tensors.items():
            datatype = "BYTES" if array.dtype == object else "INT32" if array.dtype == np.int32 else "INT64"
            tensor = module.InferInput(name, array.shape, datatype)
            tensor.set_data_from_numpy(array)
            made.append(tensor)
        return made

    def named(self, error: ClientError) -> ClientError:
        """The error with the row's place in the caller's list: the server knows only its place in the request."""
        found = re.match(r"row (\d+): ", error.reason)
        if self.single or (found is None and self.rows > 1):
            return error
        row = 0 if found is None else min(int(found[1]), self.rows - 1)
        reason = error.reason if found is None else error.reason[found.end() :]
        return type(error)(f"row {self.places[row]}: {reason}", where=error.where)


@dataclass(frozen=True)
class Call:
    """A checked call: its requests are made once the model's facts are known."""

    histories: list[Any]
    input_ids: list[Any]
    include: list[Any]
    exclude: list[Any]
    constraints: list[str | None]  # one per history
    parameters: Parameters
    single: bool
    return_errors: bool
    timeout: float | None
    headers: dict[str, str]

    @classmethod
    def checked(
        cls,
        history: Any,
        num_results: int,
        *,
        constraint: str | Sequence[str | None] | None = None,
        include: Any = None,
        exclude: Any = None,
        beam_width: int | None = None,
        strict: bool = False,
        input_ids: Any = None,
        timeout: float | None = None,
        headers: dict[str, str] | None = None,
        return_errors: bool = False,
    ) -> "Call":
        """Sort the arguments of `retrieve` out; their meaning is told in `trieton_client.arguments`.

        Raises:
            InvalidRequestError: naming the argument.
            ValueError: headers that no request can carry.
        """
        given, name = (history, "history") if input_ids is None else (input_ids, "input_ids")
        if (history is None) == (input_ids is None):
            raise InvalidRequestError(
                "expected either history or input_ids, got " + ("none" if given is None else "both")
            )
        single = not _is_nested(given, name)
        rows = [given] if single else list(given)
        parameters: Parameters = {"num_results": _integer("num_results", num_results)}
        if beam_width is not None:
            parameters["beam_width"] = _integer("beam_width", beam_width)
        if _boolean("strict", strict):
            parameters["strict"] = True
        return cls(
            rows if input_ids is None else [],
            [] if input_ids is None else rows,
            _per_row(include, len(rows), "include", single),
            _per_row(exclude, len(rows), "exclude", single),
            _constraints(constraint, len(rows), single),
            parameters,
            single,
            _boolean("return_errors", return_errors),
            timeout,
            checked_headers(headers),
        )

    def groups(self, facts: ModelFacts) -> list[list[Chunk]]:
        """The requests; those with one constraint in one list, since a request has only one.

        Raises:
            InvalidRequestError: ids of the wrong kind.
        """
        # One form for one list that all rows share and for one list per row.
        tensors = {
            "history": [_ids("history", ids, facts.text_ids) for ids in self.histories],
            "input_ids": [_tokens(ids) for ids in self.input_ids],
            "include_items": [_ids("include", ids, facts.text_ids) for ids in self.include],
            "exclude_items": [_ids("exclude", ids, facts.text_ids) for ids in self.exclude],
        }
        same: dict[str | None, list[int]] = {}
        for place, constraint in enumerate(self.constraints):
            same.setdefault(constraint, []).append(place)
        size = max(1, facts.max_batch_size)
        groups = []
        for constraint, members in same.items():
            parameters = self.parameters if constraint is None else {**self.parameters, "constraint": constraint}
            group = []
            for first in range(0, len(members), size):
                places = members[first : first + size]
                block = {
                    name: _rectangle(
                        [lists[place] for place in places] if lists else [],
                        len(places),
                        facts.text_ids,
                        name == "input_ids",
                    )
                    for name, lists in tensors.items()
                }
                group.append(Chunk(tuple(places), block, parameters, self.single))
            groups.append(group)
        return groups

    def arranged(self, answers: Sequence[tuple[Chunk, Sequence[Results | ClientError]]]) -> Any:
        """What `retrieve` returns, in the order of the histories. Raises the first row's error, unless asked not to."""
        rows: list[Any] = [None] * len(self.constraints)
        for chunk, entries in answers:
            for place, entry in zip(chunk.places, entries, strict=True):
                rows[place] = chunk.named(entry) if isinstance(entry, ClientError) else entry
        if not self.return_errors:
            for row in rows:
                if isinstance(row, ClientError):
                    raise row
        return rows[0] if self.single else rows


def description_request(facts: ModelFacts) -> Chunk:
    """The request that asks the served version to describe itself: no search, so nothing in its tensors."""
    ids = np.zeros((1, 0), object if facts.text_ids else np.int64)
    tensors = {"history": ids, "input_ids": np.zeros((1, 0), np.int32), "include_items": ids, "exclude_items": ids}
    return Chunk((0,), tensors, {"describe": True})


def read_description(response: Any, where: str) -> dict[str, Any]:
    """The description in tritonclient's InferResult. Raises InvalidRequestError where there is none."""
    found = response.as_numpy("description")
    if found is None:
        raise InvalidRequestError("the answer has no description: the server's version is too old", where=where)
    return dict(json.loads(found.flat[0]))


def read_results(response: Any, rows: int, model_version: str) -> list[Results | ClientError]:
    """One Results per row of tritonclient's InferResult, or the error that the server gives for this row alone."""
    names = ("item_ids", "scores", "codes", "num_results", "num_unknown", "certified", "bundle_id")
    ids, scores, codes, counts, unknown, certified, bundle_id = (response.as_numpy(name) for name in names)
    # Older servers have neither of them.
    listed, errors = response.as_numpy("num_unknown_listed"), response.as_numpy("error")
    results: list[Results | ClientError] = []
    for row in range(rows):
        if errors is not None and errors[row, 0]:
            results.append(row_error(errors[row, 0].decode(errors="replace"), row if rows > 1 else None))
            continue
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
                num_unknown_listed=None if listed is None else int(listed[row, 0]),
                certified=bool(certified[row, 0]),
                bundle_id=bundle_id[row, 0].decode(),
                model_version=model_version,
            )
        )
    return results


def count_answers(statistics: dict[str, Any]) -> dict[str, int]:
    """{version: requests answered so far} from the server's statistics about a model as JSON."""
    counts = {}
    for entry in statistics.get("model_stats", []):
        success = entry.get("inference_stats", {}).get("success", {})
        counts[str(entry.get("version"))] = int(success.get("count", 0))
    return counts


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


def _constraints(constraint: Any, rows: int, single: bool) -> list[str | None]:
    """One constraint per history, from one for all or from a list."""
    if constraint is None or isinstance(constraint, str):
        given = [constraint] * rows
    elif isinstance(constraint, bytes) or not isinstance(constraint, Sequence | np.ndarray):
        raise InvalidRequestError(f"constraint: expected text, got {type(constraint).__name__}")
    elif single or len(constraint) != rows:
        raise InvalidRequestError(
            f"constraint: expected one text, or one per history ({rows}), got a list of {len(constraint)}"
        )
    else:
        given = list(constraint)
    for text in set(given) if all(isinstance(text, str | None) for text in given) else given:
        if not isinstance(text, str | None):
            raise InvalidRequestError(f"constraint: expected text, got {type(text).__name__}")
        if text is not None:
            _utf8("constraint", text)
    return given


def _utf8(name: str, text: str) -> bytes:
    """Raises InvalidRequestError for half a character: a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name}: expected text, got {text!r} with half a character ({error.reason})"
        ) from None


def _ids(name: str, values: Any, text: bool) -> np.ndarray:
    """int64 [n], or UTF-8 bytes as an object array [n]."""
    if text:
        encoded = np.empty(len(values), object)
        for place, value in enumerate(values):
            if not isinstance(value, str | bytes) or not value:
                raise InvalidRequestError(f"{name}: this catalogue's item ids are strings, got {value!r} at {place}")
            if isinstance(value, bytes) and value.decode(errors="replace").encode() != value:
                raise InvalidRequestError(f"{name}: expected item ids in UTF-8, got {value!r} at {place}")
            encoded[place] = _utf8(name, value) if isinstance(value, str) else bytes(value)
        return encoded
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths in it
        raise InvalidRequestError(f"{name}: expected a list of ids, or one list of ids per history") from None
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype == np.uint64 and array.max() > INT64.max):
        raise InvalidRequestError(f"{name}: this catalogue's item ids are 64-bit integers, got {array.flat[0]!r}, ...")
    array = array.astype(np.int64, copy=False)
    if (array == -1).any():
        raise InvalidRequestError(f"{name}: -1 is not an item id, it marks padding")
    return array


def _tokens(values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths in it
        raise InvalidRequestError("input_ids: expected a list of tokens, or one list per prompt") from None
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
    if not INT64.min <= int(value) <= INT64.max:
        raise InvalidRequestError(f"{name}: expected an integer of 64 bits, got {value}")
    return int(value)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InvalidRequestError(f"{name}: expected True or False, got {value!r}")
    return bool(value)
