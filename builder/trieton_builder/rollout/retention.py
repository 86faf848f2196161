"""Going back to an older version, taking one out, removing old ones, and the table of all of them."""

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trieton_builder.rollout.asked import asked_by, make_ready
from trieton_builder.rollout.control import ServerControl
from trieton_builder.rollout.errors import NoControlError, RolloutError, say_also
from trieton_builder.rollout.ledger import Ledger
from trieton_builder.rollout.moving import go_back, hold
from trieton_builder.rollout.recover import recover
from trieton_builder.rollout.repository import Repository
from trieton_builder.rollout.steps import Listener, Steps, numbers, telling
from trieton_builder.rollout.targets import Endpoint, Reach, Target, locked, open_targets


def rollback(
    repository: str | os.PathLike[str],
    *,
    to: int | None = None,
    servers: Sequence[str | Endpoint] | None = None,
    control_key: str | None = None,
    wait: float = 0.0,
    load_timeout: float = 600.0,
    command: str | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Let every server answer from an older version again; the newer ones leave the repository.

    A version that is still resident answers within milliseconds, another one is loaded first; no request fails. Nothing
    is withdrawn before a real request to the older version was answered; one whose process has died is started anew.

    Args:
        to: version number; None takes the one before the current version.

    Returns:
        {"from", "to", "withdrawn": every version that left the repository, "bundle_id", "servers", "steps"}.

    Raises:
        RolloutError: no such version, or a server failed; it and those done before then answer as before. The text says
            which server could not be brought back.
    """

    def choose(older: list[int], current: int) -> int:
        if to == current:
            raise RolloutError(f"version {to} is the current one already")
        if to is not None and to not in older:
            raise RolloutError(f"version {to} is not in {repository}; expected one of {older}")
        if not older:
            raise RolloutError(f"version {current} is the only one in {repository}; nothing to go back to")
        return older[-1] if to is None else to

    reach = Reach(servers, control_key, wait, load_timeout, command, listener)
    return _step_back("rollback", repository, choose, reach)


def withdraw(
    repository: str | os.PathLike[str],
    version: int,
    *,
    servers: Sequence[str | Endpoint] | None = None,
    control_key: str | None = None,
    wait: float = 0.0,
    load_timeout: float = 600.0,
    command: str | None = None,
    listener: Listener | None = None,
) -> dict[str, Any]:
    """Take one version out of the repository so that it is never served again; the current one by going back first.

    It stays in the folder `withdrawn` beside the repository until it is pruned.

    Raises:
        RolloutError: no such version; it is the only one; or a server failed.
    """
    repo, reach = Repository(repository), Reach(servers, control_key, wait, load_timeout, command, listener)
    if version not in repo.versions():
        raise RolloutError(f"version {version} is not in {repo}; expected one of {repo.versions()}")
    if version == repo.current():
        older = [number for number in repo.versions() if number != version]
        if not older:
            raise RolloutError(f"version {version} is the only one in {repo}: publish another one first")
        return _step_back("withdraw", repository, lambda older, current: older[-1], reach)
    steps = Steps(listener)
    with reach.targets(repository) as targets, locked(targets, wait, steps):
        gone = [number for target in targets for number in recover(target, steps)]
        with telling(gone):
            for target in targets:
                _withdraw_resident(target, version, steps)
                _record(target, "withdraw", version, target.repository.current(), [version], command)
        first = targets[0].repository
        return _result(version, first.current(), [*gone, version], first, targets, steps)


def _withdraw_resident(target: Target, version: int, steps: Steps) -> None:
    """Take out a version that is not the current one, and let no server hold it."""
    repo, current = target.repository, target.repository.current()
    if version not in repo.versions() or current is None or version == current:
        raise RolloutError(f"{repo} has changed meanwhile: current version {current}; look again")
    repo.write_intent({"action": "withdraw", "version": version, "to": current, "out": [version]})
    try:
        for control in target.servers:
            with steps.step("unload", f"{control.url} holds version {current} only"):
                _hold(control, current, repo, steps)
    except BaseException as error:
        repo.clear_intent()
        say_also(error, "the withdraw withdrew nothing")
        raise
    with steps.step("rename", f"version {version} leaves {repo.model_dir}"):
        repo.take_out(version)


def prune(
    repository: str | os.PathLike[str],
    *,
    keep: int = 3,
    servers: Sequence[str | Endpoint] | None = None,
    control_key: str | None = None,
    wait: float = 0.0,
    command: str | None = None,
    dry_run: bool = False,
    listener: Listener | None = None,
) -> list[int]:
    """Remove all but the newest `keep` versions and the newest `keep` withdrawn ones. Returns what was removed.

    Never removed: the current version, and any that a server holds ready. A server that cannot be asked is an error.
    """
    steps = Steps(listener)
    with open_targets(repository, servers, control_key=control_key) as targets:
        if dry_run:
            return sorted({number for target in targets for number, _ in _removable(target, keep)})
        with locked(targets, wait, steps):
            removed: set[int] = set()
            for target in targets:
                recover(target, steps)
                removed.update(prune_locked(target, keep, steps, command))
            return sorted(removed)


def prune_locked(target: Target, keep: int, steps: Steps, command: str | None = None) -> list[int]:
    """`prune` for one repository whose lock is held."""
    removable = _removable(target, keep)
    if removable:
        with steps.step("prune", f"remove versions {', '.join(str(number) for number, _ in removable)}"):
            for number, folder in removable:
                bundle_id = target.repository.known_bundle_id(number, folder)  # a damaged one goes like any other
                target.repository.remove(folder)
                Ledger(target.repository.state).add("prune", number, bundle_id=bundle_id, command=_command(command))
    return [number for number, _ in removable]


def versions(
    repository: str | os.PathLike[str],
    *,
    servers: Sequence[str | Endpoint] | None = None,
    control_key: str | None = None,
) -> list[dict[str, Any]]:
    """Every version that ever was, newest first, from the ledger, the folders and the servers.

    `state` of each: "serving" (what servers answer from), "resident" (held ready by a server, behind the serving one),
    "current" (what a server will load; none was asked), "kept", "withdrawn", "failed", "pruned".
    """
    with open_targets(repository, servers, control_key=control_key) as targets:
        target = targets[0]
        repo = target.repository
        held = {control.url: control.ready_versions() for control in target.servers}
    if not repo.state.is_dir():  # a failed first publish leaves a ledger and no repository
        repo.require()
    table: dict[int, dict[str, Any]] = {}
    for entry in Ledger(repo.state).entries():
        number = entry["version"]
        row = table.setdefault(number, {"version": number, "state": "failed"})
        if entry["action"] == "publish":
            row |= {key: value for key, value in entry.items() if key not in ("action", "version", "outcome", "by")}
        row["last"] = f"{entry['action']} {entry['time']}"
        if entry["action"] == "prune":
            row["state"] = "pruned"
    for number in repo.versions():
        row = table.setdefault(number, {"version": number})
        row |= {"bundle_id": repo.known_bundle_id(number), "state": "kept"}
    for number in repo.withdrawn_versions():
        row = table.setdefault(number, {"version": number})
        row["state"] = "failed" if row.get("error") else "withdrawn"
    for number, row in table.items():
        row["on"] = [url for url, ready in held.items() if number in ready]
        if any(ready and ready[-1] == number for ready in held.values()):
            row["state"] = "serving"
        elif row["on"]:
            row["state"] = "resident"
        elif number == repo.current() and not held:
            row["state"] = "current"
    return [table[number] for number in sorted(table, reverse=True)]


def _step_back(
    action: str, repository: str | os.PathLike[str], choose: Callable[[list[int], int], int], reach: Reach
) -> dict[str, Any]:
    """Servers first, because that is what people wait for; the newer directories leave afterwards.

    Args:
        choose: (versions older than the one that answers, that one) -> where to go back to.
    """
    steps = Steps(reach.listener)
    with reach.targets(repository) as targets, locked(targets, reach.wait, steps):
        gone = [number for target in targets for number in recover(target, steps)]
        with telling(gone):
            first, current = targets[0].repository, _answering(targets[0])
            if current is None:
                raise RolloutError(f"{repository} has no version")
            chosen = choose([number for number in first.versions() if number < current], current)
            for target in targets[1:]:
                repo = target.repository
                if repo.current() != first.current() or chosen not in repo.versions():
                    raise RolloutError(f"{repo} holds {repo.versions()}, expected {chosen} and {first.current()}")
            out = {target.repository.root: _newer(target.repository, chosen) for target in targets}
            _move_servers(action, targets, current, chosen, out, steps)
            for target in targets:
                _take_out(action, target, chosen, out[target.repository.root], steps)
                _record(target, action, current, chosen, out[target.repository.root], reach.command)
        gone += [number for leaving in out.values() for number in leaving]
        return _result(current, chosen, gone, first, targets, steps)


def _move_servers(
    action: str, targets: list[Target], current: int, chosen: int, out: dict[Path, list[int]], steps: Steps
) -> None:
    """Let every server answer from `chosen`, one after the other, or all of them from `current` again."""
    done: list[tuple[ServerControl, Repository]] = []
    try:
        for target in targets:
            repo = target.repository
            repo.write_intent({"action": action, "version": current, "to": chosen, "out": out[repo.root]})
            models = asked_by(repo.path(chosen))
            for control in target.servers:
                make_ready(models, control, steps.note)  # a restart may have left them out
                done.append((control, repo))
                with steps.step("load", f"{control.url} answers from version {chosen}"):
                    _hold(control, chosen, repo, steps)
    except BaseException as error:
        problems = [
            go_back(control, current, repo.known_bundle_id(current), steps.note) for control, repo in done[::-1]
        ]
        for target in targets:
            target.repository.clear_intent()
        say_also(error, "; ".join([f"the {action} withdrew nothing", *filter(None, problems)]))
        raise


def _answering(target: Target) -> int | None:
    """The version to go back from: the current one, or a newer one that a server holds and whose folder was removed."""
    held = [number for control in target.servers for number in control.ready_versions()]
    return max([*target.repository.versions(), *held], default=None)


def _newer(repository: Repository, version: int) -> list[int]:
    return [number for number in repository.versions() if number > version]


def _take_out(action: str, target: Target, chosen: int, out: list[int], steps: Steps) -> None:
    """Move the newer versions out; a server that watches the repository by itself goes back only then."""
    repo = target.repository
    with steps.step("rename", f"{', '.join(map(str, out)) or 'none'} leave {repo.model_dir}"):
        for number in out:
            repo.take_out(number)
    watching = [control for control in target.servers if control.ready_versions()[-1:] != [chosen]]
    try:
        for control in watching:
            with steps.step("ready", f"{control.url} holds version {chosen} ready"):
                control.wait_ready(chosen, timeout=120)
                fault = control.fault(None, repo.known_bundle_id(chosen))
                if fault is not None:
                    raise RolloutError(f"{control.url}: version {chosen} does not answer: {fault}")
    except RolloutError as error:
        for number in out:
            repo.rename(repo.withdrawn / str(number), repo.path(number))
        repo.clear_intent()
        say_also(error, f"the {action} withdrew nothing: {numbers(out)} back in {repo.model_dir}")
        raise


def _hold(control: ServerControl, version: int, repository: Repository, steps: Steps) -> None:
    with contextlib.suppress(NoControlError):  # in POLL mode the rename is the order
        hold(control, version, repository.known_bundle_id(version), steps.note)


def _record(target: Target, action: str, version: int, to: int | None, out: list[int], command: str | None) -> None:
    Ledger(target.repository.state).add(action, version, to=to, out=out, command=_command(command))
    target.repository.clear_intent()


def _result(
    version: int, to: int | None, gone: list[int], repository: Repository, targets: list[Target], steps: Steps
) -> dict[str, Any]:
    return {
        "from": version,
        "to": to,
        "withdrawn": sorted(set(gone)),
        "bundle_id": None if to is None else repository.bundle_id(to),
        "servers": [control.url for target in targets for control in target.servers],
        "steps": steps.log,
    }


def _removable(target: Target, keep: int) -> list[tuple[int, Path]]:
    if keep < 1:
        raise ValueError(f"keep: expected at least 1, got {keep}")
    repository = target.repository
    repository.require()
    held = {number for control in target.servers for number in control.ready_versions()}
    present = repository.versions()
    old = [(number, repository.path(number)) for number in present[:-keep] if number not in held]
    taken_out = repository.withdrawn_versions()[:-keep]
    return [*old, *((number, repository.withdrawn / str(number)) for number in taken_out)]


def _command(command: str | None) -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if command is None else command
