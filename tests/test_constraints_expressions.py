"""The language of constraints: what it means, what is equal, and what it says when a text is wrong."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trieton.constraint.compile import ConstraintError, compile_constraint
from trieton.constraint.expressions import MAX_DEPTH, MAX_NAMES, MAX_TEXT, check_names, named, parse
from trieton_builder.indexing.trie import build_index

# Eight items, one for each way to be in or out of three sets: bits over them are a truth table.
TRUTH = {name: np.array([item >> place & 1 for item in range(8)], bool) for place, name in enumerate("abc")}
TABLE = {name: np.packbits(mask, bitorder="little") for name, mask in TRUTH.items()}

TEXTS = st.recursive(
    st.sampled_from(["a", "b", "c"]),
    lambda inner: st.one_of(
        inner.map("not {}".format),
        inner.map("({})".format),
        st.lists(inner, min_size=2, max_size=3).map(" and ".join),
        st.lists(inner, min_size=2, max_size=3).map(" or ".join),
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def index():
    masks = {**TRUTH, "fresh": TRUTH["a"], "region_us": TRUTH["b"], "Children's": TRUTH["c"]}
    return build_index(np.arange(8)[:, None], codebook_sizes=(8,), sets=masks)


@settings(deadline=None, max_examples=300)
@given(TEXTS)
def test_operators_bind_as_in_python(text):
    want = [eval(text, {}, {name: bool(mask[item]) for name, mask in TRUTH.items()}) for item in range(8)]
    got = np.unpackbits(parse(text).evaluate(TABLE, 8), bitorder="little").astype(bool)
    assert got.tolist() == want


@settings(deadline=None, max_examples=300)
@given(TEXTS)
def test_the_canonical_text_is_the_same_expression(text):
    assert parse(parse(text).text) == parse(text)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("a and b", "b and a"),
        ("a or b or a", "b or a"),
        ("not not a", "a"),
        ("not not not (a)", "not a"),
        ("a and (b and (c and a))", "c and b and a"),
        ("a and a", "a"),
        ("(a or b) and c", "c and (b or a)"),
        ('"a" and b', "a and b"),
    ],
)
def test_equal_expressions_have_one_canonical_form(text, same):
    assert parse(text).text == parse(same).text


def test_different_expressions_never_share_a_canonical_form():
    texts = ["a", "not a", "a and b", "a or b", "a and not b", "not (a and b)", "a and (b or c)", "a and b or c", "A"]
    assert len({parse(text).text for text in [*texts, '"a and b"', '"not a"', '"(a"']}) == len(texts) + 3


@settings(deadline=None, max_examples=200)
@given(st.text(min_size=1, max_size=12))
@example("and")
@example('a"b\\')
def test_any_name_can_be_written(name):
    assert parse(named(name).text).names() == {name}


@settings(deadline=None, max_examples=500)
@given(st.one_of(st.text(max_size=30), st.text('ab ()"\\andortnNOT-é\n', max_size=40)))
def test_any_text_is_an_expression_or_an_error_with_a_position(text):
    try:
        outcome: object = parse(text)
    except ConstraintError as error:
        outcome = error
    if isinstance(outcome, ConstraintError):
        assert outcome.position is not None
        assert 0 <= outcome.position <= len(text)
    else:
        assert outcome.names()


@pytest.mark.case("C03")
@pytest.mark.parametrize(
    ("text", "position", "says"),
    [
        ("fresh and region_uk", 10, "unknown set 'region_uk'; did you mean 'region_us'?"),
        ("fresh and Fresh", 10, "unknown set 'Fresh'; did you mean 'fresh'?"),
        ('fresh and "Childrens"', 10, "unknown set 'Childrens'; did you mean \"Children's\"?"),
        ("(fresh or (a and b)", 0, "'(' is never closed"),
        ("fresh)", 5, "no '(' is open here, got ')'"),
        ("", 0, "got empty text"),
        ("  \n", 0, "got empty text"),
        ("a and " * 20_000, MAX_TEXT, "expected at most 8192 characters, got 120000"),
        ("x" * 100_000, MAX_TEXT, "expected at most 8192 characters, got 100000"),
        ("not " * 10_000 + "a", MAX_TEXT, "expected at most 8192 characters, got 40001"),
        ("not " * 2_000 + "a", 4 * MAX_DEPTH, "nested more than 64 deep"),
        ("(" * 4_000 + "a" + ")" * 4_000, MAX_DEPTH, "nested more than 64 deep"),
        ("a or " * MAX_NAMES + "a", 5 * MAX_NAMES, "at most 256 names"),
        ("a and", 5, "expected a set name, 'not' or '(', got the end of the text"),
        ("a b", 2, "expected 'and', 'or' or the end, got 'b'"),
        ("a AND b", 2, "operators are lower case: and"),
        ("a & b", 2, "unexpected '&'"),
        ('a and "b', 6, "this quote is not closed"),
        ("and", 0, "got 'and'"),
        ("()", 1, "got ')'"),
    ],
)
def test_a_wrong_expression_is_refused_with_its_position(index, text, position, says):
    with pytest.raises(ConstraintError) as caught:
        compile_constraint(index, text)
    assert caught.value.position == position
    assert f"character {position + 1}: " in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 250


def test_what_the_limits_allow_is_compiled(index):
    deepest = "not " * MAX_DEPTH + "a"
    longest = " or ".join(["a", "b"] * (MAX_NAMES // 2))
    for text in (deepest, longest, "(" * MAX_DEPTH + "a" + ")" * MAX_DEPTH):
        assert compile_constraint(index, text).allows(np.arange(8)).any()


def test_a_version_without_sets_says_so():
    with pytest.raises(ConstraintError, match="this version has no named sets"):
        check_names("a", parse("a"), [])


def test_something_other_than_text_is_refused(index):
    with pytest.raises(ConstraintError, match="expected the expression as text, got int"):
        compile_constraint(index, 5)


def test_a_base_expression_holds_besides_and_errors_keep_the_position_of_their_own_text(index):
    both = compile_constraint(index, "b or c", base="a")
    assert both is compile_constraint(index, "a and (c or b)")
    assert compile_constraint(index, base="a") is compile_constraint(index, "a")
    with pytest.raises(ConstraintError) as caught:
        compile_constraint(index, "b or d", base="a and b and c")
    assert caught.value.position == 5
    deepest = "not " * MAX_DEPTH + "a"
    assert compile_constraint(index, deepest, base=deepest) is compile_constraint(index, "a")
