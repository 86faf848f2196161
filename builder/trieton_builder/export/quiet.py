"""Silence for libraries that print while they work: their bars and remarks would break into the caller's output."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_bars() -> Iterator[None]:
    """Without the bars and remarks of transformers about reading and writing a file; what matters is in its report."""
    from transformers.utils import logging as library

    shown, level = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if shown:
            library.enable_progress_bar()


@contextmanager
def no_remarks() -> Iterator[None]:
    """Without the ONNX exporter's remarks about its own names and about packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
