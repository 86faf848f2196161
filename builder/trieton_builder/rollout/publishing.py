"""Publish a bundle: stage, sync, verify, preflight, one rename, load, ready, canary; or everything as it was."""

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trieton_builder.bundle.protected import refuse_as_repository
from trieton_builder.files.whole_file import named
from trieton_builder.rollout import asked, canary, memory
from trieton_builder.rollout.canary import Canary, Outcome
from trieton_builder.rollout.checks import check_base, check_config, check_room, check_sets, config_text, next_version
from trieton_builder.rollout.control import ServerControl
from trieton_builder.rollout.errors import RolloutError, renaming, say_also
from trieton_builder.rollout.ledger import Ledger
from trieton_builder.rollout.moving import activate, go_back, let_go_if_dead
from trieton_builder.rollout.recover import recover
from trieton_builder.rollout.repository import Repository, write_atomically
from trieton_builder.rollout.source import Source
from trieton_builder.rollout.steps import Listener, Steps, telling
from trieton_builder.rollout.targets import Endpoint, Target, locked, open_targets


@dataclass(frozen=True)
class Published:
    """What a publish did.

    Attributes:
        version: the new version number.
        bundle_id: its bundle.
        outcome: "serving"; "placed" when no server was told; "planned" after a dry run.
        previous: the version that was current before, or None.
        servers: gRPC addresses that answer from it now.
        withdrawn: versions that left the repository: taken back from a killed publisher.
        removed: versions that were pruned for `keep`.
        notes: what is not as it was asked for, such as a version before that did not stay resident.
        steps: name, text and seconds of every step.
    """

    version: int
    bundle_id: str
    outcome: str
    previous: int | None
    servers: list[str]
    steps: list[dict[str, Any]]
    withdrawn: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def publish(
    bundle_dir: str | os.PathLike[str],
    repository: str | os.PathLike[str],
    *,
    servers: Sequence[str | Endpoint] | None = None,
    control_key: str | None = None,
    version: int | None = None,
    preflight: bool = True,
    keep_previous: bool | None = None,
    canaries: Sequence[Canary] | None = None,
    keep: int | None = None,
    allow_dropped_sets: bool = False,
    dry_run: bool = False,
    wait: float = 0.0,
    load_timeout: float = 600.0,
    command: str | None = None,
    listener: Listener | None = None,
) -> Published:
    """Make a bundle the next version of a repository and let its servers answer from it, without a failed request.

    Args:
        bundle_dir: what `trieton build` wrote, a folder or an address for fsspec. It is copied and stays as it is.
        repository: folder of models; made, with its config.pbtxt, by the first publish.
        servers: see `open_targets`. Several are changed in turn; at the first that fails all go back.
        version: a number above every one ever used; None takes the next.
        preflight: let a throw-away server with the same stub load the bundle and answer the canaries before any real
            server hears of it.
        keep_previous: leave the version before resident, for a rollback within milliseconds. None: where memory allows,
            see `memory_allows`.
        canaries: None takes the recorded ones beside the repository, or else three made from the catalogue.
        keep: remove all but this many newest versions afterwards.
        allow_dropped_sets: publish a bundle although it lacks named sets that the current version has. Requests that
            name them fail from then on.
        dry_run: verify the bundle and say what would be done; changes nothing.
        wait: seconds to wait for another publisher.
        command: for the ledger; None takes this process's command line.
        listener: told of each step, see `Steps`.

    Raises:
        BundleError: the bundle is damaged or does not fit together. Nothing was changed.
        LockedError: another publisher is at work.
        RolloutError: a step failed; the versions that served before serve now. The text says what was withdrawn, and
            which server could not be brought back.
        ServerError: the throw-away server failed on the bundle. Nothing was changed.
    """
    steps = Steps(listener)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if command is None else command
    with open_targets(repository, servers, control_key=control_key, load_timeout=load_timeout) as targets:
        job = _Publish(
            Source(bundle_dir), targets, steps, command, preflight, keep_previous, canaries, allow_dropped_sets
        )
        if dry_run:
            return job.plan(version)
        repositories = [target.repository for target in targets]
        new = [folder for each in repositories for folder in (each.model_dir, each.root) if not folder.exists()]
        try:
            with contextlib.ExitStack() as locks:
                with steps.step("lock", "exclude other publishers"):
                    locks.enter_context(locked(targets, wait, steps, create=True))
                done = job.run(version)
                if keep is not None:
                    _prune(targets, keep, steps, done)
                return done
        except BaseException:
            # No repository where no version came of it. What is beside it says what was tried, and keeps the number.
            for folder in new:
                with contextlib.suppress(OSError):  # not empty, or not there
                    folder.rmdir()
            raise


