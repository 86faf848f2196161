"""Moving one server from version to version: what answered before goes on until the other has answered a real request.

READY proves little: a version whose process was killed stays READY while each of its requests fails, and a load of it
is a no-op that says 200 (seen). So a version is asked before another one is let go for it.
"""

import contextlib
from collections.abc import Callable

from trieton_builder.rollout.control import ServerControl
from trieton_builder.rollout.errors import NoControlError, RolloutError, ServerGoneError
from trieton_builder.rollout.steps import Steps

Note = Callable[[str], None]


def activate(control: ServerControl, version: int, previous: int | None, steps: Steps, *, keep_previous: bool) -> None:
    """Let one server answer from `version`.

    With `keep_previous` the version before stays resident, so going back takes milliseconds. Anything older is dropped
    first: never more than two versions are in memory.

    Raises:
        RolloutError: the server refused or failed; `previous` answers as before.
    """
    patience = 30.0
    with steps.step("load", f"{control.url} loads version {version}"):
        try:
            resident = control.ready_versions()
            keep = [previous] if keep_previous and previous in resident else []
            if keep and set(resident) - {previous, version}:
                control.load(keep)
            control.load([*keep, version])
        except NoControlError:
            patience = control.load_timeout
            steps.note(f"{control.url} is not in EXPLICIT mode: waiting until it takes version {version} by itself")
    with steps.step("ready", f"{control.url} holds version {version} ready"):
        control.wait_ready(version, patience)
        if not control.server_ready():
            steps.note(
                f"{control.url} calls itself not ready although version {version} is: it runs with strict readiness; "
                "start it with --strict-readiness=false"
            )


def let_go_if_dead(control: ServerControl, previous: int, version: int) -> str | None:
    """Let the version before go if it stayed resident and does not answer. Returns what became of it, if anything.

    Raises:
        RolloutError: after that `version` does not answer either.
    """
    if previous not in control.ready_versions():
        return None
    fault = control.fault(previous)
    if fault is None:
        return None
    control.load([version])
    control.wait_ready(version)
    _check(control, version, None, None)
    return (
        f"version {previous} does not stay resident on {control.url}: its process has died or hangs ({fault}); "
        "a rollback loads it anew"
    )


def hold(control: ServerControl, version: int, bundle_id: str | None, note: Note) -> None:
    """Let one server answer from `version` and hold no other. What answers now goes on until `version` has answered.

    A version that is ready and does not answer is started anew, once.

    Args:
        bundle_id: what has to answer; None where it is not known.
        note: told when a version is started anew.

    Raises:
        NoControlError: the server takes no orders (POLL mode).
        RolloutError: `version` cannot be made to answer. What answered before is loaded.
    """
    ready = control.ready_versions()
    # The one that answers now; a third one would only take memory.
    beside = [ready[-1]] if ready and ready[-1] != version else []
    try:
        control.load([*beside, version])
        control.wait_ready(version, highest=False)
        fault = control.fault(version, bundle_id)
        if fault is not None:
            note(f"{control.url}: version {version} is ready but does not answer ({fault}): it is started anew")
            _start_anew(control, version, beside)
            _check(control, version, bundle_id, fault)
        control.load([version])
        control.wait_ready(version)
        _check(control, None, bundle_id, None)
    except (NoControlError, ServerGoneError):
        raise
    except RolloutError:
        if beside:
            with contextlib.suppress(RolloutError):  # the first error says more
                control.load(beside)
        raise


def go_back(control: ServerControl, previous: int | None, bundle_id: str | None, note: Note) -> str | None:
    """Let one server answer from `previous` again (from nothing when None). Returns what went wrong, if anything."""
    try:
        if previous is None:
            control.unload()
        else:
            hold(control, previous, bundle_id, note)
    except NoControlError:
        return f"{control.url} is not in EXPLICIT mode; if it does not end by itself on the old version, restart it"
    except ServerGoneError as error:
        return f"{error}: what it holds is not known; started anew, it takes the current version"
    except RolloutError as error:
        return f"{error}; {_held(control)}"
    return None


def _held(control: ServerControl) -> str:
    try:
        ready = control.ready_versions()
    except RolloutError as error:
        return str(error)
    return f"version {ready[-1]} answers there" if ready else "no version answers there"


def _start_anew(control: ServerControl, version: int, beside: list[int]) -> None:
    """End the process of a version and load it again; a load alone does nothing for one that says it is ready."""
    if beside:
        control.load(beside)
    else:
        control.unload()
    control.load([*beside, version])
    control.wait_ready(version, highest=False)


def _check(control: ServerControl, version: int | None, bundle_id: str | None, before: str | None) -> None:
    fault = control.fault(version, bundle_id)
    if fault is not None:
        again = "" if before is None else ", also after it was started anew"
        what = "the server" if version is None else f"version {version}"
        raise RolloutError(f"{control.url}: {what} does not answer{again}: {fault}")
