"""Silence for libraries that print while they work: their bars and remarks would break into the caller's output."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_bars() -> Iterator[None]:
    """Without the bars that transformers draws for reading and writing a file."""
    from transformers.utils import logging as library

    shown = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
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
