"""A file that appears whole or not at all, and errors of a full disk that say where."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

# What a full disk, a quota, a file limit and a broken disk are called: whoever writes them may forget the name.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a partial path beside `path`, which becomes `path` when the block ends and is removed if the block raises.

    A link stays a link, and its target is replaced. What is there and is no plain file (/dev/stdout, a pipe) cannot be
    replaced: its own path is yielded.

    Raises:
        OSError: names `path` where the block's own error has no name.
    """
    path = Path(path)
    with named(path):
        if path.exists() and not path.is_file():
            yield path
            return
        place = path.resolve()
        partial = place.with_name(f".{place.name}.partial-{os.getpid()}")
        try:
            yield partial
            os.replace(partial, place)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def named(path: str | Path, *, hide: bool = False) -> Iterator[None]:
    """Give a disk's error inside the block the name of what was being written, where it has none.

    Python's own writes raise without a name, and libraries raise errors of their own with the system's words in them.

    Args:
        hide: also replace the name that the error has, of a file that nobody needs to know.
    """
    try:
        yield
    except Exception as error:
        number, name = (error.errno, error.filename) if isinstance(error, OSError) else (None, None)
        number = number or next((known for known in _DISK if os.strerror(known) in str(error)), None)
        if number not in _DISK or (name and not hide):
            raise
        raise OSError(number, os.strerror(number), os.fspath(path)) from None
