"""`trieton explain` tells what the search did: its numbers are those of the answer and of the oracle's candidates."""

import re

import pytest
from tiny_bundle import tiny_catalogue
from trieton.bundle import Bundle
from trieton.search.searcher import Query, QueryError, Searcher
from trieton_builder.cli import app
from trieton_builder.report.explain import explain
from trieton_builder.report.explain_page import picture, render_html
from typer.testing import CliRunner

CATALOGUE = tiny_catalogue()


@pytest.fixture(scope="module")
def searcher(tiny_bundle):
    return Searcher(Bundle.open(tiny_bundle), threads=1)


@pytest.mark.parametrize("constraint", [None, "even", "rare"])
def test_counts_are_those_of_the_catalogue_and_the_last_beams_are_the_answer(searcher, constraint):
    told = explain(searcher, Query([1003, 1010], num_results=10, beam_width=12, constraint=constraint))
    inside = set(CATALOGUE.allowed(constraint))
    codes = dict(zip(CATALOGUE.ids, CATALOGUE.codes, strict=True))
    parents: set[tuple] = {()}
    for trace in told.levels:
        below = {codes[item][: trace.level + 1] for item in CATALOGUE.ids if codes[item][: trace.level] in parents}
        allowed = {codes[item][: trace.level + 1] for item in inside if codes[item][: trace.level] in parents}
        assert (trace.candidates, trace.allowed) == (len(below), len(allowed))
        assert len(trace.kept) == min(12, len(allowed))
        assert {beam.codes for beam in trace.kept} <= allowed
        assert all(removed.codes in below - allowed for removed in trace.removed)
        assert [beam.score for beam in trace.kept] == sorted((beam.score for beam in trace.kept), reverse=True)
        if trace.pruned is not None:
            assert trace.pruned[1] <= trace.kept[-1].score
        parents = {beam.codes for beam in trace.kept}
    last = {beam.codes: beam.score for beam in told.levels[-1].kept}
    for row, score in zip(told.answer.codes.tolist(), told.answer.scores.tolist(), strict=True):
        assert last[tuple(row)] == pytest.approx(score, abs=1e-5)
    assert told.allowed_items == len(inside)


def test_a_candidate_that_the_constraint_took_from_the_beam_is_counted_as_missed(searcher):
    free = explain(searcher, Query([1003], num_results=1, beam_width=1))
    best = free.answer.item_ids[0]
    held = explain(searcher, Query([1003], num_results=1, beam_width=1, exclude=CATALOGUE.ids))
    assert all(trace.allowed == 0 for trace in held.levels)
    sharing = [
        item for item, codes in zip(CATALOGUE.ids, CATALOGUE.codes, strict=True) if codes == tuple(free.answer.codes[0])
    ]
    without = explain(searcher, Query([1003], num_results=1, beam_width=1, exclude=sharing))
    assert best not in without.answer.item_ids
    assert any(trace.missed for trace in without.levels)


def test_the_picture_hangs_together_and_holds_every_answer(searcher):
    told = explain(searcher, Query([1003, 1010], num_results=10, beam_width=64))
    drawn = picture(told, beams=3)
    columns = drawn["columns"]
    assert {tuple(c) for c in told.answer.codes.tolist()} <= {node.codes for node in columns[-1]}
    for level, column in enumerate(columns):
        for node in column:
            assert 0 <= node.x <= drawn["width"]
            assert 0 <= node.y <= drawn["height"]
            if level:
                assert columns[level - 1][node.parent].codes == node.codes[:-1]


def test_the_page_stands_alone_and_escapes_what_it_shows(searcher):
    told = explain(searcher, Query([1003], constraint="even"))
    page = render_html(told, ["<script>"])
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert page.count("<circle") == sum(map(len, picture(told)["columns"]))


def test_a_query_with_a_fault_is_told_as_the_search_tells_it(searcher):
    with pytest.raises(QueryError, match="no_such"):
        explain(searcher, Query([1003], constraint="no_such"))


def test_the_command_prints_levels_and_writes_the_page(tiny_bundle, tmp_path):
    page = tmp_path / "why.html"
    arguments = ["explain", "1003", "1010", "--bundle", str(tiny_bundle), "-k", "3", "-c", "even", "--html", str(page)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "level 2" in result.output
    assert "the constraint took away" in result.output
    assert page.read_text().startswith("<!doctype html>")
    refused = CliRunner().invoke(app, ["explain", "abc", "--bundle", str(tiny_bundle)])
    assert refused.exit_code == 1
    assert "abc" in refused.output
