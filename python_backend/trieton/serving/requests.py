"""One request of the server -> its queries, one per row, or the reason why there are none.

What counts as given, for every tensor, over every protocol:

    the tensor is missing, or its rows have width 0    nothing was sent, for any row
    a row of `include_items` that holds only padding   a list that names nothing: it allows nothing
    a row of `exclude_items` that holds only padding   a list that names nothing: it takes nothing away
    a row of `history` or `input_ids`, likewise        not given for this row, so the other one has to be

Padding is -1, or the empty string for string ids; it may stand anywhere in a list of item ids, and only behind the last
token of `input_ids`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trieton.search.searcher import Query, QueryError
from trieton.search.trace import Trace
from trieton.serving import tracing
from trieton.serving.description import PARAMETERS


@dataclass(frozen=True)
class ReadRequest:
    """A request that could be read.

    Attributes:
        rows: how many rows its tensors have, and so its response.
        describe: it asks for the description of the version; then it has no queries.
        queries: one per row.
    """

    rows: int
    describe: bool
    queries: Sequence[Query]


class RequestReader:
    """Reads requests of one model version.

    Args:
        text_ids: item ids are strings (else int64).
        tracer: told which requests carry a trace; None where there are no spans.
    """

    def __init__(self, *, text_ids: bool, tracer: tracing.Tracer | None):
        self._text_ids = text_ids
        self._tracer = tracer

    def read(self, request: Any) -> ReadRequest:
        """Raises QueryError: a parameter that does not exist or has the wrong type; tensors without rows."""
        parameters = _parameters(request)
        unknown = [name for name in parameters if name not in PARAMETERS and not _of_the_server(name)]
        if unknown:
            raise QueryError(f"parameter {unknown[0]!r}: expected one of {', '.join(PARAMETERS)}")
        constraint = parameters.get("constraint")
        if constraint is not None and not isinstance(constraint, str):
            raise QueryError(f"constraint: expected text, got {constraint!r}")
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        rows = _rows(tensors)
        if _flag(parameters, "describe"):
            return ReadRequest(rows, True, ())
        parent = None if self._tracer is None else self._tracer.parent(request, parameters)
        shared: dict[str, Any] = {
            "num_results": parameters.get("num_results"),
            "beam_width": parameters.get("beam_width"),
            "constraint": constraint,
            "normalise": parameters.get("normalise", "vocabulary"),
            "strict": _flag(parameters, "strict"),
        }
        queries = [
            Query(
                history=_none_if_empty(self._ids(tensors.get("history"), row)),
                input_ids=_tokens(tensors.get("input_ids"), row),
                include=self._ids(tensors.get("include_items"), row),
                exclude=self._ids(tensors.get("exclude_items"), row),
                trace=None if parent is None else Trace(parent),
                **shared,
            )
            for row in range(rows)
        ]
        return ReadRequest(rows, False, queries)

    def _ids(self, tensor: np.ndarray | None, row: int) -> np.ndarray | None:
        """One row's item ids without padding; None where nothing was sent."""
        if tensor is None or not tensor.size:
            return None
        ids = tensor[row]
        return ids[ids != (b"" if self._text_ids else -1)]


def _rows(tensors: dict[str, np.ndarray]) -> int:
    """How many rows the tensors of a request have: the server sees to it that they agree. Raises QueryError."""
    name, tensor = next(iter(tensors.items()))
    if not len(tensor):
        raise QueryError(f"{name}: expected at least one row, got none")
    return len(tensor)


def _none_if_empty(ids: np.ndarray | None) -> np.ndarray | None:
    return ids if ids is not None and len(ids) else None


def _tokens(tensor: np.ndarray | None, row: int) -> np.ndarray | None:
    """One row's prompt tokens without the padding behind them; None where nothing was sent."""
    if tensor is None or not tensor.size:
        return None
    tokens = tensor[row]
    real = np.flatnonzero(tokens != -1)
    return tokens[: real[-1] + 1] if len(real) else None


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise QueryError(f"{name}: expected true or false, got {value!r}")
    return value


def _parameters(request: Any) -> dict[str, Any]:
    """Parameters of a request. Raises QueryError."""
    try:
        parameters = json.loads(request.parameters() or "{}")
    except UnicodeDecodeError as error:  # bytes that are not UTF-8 reach the model
        # A caller's headers, handed on, may be anything: what cannot be read in them costs the spans, not the answer.
        parameters = json.loads(error.object.decode(errors="surrogateescape"))
        own = {name: value for name, value in parameters.items() if not _of_the_server(name)}
        try:
            json.dumps(own, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise QueryError("parameters: expected JSON in UTF-8") from None
    return parameters


def _of_the_server(name: str) -> bool:
    """Whether a parameter is none of the client's: the server adds its own, and headers that it hands on."""
    return name.startswith("triton_") or name.lower() in tracing.HEADERS
