"""The model that the server loads.

Requests become queries in `requests`, answers become tensors in `responses`; everything that decides an answer is in
`trieton.search.searcher`. Runs only inside the Python backend's stub.
"""

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # exists only inside the stub

from trieton.serving import background, tracing

background.enter()  # until `initialize` is done; the imports below are half of a version's start

from trieton.bundle import Bundle  # noqa: E402
from trieton.resources import usable_cores  # noqa: E402
from trieton.retriever.onnx import DEFAULT_THREADS  # noqa: E402
from trieton.search.searcher import Answer, Limits, Query, QueryError, Searcher  # noqa: E402
from trieton.serving.description import describe  # noqa: E402
from trieton.serving.metrics import Reporter  # noqa: E402
from trieton.serving.requests import ReadRequest, RequestReader  # noqa: E402
from trieton.serving.responses import ResponseWriter, error_response, failure  # noqa: E402

ID_TENSORS = ("history", "include_items", "exclude_items", "item_ids")


class TritonPythonModel:
    """One instance of `generative_retriever`; the server calls the three methods from one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the bundle this file lies in, search once in every shape, and only then be ready."""
        config = json.loads(args["model_config"])
        given = {name: entry["string_value"] for name, entry in config.get("parameters", {}).items()}
        limits = Limits(**{name: int(given[name]) for name in vars(Limits()) if name in given})
        threads = _threads(int(given.get("threads", 0)))
        device = _device(args)
        folder = Path(args["model_repository"]) / args["model_version"]
        bundle = Bundle.open(folder, device=device)
        self.searcher = Searcher(bundle, threads=threads, kernel=given.get("kernel", "auto"), limits=limits)
        self.text_ids = bundle.index.catalog.is_text
        self._check_types(config)
        self.searcher.warm_up(max(1, config["max_batch_size"]))
        model, version = args["model_name"], args["model_version"]
        instance = args["model_instance_name"]
        self.reporter = Reporter(
            pb_utils, self.searcher, model=model, version=version, instance=instance, now=time.time()
        )
        self.tracer = _tracer(model, version, bundle.bundle_id)
        self.reader = RequestReader(text_ids=self.text_ids, tracer=self.tracer)
        description = describe(self.searcher, model=model, version=int(version), config=config)
        self.writer = ResponseWriter(self.searcher, description)
        # What was made until now lives as long as the process: the collector need not look at it between two requests.
        gc.collect()
        gc.freeze()
        background.leave()
        pb_utils.Logger.log_info(
            f"trieton: version {version} is bundle {bundle.bundle_id}: {bundle.index.num_items} items, "
            f"{bundle.index.num_levels} levels, {threads} thread(s) on {device}"
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
            self.searcher.totals.failed += len(requests)
            error = failure(f"a batch of {len(requests)} requests failed")
            return [error_response(error) for _ in requests]

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
        reads: list[ReadRequest | QueryError] = []
        for place, request in enumerate(requests):
            read = self._read(request)
            reads.append(read)
            if isinstance(read, ReadRequest):
                owners += [place] * len(read.queries)
                queries += read.queries
        entries = self.searcher.search(queries, cancelled=lambda place: requests[owners[place]].is_cancelled())
        left = iter(entries)
        self.reporter.batch(len(queries))
        responses = [self._respond(request, read, left) for request, read in zip(requests, reads, strict=True)]
        if self.tracer is not None:
            for query, entry in zip(queries, entries, strict=True):
                if query.trace is not None:
                    self.tracer.finish(query.trace, entry)
        return responses

    def _read(self, request: Any) -> ReadRequest | QueryError:
        try:
            return self.reader.read(request)
        except QueryError as error:
            self.searcher.totals.invalid += 1
            return error
        except Exception:
            self.searcher.totals.failed += 1
            return failure("a request could not be read")

    def _respond(self, request: Any, read: ReadRequest | QueryError, left: Iterator[Answer | QueryError]) -> Any:
        """The response of one request; takes its entries from those that are `left`."""
        if isinstance(read, QueryError):
            return error_response(read)
        entries = list(itertools.islice(left, len(read.queries)))
        try:
            if read.describe:
                return self.writer.description(request, read.rows)
            return self.writer.response(request, entries)
        except Exception:
            self.searcher.totals.failed += 1
            return error_response(failure("an answer could not be written"))

    def _check_types(self, config: dict[str, Any]) -> None:
        """The config says which kind of item ids clients send; the catalogue has to agree."""
        need = "TYPE_STRING" if self.text_ids else "TYPE_INT64"
        for entry in [*config["input"], *config["output"]]:
            if entry["name"] in ID_TENSORS and entry["data_type"] != need:
                raise ValueError(
                    f"config.pbtxt: {entry['name']} is {entry['data_type']}, but this bundle's item ids need {need}; "
                    "write the config anew with trieton_builder.bundle.model_config.render_config"
                )


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


def _threads(asked: int) -> int:
    """Threads of one instance: one unless the config asks for more, and no more than the container has cores."""
    threads = min(asked or DEFAULT_THREADS, usable_cores())
    if threads < asked:
        pb_utils.Logger.log_warn(f"trieton: threads: {asked} asked for, but only {threads} core(s) may be used here")
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
