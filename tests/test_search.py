"""The whole search in process, on a real bundle, against the oracle."""

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_bundle import SIZES, assert_same, expected, tiny_catalogue
from tiny_retriever import VOCAB_SIZE
from trieton.bundle import Bundle
from trieton.search.groups import PADDING_TOKENS, groups
from trieton.search.prepare import Prepared
from trieton.search.searcher import DECODE_BYTES, Answer, Limits, Query, QueryError, Searcher
from trieton.search.watch import CHECK_SECONDS

LIMITS = Limits(max_num_results=50, max_beam_width=64, max_list_items=400)
CATALOGUE = tiny_catalogue()


@pytest.fixture(scope="module")
def searcher(tiny_bundle):
    return Searcher(Bundle.open(tiny_bundle), threads=1, limits=LIMITS)


def one(searcher: Searcher, *arguments, **options) -> Answer:
    (entry,) = searcher.search([Query(*arguments, **options)])
    if isinstance(entry, QueryError):
        raise entry
    return entry


def pairs(answer: Answer) -> list[tuple[object, float]]:
    return list(zip(answer.item_ids.tolist(), answer.scores.tolist(), strict=True))


def prompt_of(searcher: Searcher, history: list) -> np.ndarray:
    codes = [CATALOGUE.codes[CATALOGUE.ids.index(item)] for item in history if item in CATALOGUE.ids]
    return searcher.retriever.spec.prompt.tokens(np.array(codes))


constraints = st.sampled_from(
    [None, "even", "even and third", "not rare", "rare or (third and not even)", "none_at_all"]
)
histories = st.lists(st.sampled_from([*CATALOGUE.ids, 7, 8]), min_size=1, max_size=14).filter(
    lambda ids: any(i >= 1000 for i in ids)
)
queries = st.builds(
    Query,
    history=histories,
    num_results=st.integers(1, 20),
    beam_width=st.integers(20, 64),
    constraint=constraints,
    include=st.none() | st.lists(st.sampled_from([*CATALOGUE.ids, 7]), max_size=40),
    exclude=st.none() | st.lists(st.sampled_from([*CATALOGUE.ids, 7]), max_size=40),
)


@settings(deadline=None, max_examples=25)
@given(batch=st.lists(queries, min_size=1, max_size=5))
def test_every_query_of_a_mixed_batch_equals_the_oracle(searcher, batch):
    for query, answer in zip(batch, searcher.search(batch), strict=True):
        assert isinstance(answer, Answer)
        allowed = CATALOGUE.allowed(query.constraint, query.include, query.exclude)
        prompt = prompt_of(searcher, list(query.history))
        want = expected(searcher.retriever, CATALOGUE, prompt, allowed, query.beam_width, query.num_results)
        assert_same(pairs(answer), want)
        assert [CATALOGUE.codes[CATALOGUE.ids.index(i)] for i in answer.item_ids] == list(map(tuple, answer.codes))
        assert answer.num_unknown == sum(item not in CATALOGUE.ids for item in query.history)
        if answer.certified:
            everything = expected(searcher.retriever, CATALOGUE, prompt, allowed, 10**6, query.num_results)
            assert_same(pairs(answer), everything)


def test_string_ids_give_the_same_items_as_integer_ids(searcher, make_tiny_bundle):
    text = Searcher(Bundle.open(make_tiny_bundle(text_ids=True)), threads=1)
    answer = one(text, ["item-1003", "item-1010"], constraint="even", exclude=["item-1004"])
    same = one(searcher, [1003, 1010], constraint="even", exclude=[1004])
    assert answer.item_ids.tolist() == [f"item-{i}" for i in same.item_ids]
    assert answer.scores.tolist() == same.scores.tolist()


@pytest.mark.case("I07")
def test_items_that_share_a_semantic_id_come_one_after_the_other_with_the_same_score(searcher):
    answer = one(searcher, [1000], num_results=50, beam_width=64)
    by_codes: dict[tuple, list] = {}
    for item, codes in zip(CATALOGUE.ids, CATALOGUE.codes, strict=True):
        by_codes.setdefault(codes, []).append(item)
    got: dict[tuple, list] = {}
    for item, codes in zip(answer.item_ids.tolist(), map(tuple, answer.codes.tolist()), strict=True):
        got.setdefault(codes, []).append(item)
    whole = list(got)[:-1]  # the last one may be cut by num_results
    assert all(got[codes] == by_codes[codes] for codes in whole)
    assert any(len(items) > 1 for items in got.values())


