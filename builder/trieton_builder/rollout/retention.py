"""Going back to an older version, taking one out, removing old ones, and the table of all of them."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trieton_builder.rollout.asked import asked_by, make_ready
from trieton_builder.rollout.control import ServerControl
from trieton_builder.rollout.errors import NoControlError, RolloutError
from trieton_builder.rollout.ledger import Ledger
from trieton_builder.rollout.recover import recover
from trieton_builder.rollout.repository import Repository, read_bundle_id
from trieton_builder.rollout.steps import Listener, Steps
from trieton_builder.rollout.targets import Endpoint, Target, locked, open_targets


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

    A version that is still resident answers within milliseconds, another one is loaded first; no request fails.

    Args:
        to: version number; None takes the one before the current version.

    Returns:
        {"from", "to", "bundle_id", "servers", "steps"}.

    Raises:
        RolloutError: no such version, or a server failed; it and those done before then answer as before.
    """

    def choose(versions: list[int]) -> int:
        if not versions:
            raise RolloutError(f"{repository} has no version")
        older = versions[:-1]
        if to is None:
            if not older:
                raise RolloutError(f"version {versions[-1]} is the only one in {repository}; nothing to go back to")
            return older[-1]
        if to == versions[-1]:
            raise RolloutError(f"version {to} is the current one already")
        if to not in older:
            raise RolloutError(f"version {to} is not in {repository}; expected one of {older}")
        return to

    return _step_back(
        "rollback",
        repository,
        choose,
        servers=servers,
        control_key=control_key,
        wait=wait,
        load_timeout=load_timeout,
        command=command,
        listener=listener,
    )


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
    repo = Repository(repository)
    if version not in repo.versions():
        raise RolloutError(f"version {version} is not in {repo}; expected one of {repo.versions()}")
    if version == repo.current():
        older = [number for number in repo.versions() if number != version]
        if not older:
            raise RolloutError(f"version {version} is the only one in {repo}: publish another one first")
        return _step_back(
            "withdraw",
            repository,
            lambda versions: older[-1],
            servers=servers,
            control_key=control_key,
            wait=wait,
            load_timeout=load_timeout,
            command=command,
            listener=listener,
        )
    steps = Steps(listener)
    with open_targets(repository, servers, control_key=control_key, load_timeout=load_timeout) as targets:
        with locked(targets, wait):
            for target in targets:
                recover(target, steps)
                current = target.repository.current()
                if version not in target.repository.versions() or current is None or version == current:
                    raise RolloutError(
                        f"{target.repository} has changed meanwhile: current version {current}; look again"
                    )
                target.repository.write_intent(
                    {"action": "withdraw", "version": version, "to": current, "out": [version]}
                )
                for control in target.servers:
                    with steps.step("unload", f"{control.url} holds version {current} only"):
                        _hold(control, current)
                with steps.step("rename", f"version {version} leaves {target.repository.model_dir}"):
                    target.repository.take_out(version)
                _record(target, "withdraw", version, current, [version], command)
        first = targets[0].repository
        return _result(version, first.current(), first, targets, steps)


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
        with locked(targets, wait):
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
                bundle_id = read_bundle_id(folder)
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
        row |= {"bundle_id": repo.bundle_id(number), "state": "kept"}
    for folder in repo.withdrawn.iterdir() if repo.withdrawn.is_dir() else ():
        row = table.setdefault(int(folder.name), {"version": int(folder.name)})
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
    action: str,
    repository: str | os.PathLike[str],
    choose: Callable[[list[int]], int],
    *,
    servers: Sequence[str | Endpoint] | None,
    control_key: str | None,
    wait: float,
    load_timeout: float,
    command: str | None,
    listener: Listener | None,
) -> dict[str, Any]:
    """Servers first, because that is what people wait for; the newer directories leave afterwards."""
    steps = Steps(listener)
    with open_targets(repository, servers, control_key=control_key, load_timeout=load_timeout) as targets:
        with locked(targets, wait):
            for target in targets:
                recover(target, steps)
            current = targets[0].repository.current()
            chosen = choose(targets[0].repository.versions())
            for target in targets[1:]:
                if target.repository.current() != current or chosen not in target.repository.versions():
                    raise RolloutError(
                        f"{target.repository} holds {target.repository.versions()}, expected {chosen} and {current}"
                    )
            assert current is not None  # choose() has refused a repository without versions
            done: list[ServerControl] = []
            try:
                for target in targets:
                    out = [number for number in target.repository.versions() if number > chosen]
                    target.repository.write_intent({"action": action, "version": current, "to": chosen, "out": out})
                    models = asked_by(target.repository.path(chosen))
                    for control in target.servers:
                        make_ready(models, control, steps.note)  # a restart may have left them out
                        done.append(control)
                        with steps.step("load", f"{control.url} answers from version {chosen}"):
                            _hold(control, chosen)
            except BaseException:
                for control in reversed(done):
                    _try_hold(control, current, steps)
                for target in targets:
                    target.repository.clear_intent()
                raise
            for target in targets:
                out = [number for number in target.repository.versions() if number > chosen]
                with steps.step("rename", f"{', '.join(map(str, out))} leave {target.repository.model_dir}"):
                    for number in out:
                        target.repository.take_out(number)
                for control in target.servers:
                    if control.ready_versions()[-1:] != [chosen]:  # a server that watches by itself does it only now
                        with steps.step("ready", f"{control.url} holds version {chosen} ready"):
                            control.wait_ready(chosen, timeout=120)
                _record(target, action, current, chosen, out, command)
        return _result(current, chosen, targets[0].repository, targets, steps)


def _hold(control: ServerControl, version: int) -> None:
    try:
        control.load([version])
        control.wait_ready(version)
    except NoControlError:
        pass  # in POLL mode the rename is the order


def _try_hold(control: ServerControl, version: int, steps: Steps) -> None:
    try:
        _hold(control, version)
    except RolloutError as error:
        steps.note(f"while going back: {error}")


def _record(target: Target, action: str, version: int, to: int, out: list[int], command: str | None) -> None:
    Ledger(target.repository.state).add(action, version, to=to, out=out, command=_command(command))
    target.repository.clear_intent()


def _result(
    version: int, to: int | None, repository: Repository, targets: list[Target], steps: Steps
) -> dict[str, Any]:
    return {
        "from": version,
        "to": to,
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
    folders = repository.withdrawn.iterdir() if repository.withdrawn.is_dir() else ()
    taken_out = sorted(int(folder.name) for folder in folders)
    return [*old, *((number, repository.withdrawn / str(number)) for number in taken_out[:-keep])]


def _command(command: str | None) -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if command is None else command
