"""What every subcommand shares: one clear line for an expected error, and output that is a table or JSON."""

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from trieton.constraint import RULES

from trieton_builder.files.whole_file import named

CONSTRAINT_HELP = f'E.g. "fresh and not adult": {RULES}.'
P = ParamSpec("P")
T = TypeVar("T")

# Progress and notes go to stderr, so that `--json` on stdout can be piped.
err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False)


def fail(text: str) -> NoReturn:
    """Print `trieton: <text>` on stderr and leave with exit code 1."""
    print(f"trieton: {text}", file=sys.stderr)
    raise typer.Exit(1)


def clean_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Turn the errors a user can do something about into one `trieton: <text>` and exit code 1.

    These are ValueError and OSError with their subclasses, which include all of the project's own errors, and Ctrl-C
    (exit code 130). Anything else is a bug and keeps its traceback. A reader of the output that has gone is no error
    to talk about. Goes below `@app.command()`.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with named("standard output"):  # whatever else is written has its own name
                result = function(*args, **kwargs)
                sys.stdout.flush()
            return result
        except BrokenPipeError:
            # The reader (`head`, a pager) has enough. Python would complain once more when it flushes at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (ValueError, OSError) as error:
            fail(describe(error))
        except KeyboardInterrupt:
            print("trieton: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return wrapper


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
    """One JSON document on stdout; NaN and infinity are refused, since strict parsers refuse them too.

    Args:
        lines: one of many: on a line of its own, which a reader has at once.
    """
    print(json.dumps(value, indent=None if lines else 2, ensure_ascii=False, allow_nan=False), flush=lines)