@pytest.mark.case("B13")
def test_ten_of_a_hundred_are_the_first_ten_of_the_hundred(searcher):
    wide = one(searcher, [1005], num_results=50, beam_width=64)
    few = one(searcher, [1005], num_results=10, beam_width=64)
    assert few.item_ids.tolist() == wide.item_ids[:10].tolist()


@pytest.mark.case("B11")
def test_an_answer_does_not_depend_on_its_neighbours(searcher):
    asked = Query([1003, 1077], num_results=10, beam_width=20, constraint="even")
    others = [
        Query([1000 + i], num_results=5 + i, beam_width=20 + 6 * i, constraint=("third", None, "not even")[i % 3])
        for i in range(7)
    ]
    alone = one(searcher, **vars(asked))
    together = searcher.search([*others[:4], asked, *others[4:]])[4]
    assert together.item_ids.tolist() == alone.item_ids.tolist()
    np.testing.assert_allclose(together.scores, alone.scores, atol=1e-5)


@pytest.mark.case("S01")
def test_only_the_newest_part_of_a_long_history_counts(searcher):
    keep = searcher.retriever.spec.prompt.max_items
    history = CATALOGUE.ids[: keep + 25]
    assert pairs(one(searcher, history)) == pairs(one(searcher, history[-keep:]))


@pytest.mark.case("S01")
def test_unknown_items_are_skipped_and_counted_and_nothing_else_is_an_error(searcher):
    answer = one(searcher, [5, 1003, 6, 1010, 5])
    assert answer.num_unknown == 3
    assert pairs(answer) == pairs(one(searcher, [1003, 1010]))
    with pytest.raises(QueryError, match="none of the 2 item ids is in the catalogue"):
        one(searcher, [5, 6])


def test_raw_tokens_give_what_their_history_gives(searcher):
    tokens = prompt_of(searcher, [1003, 1010])
    assert pairs(one(searcher, input_ids=tokens)) == pairs(one(searcher, [1003, 1010]))


@pytest.mark.case("C05")
def test_an_include_list_of_three_gives_three(searcher):
    answer = one(searcher, [1000], include=[1001, 1002, 1003], num_results=10)
    assert sorted(answer.item_ids) == [1001, 1002, 1003]
    assert answer.certified


@pytest.mark.case("C06")
def test_nothing_allowed_gives_nothing(searcher):
    for options in ({"include": []}, {"constraint": "none_at_all"}, {"include": [1001], "exclude": [1001]}):
        answer = one(searcher, [1000], **options)
        assert len(answer.item_ids) == 0
        assert answer.codes.shape == (0, len(SIZES))


BAD = [
    ({}, "expected one of them, got neither"),
    ({"history": [1000], "input_ids": [5]}, "expected one of them, got both"),
    ({"history": []}, "history: expected at least one item id"),
    ({"history": ["a"]}, "history: item ids: expected integers"),
    ({"history": [1000] * 401}, "history: expected at most 400 item ids, got 401"),
    ({"history": [1000], "num_results": 0}, "num_results: expected 1 to 50, got 0"),
    ({"history": [1000], "num_results": -3}, "num_results: expected 1 to 50, got -3"),
    ({"history": [1000], "num_results": 51}, "num_results: expected 1 to 50, got 51"),
    ({"history": [1000], "num_results": 2.0}, "num_results: expected an integer from 1 to 50, got 2.0"),
    ({"history": [1000], "num_results": True}, "num_results: expected an integer"),
    ({"history": [1000], "beam_width": 65}, "beam_width: expected 1 to 64, got 65"),
    ({"history": [1000], "beam_width": 9}, "beam_width: expected at least num_results = 10, got 9"),
    ({"history": [1000], "constraint": "no_such_set"}, "no_such_set"),
    ({"history": [1000], "constraint": "even and (third"}, "character"),
    ({"history": [1000], "constraint": ""}, "constraint: character 1"),
    ({"history": [1000], "include": ["x"]}, "include"),
    ({"history": [1000], "exclude": [1000] * 401}, "exclude: expected at most 400 item ids, got 401"),
    ({"input_ids": [100_000]}, "input_ids: expected tokens 0 <= token < 1024, got 100000 at place 0"),
    ({"input_ids": [-2]}, "input_ids: expected tokens"),
    ({"input_ids": [3] * 65}, "input_ids: expected 1 to 64 tokens, got 65"),
]


@pytest.mark.case("S03")
@pytest.mark.case("S05")
@pytest.mark.parametrize(("options", "text"), BAD, ids=[text[:40] for _, text in BAD])
def test_a_bad_query_is_told_what_was_wrong_and_its_neighbours_are_answered(searcher, options, text):
    good = Query([1003])
    first, bad, last = searcher.search([good, Query(**options), good])
    assert isinstance(bad, QueryError)
    assert bad.kind == "invalid"
    assert text in str(bad)
    assert pairs(first) == pairs(last) == pairs(one(searcher, [1003]))


