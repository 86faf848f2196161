"""Entry point of the `trieton` command."""

import importlib.util
import signal
import sys


def main() -> None:
    """Run the command line, or say which extra is missing on a machine that has only the client."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        sys.exit(f"trieton: {names} not installed; the command needs: pip install '.[builder]' in the checkout")
    from trieton_builder.cli import app

    # A supervisor's SIGTERM ends a command as Ctrl-C does: with what it began taken back.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()


if __name__ == "__main__":
    main()
