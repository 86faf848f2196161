"""What the users of a load test ask: real histories, and a fixed mix of constraints, widths and exclude lists.

Everything follows from one seed: which person is popular, which constraint, and the order in which a user asks.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

History = list[int] | list[str]

# (share, value). Most callers take the defaults; a few ask for much more, and pay for it alone.
NUM_RESULTS = ((0.70, 10), (0.15, 5), (0.10, 20), (0.05, 50))
BEAM_WIDTHS = ((0.80, None), (0.10, 40), (0.10, 80))
CONSTRAINED = 0.6
SEEN_EXCLUDED = 0.5  # "not what I have seen already"
LONG_EXCLUDED = 0.05  # a block list on top of it
LONG_LIST = 150
NUM_CONSTRAINTS = 40


@dataclass(frozen=True)
class Constraint:
    """A boolean expression over named sets, kept as a tree so that it can be judged without the server's own parser.

    Attributes:
        op: "set", "not", "and" or "or".
        parts: the name of the set, or the operands.
    """

    op: str
    parts: tuple["Constraint | str", ...]

    def text(self) -> str:
        """As the request parameter."""
        if self.op == "set":
            return str(self.parts[0])
        inner = [part.text() for part in self.parts if isinstance(part, Constraint)]
        return f"not {inner[0]}" if self.op == "not" else f"({f' {self.op} '.join(inner)})"

    def allowed(self, sets: Mapping[str, np.ndarray]) -> np.ndarray:
        """bool [num_items] from bool [num_items] per named set."""
        if self.op == "set":
            return sets[str(self.parts[0])]
        masks = [part.allowed(sets) for part in self.parts if isinstance(part, Constraint)]
        if self.op == "not":
            return ~masks[0]
        return np.logical_and.reduce(masks) if self.op == "and" else np.logical_or.reduce(masks)


@dataclass(frozen=True)
class Query:
    """One request, as `trieton_client` takes it."""

    history: History
    num_results: int
    beam_width: int | None
    constraint: Constraint | None
    exclude: History


class Traffic:
    """Queries for any number of users.

    Args:
        histories: one per person, item ids oldest first.
        set_names: named sets that every served bundle has; without any, nothing is constrained.
        seed: of everything.
        zipf: popularity of the person of rank r is r to the power of minus this.
    """

    def __init__(self, histories: Sequence[History], set_names: Sequence[str], *, seed: int, zipf: float = 1.1):
        self.histories = [history for history in histories if history]
        if not self.histories:
            raise ValueError("histories: expected at least one that is not empty")
        self.seed = seed
        rng = np.random.default_rng(seed)
        self._people = rng.permutation(len(self.histories))
        self._popularity = _zipf(len(self.histories), zipf)
        self._items = sorted({item for history in self.histories for item in history})
        self._constraints = make_constraints(sorted(set_names), rng)
        self._constraint_share = _zipf(len(self._constraints), zipf) if self._constraints else None

    def user(self, number: int, worker: int = 0) -> "UserTraffic":
        """The endless stream of one user; different for each number and worker, the same in every run."""
        return UserTraffic(self, np.random.default_rng([self.seed, worker, number]))

    def draw(self, rng: np.random.Generator) -> Query:
        """One query."""
        history = self.histories[self._people[rng.choice(len(self._people), p=self._popularity)]]
        constraint = None
        if self._constraints and rng.random() < CONSTRAINED:
            constraint = self._constraints[rng.choice(len(self._constraints), p=self._constraint_share)]
        exclude = list(history) if rng.random() < SEEN_EXCLUDED else []
        if rng.random() < LONG_EXCLUDED:
            exclude += [self._items[place] for place in rng.integers(0, len(self._items), LONG_LIST)]
        num_results = _pick(NUM_RESULTS, rng)
        beam_width = _pick(BEAM_WIDTHS, rng)
        if beam_width is not None:
            beam_width = max(beam_width, num_results or 0)  # a narrower beam could not hold the results
        return Query(history, num_results or 10, beam_width, constraint, exclude)


@dataclass
class UserTraffic:
    """Iterator of one user's queries."""

    traffic: Traffic
    rng: np.random.Generator

    def __iter__(self) -> "UserTraffic":
        return self

    def __next__(self) -> Query:
        return self.traffic.draw(self.rng)


def make_constraints(names: Sequence[str], rng: np.random.Generator) -> list[Constraint]:
    """Distinct constraints of one to three sets, in the order of their popularity; none without names."""
    if not names:
        return []
    made: dict[str, Constraint] = {}
    for _ in range(20 * NUM_CONSTRAINTS):
        a, b, c = (Constraint("set", (names[place],)) for place in rng.integers(0, len(names), 3))
        forms = (
            a,
            Constraint("not", (a,)),
            Constraint("or", (a, b)),
            Constraint("and", (a, Constraint("not", (b,)))),
            Constraint("and", (Constraint("or", (a, b)), Constraint("not", (c,)))),
        )
        form = forms[rng.integers(len(forms))]
        made.setdefault(form.text(), form)
        if len(made) == NUM_CONSTRAINTS:
            break
    return list(made.values())


def load_histories(source: str) -> list[History]:
    """Histories from where `source` says.

    Args:
        source: "movielens" (the demo's people); a folder with test.csv and valid.csv (columns history, target; ids
            parted by blanks); or a file of JSON lines, one list of item ids each.

    Raises:
        ValueError: nothing of that kind, or a line that is not a list of ids.
    """
    if source == "movielens":
        from trieton_builder.demo.movielens import load_movielens

        data = load_movielens()
        return [data.item_ids[rows].tolist() for rows in data.histories]
    path = Path(source)
    if path.is_dir():
        rows: list[History] = []
        for name in ("test.csv", "valid.csv"):
            with open(path / name, newline="") as file:
                rows += [[int(item) for item in row["history"].split()] for row in csv.DictReader(file)]
        return rows
    if not path.is_file():
        raise ValueError(
            f"histories: expected movielens, a folder with test.csv, or a file of JSON lines, got {source!r}"
        )
    read = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        history = json.loads(line)
        if not isinstance(history, list):
            raise ValueError(f"{path}, line {number}: expected a list of item ids, got {line[:60]!r}")
        read.append(history)
    return read


def _zipf(count: int, exponent: float) -> np.ndarray:
    share = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return share / share.sum()


def _pick(shares: Sequence[tuple[float, int | None]], rng: np.random.Generator) -> int | None:
    point, passed = rng.random(), 0.0
    for share, value in shares:
        passed += share
        if point < passed:
            return value
    return shares[-1][1]
