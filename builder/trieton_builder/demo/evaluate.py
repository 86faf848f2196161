"""The demo's last table: what the server answered for every test person, beside what else one could do."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from rich.progress import Progress
from rich.table import Table
from trieton.bundle import Bundle
from trieton.search.searcher import Answer, Query, Searcher
from trieton_client import Client

from trieton_builder.demo.baselines import item_knn, popularity, score, unconstrained_beam
from trieton_builder.demo.movielens import MovieLens
from trieton_builder.demo.prepare import Prepared

NUM_RESULTS, BEAM_WIDTH = 10, 20
CLIENTS = 16  # people asking at the same time
TIE = 1e-5  # two engines' float32 scores of the same film differ by less


@dataclass(frozen=True, eq=False)
class Served:
    """Answers of the server for every test person.

    Attributes:
        recommended: rows int64 [num_people, NUM_RESULTS] of films; -1 where there were fewer.
        scores: float32 [num_people, NUM_RESULTS]; -inf where there were fewer.
        invalid: answers whose semantic ID is no film's.
    """

    recommended: np.ndarray
    scores: np.ndarray
    invalid: int


def ask_everyone(url: str, prepared: Prepared, progress: Progress) -> Served:
    """Ask the server for each person's next films, those already seen excluded."""
    data = prepared.data
    row_of = {int(item): row for row, item in enumerate(data.item_ids)}
    known = {tuple(codes) for codes in prepared.ids.codes.tolist()}
    recommended = np.full((data.num_people, NUM_RESULTS), -1)
    scores = np.full((data.num_people, NUM_RESULTS), -np.inf, np.float32)
    invalid = 0
    with Client(url, timeout=60) as client, ThreadPoolExecutor(CLIENTS) as pool:

        def ask(person: int):
            seen = data.item_ids[data.histories[person]]
            return client.retrieve(seen, NUM_RESULTS, beam_width=BEAM_WIDTH, exclude=seen)

        answers = pool.map(ask, range(data.num_people))
        for person, answer in progress.track(enumerate(answers), total=data.num_people, description="asking"):
            recommended[person, : len(answer)] = [row_of[item] for item in answer.item_ids.tolist()]
            scores[person, : len(answer)] = answer.scores
            invalid += sum(tuple(codes) not in known for codes in answer.codes.tolist())
    return Served(recommended, scores, invalid)


def different_from_in_process(served: Served, bundle: Bundle, data: MovieLens, progress: Progress) -> int:
    """People whose served films differ from the same search called in this process, near ties aside."""
    searcher = Searcher(bundle)
    different = 0
    for person in progress.track(range(data.num_people), description="searching in process"):
        seen = data.item_ids[data.histories[person]]
        query = Query(seen, num_results=NUM_RESULTS, beam_width=BEAM_WIDTH, exclude=seen)
        answer = searcher.search([query])[0]
        assert isinstance(answer, Answer), answer
        films = data.item_ids[served.recommended[person][: len(answer.item_ids)]]
        swapped = films != answer.item_ids
        close = np.abs(served.scores[person][: len(answer.scores)] - answer.scores) <= TIE
        same_films = not swapped.any() or set(films.tolist()) == set(answer.item_ids.tolist())
        different += not (same_films and close.all())
    return different


def quality_table(prepared: Prepared, served: Served, bundle: Bundle, progress: Progress) -> Table:
    """Hit rate and NDCG at 10 of the served answers and of the alternatives."""
    data = prepared.data
    free = unconstrained_beam(
        bundle.load_retriever(), data, prepared.ids, beam_width=BEAM_WIDTH, num_results=NUM_RESULTS, progress=progress
    )
    table = Table(title=f"Next film of {data.num_people} people, films already seen excluded", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("hit rate @10", "NDCG @10", "invalid IDs"):
        table.add_column(heading, justify="right")
    rows = [
        ("popularity", popularity(data), "-"),
        ("item-kNN, last 20 films", item_knn(data, last=20), "-"),
        ("item-kNN, last 5 films", item_knn(data, last=5), "-"),
        ("same model, unconstrained beam", free.recommended, f"{free.invalid:.1%}"),
        ("Trieton, as served", served.recommended, str(served.invalid)),
    ]
    for name, recommended, invalid in rows:
        quality = score(recommended, data.targets)
        style = "bold" if name.startswith("Trieton") else None
        table.add_row(name, f"{quality.hit_rate:.3f}", f"{quality.ndcg:.3f}", invalid, style=style)
    return table
