"""Codes written as text, such as `<a_12><b_7>`: the numbers, and the level that each of them says it is of."""

import re
from collections.abc import Callable

import numpy as np
import polars as pl

Tag = tuple[str, str]  # what stands before and behind the number
_PIECES = re.compile(r"[^\W\d_]+|\d+|.", re.DOTALL)


class CodeText:
    """A code pattern, and what it has read so far.

    The text around a number is its tag: `<a_` and `>`. All codes of a level have one tag, in all rows and files, and
    either every level has its own or all share one. Tags that count, by a letter or a number, count up by one from
    level to level. So codes out of order, or a level left out, are noticed.
    """

    def __init__(self, pattern: str):
        """Raises ValueError: no regular expression, or not one group."""
        try:
            groups = len(pl.Series([""]).str.extract_groups(pattern).struct.fields)
        except pl.exceptions.PolarsError as error:
            said = str(error).splitlines()
            reason = next((line for line in said if line.startswith("error: ")), said[0]).removeprefix("error: ")
            raise ValueError(f"code_pattern {pattern!r}: no regular expression: {reason}") from None
        if groups != 1:
            raise ValueError(
                rf"code_pattern {pattern!r}: expected one group, around the number, as in '<\w_(\d+)>'; got {groups}"
            )
        self.pattern = pattern
        try:
            self._search: Callable[[str], re.Match[str] | None] | None = re.compile(pattern).search
        except re.error:  # the two dialects differ a little
            self._search = None
        self._tag_of: dict[str, Tag] = {}
        self._levels: dict[int, Tag] = {}

    def split(self, series: pl.Series) -> tuple[pl.Series, int | None]:
        """Lists of codes from text, and the first place that holds something else, if any."""
        left = series.str.replace_all(self.pattern, "").str.strip_chars(" [],")
        rest = (left != "").fill_null(False)
        return series.str.extract_all(self.pattern), int(rest.arg_max() or 0) if rest.any() else None

    def numbers(self, codes: pl.Series) -> pl.Series:
        """Int64 of single codes; null where there is none, more than one, or no integer."""
        rest = codes.str.replace(self.pattern, "").str.strip_chars()
        found = codes.str.extract(self.pattern, 1).cast(pl.Int64, strict=False)
        return found.set(rest.is_not_null() & (rest != ""), None)

    def check_levels(self, codes: pl.Series, levels: np.ndarray) -> tuple[int, str] | None:
        """Compare the tags of `codes` (text without nulls, all valid) with those of their `levels` [n].

        Returns:
            The place of the first code that has another, and what is wrong with it; None where all is right.
        """
        if not len(codes):
            return None
        unique = codes.unique()
        for code in unique.to_list():
            if code not in self._tag_of:
                self._tag_of[code] = self._tag(code)
        known = {tag: number for number, tag in enumerate(set(self._tag_of.values()))}
        tags = codes.replace_strict(
            unique, [known[self._tag_of[code]] for code in unique.to_list()], return_dtype=pl.Int64
        ).to_numpy()
        faults = []
        for level in np.unique(levels).tolist():
            places = np.flatnonzero(levels == level)
            if level not in self._levels:
                self._levels[level] = self._tag_of[codes[int(places[0])]]
                if what := self._misfit(level):
                    faults.append((int(places[0]), what))
            wrong = np.flatnonzero(tags[places] != known[self._levels[level]])
            if wrong.size:
                at = int(places[wrong[0]])
                faults.append((at, f"level {level}: expected {_shown(self._levels[level])}, got {codes[at]!r}"))
        return min(faults, default=None)

    def _tag(self, code: str) -> Tag:
        number = pl.Series([code]).str.extract(self.pattern, 1)[0]
        match = self._search(code) if self._search else None
        start = match.start(1) if match and match[1] == number else code.rindex(number)
        return code[:start].strip(" [],"), code[start + len(number) :].strip(" [],")

    def _misfit(self, level: int) -> str | None:
        """What is wrong with the tag of a level beside those of the levels known."""
        tag, others = self._levels[level], {n: t for n, t in self._levels.items() if n != level}
        same = [n for n, t in others.items() if t == tag]
        if same and len(same) < len(others):
            return f"level {level}: got {_shown(tag)}, which level {same[0]} has; are the codes in order?"
        if level - 1 in others and not same:
            before = others[level - 1]
            if not _may_follow(before, tag):
                return f"level {level}: got {_shown(tag)} behind {_shown(before)}; are all levels there, in order?"
        return None


def _may_follow(before: Tag, tag: Tag) -> bool:
    """Whether a tag can be that of the next level: what counts in it counts up by one."""
    pieces = [_PIECES.findall(f"{start}\0{end}") for start, end in (before, tag)]
    if len(pieces[0]) != len(pieces[1]):
        return True
    differ = [(a, b) for a, b in zip(*pieces, strict=True) if a != b]
    if len(differ) != 1:
        return True
    a, b = differ[0]
    if a.isdecimal() and b.isdecimal():
        return int(b) == int(a) + 1
    return not (len(a) == len(b) == 1 and a.isalpha() and b.isalpha()) or ord(b) == ord(a) + 1


def _shown(tag: Tag) -> str:
    return f"{tag[0]}...{tag[1]}"
