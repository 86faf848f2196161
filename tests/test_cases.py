"""The list of cases and the tests that carry their names are held to each other."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_every_case_of_the_list_has_a_test_and_every_mark_leads_to_the_list():
    listed = re.findall(r"(?m)^\| ([A-Z]\d\d) \|", (TESTS / "CASES.md").read_text())
    marked = {name for file in TESTS.rglob("test_*.py") for name in re.findall(r'case\("(\w+)"\)', file.read_text())}
    assert len(listed) == len(set(listed))
    assert marked == set(listed)
