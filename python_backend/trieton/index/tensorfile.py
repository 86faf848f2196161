"""Files of named tensors: safetensors layout, mapped instead of read, with a checksum over every byte.

Any safetensors reader opens these files. On top of the format, the header's `__metadata__` carries `format`,
`format_version` and `sha256`: the SHA-256 over the SHA-256 digests of the file's pieces (the header with the digest
itself taken as 64 zeros, then the data in pieces of 4 MiB), so that several cores can check a large file.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

FORMAT_VERSION = 1
_ZERO_DIGEST = "0" * 64
_PIECE = 1 << 22  # bytes hashed at a time
_CHUNK = 1 << 24  # bytes written at a time
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format
_HASH_THREADS = 4
_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F32": np.float32,
    "F64": np.float64,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}

TensorSpec = tuple[np.dtype, tuple[int, ...]]


class DamagedFileError(ValueError):
    """A file that must not be used: truncated, altered, of another kind or written by a newer format version."""


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of a tensor of that dtype and shape."""
    dtype, shape = spec
    return int(dtype.itemsize * np.prod(shape, dtype=np.int64))


class TensorFileWriter:
    """Writes a tensor file piece by piece, for tensors that memory does not hold at once.

    A context manager: `append` each tensor's values in order, then `finish`. The file appears under its name, whole,
    in `finish`; whatever ends the block before that leaves nothing.
    """

    def __init__(self, path: str | Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], *, kind: str):
        """Open a partial file beside `path`.

        Args:
            specs: dtype and shape of each tensor to come.
            metadata: further entries for the header.
            kind: what `read_tensors` must ask for.

        Raises:
            ValueError: a dtype that the format lacks, or a header that no reader would take.
        """
        self.path = Path(path)
        self._specs = {name: (np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in specs.items()}
        # Wide types first keeps every tensor aligned to its own item size, as the format asks.
        names = sorted(self._specs, key=lambda name: (-self._specs[name][0].itemsize, name))
        header: dict[str, object] = {
            "__metadata__": {
                **metadata,
                "format": kind,
                "format_version": str(FORMAT_VERSION),
                "sha256": _ZERO_DIGEST,
            }
        }
        offset = 0
        self._starts: dict[str, int] = {}
        for name in names:
            dtype, shape = self._specs[name]
            if dtype not in _NAMES:
                raise ValueError(f"tensor {name!r}: expected one of {sorted(_DTYPES)}, got dtype {dtype}")
            end = offset + tensor_bytes(self._specs[name])
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            self._starts[name] = offset
            offset = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=True)
        self._text = text + " " * (-len(text) % 8)
        if len(self._text) > MAX_HEADER:
            raise ValueError(
                f"{self.path}: the names of {len(names):,} tensors need a header of {len(self._text):,} bytes, and "
                f"readers of the safetensors format take {MAX_HEADER:,}; expected fewer or shorter names of sets"
            )
        self._prefix = len(self._text).to_bytes(8, "little")
        self._data_start = 8 + len(self._text)
        self._data_bytes = offset
        self._done: dict[tuple[str, int], int] = {}  # bytes appended so far, per tensor and row
        self._partial = self.path.with_name(f".{self.path.name}.partial-{os.getpid()}")
        self._file = open(self._partial, "w+b")  # noqa: SIM115 - closed by the context manager

    def append(self, name: str, values: np.ndarray, *, row: int | None = None) -> None:
        """Append `values` to tensor `name`, or to one row of a 2-D tensor whose rows grow side by side."""
        dtype, shape = self._specs[name]
        if values.dtype != dtype:
            raise ValueError(f"tensor {name!r}: expected {dtype}, got {values.dtype}")
        size = tensor_bytes((dtype, shape if row is None else shape[1:]))
        done = self._done.get((name, row or 0), 0)
        if done + values.nbytes > size:
            raise ValueError(f"tensor {name!r}: expected {size} bytes, got {done + values.nbytes}")
        self._file.seek(self._data_start + self._starts[name] + (row or 0) * size + done)
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        for start in range(0, flat.size, _CHUNK):
            self._file.write(flat[start : start + _CHUNK].data)
        self._done[name, row or 0] = done + flat.size

    def finish(self) -> str:
        """Checksum the file, put it in its place and return its digest (hex).

        Raises:
            ValueError: a tensor is shorter than announced.
        """
        missing = self._data_bytes - sum(self._done.values())
        if missing:
            raise ValueError(f"{self.path}: {missing} bytes of tensors were announced and not written")
        self._file.flush()
        digests = [hashlib.sha256(self._prefix + self._text.encode()).digest()]
        self._file.seek(self._data_start)
        while piece := self._file.read(_PIECE):
            digests.append(hashlib.sha256(piece).digest())
        hexdigest = hashlib.sha256(b"".join(digests)).hexdigest()
        self._file.seek(0)
        self._file.write(self._prefix + self._text.replace(_ZERO_DIGEST, hexdigest, 1).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self.path)
        return hexdigest

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


