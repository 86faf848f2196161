"""Errors of the rollout, and what is added to errors on their way."""

import contextlib
from collections.abc import Iterator, Mapping


class RolloutError(OSError):
    """A rollout step that could not be done; the text says what was left as it was, or how it was put right."""


class LockedError(RolloutError):
    """Another publisher works on this repository right now."""


class NoControlError(RolloutError):
    """The server is not in EXPLICIT mode: it takes versions by itself and no orders."""


class ServerGoneError(RolloutError):
    """A server that does not answer any more: it has ended, cannot be reached, or hangs."""


def say_also(error: BaseException, text: str) -> None:
    """Add to the text of an error what is so now; the last line of a command is then the whole truth."""
    if not text:
        return
    if isinstance(error, OSError) and error.strerror:
        error.strerror = f"{error.strerror}; {text}"
    else:
        error.args = (f"{error}; {text}" if str(error) else text, *error.args[1:])


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors of the block say other names, {in the error: instead}; for paths that nobody outside knows."""

    def renamed(text: object) -> str:
        said = str(text)
        for name, instead in names.items():
            said = said.replace(name, instead)
        return said

    try:
        yield
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename:
            error.filename = renamed(error.filename)
        else:
            error.args = (renamed(error), *error.args[1:])
        raise
