"""The ledger: one line of JSON for everything that was done to a repository, never changed, only added to."""

import getpass
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from trieton_builder.files.whole_file import named
from trieton_builder.rollout.disk import sync
from trieton_builder.rollout.errors import RolloutError


class Ledger:
    """`ledger.jsonl` beside a repository.

    Entries have `time` (UTC), `by` (user@host), `action`, `version`, and what belongs to the action. A publish writes
    two: `outcome: "started"` reserves the number for ever, the second says what became of it.
    """

    def __init__(self, state: Path):
        self.path = state / "ledger.jsonl"

    def entries(self) -> list[dict[str, Any]]:
        """All entries, oldest first. A last line cut short by a crash is no entry."""
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        entries = []
        for number, line in enumerate(lines[:-1], 1):  # a whole line ends with a newline, so the last piece is none
            if not line:
                continue
            try:
                entry = json.loads(line)
            except ValueError:
                raise self._damaged(number, "not JSON") from None
            known = isinstance(entry, dict) and isinstance(entry.get("action"), str)
            if not known or not isinstance(entry.get("version", None), int | None) or not entry.get("time"):
                raise self._damaged(number, "no entry with action, version and time")
            entries.append(entry)
        return entries

    def _damaged(self, number: int, what: str) -> RolloutError:
        return RolloutError(
            f"{self.path}, line {number}: {what}; edited by hand, or damaged by a crash? Version numbers are given out "
            "by it, so it is not passed over: mend or remove that line"
        )

    def add(self, action: str, version: int | None, **fields: Any) -> None:
        """Append one entry durably."""
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "by": f"{_user()}@{socket.gethostname()}",
            "action": action,
            "version": version,
            **fields,
        }
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.ftruncate(descriptor, os.pread(descriptor, size, 0).rfind(b"\n") + 1)  # a line cut short by a crash
            with named(self.path):
                os.write(descriptor, json.dumps(entry, allow_nan=False).encode() + b"\n")
                sync(descriptor)
        finally:
            os.close(descriptor)

    def highest(self) -> int:
        """The highest version number ever given out."""
        return max((entry["version"] for entry in self.entries() if entry.get("version") is not None), default=0)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's number without a name
        return str(os.getuid())
