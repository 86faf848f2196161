"""What every subcommand shares: one clear line for an expected error, and output that is a table or JSON."""

import functools
import json
import os
import select
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer
from trieton.constraint import RULES

from trieton_builder.console import PlainConsole
from trieton_builder.files.whole_file import named
from trieton_builder.interrupts import exit_code

CONSTRAINT_HELP = f'E.g. "fresh and not adult": {RULES}.'
P = ParamSpec("P")
T = TypeVar("T")

# Progress and notes go to stderr, so that `--json` on stdout can be piped.
err = PlainConsole(stderr=True, soft_wrap=True)
out = PlainConsole()


def fail(text: str) -> NoReturn:
    """Print `trieton: <text>` on stderr and leave with exit code 1."""
    print(f"trieton: {text}", file=sys.stderr)
    raise typer.Exit(1)


def clean_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Turn the errors a user can do something about into one `trieton: <text>` and exit code 1.

    These are ValueError and OSError with their subclasses, which include all of the project's own errors, and Ctrl-C
    or SIGTERM (exit code 130 or 143). Anything else is a bug and keeps its traceback. A reader of the output that has
    gone is no error to talk about. Goes below `@app.command()`.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with named("standard output"):  # whatever else is written has its own name
                result = function(*args, **kwargs)
                sys.stdout.flush()
            return result
        except (ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError) and reader_has_gone():
                drop_output()
                raise typer.Exit(1) from None
            fail(describe(error))
        except KeyboardInterrupt as interrupt:
            print("; ".join(["trieton: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
            raise typer.Exit(exit_code(interrupt)) from None

    return wrapper


def reader_has_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more (`head`, a pager that was left)."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def drop_output() -> None:
    """Send what is still in stdout nowhere: when Python flushes it at its end, it would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def goes_with(option: str, given: object, other: str, present: object) -> None:
    """Refuse an option that would be ignored. Raises ValueError."""
    if given and not present:
        raise ValueError(f"{option}: goes with {other}")


def describe(error: Exception) -> str:
    """The text of an error without its Python clothes: `[Errno 2] ...: 'x'` becomes `x: ...`."""
    if isinstance(error, OSError) and error.strerror:
        name = error.filename if error.filename2 is None else f"{error.filename} -> {error.filename2}"
        return f"{name}: {error.strerror}" if name else error.strerror
    return str(error) or type(error).__name__


def print_json(value: Any, *, lines: bool = False) -> None:
    """One JSON document on stdout, which a reader has at once, also from a command that goes on.

    NaN and infinity are refused, since strict parsers refuse them too. Where the terminal's encoding is not UTF-8, what
    is not ASCII is escaped, and so are the halves of surrogates that stand for bytes of file names.

    Args:
        lines: one of many: on a line of its own.
    """
    text = json.dumps(value, indent=None if lines else 2, ensure_ascii=False, allow_nan=False)
    if not _is_utf8(sys.stdout.encoding) or not _is_plain(text):
        text = json.dumps(value, indent=None if lines else 2, allow_nan=False)
    print(text, flush=True)


def _is_utf8(encoding: str | None) -> bool:
    return encoding is not None and encoding.lower().replace("-", "").replace("_", "") == "utf8"


def _is_plain(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
