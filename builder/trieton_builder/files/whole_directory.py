"""A directory that appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trieton_builder.files.whole_file import named
from trieton_builder.interrupts import held_back


@contextmanager
def whole_directory(out_dir: str | Path, *, overwrite: bool = False, mark: str = "") -> Iterator[Path]:
    """Yield a partial directory, which becomes `out_dir` when the block ends and is removed if the block raises.

    Args:
        overwrite: replace `out_dir` where it exists.
        mark: a file that `out_dir` must hold to be replaced: nobody's other folder is removed by a slip.

    Raises:
        FileExistsError: `out_dir` exists and `overwrite` is not set, or it does not hold `mark`.
        OSError: it cannot be made; names `out_dir`.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and not overwrite:
        raise FileExistsError(f"{out_dir}: exists already; remove it, or replace it with --overwrite")
    if out_dir.exists() and not (out_dir / mark).exists():
        raise FileExistsError(f"{out_dir}: not replaced, because it holds no {mark}; remove it yourself")
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.partial-", dir=out_dir.parent))
    except OSError as error:  # of a name that nobody gave
        raise type(error)(error.errno, error.strerror, str(out_dir)) from None
    try:
        with named(out_dir):
            yield partial
        partial.chmod(0o755)  # mkdtemp makes it private; the server may run as another user
        if out_dir.exists():
            shutil.rmtree(out_dir)
        os.replace(partial, out_dir)
    finally:
        with held_back():
            shutil.rmtree(partial, ignore_errors=True)