def _prune(targets: Sequence[Target], keep: int, steps: Steps, done: Published) -> None:
    from trieton_builder.rollout.retention import prune_locked

    try:
        for target in targets:
            done.removed.extend(prune_locked(target, keep, steps))
    except BaseException as error:
        say_also(error, f"only old versions could not be removed: version {done.version} is {done.outcome}")
        raise


class _Publish:
    """One publish under way. `targets` are in the order in which they are changed."""

    def __init__(
        self,
        source: Source,
        targets: list[Target],
        steps: Steps,
        command: str,
        preflight: bool,
        keep_previous: bool | None,
        canaries: Sequence[Canary] | None,
        allow_dropped_sets: bool,
    ):
        self.source, self.targets, self.steps, self.command = source, targets, steps, command
        self.preflight, self.keep_previous = preflight, keep_previous
        self.allow_dropped_sets = allow_dropped_sets
        self.main = targets[0].repository
        self.wanted_canaries = canaries
        self.previous = {id(target): target.repository.current() for target in targets}
        self.staged: dict[int, Path] = {}
        self.linked: set[int] = set()  # targets whose staged copy shares files with a published version
        self.withdrawn: list[int] = []  # from a killed publisher
        self.notes: list[str] = []

    # The steps in order

    def plan(self, version: int | None) -> Published:
        """Everything that can be said without changing anything."""
        with (
            self.steps.step("verify", f"verify the checksums of {self.source.address}"),
            tempfile.TemporaryDirectory(prefix="trieton-plan-") as folder,
        ):
            copy = Path(folder) / "bundle"
            with named(tempfile.gettempdir(), hide=True):
                self.source.copy_to(copy)
            with self._as_given(copy):
                bundle, models = self._open(copy), asked.asked_by(copy)
                check_base(bundle)
        with self.steps.step("check", "number, configuration, room on the disk, servers"):
            number = next_version(self.targets, version)
            for target in self.targets:
                refuse_as_repository(target.repository.root)
                check_config(target.repository, bundle)
                self._check_sets(target)
                if self.preflight:
                    asked.lend(models, target.repository, None)
                check_room(self.source, target.repository)
                for control in target.servers:
                    self.steps.note(f"{control.url} answers from version {max(control.ready_versions(), default=None)}")
                self.steps.note(f"would place version {number} in {target.repository.model_dir}")
        return Published(number, bundle.bundle_id, "planned", self._previous(self.targets[0]), [], self.steps.log)

    def run(self, version: int | None) -> Published:
        with self.steps.step("recover", "put right what a killed publisher left"):
            self.withdrawn = sorted({number for target in self.targets for number in recover(target, self.steps)})
            self.previous = {id(target): target.repository.current() for target in self.targets}
        with telling(self.withdrawn):
            return self._run(version)

    def _run(self, version: int | None) -> Published:
        with self.steps.step("check", "number, room on the disk, named sets, servers"):
            # Asks the servers, so one that is away or wants another key is known before anything is written.
            number = next_version(self.targets, version)
            for target in self.targets:
                self._check_sets(target)
                check_room(self.source, target.repository)
        try:
            bundle = self._prepare(number)
            served = self._swap(number, bundle)
        except BaseException as error:
            say_also(error, self._undo(number, error))
            raise
        outcome = "serving" if served else "placed"
        with self.steps.step("record", f"version {number} is {outcome}"):
            for target in self.targets:
                Ledger(target.repository.state).add(
                    "publish",
                    number,
                    outcome=outcome,
                    bundle_id=bundle.bundle_id,
                    previous=self._previous(target),
                    servers=[control.url for control in target.servers],
                    command=self.command,
                    inputs=bundle.manifest.get("provenance", {}),
                    items=bundle.index.num_items,
                    seconds={entry["step"]: entry["seconds"] for entry in self.steps.log if "seconds" in entry},
                )
                target.repository.clear_intent()
                shutil.rmtree(self.staged[id(target)].parents[1], ignore_errors=True)
        previous = self._previous(self.targets[0])
        return Published(
            number, bundle.bundle_id, outcome, previous, served, self.steps.log, self.withdrawn, [], self.notes
        )

    def _prepare(self, number: int) -> Any:
        """Staged, synced, verified and tried copies in every target's staging folder. Returns the opened bundle."""
        with self.steps.step("stage", f"copy {self.source.address} beside the repository and sync it to the disk"):
            bundle_id = self.source.bundle_id()
            for target in self.targets:
                repository = target.repository
                repository.write_intent({"action": "publish", "version": number, "previous": self._previous(target)})
                Ledger(repository.state).add(
                    "publish", number, outcome="started", bundle_id=bundle_id, command=self.command
                )
                # A staged bundle lies in a small repository of its own, which is what the throw-away server reads.
                staged = repository.staging / str(number) / repository.model / str(number)
                self.staged[id(target)] = staged
                with named(repository.state, hide=True):
                    if self.source.copy_to(staged, repository.published_files()):
                        self.linked.add(id(target))
        with (
            self.steps.step("verify", "verify every checksum of the staged copy"),
            self._as_given(*self.staged.values()),
        ):
            bundles = [self._open_staged(target) for target in self.targets]
            if bundles[0].bundle_id != bundle_id:
                raise RolloutError(
                    f"{self.source.address}: the bundle was changed while it was copied; publish it again"
                )
            check_base(bundles[0])
            for target in self.targets:
                check_config(target.repository, bundles[0])
        self.canaries = self._find_canaries(bundles[0])
        if self.preflight:
            staged = self.staged[id(self.targets[0])]
            with (
                self.steps.step("preflight", "a throw-away server loads it and answers the canaries"),
                self._as_given(staged, staged.parents[1]),
            ):
                self._preflight(staged.parents[1], self.main, bundles[0])
        return bundles[0]

    def _swap(self, number: int, bundle: Any) -> list[str]:
        """Rename into every repository and move its servers over, one after the other. Returns the servers."""
        served, models = [], asked.asked_by(self.staged[id(self.targets[0])])
        for target in self.targets:
            for control in target.servers:
                asked.make_ready(models, control, self.steps.note)
            before = {control.url: self._before(control, target) for control in target.servers}
            with self.steps.step("rename", f"version {number} appears in {target.repository.model_dir}"):
                if not target.repository.config.is_file():
                    write_atomically(target.repository.config, config_text(target.repository, bundle))
                target.repository.rename(self.staged[id(target)], target.repository.path(number))
            for control in target.servers:
                self._move(control, number, target, bundle, before[control.url])
                served.append(control.url)
        return served

    def _move(
        self, control: ServerControl, number: int, target: Target, bundle: Any, before: list[Outcome] | None
    ) -> None:
        """Let one server answer from the new version, and prove by real requests which versions it really holds."""
        previous, killed = self._previous(target), memory.kills()
        keep = self.keep_previous
        if keep is None:
            keep = previous is not None and memory.keeps(control.url, self.source.size(), previous, self.steps.note)
        try:
            activate(control, number, previous, self.steps, keep_previous=keep)
            with self.steps.step("canary", f"{control.url} answers {len(self.canaries)} canary requests"):
                outcomes = canary.ask(control.url, self.canaries)
                canary.check(control.url, self.canaries, outcomes, bundle, before)
                lost = let_go_if_dead(control, previous, number) if keep and previous is not None else None
        except RolloutError as error:
            say_also(error, memory.told(control.url, killed))
            raise
        if lost is not None:
            self.notes.append("; ".join(filter(None, [lost, memory.told(control.url, killed)])))
            self.steps.note(self.notes[-1])

    def _undo(self, number: int, error: BaseException) -> str:
        """Bring every server and repository back to the version before.

        Returns:
            What is so now; empty where nothing had been changed yet.
        """
        facts: list[str] = []
        for target in reversed(self.targets):
            repository, previous = target.repository, self._previous(target)
            if repository.path(number).is_dir():
                back, problems = [], []
                for control in reversed(target.servers):
                    # Traffic goes back first, then the directory goes away.
                    bundle_id = repository.known_bundle_id(previous)
                    problem = go_back(control, previous, bundle_id, self.steps.note)
                    if problem is None:
                        back.append(control.url)
                    else:
                        problems.append(problem)
                repository.take_out(number)
                facts += [_withdrawal(number, previous, repository, back[::-1]), *problems]
            if previous is None:  # a first publish leaves no configuration behind that no version has
                repository.config.unlink(missing_ok=True)
            staged = self.staged.get(id(target))
            if staged is not None:
                shutil.rmtree(repository.staging / str(number), ignore_errors=True)
            if repository.read_intent() is not None:
                text = str(error) or type(error).__name__
                Ledger(repository.state).add("publish", number, outcome="failed", error=text, command=self.command)
                repository.clear_intent()
        return "; ".join(facts)

    # Parts of steps

    def _as_given(self, *copies: Path) -> contextlib.AbstractContextManager[None]:
        """Let errors about copies, which go away with the error, name the bundle that was given."""
        return renaming({str(copy): self.source.address for copy in copies})

    def _previous(self, target: Target) -> int | None:
        return self.previous[id(target)]

    def _open(self, folder: Path) -> Any:
        from trieton.bundle import Bundle  # only here: the other commands start in a third of the time without it

        bundle = Bundle.open(folder, verify=True)
        asked.asked_by(folder)  # no engine reads them before the server does
        return bundle

    def _open_staged(self, target: Target) -> Any:
        staged = self.staged[id(target)]
        try:
            return self._open(staged)
        except ValueError as error:
            if id(target) not in self.linked:
                raise
            # Perhaps not the bundle is damaged but the published file that a link stands for.
            self.steps.note(f"a file of a published version is not what it was; everything is copied ({error})")
            shutil.rmtree(staged)
            self.source.copy_to(staged)
            return self._open(staged)

    def _check_sets(self, target: Target) -> None:
        if not self.allow_dropped_sets:
            check_sets(self.source, target.repository, self._previous(target), self.steps.note)

    def _find_canaries(self, bundle: Any) -> list[Canary]:
        if self.wanted_canaries is not None:
            return list(self.wanted_canaries)
        if self.main.canary_file.is_file():
            return canary.load_canaries(self.main.canary_file)
        return canary.default_canaries(bundle)

    def _before(self, control: ServerControl, target: Target) -> list[Outcome] | None:
        """What the version before answers, where an expectation compares with it."""
        compares = any(one.min_overlap > 0 or one.max_latency_ratio is not None for one in self.canaries)
        if not compares or not control.ready_versions():
            return None
        with self.steps.step("before", f"{control.url} answers the canaries from version {self._previous(target)}"):
            return canary.ask(control.url, self.canaries)

    def _preflight(self, staged: Path, repository: Repository, bundle: Any) -> None:
        from trieton_builder.server.process import TritonServer

        (staged / repository.model / "config.pbtxt").write_text(config_text(repository, bundle))
        models = asked.asked_by(bundle.path)
        asked.lend(models, repository, staged)
        load = (*sorted({model.name for model in models}), repository.model)
        # Real servers may share this machine: the trial takes what they leave of it.
        server = TritonServer(staged, load=load, niceness=10, start_timeout=600)
        try:
            server.start()
            outcomes = canary.ask(server.grpc_url, self.canaries)
            canary.check("preflight", self.canaries, outcomes, bundle, None)
        finally:
            server.kill()


def _withdrawal(number: int, previous: int | None, repository: Repository, servers: list[str]) -> str:
    """What is so after a failed publish."""
    if previous is None:
        return f"version {number} is withdrawn, no version is left in {repository}"
    answers = f"answers on {', '.join(servers)} as before" if servers else f"is the current one of {repository} again"
    return f"version {number} is withdrawn, version {previous} {answers}"
