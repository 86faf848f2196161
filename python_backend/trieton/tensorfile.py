"""Files of named tensors: safetensors layout, mapped instead of read, with a checksum over every byte.

Any safetensors reader opens these files. On top of the format, the header's `__metadata__` carries `format`,
`format_version` and `sha256`, the digest of the whole file with the digest itself taken as 64 zeros.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

FORMAT_VERSION = 1
_ZERO_DIGEST = "0" * 64
_CHUNK = 1 << 24  # bytes hashed or written at a time
_MAX_HEADER = 100_000_000  # the limit of the safetensors format
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


class DamagedFileError(ValueError):
    """A file that must not be used: truncated, altered, of another kind or written by a newer format version."""


def _chunks(array: np.ndarray) -> Iterator[memoryview]:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK].data


def write_tensors(
    path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str], *, kind: str
) -> str:
    """Write `tensors` and return the file's own sha256 (hex). The file appears whole or not at all.

    Arrays may be memory maps: they are written in pieces. The same arguments give the same bytes.
    """
    path = Path(path)
    # Wide types first keeps every tensor aligned to its own item size, as the format asks.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {
        "__metadata__": {
            **metadata,
            "format": kind,
            "format_version": str(FORMAT_VERSION),
            "sha256": _ZERO_DIGEST,
        }
    }
    offset = 0
    for name in names:
        array = tensors[name]
        if array.dtype not in _NAMES:
            raise ValueError(f"tensor {name!r}: expected one of {sorted(_DTYPES)}, got dtype {array.dtype}")
        end = offset + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True)
    text += " " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little")
    digest = hashlib.sha256(prefix + text.encode())
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            file.write(prefix + text.encode())
            for name in names:
                for chunk in _chunks(tensors[name]):
                    digest.update(chunk)
                    file.write(chunk)
            hexdigest = digest.hexdigest()
            file.seek(0)
            file.write(prefix + text.replace(_ZERO_DIGEST, hexdigest, 1).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return hexdigest


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
        if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
            raise DamagedFileError(f"{path}: not a tensor file, or truncated inside its header ({size} bytes)")
        text = file.read(length).decode(errors="replace")
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__")
        found, version, recorded = metadata["format"], int(metadata["format_version"]), metadata["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{path}: header is not readable ({type(error).__name__}: {error})") from None
    if found != kind:
        raise DamagedFileError(f"{path}: expected a file of format {kind!r}, got {found!r}")
    if version > FORMAT_VERSION:
        raise DamagedFileError(
            f"{path}: written by format version {version}, this release reads up to {FORMAT_VERSION}; upgrade trieton"
        )
    data = np.memmap(path, dtype=np.uint8, mode="c", offset=8 + length) if size > 8 + length else np.zeros(0, np.uint8)
    tensors = {name: _view(path, data, name, entry) for name, entry in header.items()}
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != data.size:
        raise DamagedFileError(f"{path}: expected {end} bytes of tensors, got {data.size}: truncated or extended")
    if verify:
        digest = hashlib.sha256(prefix + text.replace(recorded, _ZERO_DIGEST, 1).encode())
        for chunk in _chunks(data):
            digest.update(chunk)
        if digest.hexdigest() != recorded:
            raise DamagedFileError(f"{path}: checksum is {digest.hexdigest()}, the header says {recorded}: altered")
    return tensors, metadata


def _view(path: Path, data: np.ndarray, name: str, entry: dict) -> np.ndarray:
    try:
        start, end = entry["data_offsets"]
        dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(int(n) for n in entry["shape"])
        if not 0 <= start <= end <= data.size:
            raise ValueError(f"bytes {start}:{end} lie outside the file's {data.size}")
        # A plain ndarray view: subclass machinery of np.memmap costs time on every slice.
        return data[start:end].view(np.ndarray).view(dtype).reshape(shape)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{path}: tensor {name!r} does not fit: {error}") from None
