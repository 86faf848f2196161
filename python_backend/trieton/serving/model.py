"""The model that the server loads: requests -> queries, answers -> tensors, and the figures about both.

Everything that decides an answer is in `trieton.search.searcher`. Runs only inside the Python backend's stub.
"""

import gc
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # exists only inside the stub

from trieton.serving import background, tracing

background.enter()  # until `initialize` is done; the imports below are half of a version's start

from trieton.bundle import Bundle  # noqa: E402
from trieton.search.searcher import Answer, Limits, Query, QueryError, Searcher  # noqa: E402
from trieton.serving.metrics import Reporter  # noqa: E402

LOWEST = np.finfo(np.float32).min  # padding of scores: JSON knows neither NaN nor infinity
PARAMETERS = ("num_results", "beam_width", "constraint", "normalise")
ID_TENSORS = ("history", "include_items", "exclude_items", "item_ids")
# Names, because the stub fills pb_utils only after it has imported the model.
KINDS = {"invalid": "INVALID_ARG", "cancelled": "CANCELLED", "failed": "INTERNAL"}


class TritonPythonModel:
    """One instance of `generative_retriever`; the server calls the three methods from one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the bundle this file lies in, search once in every shape, and only then be ready."""
        config = json.loads(args["model_config"])
        given = {name: entry["string_value"] for name, entry in config.get("parameters", {}).items()}
        limits = Limits(**{name: int(given[name]) for name in vars(Limits()) if name in given})
        instances = sum(group.get("count", 1) for group in config.get("instance_group", [])) or 1
        threads = _threads(int(given.get("threads", 0)), instances)
        device = _device(args)
        folder = Path(args["model_repository"]) / args["model_version"]
        bundle = Bundle.open(folder, device=device)
        self.searcher = Searcher(bundle, threads=threads, kernel=given.get("kernel", "auto"), limits=limits)
        self.text_ids = bundle.index.catalog.is_text
        self.bundle_id = bundle.bundle_id.encode()
        self._check_types(config)
        self.searcher.warm_up(max(1, config["max_batch_size"]))
        version = args["model_version"]
        self.reporter = Reporter(pb_utils, self.searcher, model=args["model_name"], version=version, now=time.time())
        self.tracer = _tracer(args["model_name"], version, bundle.bundle_id)
        # What was made until now lives as long as the process: the collector need not look at it between two requests.
        gc.collect()
        gc.freeze()
        background.leave()
        pb_utils.Logger.log_info(
            f"trieton: version {version} is bundle {bundle.bundle_id}: {bundle.index.num_items} items, "
            f"{bundle.index.num_levels} levels, {threads or 'default'} threads on {device}"
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a batch. Every request gets its own response or its own error.

        All at once, when the last is done. Who was cancelled meanwhile does not wait for it: a gRPC client has been
        told by its own library, at the moment it left.
        """
        try:
            return self._execute(requests)
        except Exception:
            # The server would send a traceback with paths to every client of the batch.
            failure = _failure(f"a batch of {len(requests)} requests failed")
            return [_error(failure) for _ in requests]

    def finalize(self) -> None:
        """Report the last figures and spans."""
        self.reporter.close()
        if self.tracer is not None:
            self.tracer.close()

    def is_ready(self) -> bool:
        """For servers that ask (newer than 2.51): initialize has returned, so every shape was searched once."""
        return True

    # ---- one batch

    def _execute(self, requests: list[Any]) -> list[Any]:
        queries: list[Query] = []
        owners: list[int] = []  # the request of each query
        rows: list[slice | QueryError] = []  # the queries of each request
        for place, request in enumerate(requests):
            try:
                read = self._read(request)
            except QueryError as error:
                self.searcher.totals.invalid += 1
                rows.append(error)
                continue
            except Exception:
                self.searcher.totals.failed += 1
                rows.append(_failure("a request could not be read"))
                continue
            rows.append(slice(len(queries), len(queries) + len(read)))
            owners += [place] * len(read)
            queries += read
        entries = self.searcher.search(queries, cancelled=lambda place: requests[owners[place]].is_cancelled())
        responses = []
        for request, row in zip(requests, rows, strict=True):
            responses.append(_error(row) if isinstance(row, QueryError) else self._response(request, entries[row]))
        self.reporter.batch(len(queries))
        if self.tracer is not None:
            for query, entry in zip(queries, entries, strict=True):
                if query.trace is not None:
                    self.tracer.finish(query.trace, entry)
        return responses

    def _read(self, request: Any) -> list[Query]:
        """The queries of one request, one per row of its tensors."""
        parameters = _parameters(request)
        unknown = [name for name in parameters if name not in PARAMETERS and not _of_the_server(name)]
        if unknown:
            raise QueryError(f"parameter {unknown[0]!r}: expected one of {', '.join(PARAMETERS)}")
        constraint = parameters.get("constraint")
        if constraint is not None and not isinstance(constraint, str):
            raise QueryError(f"constraint: expected text, got {constraint!r}")
        parent = None if self.tracer is None else self.tracer.parent(request, parameters)
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        shared: dict[str, Any] = {
            "num_results": parameters.get("num_results"),
            "beam_width": parameters.get("beam_width"),
            "constraint": constraint,
            "normalise": parameters.get("normalise", "vocabulary"),
        }
        return [
            Query(
                history=self._ids(tensors.get("history"), row),
                input_ids=_tokens(tensors.get("input_ids"), row),
                include=self._ids(tensors.get("include_items"), row),
                exclude=self._ids(tensors.get("exclude_items"), row),
                trace=None if parent is None else tracing.Trace(parent),
                **shared,
            )
            for row in range(len(next(iter(tensors.values()))))
        ]

    def _ids(self, tensor: np.ndarray | None, row: int) -> np.ndarray | None:
        """One row's item ids without padding; None where nothing was sent."""
        if tensor is None or not tensor.shape[1]:
            return None
        ids = tensor[row]
        ids = ids[ids != (b"" if self.text_ids else -1)]
        return ids if len(ids) else None

    def _response(self, request: Any, entries: list[Answer | QueryError]) -> Any:
        for row, entry in enumerate(entries):
            if isinstance(entry, QueryError):
                if entry.__cause__ is not None:
                    trace = "".join(traceback.format_exception(entry.__cause__))
                    pb_utils.Logger.log_error(f"trieton: a search failed\n{trace}")
                return _error(entry, row if len(entries) > 1 else None)
        return pb_utils.InferenceResponse(self._tensors(request, entries))  # type: ignore[arg-type]

    def _tensors(self, request: Any, answers: list[Answer]) -> list[Any]:
        """Output tensors that the request wants, padded to the number of results it asked for."""
        rows, count, levels = len(answers), answers[0].num_wanted, self.searcher.index.num_levels
        ids = np.full((rows, count), b"", object) if self.text_ids else np.full((rows, count), -1, np.int64)
        scores = np.full((rows, count), LOWEST, np.float32)
        codes = np.full((rows, count, levels), -1, np.int32)
        for row, answer in enumerate(answers):
            n = len(answer.positions)
            ids[row, :n] = self.searcher.index.catalog.item_ids[answer.positions].tolist()
            scores[row, :n] = answer.scores
            codes[row, :n] = answer.codes
        made = {
            "item_ids": ids,
            "scores": scores,
            "codes": codes,
            "num_results": np.array([[len(answer.positions)] for answer in answers], np.int32),
            "num_unknown": np.array([[answer.num_unknown] for answer in answers], np.int32),
            "certified": np.array([[answer.certified] for answer in answers], np.bool_),
            "bundle_id": np.array([[self.bundle_id]] * rows, object),
        }
        wanted = request.requested_output_names()
        return [pb_utils.Tensor(name, made[name]) for name in wanted if name in made]

    def _check_types(self, config: dict[str, Any]) -> None:
        """The config says which kind of item ids clients send; the catalogue has to agree."""
        need = "TYPE_STRING" if self.text_ids else "TYPE_INT64"
        for entry in [*config["input"], *config["output"]]:
            if entry["name"] in ID_TENSORS and entry["data_type"] != need:
                raise ValueError(
                    f"config.pbtxt: {entry['name']} is {entry['data_type']}, but this bundle's item ids need {need}; "
                    "write the config anew with trieton_builder.bundle.model_config.render_config"
                )


def _parameters(request: Any) -> dict[str, Any]:
    """Parameters of a request. Raises QueryError."""
    try:
        parameters = json.loads(request.parameters() or "{}")
    except UnicodeDecodeError as error:  # seen: bytes that are not UTF-8 reach the model
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


def _tracer(model: str, version: str, bundle_id: str) -> tracing.Tracer | None:
    if not tracing.configured():
        return None
    if not tracing.installed():
        pb_utils.Logger.log_warn(
            f"trieton: no spans: {' or '.join(tracing.VARIABLES)} is set, but the packages that send them are missing; "
            "install trieton[trace]"
        )
        return None
    return tracing.Tracer({"model": model, "model_version": int(version), "bundle_id": bundle_id})


def _tokens(tensor: np.ndarray | None, row: int) -> np.ndarray | None:
    """One row's prompt tokens without the padding behind them; None where nothing was sent."""
    if tensor is None or not tensor.shape[1]:
        return None
    tokens = tensor[row]
    real = np.flatnonzero(tokens != -1)
    return tokens[: real[-1] + 1] if len(real) else None


def _failure(what: str) -> QueryError:
    """The error for the client of an exception that is being handled; what it was stands in the server's log only."""
    pb_utils.Logger.log_error(f"trieton: {what}\n{traceback.format_exc()}")
    return QueryError("the search failed", "failed")


def _error(error: QueryError, row: int | None = None) -> Any:
    text = str(error) if row is None else f"row {row}: {error}"
    return pb_utils.InferenceResponse(
        error=pb_utils.TritonError(text, getattr(pb_utils.TritonError, KINDS[error.kind]))
    )


def _threads(asked: int, instances: int) -> int | None:
    """Threads of one instance; None (the engine chooses) where it has the machine for itself."""
    if not asked and instances == 1:
        return None
    threads = asked or max(1, math.floor(len(os.sched_getaffinity(0)) / instances))
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(threads)
    return threads


def _device(args: dict[str, str]) -> str:
    """ "cuda" for an instance that the server placed on a GPU, which becomes the only one this process sees."""
    if args["model_instance_kind"] != "GPU":
        return "cpu"
    number = int(args["model_instance_device_id"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
    return "cuda"
