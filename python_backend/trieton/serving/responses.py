"""Answers -> the response of one request. Runs only inside the Python backend's stub.

The rows of one request share one response. A row without an answer has `num_results` 0 and only padding, and says why
in the output `error`; then the other rows are answered. The request as a whole fails where no row has an answer, or
where the caller does not ask for `error`: an answer that lacks a row without a word would be taken for "nothing found".
"""

import traceback
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # exists only inside the stub

from trieton.search.searcher import Answer, QueryError, Searcher

LOWEST = np.finfo(np.float32).min  # padding of scores: JSON knows neither NaN nor infinity
# How each kind of error is told: the server's code (by name, because the stub fills pb_utils only after it has imported
# the model), and the first word of a row's text in the output `error`.
KINDS = {
    "invalid": ("INVALID_ARG", "INVALID_ARGUMENT"),
    "cancelled": ("CANCELLED", "CANCELLED"),
    "failed": ("INTERNAL", "INTERNAL"),
}


def failure(what: str) -> QueryError:
    """The error for the client of an exception that is being handled; what it was stands in the server's log only."""
    pb_utils.Logger.log_error(f"trieton: {what}\n{traceback.format_exc()}")
    return QueryError("the search failed", "failed")


def error_response(error: QueryError, row: int | None = None) -> Any:
    """The response of a request that has no answer."""
    text = str(error) if row is None else f"row {row}: {error}"
    return pb_utils.InferenceResponse(
        error=pb_utils.TritonError(text, getattr(pb_utils.TritonError, KINDS[error.kind][0]))
    )


class ResponseWriter:
    """Writes the responses of one model version."""

    def __init__(self, searcher: Searcher, description: str):
        self._catalog, self._levels = searcher.index.catalog, searcher.index.num_levels
        self._bundle_id = searcher.bundle.bundle_id.encode()
        self._description = description.encode()

    def description(self, request: Any, rows: int) -> Any:
        """The response of a request that asks for the description: `description` and `bundle_id`, nothing else."""
        wanted = request.requested_output_names()
        if "description" not in wanted:
            return error_response(
                QueryError(
                    "describe: expected the output `description` among those asked for; a config.pbtxt without it is "
                    "older than this release"
                )
            )
        made = {"description": self._description, "bundle_id": self._bundle_id}
        tensors = [pb_utils.Tensor(name, np.array([[text]] * rows, object)) for name, text in made.items()]
        return pb_utils.InferenceResponse([tensor for tensor in tensors if tensor.name() in wanted])

    def response(self, request: Any, entries: Sequence[Answer | QueryError]) -> Any:
        """The response of a request with these answers, one per row."""
        wanted = request.requested_output_names()
        errors = [(row, entry) for row, entry in enumerate(entries) if isinstance(entry, QueryError)]
        for _, error in errors:
            if error.__cause__ is not None:
                trace = "".join(traceback.format_exception(error.__cause__))
                pb_utils.Logger.log_error(f"trieton: a search failed\n{trace}")
        if errors and (len(errors) == len(entries) or "error" not in wanted):
            row, error = errors[0]
            return error_response(error, row if len(entries) > 1 else None)
        made = self._arrays(entries)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, made[name]) for name in wanted if name in made])

    def _arrays(self, entries: Sequence[Answer | QueryError]) -> dict[str, np.ndarray]:
        """Every output but `description`, padded to the number of results that the request asked for."""
        rows, levels, text = len(entries), self._levels, self._catalog.is_text
        count = next(entry.num_wanted for entry in entries if isinstance(entry, Answer))
        ids = np.full((rows, count), b"", object) if text else np.full((rows, count), -1, np.int64)
        scores = np.full((rows, count), LOWEST, np.float32)
        codes = np.full((rows, count, levels), -1, np.int32)
        numbers = np.zeros((rows, 3), np.int32)
        certified = np.zeros((rows, 1), np.bool_)
        errors = np.full((rows, 1), b"", object)
        for row, entry in enumerate(entries):
            if isinstance(entry, QueryError):
                errors[row, 0] = f"{KINDS[entry.kind][1]}: {entry}".encode()
                continue
            n = len(entry.positions)
            ids[row, :n] = self._catalog.item_ids[entry.positions].tolist()
            scores[row, :n] = entry.scores
            codes[row, :n] = entry.codes
            numbers[row] = n, entry.num_unknown, entry.num_unknown_listed
            certified[row] = entry.certified
        return {
            "item_ids": ids,
            "scores": scores,
            "codes": codes,
            "num_results": numbers[:, :1],
            "num_unknown": numbers[:, 1:2],
            "num_unknown_listed": numbers[:, 2:],
            "certified": certified,
            "bundle_id": np.array([[self._bundle_id]] * rows, object),
            "error": errors,
        }
