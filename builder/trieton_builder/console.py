"""Output for people: what a user named is printed as it is named, whatever Rich would make of it.

Rich reads `[red]` as a colour, `[/x]` as the end of one and `:eyes:` as a picture, in everything that it is given,
cells of tables included. Item ids, sets and paths may hold all of that. A `PlainConsole` takes text as text; what is to
be styled is a `Text` that says so.
"""

import os
import re
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

# What would move the cursor or colour the rest of a terminal: C0 and C1 without tab and newline.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class PlainConsole(Console):
    """A console without markup, emoji and highlighting. Lines of text are not broken, wherever they are printed."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string that is printed comes through here, those of a table too."""
        return super().render_str(shown(text), **options | {"markup": False, "emoji": False})

    def print(self, *objects: Any, **options: Any) -> None:
        """As Rich's, but a line of text is as long as it is: a path that is broken in two cannot be copied."""
        if all(isinstance(thing, str | Text) for thing in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)

    def status(self, status: Any, **options: Any) -> Status:
        """As Rich's; its spinner would read markup whatever the console says."""
        return super().status(Text(shown(status)) if isinstance(status, str) else status, **options)

    def on_broken_pipe(self) -> None:
        """The reader has gone. Without notes a command goes on; about its results the caller decides."""
        if not self.stderr:
            raise BrokenPipeError
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def shown(text: str) -> str:
    """Text with its control characters written out, as `\\x1b`."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
