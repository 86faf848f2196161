"""The demo's data, baselines and training, on a few made-up people; MovieLens itself where its wheel is installed."""

import importlib.util
import math

import numpy as np
import pytest
import torch
from trieton.retriever.session import Retriever, RetrieverSpec
from trieton.retriever.torch_export import TorchEngine
from trieton_builder.catalogue.semantic_ids import SemanticIds, semantic_ids
from trieton_builder.demo import movielens
from trieton_builder.demo.baselines import item_knn, popularity, score, unconstrained_beam
from trieton_builder.demo.movielens import MovieLens, load_movielens, read_movielens
from trieton_builder.demo.train import Recipe, demo_prompt, load_model, model_loss, new_model, train_retriever
from trieton_builder.demo.vectors import item_vectors
from trieton_builder.export.family import Limits
from trieton_builder.export.t5 import t5_graphs

pytestmark = pytest.mark.usefixtures("one_torch_thread")

ITEMS = """item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq
10\tFar Side, The\t1991\tSci-Fi Children's
2\tNight\tV\tFilm-Noir
30\tDay\t1998\tDrama unknown
4\tDusk\t1997\tDrama
"""
EVENTS = """user_id:token\titem_id:token\trating:float\ttimestamp:float
7\t30\t3\t300
7\t10\t3\t100
7\t2\t3\t300
1\t4\t5\t9
1\t2\t5\t8
1\t10\t5\t7
"""


@pytest.fixture
def files(tmp_path):
    events, items = tmp_path / "x.inter", tmp_path / "x.item"
    events.write_text(EVENTS)
    items.write_text(ITEMS)
    return events, items


def made_up(people: int = 30, items: int = 40, seed: int = 0) -> MovieLens:
    rng = np.random.default_rng(seed)
    sequences = [rng.permutation(items)[: rng.integers(5, 15)] for _ in range(people)]
    return MovieLens(
        item_ids=np.arange(100, 100 + items),
        titles=tuple(f"Film {row}" for row in range(items)),
        years=np.full(items, 1990, np.int32),
        genre_names=("drama", "war"),
        genres=rng.random((items, 2)) < 0.5,
        person_ids=np.arange(people),
        histories=tuple(sequence[:-1] for sequence in sequences),
        targets=np.array([sequence[-1] for sequence in sequences]),
    )


def test_the_split_is_by_time_and_ties_follow_the_order_of_lines(files):
    data = read_movielens(*files)
    assert data.item_ids.tolist() == [2, 4, 10, 30]
    assert data.person_ids.tolist() == [1, 7]
    assert [data.item_ids[history].tolist() for history in data.histories] == [[10, 2], [10, 30]]
    assert data.item_ids[data.targets].tolist() == [4, 2]


def test_named_sets_are_genres_years_decades_and_the_newest(files):
    data = read_movielens(*files)
    members = {name: data.item_ids[mask].tolist() for name, mask in data.sets().items()}
    assert members == {
        "children": [10],
        "drama": [4, 30],
        "film_noir": [2],
        "sci_fi": [10],
        "y1991": [10],
        "y1997": [4],
        "y1998": [30],
        "years_1990s": [4, 10, 30],
        "newest": [4, 30],
    }
    assert data.titles[2] == "The Far Side"
    assert data.years.tolist() == [0, 1997, 1991, 1998]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("Misérables, Les", "Les Misérables"),
        ("Enfer, L'", "L'Enfer"),
        ("Boot, Das", "Das Boot"),
        ("Blue Angel, The (Blaue Engel, Der)", "The Blue Angel (Der Blaue Engel)"),
        ("Die xue shuang xiong (Killer, The)", "Die xue shuang xiong (The Killer)"),
        ("Fille seule, La (A Single Girl)", "La Fille seule (A Single Girl)"),
        ("Sex, Lies, and Videotape", "Sex, Lies, and Videotape"),
        ("Mrs. Brown (Her Majesty, Mrs. Brown)", "Mrs. Brown (Her Majesty, Mrs. Brown)"),
        ("The Good, The Bad and The Ugly", "The Good, The Bad and The Ugly"),
    ],
)
def test_an_article_stands_before_its_title_in_any_language(written, read):
    assert movielens.article_first(written) == read


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("30\tDay", "x\tDay"), "x.item: expected integers"),
        (("movie_title", "name"), "x.item: expected a column 'movie_title'"),
        (("4\tDusk", "2\tDusk"), "x.item: a film stands twice"),
        (("30\tDay", "31\tDay"), "x.inter: film 30 is not in"),
    ],
)
def test_a_file_that_does_not_fit_is_named(files, change, text):
    files[1].write_text(ITEMS.replace(*change))
    with pytest.raises(ValueError, match=text):
        read_movielens(*files)


def test_a_missing_wheel_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps recbole==1\.2\.1"):
        load_movielens()


