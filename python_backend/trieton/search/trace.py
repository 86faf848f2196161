"""What a traced query went through. The spans are made of it elsewhere: see `trieton.serving.tracing`."""

import time
from collections.abc import Mapping
from typing import Any


class Trace:
    """What a traced query went through, as it happens; spans are made of it later, elsewhere."""

    __slots__ = ("attributes", "parent", "stages", "started")

    def __init__(self, parent: Any):
        self.parent = parent
        self.started = time.perf_counter()
        self.stages: list[tuple[str, float, float, Mapping[str, Any]]] = []
        self.attributes: dict[str, Any] = {}

    def stage(self, name: str, started: float, ended: float, attributes: Mapping[str, Any]) -> None:
        """Note a stage; both times are those of `time.perf_counter`."""
        self.stages.append((name, started, ended, attributes))
