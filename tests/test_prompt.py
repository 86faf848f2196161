"""Token map and prompt template: codes to tokens, histories to prompts."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trieton.retriever.session import PromptTemplate, RetrieverSpec, TokenMap

MAP = TokenMap((range(10, 14), (7, 99, 3)), end_token=2)


def test_a_level_is_a_run_of_tokens_or_a_list_of_them():
    assert MAP.sizes == (4, 3)
    np.testing.assert_array_equal(MAP.tokens(0, np.array([[3, 0]])), [[13, 10]])
    np.testing.assert_array_equal(MAP.tokens(1, np.array([0, 1, 2])), [7, 99, 3])


def test_the_end_token_is_the_last_column_of_every_level_but_the_first():
    assert [columns.tolist() for columns in MAP.columns] == [[10, 11, 12, 13], [7, 99, 3, 2]]
    assert MAP.tokens(1, np.array([3])) == 2
    with pytest.raises(ValueError, match="level 0: expected 0 <= code < 4, got 4"):
        MAP.tokens(0, np.array([4]))


@pytest.mark.case("I12")
def test_one_declaration_serves_level_local_codes_and_level_offset_tokens():
    offset = TokenMap.contiguous((256, 256), first=0)
    assert offset.tokens(1, np.array([255])) == 511
    with pytest.raises(ValueError, match="level 1: expected 0 <= code < 256, got 300"):
        offset.tokens(1, np.array([300]))


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"start": 1}, "level 0: expected"),
        ({"start": 1, "size": 0}, "level 0: expected at least one token"),
        ({"start": -1, "size": 4}, "level 0: expected at least one token, none negative"),
        ({"tokens": []}, "level 0: expected"),
        ({"tokens": [1, 1]}, "level 0: two codes have the same token"),
        ({"tokens": [1, "2"]}, "level 0: expected"),
        ({"tokens": [1], "size": 1}, "level 0: expected"),
        ("x", "level 0: expected"),
    ],
)
def test_a_token_map_that_does_not_fit_names_the_level(entry, text):
    with pytest.raises(ValueError, match=text):
        TokenMap.from_json([entry])


def test_the_end_token_is_no_code():
    with pytest.raises(ValueError, match="level 1: the end token 7 is also the token of a code"):
        TokenMap((range(10, 14), (7, 99)), end_token=7)


def test_a_template_puts_separators_between_items_and_keeps_the_newest():
    prompt = PromptTemplate(MAP, max_items=2, prefix=(50, 51), separator=(60,), suffix=(70,))
    tokens = prompt.tokens(np.array([[3, 2], [0, 1], [1, 0]]))
    assert tokens.tolist() == [50, 51, 10, 99, 60, 11, 7, 70]
    assert tokens.dtype == np.int64
    assert len(tokens) == prompt.longest


def test_a_short_semantic_id_takes_fewer_tokens():
    prompt = PromptTemplate(MAP, max_items=3, separator=(60,))
    assert prompt.tokens(np.array([[3, -1], [0, 1]])).tolist() == [13, 60, 10, 99]


def test_an_empty_history_is_the_frame_alone():
    prompt = PromptTemplate(MAP, max_items=3, prefix=(1,), separator=(60,), suffix=(2,))
    assert prompt.tokens(np.zeros((0, 2), np.int32)).tolist() == [1, 2]


def test_a_history_with_another_number_of_levels_is_refused():
    prompt = PromptTemplate(MAP, max_items=3)
    with pytest.raises(ValueError, match=r"expected codes \[n, 2\], got shape \(1, 3\)"):
        prompt.tokens(np.zeros((1, 3), np.int32))
    with pytest.raises(ValueError, match="item 1 has no semantic ID"):
        prompt.tokens(np.array([[0, 0], [-1, -1]]))


lists = st.lists(st.integers(0, 200), max_size=3).map(tuple)


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    end=st.booleans(),
    prefix=lists,
    separator=lists,
    suffix=lists,
    max_items=st.integers(1, 6),
    count=st.integers(0, 9),
    data=st.data(),
)
def test_a_prompt_is_what_the_loop_over_items_writes(sizes, end, prefix, separator, suffix, max_items, count, data):
    token_map = TokenMap.contiguous(sizes, first=100, end_token=99 if end else None)
    prompt = PromptTemplate(token_map, max_items, prefix, separator, suffix)
    rows = []
    for _ in range(count):
        length = data.draw(st.integers(1, len(sizes)))
        codes = [data.draw(st.integers(0, size - 1)) for size in sizes[:length]]
        rows.append(codes + [-1] * (len(sizes) - length))
    wanted = list(prefix)
    for place, row in enumerate(rows[-max_items:]):
        wanted += list(separator) if place else []
        wanted += [100 + sum(sizes[:level]) + code for level, code in enumerate(row) if code >= 0]
    tokens = prompt.tokens(np.array(rows, np.int32).reshape(count, len(sizes)))
    assert tokens.tolist() == wanted + list(suffix)
    assert len(tokens) <= prompt.longest


def spec(**changes) -> RetrieverSpec:
    fields = {"family": "t5", "vocab_size": 100, "max_length": 8, "prompt": PromptTemplate(MAP, max_items=2)}
    return RetrieverSpec(**{**fields, **changes})


def test_a_spec_survives_its_file(tmp_path):
    graph = tmp_path / "prefill.onnx"
    graph.write_bytes(b"weights")
    saved = spec(prompt=PromptTemplate(MAP, 2, (1,), (5,), (6, 4))).save(tmp_path, [graph])
    assert RetrieverSpec.load(tmp_path) == saved
    assert len(saved.fingerprint) == 64


def test_the_fingerprint_follows_weights_and_spec(tmp_path):
    graph = tmp_path / "prefill.onnx"
    graph.write_bytes(b"weights")
    first = spec().save(tmp_path, [graph]).fingerprint
    assert spec().save(tmp_path, [graph]).fingerprint == first
    assert spec(max_length=9).save(tmp_path, [graph]).fingerprint != first
    graph.write_bytes(b"Weights")
    assert spec().save(tmp_path, [graph]).fingerprint != first


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vocab_size": 99}, "token 99 lies outside the model's vocabulary of 99"),
        ({"max_length": 3}, "2 items make up to 4 tokens"),
        ({"prompt": PromptTemplate(MAP, 2, suffix=(100,))}, "suffix: token 100 lies outside the vocabulary of 100"),
        ({"normalise": "beam"}, "normalise: expected"),
    ],
)
def test_a_spec_that_does_not_fit_together_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        spec(**changes)


def test_a_spec_file_of_another_format_is_refused(tmp_path):
    (tmp_path / "retriever.json").write_text(json.dumps({**spec().to_json(), "format_version": 99}))
    with pytest.raises(ValueError, match=r"retriever\.json.*format version 99"):
        RetrieverSpec.load(tmp_path)
    fields = spec().to_json()
    del fields["token_map"]
    (tmp_path / "retriever.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="field 'token_map' is missing"):
        RetrieverSpec.load(tmp_path)
