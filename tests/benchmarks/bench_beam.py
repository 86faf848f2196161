"""How wide a beam has to be: the true top ten at several widths, on the demo's films and people.

    .venv/bin/python tests/benchmarks/bench_beam.py [--demo .demo] [--people 200] [--constraint EXPRESSION ...]

The truth is a beam as wide as the catalogue: it prunes nothing, so its first ten are the true ten. Each person is asked
alone, in process, with the films they have seen excluded. Needs `make demo` before.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from trieton.bundle import Bundle
from trieton.constraint.compile import compile_constraint
from trieton.search.query import Answer, Limits, Query
from trieton.search.searcher import Searcher
from trieton_builder.demo.movielens import load_movielens

ROOT = Path(__file__).parents[2]
WIDTHS = (10, 20, 50, 100)
NUM_RESULTS = 10
CONSTRAINTS = ("", "drama and not children", "(comedy or romance) and years_1990s and not children", "film_noir")
console = Console(highlight=False, width=130)


def ask(searcher: Searcher, query: Query) -> tuple[Answer, float]:
    """One answer, and the milliseconds that it took."""
    started = time.perf_counter()
    answer = searcher.search([query])[0]
    if not isinstance(answer, Answer):
        raise answer
    return answer, 1e3 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=ROOT / ".demo")
    parser.add_argument("--people", type=int, default=200)
    parser.add_argument("--constraint", nargs="*", default=CONSTRAINTS)
    args = parser.parse_args()
    bundle = Bundle.open(args.demo / "bundles" / "all-films")
    data = load_movielens()
    searcher = Searcher(bundle, threads=1, limits=Limits(max_beam_width=bundle.index.num_leaves))
    searcher.warm_up(1)
    people = np.linspace(0, data.num_people - 1, min(args.people, data.num_people)).astype(int)
    table = Table(title=f"True top ten of {len(people)} people at several beam widths", title_justify="left")
    for heading in ("constraint", "allowed", "beam", "all ten true", "true of ten", "certified", "ms"):
        table.add_column(heading, justify="left" if heading == "constraint" else "right", no_wrap=True)
    for constraint in args.constraint:
        queries = []
        for person in people:
            seen = data.item_ids[data.histories[person]]
            queries.append(Query(seen, num_results=NUM_RESULTS, constraint=constraint or None, exclude=seen))
        everything = bundle.index.num_leaves
        truth = [ask(searcher, replace(query, beam_width=everything))[0] for query in queries]
        assert all(answer.certified for answer in truth), "a beam as wide as the catalogue pruned something"
        plane = compile_constraint(bundle.index, expression=constraint or None)
        allowed = int(plane.allows(np.arange(bundle.index.num_items)).sum())
        for width in WIDTHS:
            found = [ask(searcher, replace(query, beam_width=width)) for query in queries]
            common = [
                len(set(answer.item_ids.tolist()) & set(true.item_ids.tolist())) / max(1, len(true.item_ids))
                for (answer, _), true in zip(found, truth, strict=True)
            ]
            wrong = [answer for (answer, _), share in zip(found, common, strict=True) if answer.certified and share < 1]
            assert not wrong, "a certified answer is not the true top ten"
            table.add_row(
                constraint or "none",
                f"{allowed:,}",
                str(width),
                f"{np.mean([share == 1 for share in common]):.0%}",
                f"{10 * np.mean(common):.2f}",
                f"{np.mean([answer.certified for answer, _ in found]):.0%}",
                f"{np.median([ms for _, ms in found]):.1f}",
            )
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    main()
