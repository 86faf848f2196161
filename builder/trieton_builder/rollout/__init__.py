"""Publishing bundles into the repository of running servers, and taking them back.

publish(bundle, "models", servers=["localhost:8001"])   # stage ... rename, load, canary; or everything as it was
rollback("models")                                      # the version before answers again, in milliseconds
versions("models"); withdraw("models", 7); prune("models", keep=3)
"""

from trieton_builder.rollout.errors import LockedError, NoControlError, RolloutError
from trieton_builder.rollout.publish import Published, publish
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
