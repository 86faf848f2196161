"""Caches bounded in bytes that many threads share: compiled planes, and the canonical texts of expressions."""

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from trieton.constraint.plane import Plane

DEFAULT_MAX_BYTES = 512 << 20
TEXT_MAX_BYTES = 4 << 20
ENTRY_BYTES = 1024  # what an entry costs besides its plane or text: objects, keys, tuples


class TextCache:
    """Maps texts to what they are canonically; the least recently used go first."""

    def __init__(self, max_bytes: int = TEXT_MAX_BYTES):
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[str, ...], str] = OrderedDict()
        self._max_bytes = max_bytes
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._bytes

    def get(self, texts: tuple[str, ...]) -> str | None:
        """The canonical text of `texts`, None where it is not held."""
        with self._lock:
            found = self._held.get(texts)
            if found is not None:
                self._held.move_to_end(texts)
            return found

    def put(self, texts: tuple[str, ...], canonical: str) -> None:
        """Hold a canonical text, and drop old ones to stay within `max_bytes`."""
        with self._lock:
            if texts not in self._held:
                self._bytes += _text_bytes(*texts, canonical)
            self._held[texts] = canonical
            while self._bytes > self._max_bytes:
                old, text = self._held.popitem(last=False)
                self._bytes -= _text_bytes(*old, text)


def _text_bytes(*texts: str) -> int:
    return ENTRY_BYTES + sum(map(sys.getsizeof, texts))


@dataclass(frozen=True)
class CacheStats:
    """What a cache has done since it was made.

    Attributes:
        hits: requests answered by a plane that was there or that another thread was just compiling.
        misses: planes compiled.
        evictions: planes dropped to stay within `max_bytes`.
        entries, bytes, max_bytes: planes held now, their size with that of their keys, and the most that is kept.
        compile_seconds: wall time spent compiling, summed over all planes.
    """

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int
    max_bytes: int
    compile_seconds: float


class PlaneCache:
    """Least recently used planes go first; of threads that want the same new plane one compiles and the rest wait."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES):
        self._lock = threading.Lock()
        self._held: OrderedDict[str, Plane] = OrderedDict()
        self._in_flight: dict[str, Future[Plane]] = {}
        self._max_bytes = max_bytes
        self._bytes = self._hits = self._misses = self._evictions = 0
        self._compile_seconds = 0.0

    def get(self, key: str, compile_plane: Callable[[], Plane]) -> Plane:
        """The plane of `key`, from `compile_plane` when it is not held.

        What `compile_plane` raises reaches every waiting caller, and the next call tries again.
        """
        with self._lock:
            plane = self._held.get(key)
            if plane is not None:
                self._held.move_to_end(key)
                self._hits += 1
                return plane
            future = self._in_flight.get(key)
            mine = future is None
            if future is None:
                future = self._in_flight[key] = Future()
                self._misses += 1
            else:
                self._hits += 1
        return self._compile(key, future, compile_plane) if mine else future.result()

    def _compile(self, key: str, future: "Future[Plane]", compile_plane: Callable[[], Plane]) -> Plane:
        started = time.perf_counter()
        try:
            plane = compile_plane()
        except BaseException as error:
            with self._lock:
                del self._in_flight[key]
                self._compile_seconds += time.perf_counter() - started
            future.set_exception(error)
            raise
        with self._lock:
            del self._in_flight[key]
            self._compile_seconds += time.perf_counter() - started
            # The key counts, too: planes that allow everything or nothing are of no size, their texts are not.
            if (cost := _cost(key, plane)) <= self._max_bytes:
                self._held[key] = plane
                self._bytes += cost
                self._shrink()
        future.set_result(plane)
        return plane

    def resize(self, max_bytes: int) -> None:
        """Keep at most `max_bytes` of planes from now on."""
        if max_bytes < 0:
            raise ValueError(f"max_bytes: expected 0 or more, got {max_bytes}")
        with self._lock:
            self._max_bytes = max_bytes
            self._shrink()

    def stats(self) -> CacheStats:
        """Counters and sizes, all of one moment."""
        with self._lock:
            return CacheStats(
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                entries=len(self._held),
                bytes=self._bytes,
                max_bytes=self._max_bytes,
                compile_seconds=self._compile_seconds,
            )

    def _shrink(self) -> None:
        while self._bytes > self._max_bytes:
            key, plane = self._held.popitem(last=False)
            self._bytes -= _cost(key, plane)
            self._evictions += 1


def _cost(key: str, plane: Plane) -> int:
    return plane.nbytes + _text_bytes(key)
