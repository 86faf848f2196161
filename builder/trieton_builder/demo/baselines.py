"""What the demo's table compares the served answers with: popularity, item-kNN, and the beam without a constraint."""

from dataclasses import dataclass

import numpy as np
from rich.progress import Progress
from trieton.retriever.session import Retriever

from trieton_builder.catalogue.semantic_ids import SemanticIds
from trieton_builder.demo.movielens import MovieLens


@dataclass(frozen=True)
class Scores:
    """Quality of ranked lists with one right answer each.

    Attributes:
        hit_rate: share of lists that hold the right film.
        ndcg: mean of 1 / log2(1 + rank) of the right film, 0 where it is missing.
    """

    hit_rate: float
    ndcg: float


def score(recommended: np.ndarray, targets: np.ndarray) -> Scores:
    """Scores of `recommended` int [P, K], best first, -1 for padding, against `targets` int [P]."""
    hits = recommended == targets[:, None]
    found = hits.any(axis=1)
    gains = np.where(found, 1 / np.log2(2 + hits.argmax(axis=1)), 0.0)
    return Scores(float(found.mean()), float(gains.mean()))


def popularity(data: MovieLens, num_results: int = 10) -> np.ndarray:
    """Rows int64 [num_people, num_results] of the films most watched in the training part, without those seen."""
    return _best(np.tile(data.counts.astype(float), (data.num_people, 1)), data, num_results)


def item_knn(data: MovieLens, *, last: int, num_results: int = 10) -> np.ndarray:
    """Rows int64 [num_people, num_results] by item-kNN: summed cosine similarity to each person's last films.

    Two films are as similar as the sets of people who watched them (Sarwar et al., WWW 2001). Films seen are left out.
    """
    watched = np.zeros((data.num_people, data.num_items))
    recent = np.zeros_like(watched)
    for person, history in enumerate(data.histories):
        watched[person, history] = 1.0
        recent[person, history[-last:]] = 1.0
    unit = watched / np.maximum(np.linalg.norm(watched, axis=0), 1.0)
    similarity = unit.T @ unit
    np.fill_diagonal(similarity, 0.0)
    return _best(recent @ similarity, data, num_results)


def _best(values: np.ndarray, data: MovieLens, num_results: int) -> np.ndarray:
    for person, history in enumerate(data.histories):
        values[person, history] = -np.inf
    return np.argsort(-values, axis=1, kind="stable")[:, :num_results]


@dataclass(frozen=True, eq=False)
class Unconstrained:
    """Answers of the beam without a constraint.

    Attributes:
        recommended: rows int64 [num_people, num_results]; -1 where too few beams were valid and new.
        invalid: share of all returned beams that are no film's semantic ID.
    """

    recommended: np.ndarray
    invalid: float


def unconstrained_beam(
    retriever: Retriever,
    data: MovieLens,
    ids: SemanticIds,
    *,
    beam_width: int = 20,
    num_results: int = 10,
    batch: int = 64,
    progress: Progress | None = None,
) -> Unconstrained:
    """Beam search over the whole vocabulary at every level: the same model, free to write what it likes.

    Beams that are no semantic ID, and films already seen, can only be dropped afterwards.
    """
    token_map, vocabulary = retriever.spec.token_map, np.arange(retriever.spec.vocab_size)
    tokens = np.stack([token_map.tokens(level, column) for level, column in enumerate(ids.codes.T)], axis=1)
    row_of = {tuple(row): film for film, row in enumerate(tokens.tolist())}
    recommended = np.full((data.num_people, num_results), -1, np.int64)
    invalid = 0
    task = progress.add_task("beam without a constraint", total=data.num_people) if progress else None
    for start in range(0, data.num_people, batch):
        histories = data.histories[start : start + batch]
        written = _free_beam(
            retriever, [retriever.spec.prompt.tokens(ids.codes[h]) for h in histories], vocabulary, beam_width
        )
        for person, (history, beams) in enumerate(zip(histories, written.tolist(), strict=True), start):
            films = [row_of.get(tuple(beam), -1) for beam in beams]
            invalid += films.count(-1)
            seen = set(history.tolist())
            kept = [film for film in films if film >= 0 and film not in seen][:num_results]
            recommended[person, : len(kept)] = kept
        if progress and task is not None:
            progress.update(task, advance=len(histories))
    return Unconstrained(recommended, invalid / (data.num_people * beam_width))


def _free_beam(retriever: Retriever, prompts: list[np.ndarray], vocabulary: np.ndarray, width: int) -> np.ndarray:
    """Tokens int64 [B, width, L] of the best beams over the whole vocabulary, best first."""
    input_ids, attention_mask = retriever.padded(prompts)
    engine = retriever.engine
    logits, log_z, state = engine.prefill(input_ids, attention_mask, vocabulary)
    scores = np.zeros((len(prompts), 1), np.float32)
    beams = np.zeros((len(prompts), 1, 0), np.int64)
    parents = np.zeros((len(prompts), 1), np.int64)
    for level in range(retriever.spec.num_levels):
        if level:
            logits, log_z = engine.decode(state, *engine.beams(vocabulary, beams[:, :, -1], parents), vocabulary)
        logits, log_z = np.asarray(logits), np.asarray(log_z)
        total = (scores[..., None] + (logits - log_z[..., None])).reshape(len(prompts), -1)
        best = np.argsort(-total, axis=1, kind="stable")[:, :width]
        scores = np.take_along_axis(total, best, axis=1)
        parents, chosen = np.divmod(best, len(vocabulary))
        beams = np.concatenate([np.take_along_axis(beams, parents[..., None], 1), chosen[..., None]], axis=2)
    return beams