@pytest.mark.skipif(importlib.util.find_spec("recbole") is None, reason=f"{movielens.WHEEL} is not installed")
def test_movielens_100k_is_whole_and_nobody_trains_on_the_held_out_film():
    data = load_movielens()
    assert (data.num_people, data.num_items) == (943, 1682)
    assert sum(map(len, data.histories)) == 100_000 - 943
    assert not any(target in history for target, history in zip(data.targets, data.histories, strict=True))
    assert {"drama", "sci_fi", "film_noir", "children", "y1997", "years_1990s", "newest"} <= set(data.sets())
    found = score(popularity(data), data.targets)
    assert (round(found.hit_rate, 3), round(found.ndcg, 3)) == (0.086, 0.045)


def test_item_vectors_know_nothing_of_the_held_out_films():
    data = made_up()
    moved = MovieLens(**{**vars(data), "targets": data.targets[::-1]})
    np.testing.assert_array_equal(item_vectors(data, dimensions=8), item_vectors(moved, dimensions=8))


def test_scores_are_the_definition():
    found = score(np.array([[3, 1, 2], [4, 5, -1], [7, 8, 9]]), np.array([2, 4, 1]))
    assert found.hit_rate == pytest.approx(2 / 3)
    assert found.ndcg == pytest.approx((1 / math.log2(4) + 1) / 3)


def test_baselines_leave_out_what_was_seen():
    data = made_up()
    for lists in (popularity(data), item_knn(data, last=5)):
        assert lists.shape == (30, 10)
        assert not any(np.isin(row, history).any() for row, history in zip(lists, data.histories, strict=True))


def test_item_knn_prefers_what_the_same_people_watched():
    data = made_up(people=4, items=6)
    together = [np.array([0, 1]), np.array([0, 1]), np.array([0, 5]), np.array([2, 3])]
    data = MovieLens(**{**vars(data), "histories": tuple(together)})
    assert item_knn(data, last=5, num_results=1)[2] == [1]


def small_ids(data: MovieLens) -> SemanticIds:
    return semantic_ids(item_vectors(data, dimensions=8), (4, 4))


SMALL = Recipe(
    steps=3, batch=4, history=3, targets=2, d_model=8, d_kv=4, heads=2, d_ff=8, layers=1, dropout=0.0, warmup=1
)


def test_targets_in_one_decoder_row_teach_the_same_as_separate_rows():
    ids = small_ids(made_up())
    torch.manual_seed(0)
    model = new_model(ids, SMALL).eval()
    input_ids = torch.randint(2, 10, (3, 6))
    mask = torch.tensor([[1] * 6, [1] * 6, [0, 0, 1, 1, 1, 1]])
    labels = torch.randint(2, 10, (3, 4, 3))
    labels[1, 2:] = -100
    together = model_loss(model, input_ids, mask, labels)
    separate = []
    for row in range(3):
        for target in labels[row]:
            if target[0] >= 0:
                output = model(
                    input_ids=input_ids[row : row + 1], attention_mask=mask[row : row + 1], labels=target[None]
                )
                separate.append(output.loss)
    assert together.item() == pytest.approx(torch.stack(separate).mean().item(), abs=1e-5)


def test_training_is_reproducible_kept_and_renewed_when_an_input_changes(tmp_path):
    data = made_up()
    ids = small_ids(data)
    assert train_retriever(data, ids, tmp_path / "a", recipe=SMALL)
    assert train_retriever(data, ids, tmp_path / "b", recipe=SMALL)
    first = (tmp_path / "a" / "model.safetensors").read_bytes()
    assert first == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert not train_retriever(data, ids, tmp_path / "a", recipe=SMALL)
    longer = Recipe(**{**vars(SMALL), "steps": 4})
    assert train_retriever(data, ids, tmp_path / "a", recipe=longer)
    assert first != (tmp_path / "a" / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_the_beam_without_a_constraint_counts_what_is_no_film(tmp_path):
    data = made_up()
    ids = small_ids(data)
    recipe = Recipe(**{**vars(SMALL), "steps": 150, "batch": 16, "d_model": 16, "learning_rate": 1e-2})
    train_retriever(data, ids, tmp_path / "model", recipe=recipe)
    model, prompt = load_model(tmp_path / "model"), demo_prompt(ids, SMALL)
    spec = RetrieverSpec("t5", model.config.vocab_size, prompt.longest, prompt, engine="torch")
    graphs = t5_graphs(model, Limits(prompt.longest, 3), "vocabulary")
    retriever = Retriever(spec, TorchEngine(graphs.prefill, graphs.decode))
    free = unconstrained_beam(retriever, data, ids, beam_width=40, batch=7)
    assert 0 < free.invalid < 1
    for row, history in zip(free.recommended, data.histories, strict=True):
        assert not np.isin(row[row >= 0], history).any()