def write_tensors(
    path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str], *, kind: str
) -> str:
    """Write `tensors` and return the file's digest (hex). The file appears whole or not at all.

    The same arguments give the same bytes.
    """
    specs = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    with TensorFileWriter(path, specs, metadata, kind=kind) as file:
        for name, array in tensors.items():
            file.append(name, array)
        return file.finish()


def read_tensors(path: str | Path, *, kind: str, verify: bool = True) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Map a file that `write_tensors` wrote: (tensors by name, metadata).

    The arrays are private copy-on-write views of the file: processes that load the same file share its pages.

    Args:
        kind: the `format` the file must carry.
        verify: compare the checksum (one pass over the file). Structure is always checked.

    Raises:
        DamagedFileError: with the file's name and what is wrong with it.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER):
            raise DamagedFileError(f"{path}: not a tensor file, or truncated inside its header ({size} bytes)")
        raw = file.read(length)
    try:
        header = json.loads(raw.decode())
        metadata = header.pop("__metadata__")
        found, version, recorded = metadata["format"], int(metadata["format_version"]), metadata["sha256"]
        zeroed = raw.replace(recorded.encode(), _ZERO_DIGEST.encode(), 1)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"{path}: header is not readable ({type(error).__name__}: {error})") from None
    if found != kind:
        raise DamagedFileError(f"{path}: expected a file of format {kind!r}, got {found!r}")
    if version > FORMAT_VERSION:
        raise DamagedFileError(
            f"{path}: written by format version {version}, this release reads up to {FORMAT_VERSION}; upgrade trieton"
        )
    data = np.zeros(0, np.uint8)
    if size > 8 + length:
        # A plain ndarray: the subclass machinery of np.memmap costs time on every slice.
        data = np.memmap(path, dtype=np.uint8, mode="c", offset=8 + length).view(np.ndarray)
    tensors = {name: _view(path, data, name, entry) for name, entry in header.items()}
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != data.size:
        raise DamagedFileError(f"{path}: expected {end} bytes of tensors, got {data.size}: truncated or extended")
    if verify:
        pieces = [memoryview(prefix + zeroed)] + [data[i : i + _PIECE].data for i in range(0, data.size, _PIECE)]
        digest = piecewise_digest(pieces)
        if digest != recorded:
            raise DamagedFileError(f"{path}: checksum is {digest}, the header says {recorded}: altered")
    return tensors, metadata


def piecewise_digest(pieces: list[memoryview]) -> str:
    """SHA-256 over the SHA-256 digests of the pieces, hex."""

    def hashed(piece: memoryview) -> bytes:
        return hashlib.sha256(piece).digest()

    if len(pieces) < 4:  # threads cost more than they save
        return hashlib.sha256(b"".join(map(hashed, pieces))).hexdigest()
    with ThreadPoolExecutor(_HASH_THREADS) as threads:  # hashlib releases the interpreter lock
        return hashlib.sha256(b"".join(threads.map(hashed, pieces))).hexdigest()


def _view(path: Path, data: np.ndarray, name: str, entry: dict) -> np.ndarray:
    try:
        start, end = entry["data_offsets"]
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(int(n) for n in entry["shape"])
        if not 0 <= start <= end <= data.size:
            raise ValueError(f"bytes {start}:{end} lie outside the file's {data.size}")
        if any(n < 0 for n in shape):
            raise ValueError(f"shape {shape} is negative")
        return data[start:end].view(dtype).reshape(shape)
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError) as error:
        raise DamagedFileError(f"{path}: tensor {name!r} does not fit: {error}") from None
