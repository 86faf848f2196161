"""Numba's `njit` with its cache on disk, also where the usual places for that cache may not be written.

Numba keeps compiled code beside the source or in the user's home. A user without a home, on packages installed by
somebody else, has neither, and Numba refuses the function itself. Such a user gets a private folder among the temporary
files; where even that cannot be had, the code is compiled anew at each start.
"""

import contextlib
import functools
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

LOG = logging.getLogger("trieton")


def cached_njit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`numba.njit(function, cache=True, **options)`, or a decorator; a missing place for the cache is no error."""
    if function is None:
        return functools.partial(cached_njit, **options)
    for has_place in (lambda: True, _use_private_folder):
        # RuntimeError: Numba found no place for the cache; it has no narrower error.
        with contextlib.suppress(RuntimeError):
            if has_place():
                return numba.njit(function, cache=True, **options)
    return numba.njit(function, **options)


def private_folder() -> Path:
    """A folder among the temporary files that only this user can have written; it is made where it is missing.

    The cache holds pickles: whoever can write there runs code as the one who reads.

    Raises:
        OSError: no temporary folder may be written, or somebody else was there first.
    """
    folder = Path(tempfile.gettempdir()) / f"trieton-numba-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder}: expected a folder that only user {os.getuid()} may enter; remove it")
    tempfile.TemporaryFile(dir=folder).close()
    return folder


@functools.cache
def _use_private_folder() -> bool:
    """Let Numba cache in the private folder. False, and one warning, where there is none."""
    try:
        numba.config.CACHE_DIR = str(private_folder())
    except OSError as error:
        LOG.warning("trieton: compiled code is not kept, each start compiles it anew: %s", error)
        return False
    return True


def cache_place() -> str | None:
    """Where the compiled code of this package is kept; None where it is compiled anew at each start."""

    @cached_njit
    def probe() -> None:
        """Never called: Numba chooses the place when it takes the function."""

    stats = getattr(probe, "stats", None)
    return None if stats is None else stats.cache_path
