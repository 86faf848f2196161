"""The cache of planes: shared by threads, bounded in bytes, gone with its index."""

import gc
import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from trieton.constraint.compile import ConstraintError, compile_constraint, plane_cache, precompile
from trieton.constraint.plane import Plane
from trieton.constraint.plane_cache import ENTRY_BYTES, PlaneCache, TextCache
from trieton_builder.indexing.trie import build_index

NUM_ITEMS = 4000
WAIT_S = 30


def make_index():
    rng = np.random.default_rng(3)
    masks = {name: rng.random(NUM_ITEMS) < 0.7 for name in "abcdef"}
    return build_index(rng.integers(0, 16, (NUM_ITEMS, 4)), codebook_sizes=(16,) * 4, sets=masks), masks


def plane_of_bytes(count: int) -> Plane:
    return Plane(bits=(np.zeros(count, np.uint8),))


def test_equal_expressions_are_compiled_once_and_lists_reuse_them():
    index, _ = make_index()
    first = compile_constraint(index, "a and not b")
    assert compile_constraint(index, "not b and (a and a)") is first
    assert compile_constraint(index, "a and not b", exclude=[1, 2]).bits is first.bits
    stats = plane_cache(index).stats()
    assert (stats.misses, stats.hits, stats.entries) == (1, 2, 1)
    assert first.nbytes < stats.bytes < first.nbytes + 2 * ENTRY_BYTES
    assert stats.compile_seconds > 0


def test_precompiled_expressions_are_hits_from_the_first_request_on():
    index, _ = make_index()
    precompile(index, ["a", "b or c"])
    before = plane_cache(index).stats()
    compile_constraint(index, "c or b")
    after = plane_cache(index).stats()
    assert (before.misses, after.misses, after.hits - before.hits) == (2, 2, 1)
    with pytest.raises(ConstraintError, match="unknown set 'z'"):
        precompile(index, ["a", "z"])


def test_many_threads_that_want_one_new_plane_compile_it_once():
    cache, plane = PlaneCache(), plane_of_bytes(10)
    entered, release, calls = threading.Event(), threading.Event(), []

    def compile_plane():
        calls.append(1)
        entered.set()
        assert release.wait(WAIT_S)
        return plane

    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(cache.get, "key", compile_plane) for _ in range(16)]
        assert entered.wait(WAIT_S)
        # Another key is not held up by the one being compiled.
        assert cache.get("other", lambda: plane_of_bytes(3)).nbytes == 3
        release.set()
        assert all(answer.result(WAIT_S) is plane for answer in answers)
    assert len(calls) == 1
    assert (cache.stats().misses, cache.stats().hits) == (2, 15)


def test_a_failed_compile_reaches_everyone_who_waits_and_is_tried_again():
    cache, plane = PlaneCache(), plane_of_bytes(10)
    entered, release = threading.Event(), threading.Event()

    def fail():
        entered.set()
        assert release.wait(WAIT_S)
        raise MemoryError("no room")

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(cache.get, "key", fail)
        assert entered.wait(WAIT_S)
        rest = [pool.submit(cache.get, "key", fail) for _ in range(3)]
        release.set()
        for answer in (first, *rest):
            with pytest.raises(MemoryError, match="no room"):
                answer.result(WAIT_S)
    assert cache.get("key", lambda: plane) is plane


def test_the_least_recently_used_planes_go_when_bytes_run_out():
    cache, size = PlaneCache(max_bytes=350_000), 100_000
    for key in "abc":
        cache.get(key, lambda: plane_of_bytes(size))
    cache.get("a", lambda: pytest.fail("a is held"))
    cache.get("d", lambda: plane_of_bytes(size))  # b is the one not used for longest
    cache.get("a", lambda: pytest.fail("a is held"))
    assert (cache.stats().entries, cache.stats().bytes // size, cache.stats().evictions) == (3, 3, 1)
    cache.get("b", lambda: plane_of_bytes(size))
    assert cache.stats().misses == 5
    cache.resize(120_000)
    assert (cache.stats().entries, cache.stats().bytes // size) == (1, 1)


def test_a_plane_larger_than_the_cache_is_answered_but_pushes_nothing_out():
    cache = PlaneCache(max_bytes=100_000)
    cache.get("small", lambda: plane_of_bytes(10))
    assert cache.get("large", lambda: plane_of_bytes(100_000)).nbytes == 100_000
    assert (cache.stats().entries, cache.stats().bytes < 10_000) == (1, True)
    with pytest.raises(ValueError, match="expected 0 or more, got -1"):
        cache.resize(-1)


@pytest.mark.case("W25")
def test_expressions_with_unknown_names_take_no_memory():
    index, _ = make_index()
    names = [letter * 2_400 for letter in "xyz"]

    def refused(number: int) -> None:
        text = f"unknown_{number}"
        for name in names:
            text = f"{name} and not ({text} or b)"
        assert 7_200 < len(text) < 8_000
        with pytest.raises(ConstraintError, match="unknown set"):
            compile_constraint(index, text)

    refused(0)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1, 1025):
            refused(number)
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 1 << 20, f"{grown:,} bytes stay"


@pytest.mark.case("W25")
def test_planes_of_no_size_are_bounded_by_their_texts():
    cache, text = PlaneCache(max_bytes=100_000), "x" * 7_600
    for number in range(100):
        cache.get(f"{number} {text}", lambda: Plane(bits=(None,)))
    stats = cache.stats()
    assert 5 < stats.entries < 100_000 / len(text)
    assert stats.bytes <= stats.max_bytes


@pytest.mark.case("W25")
def test_canonical_texts_are_bounded_and_the_latest_stay():
    cache, text = TextCache(max_bytes=100_000), "x" * 7_600
    for number in range(100):
        cache.put((f"{number}",), text)
        assert cache.nbytes <= 100_000
    assert cache.get(("99",)) == text
    assert cache.get(("0",)) is None


def test_threads_get_the_right_plane_while_planes_come_and_go():
    index, masks = make_index()
    texts = {
        "a": masks["a"],
        "b and c": masks["b"] & masks["c"],
        "not d": ~masks["d"],
        "e or f": masks["e"] | masks["f"],
        "a and not f": masks["a"] & ~masks["f"],
    }
    by_position = index.catalog.positions(np.arange(NUM_ITEMS))
    everything = np.arange(NUM_ITEMS)
    plane_cache(index).resize(2 * (compile_constraint(index, "a").nbytes + 2 * ENTRY_BYTES))  # room for two of the five

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(40):
            text = list(texts)[rng.integers(len(texts))]
            allowed = compile_constraint(index, text).allows(everything)
            np.testing.assert_array_equal(allowed[by_position], texts[text], text)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, seed) for seed in range(8)]:
            done.result(WAIT_S)
    stats = plane_cache(index).stats()
    assert stats.hits + stats.misses == 8 * 40 + 1
    assert stats.bytes <= stats.max_bytes
    assert stats.evictions == stats.misses - stats.entries


def test_the_cache_goes_with_its_index():
    index, _ = make_index()
    compile_constraint(index, "a")
    held = weakref.ref(plane_cache(index))
    del index
    gc.collect()
    assert held() is None
