"""Entry point of the `trieton` command."""

import importlib.util
import sys


def main() -> None:
    """Run the command line, or say which extra is missing on a machine that has only the client."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"trieton: {' and '.join(missing)} not installed; the command needs: pip install 'trieton[builder]'")
    from trieton_builder.cli import app

    app()


if __name__ == "__main__":
    main()
