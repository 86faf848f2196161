"""Publishing bundles into the repository of running servers, and taking them back.

publish(bundle, "models", servers=["localhost:8001"])   # stage ... rename, load, canary; or everything as it was
rollback("models")                                      # the version before answers again, in milliseconds
versions("models"); withdraw("models", 7); prune("models", keep=3)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trieton_builder.rollout.errors import LockedError, NoControlError, RolloutError
    from trieton_builder.rollout.publishing import Published, publish
    from trieton_builder.rollout.repository import Repository
    from trieton_builder.rollout.retention import prune, rollback, versions, withdraw
    from trieton_builder.rollout.steps import StepEvent
    from trieton_builder.rollout.targets import Endpoint

__all__ = [
    "Endpoint",
    "LockedError",
    "NoControlError",
    "Published",
    "Repository",
    "RolloutError",
    "StepEvent",
    "prune",
    "publish",
    "rollback",
    "versions",
    "withdraw",
]

_HOMES = {
    "errors": ("LockedError", "NoControlError", "RolloutError"),
    "publishing": ("Published", "publish"),
    "repository": ("Repository",),
    "retention": ("prune", "rollback", "versions", "withdraw"),
    "steps": ("StepEvent",),
    "targets": ("Endpoint",),
}


def __getattr__(name: str) -> Any:
    """Import a name's module at its first use: a rollback is urgent and needs a third of what a publish imports."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
