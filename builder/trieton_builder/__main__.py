"""Entry point of the `trieton` command."""

import importlib.util
import os
import signal
import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line, or say which extra is missing on a machine that has only the client."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        sys.exit(f"trieton: {names} not installed; the command needs: pip install '.[builder]' in the checkout")
    _open_streams()
    from trieton_builder import interrupts

    # A supervisor's SIGTERM ends a command as Ctrl-C does: with what it began taken back.
    signal.signal(signal.SIGTERM, interrupts.terminate)
    try:
        from trieton_builder.cli import app

        app()
    except KeyboardInterrupt as interrupt:  # before the command began
        print("trieton: interrupted", file=sys.stderr)
        sys.exit(interrupts.exit_code(interrupt))


def _open_streams() -> None:
    """Three streams that take every text.

    A stream that the caller closed (`>&-`) leaves its number to the next file that is opened, into which everybody
    would print; a terminal that is not in UTF-8 would end a command over one letter of a path.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115  (for good)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