@settings(deadline=None, max_examples=100)
@given(asked=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 300)), max_size=40))
def test_a_group_shares_a_call_only_where_nobody_pays_much_for_it(asked):
    prepared = [Prepared(i, np.zeros(n, np.int64), None, 1, width, 0) for i, (width, n) in enumerate(asked)]
    found = groups(prepared, 200)
    assert sorted(query.place for group in found for query in group) == list(range(len(asked)))
    for group in found:
        widths = [query.beam_width for query in group]
        lengths = [len(query.prompt) for query in group]
        assert max(widths) < 2 * min(widths)
        assert len(group) == 1 or len(group) * max(widths) <= 200
        assert len(group) * max(lengths) - sum(lengths) <= PADDING_TOKENS


def test_a_default_beam_is_widened_to_the_number_of_results(searcher):
    assert len(one(searcher, [1003], num_results=45).item_ids) == 45


def test_a_base_constraint_holds_every_request_and_positions_in_errors_stay_those_of_the_caller(make_tiny_bundle):
    held = Searcher(Bundle.open(make_tiny_bundle(base_constraint="even")), threads=1)
    free = Searcher(Bundle.open(make_tiny_bundle()), threads=1)
    for constraint, both in ((None, "even"), ("third", "even and third"), ("not even", "none_at_all")):
        assert pairs(one(held, [1001], constraint=constraint)) == pairs(one(free, [1001], constraint=both))
    assert pairs(one(held, [1001], include=[1001, 1002])) == pairs(one(free, [1001], include=[1002]))
    with pytest.raises(QueryError, match=r"character 11: .*nothing_such"):
        one(held, [1001], constraint="third and nothing_such")


@pytest.mark.case("S08")
def test_a_search_that_nobody_waits_for_stops_between_two_levels(searcher, monkeypatch):
    monkeypatch.setattr("trieton.search.watch.CHECK_SECONDS", 1e-9)
    levels = searcher.totals.levels
    asked = []

    def cancelled(place):
        asked.append(place)
        return len(asked) > 1  # after level 0

    (entry,) = searcher.search([Query([1003])], cancelled=cancelled)
    assert isinstance(entry, QueryError)
    assert entry.kind == "cancelled"
    assert searcher.totals.levels - levels == 1
    assert pairs(one(searcher, [1003]))


@pytest.mark.case("S08")
@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_who_leaves_a_batch_that_goes_on_loses_the_beams_and_changes_no_bit_of_the_others(
    tiny_bundle, monkeypatch, kernel, level
):
    monkeypatch.setattr("trieton.search.watch.CHECK_SECONDS", 1e-9)
    searcher = Searcher(Bundle.open(tiny_bundle), threads=1, limits=LIMITS, kernel=kernel)
    asked = [Query([1000 + i, 1050 + i], beam_width=20, constraint=(None, "even")[i % 2]) for i in range(8)]
    whole = searcher.search(asked)
    assert all(isinstance(entry, Answer) for entry in whole)
    before = replace(searcher.totals)
    seen = []
    leaving = {0, 3, 4, 7}

    def cancelled(place):
        seen.append(place)
        return place in leaving and len(seen) > 8 * level  # everybody is asked after once a level

    entries = searcher.search(asked, cancelled=cancelled)
    for place, (entry, want) in enumerate(zip(entries, whole, strict=True)):
        if place in leaving:
            assert isinstance(entry, QueryError)
            assert entry.kind == "cancelled"
        else:
            assert pairs(entry) == pairs(want)
            assert entry.scores.tobytes() == want.scores.tobytes()
            assert entry.certified == want.certified
    assert searcher.totals.cancelled - before.cancelled == 4
    assert searcher.totals.searches - before.searches == 4
    assert searcher.totals.failed == before.failed
    assert searcher.totals.levels - before.levels == 8 * level + 4 * (3 - level)


def test_asking_whether_people_still_wait_is_spread_over_the_search(searcher):
    """A question costs a message to the server; a batch of many must not ask about everybody at every level."""
    asked: list[int] = []
    started = time.perf_counter()
    searcher.search([Query([1000 + i]) for i in range(8)] * 8, cancelled=lambda place: bool(asked.append(place)))
    assert len(asked) <= (time.perf_counter() - started) / CHECK_SECONDS


