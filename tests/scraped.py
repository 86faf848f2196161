"""Scraped metrics, and just enough of PromQL to say whether an expression has a value between two scrapes."""

import re
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import promql_parser as promql

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]  # (name, labels) -> value
Vector = dict[frozenset[tuple[str, str]], float]
TRAVEL = 1.2  # seconds: twice what figures take from the model to the endpoint


def scrape(url: str) -> Series:
    """What the endpoint exports now; every series has the label `instance`, as a Prometheus would add it."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found: Series = {}
    for name, labels, value in re.findall(r"^(\w+)(?:{(.*)})? (\S+)$", text, re.MULTILINE):
        key = name, frozenset([*re.findall(r'(\w+)="([^"]*)"', labels), ("instance", "here")])
        assert key not in found, f"{key} is exported twice"
        found[key] = float(value)
    return found


def settled(url: str) -> Series:
    """What the endpoint exports once everything that has happened until now has travelled: nothing more comes."""
    for _ in range(50):
        before = _totals(url)
        time.sleep(TRAVEL)
        if _totals(url) == before:
            return scrape(url)
    raise AssertionError(f"{url}: the figures never stop; somebody else asks this server")


def _totals(url: str) -> Series:
    return {key: number for key, number in scrape(url).items() if key[0].startswith("trieton_") and "_total" in key[0]}


def value(series: Series, name: str, **labels: str) -> float:
    """The sum of the series of that name with these labels. Raises KeyError where there is none."""
    found = [v for (n, have), v in series.items() if n == name and labels.items() <= dict(have).items()]
    if not found:
        raise KeyError(f"{name}{labels}")
    return sum(found)


def evaluate(expression: str, before: Series, after: Series) -> Vector:
    """The vector of an expression whose rates are what grew between two scrapes."""
    return _vector(promql.parse(expression), before, after)


def _vector(node: Any, before: Series, after: Series) -> Any:
    if isinstance(node, promql.NumberLiteral):
        return node.val
    if isinstance(node, promql.ParenExpr):
        return _vector(node.expr, before, after)
    if isinstance(node, promql.Call) and node.func.name == "rate":
        selector = node.args[0].vector_selector
        now, then = _selected(selector, after), _selected(selector, before)
        return {labels: max(0.0, now[labels] - then[labels]) for labels in now if labels in then}
    if isinstance(node, promql.AggregateExpr) and str(node.op) == "sum":
        by = set(node.modifier.labels) if node.modifier else set()
        sums: Vector = {}
        for labels, number in _vector(node.expr, before, after).items():
            kept = frozenset((name, text) for name, text in labels if name in by)
            sums[kept] = sums.get(kept, 0) + number
        return sums
    if isinstance(node, promql.BinaryExpr):
        return _binary(str(node.op), _vector(node.lhs, before, after), _vector(node.rhs, before, after))
    raise NotImplementedError(f"{node}")


def _selected(selector: Any, series: Series) -> Vector:
    tests: dict[str, Callable[[str, str], bool]] = {
        "Equal": lambda have, want: have == want,
        "NotEqual": lambda have, want: have != want,
        "Re": lambda have, want: re.fullmatch(want, have) is not None,
    }
    return {
        labels: number
        for (name, labels), number in series.items()
        if name == selector.name
        and all(
            tests[str(m.op).rsplit(".", 1)[-1]](dict(labels).get(m.name, ""), m.value)
            for m in selector.matchers.matchers
        )
    }


def _binary(operator: str, left: Any, right: Any) -> Vector:
    if operator == "or":
        return right | left
    both = {k: (v, right if isinstance(right, float | int) else right.get(k)) for k, v in left.items()}
    pairs = {k: (a, b) for k, (a, b) in both.items() if b is not None}
    match operator:
        case ">":
            return {k: a for k, (a, b) in pairs.items() if a > b}
        case "+":
            return {k: a + b for k, (a, b) in pairs.items()}
        case "/":
            return {k: a / b for k, (a, b) in pairs.items() if b}
    raise NotImplementedError(operator)
