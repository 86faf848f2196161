"""Whether an answer is right, judged against the bundle that it says it comes from, while the load runs."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from traffic import Query
from trieton.bundle import Bundle
from trieton.constraint.compile import compile_constraint
from trieton.index.catalog import Catalog
from trieton_client import Results

MODEL = "generative_retriever"


class WrongAnswerError(AssertionError):
    """The server answered, and the answer is wrong. Counted as a failure of its own kind."""


@dataclass(frozen=True)
class Version:
    """What one bundle may answer.

    Attributes:
        catalog: its items.
        sets: bool [num_items] per named set.
        base: bool [num_items]: allowed by the bundle's own base constraint.
    """

    catalog: Catalog
    sets: dict[str, np.ndarray]
    base: np.ndarray

    @classmethod
    def open(cls, path: Path) -> "Version":
        bundle = Bundle.open(path, verify=False)  # the server has verified it
        index = bundle.index
        everything = np.arange(index.num_items)
        sets = {
            name: np.unpackbits(index.sets[name], count=index.num_items, bitorder="little").astype(bool)
            for name in index.sets
        }
        plane = compile_constraint(index, bundle.manifest.get("base_constraint"))
        return cls(index.catalog, sets, plane.allows(everything))


@dataclass
class AnswerChecker:
    """Checks answers against the bundles of a repository; without one, only what an answer shows by itself.

    Attributes:
        repository: model repository; versions published later are found when they first answer.
        counts: "answers" that are right, of them "short" (fewer than asked for) and "certified"; and "wrong" ones.
        bundles: right answers per bundle id.
        versions: what each bundle seen so far may answer.
    """

    repository: Path | None = None
    counts: Counter[str] = field(default_factory=Counter)
    bundles: Counter[str] = field(default_factory=Counter)
    versions: dict[str, Version] = field(default_factory=dict)

    def set_names(self) -> list[str]:
        """Named sets that every version of the repository has."""
        if self.repository is None:
            return []
        self._scan()
        names = [set(version.sets) for version in self.versions.values()]
        return sorted(set.intersection(*names)) if names else []

    def check(self, query: Query, answer: Results) -> None:
        """Count the answer. Raises WrongAnswerError naming what is wrong with it."""
        try:
            self._check_form(query, answer)
            if self.repository is not None:
                self._check_items(query, answer)
        except WrongAnswerError:
            self.counts["wrong"] += 1
            raise
        self.counts["answers"] += 1
        self.counts["short"] += answer.num_results < query.num_results
        self.counts["certified"] += answer.certified
        self.bundles[answer.bundle_id] += 1

    def _check_form(self, query: Query, answer: Results) -> None:
        ids = answer.item_ids.tolist()
        if len(ids) != answer.num_results or answer.num_results > query.num_results:
            raise WrongAnswerError(f"{len(ids)} results, {answer.num_results} announced, {query.num_results} asked for")
        if len(set(ids)) != len(ids):
            raise WrongAnswerError("an item is there twice")
        if not np.isfinite(answer.scores).all() or (np.diff(answer.scores) > 0).any() or (answer.scores > 0).any():
            raise WrongAnswerError("scores are not descending log-probabilities")
        if set(ids) & set(query.exclude):
            raise WrongAnswerError("an excluded item")

    def _check_items(self, query: Query, answer: Results) -> None:
        if answer.bundle_id not in self.versions:
            self._scan()
        version = self.versions.get(answer.bundle_id)
        if version is None:
            raise WrongAnswerError("a bundle that the repository does not have")
        positions = version.catalog.positions(answer.item_ids)
        if (positions < 0).any():
            raise WrongAnswerError("an item that its bundle does not have")
        allowed = version.base
        if query.constraint is not None:
            allowed = allowed & query.constraint.allowed(version.sets)
        if not allowed[positions].all():
            raise WrongAnswerError("an item that the constraint does not allow")

    def _scan(self) -> None:
        """Open every version not seen before. A version that is withdrawn meanwhile is simply no longer there."""
        assert self.repository is not None
        for manifest in sorted(self.repository.glob(f"{MODEL}/[0-9]*/manifest.json")):
            try:
                bundle_id = json.loads(manifest.read_text())["bundle_id"]
                if bundle_id not in self.versions:
                    self.versions[bundle_id] = Version.open(manifest.parent)
            except FileNotFoundError:
                continue
