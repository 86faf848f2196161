"""A directory that appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_directory(out_dir: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a partial directory, which becomes `out_dir` when the block ends and is removed if the block raises.

    Raises:
        FileExistsError: `out_dir` exists and `overwrite` is not set.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and not overwrite:
        raise FileExistsError(f"{out_dir}: exists already; remove it or ask to overwrite it")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.partial-", dir=out_dir.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp makes it private
        if out_dir.exists():
            shutil.rmtree(out_dir)
        os.replace(partial, out_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