def test_candidates_are_counted_by_the_kernels_that_can(tiny_bundle):
    """The reference ranks whatever is allowed; the compiled step comes to fewer, for it passes over who cannot win."""
    counts = {}
    for kernel in ("torch", "cpu"):
        searcher = Searcher(Bundle.open(tiny_bundle), threads=1, limits=LIMITS, kernel=kernel)
        one(searcher, [1003], include=[1001, 1002, 1003], num_results=3, beam_width=3)
        counts[kernel] = [searcher.totals.ranked]
        one(searcher, [1003], num_results=1, beam_width=1)
        counts[kernel].append(searcher.totals.ranked - counts[kernel][0])
    codes = {tuple(CATALOGUE.codes[CATALOGUE.ids.index(item)]) for item in (1001, 1002, 1003)}
    assert counts["torch"][0] == sum(len({c[: level + 1] for c in codes}) for level in range(3))
    assert counts["cpu"][0] == counts["torch"][0], "a beam with room for all rules nobody out"
    assert 3 <= counts["cpu"][1] <= counts["torch"][1]


@pytest.mark.case("I04")
def test_a_bundle_without_items_answers_every_question_with_an_error_or_nothing(make_tiny_bundle):
    empty = Searcher(Bundle.open(make_tiny_bundle(num_items=0)), threads=1)
    empty.warm_up(4)
    with pytest.raises(QueryError, match="none of the 1 item ids"):
        one(empty, [1000])
    assert len(one(empty, input_ids=[3, 4, 5]).item_ids) == 0


def test_an_item_id_that_marks_padding_is_refused_when_the_bundle_is_loaded(make_tiny_retriever, tmp_path):
    from trieton_builder.bundle.write import write_bundle
    from trieton_builder.indexing.trie import build_index

    index = build_index([[0, 0, 0], [0, 0, 1]], codebook_sizes=SIZES, item_ids=[3, 4])
    index.catalog.item_ids[0] = -1  # an older builder took it
    write_bundle(tmp_path / "b", index=index, retriever_dir=make_tiny_retriever(SIZES))
    with pytest.raises(ValueError, match="item id -1"):
        Searcher(Bundle.open(tmp_path / "b"), threads=1)


def test_totals_count_what_was_done(searcher):
    searcher.warm_up(2)
    searcher.search([Query([1003]), Query([1, 1004], num_results=5), Query([1005], include=[1001]), Query([])])
    totals = searcher.totals
    assert (totals.searches, totals.invalid, totals.short, totals.unknown_items, totals.results) == (3, 1, 1, 1, 16)
    assert totals.levels == 9
    assert all(seconds > 0 for seconds in totals.seconds.values())


@pytest.mark.case("W26")
@pytest.mark.parametrize(
    "limits",
    [
        {"max_list_items": 1},
        {"max_list_items": 2},
        {"max_beam_width": 1},
        {"max_num_results": 1},
        {"max_list_items": 1, "max_beam_width": 1, "max_num_results": 1, "default_num_results": 50},
        {"default_beam_width": 1000},
    ],
)
def test_a_version_whose_limits_are_one_warms_up_and_answers(tiny_bundle, limits):
    searcher = Searcher(Bundle.open(tiny_bundle), threads=1, limits=Limits(**limits))
    searcher.warm_up(2)
    answer = one(searcher, [1003])
    most = min(searcher.limits.max_num_results, searcher.limits.max_beam_width)
    assert len(answer.item_ids) == answer.num_wanted == min(searcher.limits.default_num_results, most)
    with pytest.raises(QueryError, match=f"num_results: expected 1 to {most}, got {most + 1}"):
        one(searcher, [1003], num_results=most + 1)


@pytest.mark.case("W26")
def test_a_prompt_of_one_item_warms_up_and_answers(make_tiny_retriever, tmp_path):
    from trieton_builder.bundle.write import write_bundle
    from trieton_builder.indexing.trie import build_index

    index = build_index(np.array(CATALOGUE.codes), codebook_sizes=SIZES, item_ids=np.array(CATALOGUE.ids))
    write_bundle(tmp_path / "b", index=index, retriever_dir=make_tiny_retriever(SIZES, max_items=1))
    searcher = Searcher(Bundle.open(tmp_path / "b"), threads=1)
    searcher.warm_up(2)
    assert pairs(one(searcher, [1001, 1003])) == pairs(one(searcher, [1003]))


def test_a_limit_below_one_is_refused_by_name():
    for name in vars(Limits()):
        with pytest.raises(ValueError, match=f"{name}: expected at least"):
            Limits(**{name: -1})
    with pytest.raises(ValueError, match="max_list_items: expected at least 1, got 0"):
        Limits(max_list_items=0)


