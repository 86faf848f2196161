"""`trieton explain` tells what the search did: its numbers are those of the answer and of the oracle's candidates."""

import itertools
import re
from xml.etree import ElementTree

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
    assert page.count("<title>") == 1 + sum(map(len, picture(told)["columns"]))


QUERIES = [
    {},
    {"constraint": "even"},
    {"constraint": "even and not rare", "exclude": [1003, 1004, 1010], "beam_width": 11},
    {"include": [1001, 1002, 1010, 1050, 99], "constraint": "even", "beam_width": 20},
]


@pytest.mark.case("W43")
@pytest.mark.parametrize("asked", QUERIES)
def test_candidates_are_those_that_stayed_found_no_room_or_were_taken_away_by_a_part(searcher, asked):
    told = explain(searcher, Query([1003, 1010], **asked), examples=10**6)
    allows = _parts(asked)
    codes = dict(zip(CATALOGUE.ids, CATALOGUE.codes, strict=True))
    assert {part.label: part.allowed for part in told.parts} == {name: len(ids) for name, ids in allows.items()}
    for part in told.parts:
        others = [ids for name, ids in allows.items() if name != part.label]
        alone = [i for i in CATALOGUE.ids if i not in allows[part.label] and all(i in ids for ids in others)]
        assert part.alone == len(alone)
    for trace in told.levels:
        assert trace.candidates == len(trace.kept) + trace.num_pruned + trace.num_removed
        assert sum(trace.removed_by.values()) == trace.num_removed == len(trace.removed)
        assert trace.missed <= min(told.beam_width, trace.num_removed)
        for removed in trace.removed:
            below = {i for i in CATALOGUE.ids if codes[i][: trace.level + 1] == removed.codes}
            assert below
            whole = [name for name, ids in allows.items() if not below & ids]
            some = [name for name, ids in allows.items() if below - ids]
            assert removed.by == (", ".join(whole) or "only together: " + ", ".join(some))


def _parts(asked):
    """Items that each part of a constraint allows, by its name."""
    parts = {}
    for text in asked["constraint"].split(" and ") if "constraint" in asked else []:
        inside = set(CATALOGUE.allowed(text.removeprefix("not ")))
        parts[text] = set(CATALOGUE.ids) - inside if text.startswith("not ") else inside
    if "include" in asked:
        parts["include list"] = set(asked["include"]) & set(CATALOGUE.ids)
    if "exclude" in asked:
        parts["exclude list"] = set(CATALOGUE.ids) - set(asked["exclude"])
    return parts


@pytest.mark.case("W43")
@pytest.mark.parametrize("asked", QUERIES)
def test_no_edge_crosses_a_label_and_the_picture_says_what_it_leaves_out(searcher, asked):
    told = explain(searcher, Query([1003, 1010], **asked))
    page = render_html(told, [1003, 1010])
    drawing = page[page.index('class="picture"') :]
    svg = ElementTree.fromstring(re.search(r"<svg width.*?</svg>", drawing, re.S)[0])
    edges = [[float(n) for n in re.findall(r"[\d.]+", path.get("d"))] for path in svg.iter("path")]
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in svg.iter("circle")]
    labels = [text for text in svg.iter("text") if "label" in text.get("class")]
    boxes = [
        (x, float(text.get("y")) - 11, x + 6.6 * len(text.text), float(text.get("y")) + 3)
        for text in labels
        for x in [float(text.get("x"))]
    ]
    assert len(circles) == len(boxes) == len(edges) + 1
    boxes += [
        (float(n.get("x")), float(n.get("y")) - 11, float(n.get("x")) + 6 * len(n.text or ""), float(n.get("y")) + 3)
        for n in svg.iter("text")
        if n.get("class") in ("note", "head")
    ]
    assert labels[0].text == "start"
    width, height = float(svg.get("width")), float(svg.get("height"))
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= width + 1
        assert 0 <= top < bottom <= height
        for edge in edges:  # a curve stays inside the box of its four points
            xs, ys = edge[0::2], edge[1::2]
            assert right <= min(xs) or left >= max(xs) or bottom <= min(ys) or top >= max(ys)
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    columns = picture(told)["columns"]
    for level, column in enumerate(columns[1:]):
        order = [(node.parent, -node.score) for node in column]
        assert order == sorted(order)
        drawn = [node for node in column if node.kind != "removed"]
        trace = told.levels[level]
        assert f"level {level}</text>" in page
        assert f"{len(drawn)} of {len(trace.kept)} beams drawn" in page
        if trace.num_removed:
            assert f"{len(column) - len(drawn)} of {trace.num_removed} taken away" in page
    assert "leads to an item of the answer" in page
    assert ("taken away by the constraint" in page) == bool(asked)
    for name in ("include", "exclude"):
        if name in asked:
            assert ", ".join(map(str, asked[name])) in page
    assert ("1 of them unknown" in page) == (99 in asked.get("include", []))


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
    assert "taken away by even" in result.output
    assert page.read_text().startswith("<!doctype html>")
    refused = CliRunner().invoke(app, ["explain", "abc", "--bundle", str(tiny_bundle)])
    assert refused.exit_code == 1
    assert "abc" in refused.output
