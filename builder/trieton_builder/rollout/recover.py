"""Putting right what a publisher left that was killed."""

from trieton_builder.rollout.asked import asked_by, make_ready
from trieton_builder.rollout.control import ServerControl
from trieton_builder.rollout.errors import RolloutError
from trieton_builder.rollout.ledger import Ledger
from trieton_builder.rollout.moving import go_back
from trieton_builder.rollout.steps import Steps
from trieton_builder.rollout.targets import Target


def recover(target: Target, steps: Steps) -> list[int]:
    """Finish or take back the step a killed publisher was at. Only under the lock, so its writer is surely gone.

    publish: the new version is taken back unless the ledger says it was done. rollback, withdraw: finished.

    Returns:
        The versions that were withdrawn by it.
    """
    repository = target.repository
    intent = repository.read_intent()
    before = repository.versions()
    if intent is not None:
        version, ledger = intent["version"], Ledger(repository.state)
        if intent["action"] == "publish":
            done = any(
                entry["action"] == "publish"
                and entry["version"] == version
                and entry.get("outcome") in ("serving", "placed")
                for entry in ledger.entries()
            )
            if not done:
                if repository.path(version).is_dir():
                    for control in target.servers:
                        _go_back(target, control, intent["previous"], steps)
                    repository.take_out(version)
                ledger.add("publish", version, outcome="failed", error="the publisher was killed", command="recovery")
                steps.note(
                    f"a publisher of version {version} was killed; version {intent['previous']} is current again"
                )
        else:
            models = asked_by(repository.path(intent["to"]))
            for control in target.servers:
                try:
                    make_ready(models, control, steps.note)
                except RolloutError as error:
                    steps.note(str(error))
                _go_back(target, control, intent["to"], steps)
            for number in intent["out"]:
                repository.take_out(number)
            ledger.add(intent["action"], version, to=intent["to"], out=intent["out"], command="recovery")
            steps.note(f"a {intent['action']} of version {version} was killed and is now finished")
        repository.clear_intent()
    repository.sweep()
    return sorted(set(before) - set(repository.versions()))


def _go_back(target: Target, control: ServerControl, version: int | None, steps: Steps) -> None:
    problem = go_back(control, version, target.repository.known_bundle_id(version), steps.note)
    if problem:
        steps.note(problem)