@pytest.mark.case("W40")
def test_queries_of_one_batch_normalise_as_each_asks(searcher):
    choices = ["allowed", "vocabulary", "level", "allowed"]
    asked = [Query([1003, 1077], constraint="rare", normalise=choice) for choice in choices]
    answers = searcher.search(asked)
    for query, answer in zip(asked, answers, strict=True):
        assert pairs(answer) == pairs(one(searcher, **vars(query)))
    level, allowed = answers[2].scores, answers[0].scores
    assert answers[1].scores[0] < level[0] < allowed[0] <= 0
    with pytest.raises(QueryError, match="normalise: expected one of vocabulary, level, allowed, got 'all'"):
        one(searcher, [1003], normalise="all")


@pytest.mark.case("W23")
def test_a_batch_that_is_decoded_in_parts_gives_the_answers_of_the_whole(tiny_bundle, monkeypatch):
    asked = [Query([1000 + i], beam_width=20, constraint=(None, "even")[i % 2]) for i in range(7)]
    whole = Searcher(Bundle.open(tiny_bundle), threads=1).search(asked)
    few = 4 * VOCAB_SIZE * 20  # the logits of one request of twenty beams
    for requests, parts in ((1, 7), (2, 4), (7, 1)):
        searcher = Searcher(Bundle.open(tiny_bundle), threads=1, limits=Limits(decode_bytes=requests * few))
        sizes: list[int] = []
        decode = searcher.retriever.engine.decode
        monkeypatch.setattr(
            searcher.retriever.engine,
            "decode",
            lambda s, ids, *a, d=decode, n=sizes: n.append(len(ids)) or d(s, ids, *a),
        )
        for got, want in zip(searcher.search(asked), whole, strict=True):
            assert got.item_ids.tolist() == want.item_ids.tolist()
            np.testing.assert_allclose(got.scores, want.scores, atol=1e-5)
        assert searcher.totals.batches == parts
        assert max(sizes) <= requests


LARGE = """
import resource, sys
import numpy as np, torch
from pathlib import Path
from transformers import T5Config, T5ForConditionalGeneration
from trieton.bundle import Bundle
from trieton.retriever.session import PromptTemplate, TokenMap
from trieton.search.searcher import Limits, Query, Searcher
from trieton_builder.bundle.write import write_bundle
from trieton_builder.export import export_retriever
from trieton_builder.indexing.trie import build_index

torch.set_num_threads(1)
config = T5Config(vocab_size=32000, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=1)
folder, prompt = Path(sys.argv[1]), PromptTemplate(TokenMap.contiguous((300, 300), first=3), max_items=4)
export_retriever(T5ForConditionalGeneration(config).eval(), folder / "r", prompt, max_length=16)
codes = np.random.default_rng(0).integers(0, 300, (2000, 2))
index = build_index(codes, codebook_sizes=(300, 300), item_ids=np.arange(2000))
write_bundle(folder / "b", index=index, retriever_dir=folder / "r")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
searcher = Searcher(Bundle.open(folder / "b"), threads=1, limits=Limits(max_beam_width=256))
before = peak()
searcher.warm_up(32)
answers = searcher.search([Query([i], beam_width=256, num_results=100) for i in range(32)])
print(peak() - before, {len(answer.item_ids) for answer in answers})
"""


@pytest.mark.case("W23")
def test_memory_does_not_grow_with_batch_times_beam_times_vocabulary(tmp_path):
    """Whole, the logits alone of 32 requests of 256 beams over 32,000 tokens are 1 GB, and the graph needs five."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True, check=False, timeout=170
    )
    assert done.returncode == 0, done.stderr[-2000:]
    megabytes, counts = done.stdout.strip().splitlines()[-1].split(maxsplit=1)
    assert float(megabytes) < 8 * DECODE_BYTES["cpu"] / 2**20
    assert counts == "{100}"


def test_behind_an_error_that_stays_with_the_device_nobody_is_searched_again(tiny_bundle, monkeypatch):
    searcher = Searcher(Bundle.open(tiny_bundle), threads=1)
    for text, searches in (("CUDA error: an illegal memory access was encountered", 1), ("a bug", 4)):
        calls: list[int] = []

        def fail(prompts: list, text: str = text, calls: list[int] = calls) -> None:
            calls.append(len(prompts))
            raise RuntimeError(text)

        monkeypatch.setattr(searcher.retriever, "start", fail)
        failed = searcher.totals.failed
        entries = searcher.search([Query([1003])] * 3)
        assert [(entry.kind, str(entry.__cause__)) for entry in entries] == [("failed", text)] * 3
        assert len(calls) == searches
        assert searcher.totals.failed == failed + 3
