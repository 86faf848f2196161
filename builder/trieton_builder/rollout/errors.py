"""Errors of the rollout."""


class RolloutError(OSError):
    """A rollout step that could not be done; the text says what was left as it was, or how it was put right."""


class LockedError(RolloutError):
    """Another publisher works on this repository right now."""


class NoControlError(RolloutError):
    """The server is not in EXPLICIT mode: it takes versions by itself and no orders."""
