"""The language of constraints: what it means, what is equal, and what it says when a text is wrong."""

import re
from pathlib import Path

import numpy as np
import pytest
import trieton
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trieton.constraint import RULES
from trieton.constraint.compile import ConstraintError, compile_constraint
from trieton.constraint.expressions import MAX_DEPTH, MAX_NAMES, MAX_TEXT, check_names, named, parse
from trieton_builder.cli import app
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
        ("a and no_such_thing", 6, "this version has 6 sets: \"Children's\", 'a', 'b', ..."),
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


@pytest.mark.case("W52")
@pytest.mark.parametrize(
    ("text", "position", "says"),
    [
        ("NOT a", 4, "operators are lower case: not"),
        ("a and (NOT b)", 11, "operators are lower case: not"),
        ("AND", 0, "operators are lower case: and"),
        ("a Or b", 2, "operators are lower case: or"),
        ("a && b", 2, "write 'and'"),
        ("a & b", 2, "write 'and'"),
        ("a || b", 2, "write 'or'"),
        ("a, b", 1, "write 'or'"),
        ("!a", 0, "write 'not'"),
        ("a - b", 2, "write 'and not'"),
        ("a not b", 2, "write 'and not'"),
        ("a == b", 2, "unexpected '=='; sets have no values"),
        ('brand = "3M"', 6, "sets have no values"),
        ("price < 10", 6, "sets have no values"),
        ("a != b", 2, "write 'not'"),
        ("region IN (a, b)", 7, "there is no 'IN'"),
        ("region in (a)", 7, "there is no 'in'"),
        ("a xor b", 2, "there is no 'xor'"),
        ("'a'", 0, "double quotes"),
        ("region us", 7, "a name with a space inside stands in double quotes"),
        ('a and "b\\nc"', 8, "a backslash stands before a quote or a backslash only, got \\n"),
        ('a and "b\\', 8, "got \\"),
        ('a and ""', 6, "nothing stands inside"),
        ('a and "b', 6, "not closed"),
        ("fersh", 0, "did you mean 'fresh'?"),
        ("Region_US", 0, "did you mean 'region_us'?"),
    ],
)
def test_a_fault_says_what_to_write_instead(index, text, position, says):
    with pytest.raises(ConstraintError) as caught:
        compile_constraint(index, text)
    assert caught.value.position == position
    assert says in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.case("W52")
def test_a_name_may_hold_anything_between_quotes():
    for name in ("and", "a\nb", "tab\there", 'say "no"', "back\\slash", "-first", "price < 10", "Ünïcödé 🎉"):
        quoted = '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        assert parse(quoted).names() == {name}
        assert parse(named(name).text).names() == {name}


@pytest.mark.case("W52")
def test_the_page_of_the_language_is_what_the_parser_does():
    page = (Path(trieton.__file__).parents[1] / "CONSTRAINTS.md").read_text()
    for limit in (MAX_TEXT, MAX_NAMES, MAX_DEPTH):
        assert f"{limit:,} " in page
    assert parse("a or not b and c") == parse("a or ((not b) and c)")
    for written, answer in re.findall(r"^\| (`.*?) \| (.*) \|$", page.split("## What a fault says")[1], re.MULTILINE):
        for text in re.findall(r"`([^`]+)`", written):
            text = text.replace("\\|", "|")
            with pytest.raises(ConstraintError) as caught:
                check_names(text, parse(text), ["fresh", "rare"])
            word = re.findall(r"`(\w+)`", answer) or re.findall(r"lower case|no values|double quotes|opened", answer)
            assert any(each in str(caught.value) for each in word) or "never closed" in str(caught.value), text


@pytest.mark.case("W52")
@pytest.mark.parametrize("command", [["query"], ["explain"], ["build"], ["canary", "record"]])
def test_the_help_of_a_command_that_takes_a_constraint_has_the_rules(command):
    # As the option is declared: the table of the help breaks lines wherever it likes.
    found = click_command(command)
    texts = [option.help or "" for option in found.params if "constraint" in option.name]
    assert any(RULES in text for text in texts), texts


def click_command(path):
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return command


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
