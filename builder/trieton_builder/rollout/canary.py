"""Canary requests: what a new version must answer before it counts as published."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
from trieton_client import Client, ClientError, Results

from trieton_builder.rollout.errors import RolloutError
from trieton_builder.rollout.repository import write_atomically

REPEATS = 3  # of a request whose latency counts; the quickest is taken
SLACK_MS = 2.0  # below this, differences of latency are noise
KIND = "trieton-canaries"


Items = tuple[int, ...] | tuple[str, ...]


class CanaryError(RolloutError):
    """A canary request failed or its answer was not what it must be."""


@dataclass(frozen=True)
class Canary:
    """One request and what is expected of its answer. In every case only allowed items of the bundle asked for.

    Attributes:
        history: item ids, oldest first.
        num_results: items asked for.
        constraint: expression over named sets.
        exclude: item ids that must not come back.
        min_results: fewest items.
        min_overlap: smallest share of the previous version's items that must come back, 0 to 1; 0 for no expectation.
        max_latency_ratio: highest latency as a multiple of the previous version's; None for no expectation.
        items: what the server answered when the canary was recorded; compared with when there is no previous version.
    """

    history: Items
    num_results: int = 10
    constraint: str | None = None
    exclude: Items = ()
    min_results: int = 1
    min_overlap: float = 0.0
    max_latency_ratio: float | None = None
    items: Items = ()

    def __post_init__(self) -> None:
        if not self.history:
            raise ValueError("canary: expected a history of at least one item, got none")
        if not 0 <= self.min_overlap <= 1:
            raise ValueError(f"canary: min_overlap: expected 0 to 1, got {self.min_overlap}")
        if self.num_results < 1 or not 0 <= self.min_results <= self.num_results:
            raise ValueError(
                f"canary: expected 0 <= min_results <= num_results and num_results >= 1, "
                f"got {self.min_results} and {self.num_results}"
            )


@dataclass(frozen=True)
class Outcome:
    """The answer to a canary, and the seconds of the quickest try."""

    results: Results
    seconds: float


def save_canaries(path: Path, canaries: Sequence[Canary]) -> None:
    """Write canaries as JSON that may be edited by hand."""
    content = {"kind": KIND, "canaries": [asdict(canary) for canary in canaries]}
    write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def load_canaries(path: Path) -> list[Canary]:
    """Read what `save_canaries` wrote. Raises ValueError that names the file and the entry."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict) or content.get("kind") != KIND or not content.get("canaries"):
        raise ValueError(f"{path}: expected canaries as `trieton canary record` writes them")
    known = {field.name for field in fields(Canary)}
    canaries = []
    for number, entry in enumerate(content["canaries"]):
        unknown = set(entry) - known
        if unknown:
            raise ValueError(f"{path}: canary {number}: unknown {sorted(unknown)}; expected {sorted(known)}")
        try:
            lists = {name: tuple(entry.get(name, ())) for name in ("history", "exclude", "items")}
            canaries.append(Canary(**{**entry, **lists}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: canary {number}: {error}") from None
    return canaries


def default_canaries(bundle: Any) -> list[Canary]:
    """Three histories of 1, 3 and 8 items spread evenly over the catalogue; for a repository without recorded ones."""
    num_items = bundle.index.num_items
    canaries = []
    for length in (1, 3, 8):
        positions = np.linspace(0, num_items - 1, min(length, num_items)).astype(np.int64)
        canaries.append(Canary(tuple(bundle.index.catalog.ids(positions).tolist())))
    return canaries


def spread_histories(version: Path, count: int = 10, length: int = 5) -> list[list[int] | list[str]]:
    """Histories made from the catalogue of a version directory, for a recording without real ones."""
    from trieton.bundle import Bundle

    index = Bundle.open(version, verify=False).index
    positions = np.linspace(0, index.num_items - 1, count * length).astype(np.int64)
    return [index.catalog.ids(row).tolist() for row in positions.reshape(length, count).T]


def read_histories(path: Path) -> list[list[int] | list[str]]:
    """One JSON list of item ids per line. Raises ValueError that names the line."""
    histories = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            history = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(history, list) or not history or {type(item) for item in history} not in ({int}, {str}):
            raise ValueError(f"{path}, line {number}: expected a list of item ids, got {line.strip()[:60]}")
        histories.append(history)
    if not histories:
        raise ValueError(f"{path}: expected one history per line, got none")
    return histories


def ask(url: str, canaries: Sequence[Canary], *, timeout: float = 30.0) -> list[Outcome]:
    """Ask a server every canary. Raises CanaryError that names the canary."""
    outcomes = []
    with Client(url, retries=0, timeout=timeout) as client:
        for number, canary in enumerate(canaries):
            seconds = np.inf
            for _ in range(REPEATS if canary.max_latency_ratio is not None else 1):
                start = time.perf_counter()
                try:
                    results = client.retrieve(
                        canary.history,
                        canary.num_results,
                        constraint=canary.constraint,
                        exclude=canary.exclude or None,
                    )
                except ClientError as error:
                    raise CanaryError(f"canary {number} got no answer: {error}") from None
                seconds = min(seconds, time.perf_counter() - start)
            outcomes.append(Outcome(results, seconds))
    return outcomes


def check(
    url: str, canaries: Sequence[Canary], outcomes: Sequence[Outcome], bundle: Any, before: Sequence[Outcome] | None
) -> None:
    """Compare answers with the expectations.

    Args:
        url: who answered, for the error.
        bundle: the opened `trieton.bundle.Bundle` that must have answered.
        before: answers of the previous version; None without one.

    Raises:
        CanaryError: names the canary and what is wrong.
    """
    for number, (canary, outcome) in enumerate(zip(canaries, outcomes, strict=True)):
        where = f"{url}: canary {number}"
        results = outcome.results
        if results.bundle_id != bundle.bundle_id:
            raise CanaryError(f"{where}: expected an answer of bundle {bundle.bundle_id}, got {results.bundle_id}")
        if results.num_results < canary.min_results:
            raise CanaryError(f"{where}: expected at least {canary.min_results} results, got {results.num_results}")
        _check_allowed(where, canary, results, bundle)
        known = before[number].results.item_ids.tolist() if before is not None else list(canary.items)
        if canary.min_overlap > 0 and known:
            overlap = len(set(known) & set(results.item_ids.tolist())) / len(known)
            if overlap < canary.min_overlap:
                raise CanaryError(
                    f"{where}: shares {overlap:.0%} of the items of the version before, "
                    f"expected {canary.min_overlap:.0%}"
                )
        if canary.max_latency_ratio is not None and before is not None:
            bound = before[number].seconds * canary.max_latency_ratio + SLACK_MS / 1e3
            if outcome.seconds > bound:
                raise CanaryError(
                    f"{where}: took {outcome.seconds * 1e3:.1f} ms, expected at most {bound * 1e3:.1f} ms"
                )


def _check_allowed(where: str, canary: Canary, results: Results, bundle: Any) -> None:
    from trieton.constraint.compile import compile_constraint

    try:
        positions = bundle.index.catalog.positions(results.item_ids)
    except ValueError as error:
        raise CanaryError(f"{where}: {error}") from None
    if (positions < 0).any():
        raise CanaryError(f"{where}: item {results.item_ids[int(np.argmin(positions))]!r} is not in the catalogue")
    plane = compile_constraint(
        bundle.index,
        canary.constraint,
        exclude=canary.exclude or None,
        base=bundle.manifest.get("base_constraint"),
    )
    allowed = plane.allows(positions)
    if not allowed.all():
        raise CanaryError(f"{where}: item {results.item_ids[int(np.argmin(allowed))]!r} is not allowed")


def record(
    url: str,
    histories: Sequence[Sequence[int] | Sequence[str]],
    *,
    num_results: int = 10,
    constraint: str | None = None,
    min_overlap: float = 0.0,
    max_latency_ratio: float | None = None,
) -> list[Canary]:
    """Ask the live server and make its answers the expectation: as many results as now.

    Raises:
        CanaryError: a history got no answer.
    """
    asked = [
        Canary(
            cast(Items, tuple(history)),
            num_results,
            constraint,
            min_results=0,
            min_overlap=min_overlap,
            max_latency_ratio=max_latency_ratio,
        )
        for history in histories
    ]
    recorded = []
    for canary, outcome in zip(asked, ask(url, asked), strict=True):
        items = tuple(outcome.results.item_ids.tolist())
        recorded.append(Canary(**{**vars(canary), "items": items, "min_results": len(items)}))
    return recorded
