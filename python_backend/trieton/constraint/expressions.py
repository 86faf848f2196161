"""Boolean expressions over named sets: `fresh and (region_us or region_ca) and not adult`.

The rules are in CONSTRAINTS.md beside this package; `trieton.constraint.RULES` is their short form.
"""

import difflib
import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from lark import Lark, Token, Transformer, UnexpectedInput, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

MAX_TEXT = 8192  # characters of an expression
MAX_DEPTH = 64  # operators and parentheses inside one another
MAX_NAMES = 256  # names written in an expression: each costs one pass over the items

_GRAMMAR = r"""
?any_of: all_of ("or" all_of)*
?all_of: unary ("and" unary)*
?unary: "not" unary -> negated
      | (NAME | QUOTED) -> named
      | "(" any_of ")"

NAME: /[\w.:\/][\w.:\/-]*/
QUOTED: /"(\\["\\]|[^"\\])+"/
%ignore /[ \t\r\n]+/
"""
_PLAIN = re.compile(r"[\w.:/][\w.:/-]*")
_NAME_TOKENS = ("NAME", "QUOTED")
_OPERATORS = ("and", "or", "not")
# What other languages write, and what stands for it here. Longer spellings first.
_FOREIGN = {
    "&&": "write 'and'",
    "||": "write 'or'",
    "!=": "sets have no values to compare; write 'not' and the name of a set",
    "&": "write 'and'",
    "|": "write 'or'",
    "!": "write 'not'",
    "~": "write 'not'",
    "-": "write 'and not'",
    "+": "write 'or'",
    ",": "write 'or' between the names",
    "'": "names stand in double quotes, or in none",
    "`": "names stand in double quotes, or in none",
    "[": "use round brackets",
    "{": "use round brackets",
} | dict.fromkeys(("==", "<=", ">=", "=", "<", ">"), "sets have no values to compare; write the name of a set")


class ConstraintError(ValueError):
    """A constraint that cannot be compiled: its text, one of its names, or one of its lists.

    Attributes:
        position: 0-based character of the expression's text, None where the fault is not in the text.
    """

    def __init__(self, message: str, position: int | None = None):
        where = "" if position is None else f"character {position + 1}: "
        super().__init__(f"constraint: {where}{message}")
        self.position = position


@dataclass(frozen=True)
class Expression:
    """A normalised expression: nested `and`s and `or`s are one, operands are sorted and distinct, no double `not`.

    Attributes:
        operator: "and", "or" and "not" over `operands`, or "set" for the one named `name`.
        text: canonical text; two expressions with equal text are the same expression.
    """

    operator: str
    operands: tuple["Expression", ...] = ()
    name: str = ""
    text: str = ""

    def names(self) -> set[str]:
        """Every set the expression names."""
        return {self.name} if self.operator == "set" else set().union(*(part.names() for part in self.operands))

    def evaluate(self, sets: Mapping[str, np.ndarray], num_items: int) -> np.ndarray:
        """Allowed items as packed bits uint8 [ceil(num_items / 8)], little bit order; the spare bits are 0."""
        if self.operator == "set":
            return sets[self.name].copy()
        if self.operator == "not":
            bits = self.operands[0].evaluate(sets, num_items)
            np.invert(bits, out=bits)
            if num_items % 8:
                bits[-1] &= (1 << num_items % 8) - 1
            return bits
        combine = np.bitwise_and if self.operator == "and" else np.bitwise_or
        bits = self.operands[0].evaluate(sets, num_items)
        for part in self.operands[1:]:
            held = sets[part.name] if part.operator == "set" else part.evaluate(sets, num_items)
            combine(bits, held, out=bits)
        return bits


def named(name: str) -> Expression:
    """The expression that is one set."""
    plain = _PLAIN.fullmatch(name) and name not in _OPERATORS
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return Expression("set", name=name, text=name if plain else f'"{escaped}"')


def negated(part: Expression) -> Expression:
    """`not part`."""
    if part.operator == "not":
        return part.operands[0]
    inner = f"({part.text})" if part.operator in ("and", "or") else part.text
    return Expression("not", (part,), text=f"not {inner}")


def combined(operator: str, parts: Collection[Expression]) -> Expression:
    """`parts` joined by `operator`, "and" or "or"."""
    flat: dict[str, Expression] = {}
    for part in parts:
        for inner in part.operands if part.operator == operator else (part,):
            flat[inner.text] = inner
    operands = tuple(flat[text] for text in sorted(flat))
    if len(operands) == 1:
        return operands[0]
    texts = (f"({p.text})" if p.operator in ("and", "or") else p.text for p in operands)
    return Expression(operator, operands, text=f" {operator} ".join(texts))


@v_args(inline=True)
class _Builder(Transformer):
    """Builds expressions while the parser reduces, so nothing recurses into the text."""

    def named(self, token: Token) -> Expression:
        return named(_name_of(token))

    def negated(self, part: Expression) -> Expression:
        return negated(part)

    def all_of(self, *parts: Expression) -> Expression:
        return combined("and", parts)

    def any_of(self, *parts: Expression) -> Expression:
        return combined("or", parts)


def _unquoted(token: str) -> str:
    return re.sub(r"\\(.)", r"\1", token[1:-1])


_PARSER = Lark(_GRAMMAR, start="any_of", parser="lalr", lexer="basic", transformer=_Builder())
_PARSER_LOCK = threading.Lock()


def parse(text: str) -> Expression:
    """Parse and normalise an expression.

    Raises:
        ConstraintError: with the position of the first thing that is wrong; empty, too long or too deep.
    """
    if len(text) > MAX_TEXT:
        raise ConstraintError(f"expected at most {MAX_TEXT} characters, got {len(text)}", MAX_TEXT)
    if not text.strip():
        raise ConstraintError("expected an expression such as 'fresh and not adult', got empty text", 0)
    with _PARSER_LOCK:
        try:
            _check_size(text)
            return cast(Expression, _PARSER.parse(text))
        except UnexpectedInput as error:
            raise _syntax_error(text, error) from None


def _check_size(text: str) -> None:
    """Refuse too many names and too deep nesting before anything is built."""
    names, depth, outer = 0, 0, [0]  # outer: the depth inside each open parenthesis
    for token in _PARSER.lex(text):
        if token.type in ("NOT", "LPAR"):
            depth += 1
            if depth > MAX_DEPTH:
                raise ConstraintError(f"{str(token)!r}: nested more than {MAX_DEPTH} deep", token.start_pos)
            if token.type == "LPAR":
                outer.append(depth)
        else:
            names += token.type in _NAME_TOKENS
            if names > MAX_NAMES:
                raise ConstraintError(f"expected at most {MAX_NAMES} names, this is one more", token.start_pos)
            if token.type == "RPAR" and len(outer) > 1:
                outer.pop()
            depth = outer[-1]


def check_names(text: str, expression: Expression, known: Collection[str]) -> None:
    """Refuse names that the version does not have.

    Raises:
        ConstraintError: the first such name with its position in `text`, and names close to it.
    """
    unknown = {name for name in expression.names() if name not in known}
    if not unknown:
        return
    with _PARSER_LOCK:
        names = (token for token in _PARSER.lex(text) if token.type in _NAME_TOKENS)
        token = next(token for token in names if _name_of(token) in unknown)
    name = _name_of(token)
    raise ConstraintError(f"unknown set {_shown(name)}{_suggestion(name, known)}", token.start_pos)


def _name_of(token: Token) -> str:
    return _unquoted(token) if token.type == "QUOTED" else str(token)


def _suggestion(name: str, known: Collection[str]) -> str:
    """What may have been meant: the nearest names, the operator, or else some of the names that there are."""
    if not known:
        return "; this version has no named sets"
    if name.lower() in _OPERATORS:
        return f"; operators are lower case: {name.lower()}"
    close: list[str] = []
    if len(name) <= 100:  # comparing costs the product of both lengths, and nobody mistypes such a name
        folded = [other for other in known if other.lower() == name.lower()]
        close = folded or difflib.get_close_matches(name, known, n=3)
    if close:
        return f"; did you mean {' or '.join(_shown(n) for n in close)}?"
    some = ", ".join(_shown(n) for n in sorted(known)[:3])
    return f"; this version has {len(known)} sets: {some}" + (", ..." if len(known) > 3 else "")


def _shown(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:57] + "...")


def _syntax_error(text: str, error: UnexpectedInput) -> ConstraintError:
    if isinstance(error, UnexpectedCharacters):
        return _character_error(text, error.pos_in_stream or 0)
    if not isinstance(error, UnexpectedToken) or error.token.type == "$END":
        opened = _unclosed(text)
        if opened is not None:
            return ConstraintError("'(' is never closed", opened)
        return ConstraintError("expected a set name, 'not' or '(', got the end of the text", len(text))
    token = error.token
    if "NAME" in error.expected:
        expected = "a set name, 'not' or '('"
    elif token.type == "RPAR":
        expected = "'and', 'or' or the end, because no '(' is open here"
    else:
        expected = "'and', 'or' or the end"
    hint = _word_hint(text, token)
    return ConstraintError(f"expected {expected}, got {_shown(str(token))}{hint}", token.start_pos)


def _character_error(text: str, position: int) -> ConstraintError:
    """The error of a character that begins nothing."""
    if text[position] == '"':
        return _quote_error(text, position)
    listed = re.search(r"\bin\b", text[:position], re.IGNORECASE) if text[position] == "," else None
    if listed:
        return ConstraintError(_no_in(listed.group()), listed.start())
    for spelling, remedy in _FOREIGN.items():
        if text.startswith(spelling, position):
            return ConstraintError(f"unexpected {spelling!r}; {remedy}", position)
    return ConstraintError(f"unexpected {text[position]!r}; put names with such characters in double quotes", position)


def _quote_error(text: str, position: int) -> ConstraintError:
    """The error of a quote that begins no name."""
    if text.startswith('""', position):
        return ConstraintError("nothing stands inside these quotes", position)
    inside = position + 1
    while inside < len(text) and text[inside] != '"':
        if text[inside] == "\\":
            if text[inside + 1 : inside + 2] not in ('"', "\\"):
                got = text[inside : inside + 2]
                return ConstraintError(
                    f"inside quotes a backslash stands before a quote or a backslash only, got {got}; "
                    "any other character, a line break too, is written as it is",
                    inside,
                )
            inside += 1
        inside += 1
    return ConstraintError("this quote is not closed", position)


def _no_in(word: str) -> str:
    return f"there is no {word!r}: write the names of sets with 'or' between them"


def _word_hint(text: str, token: Token) -> str:
    """What to write instead, where the word at `token` or the one before it is an operator of another language."""
    before = text[: token.start_pos].split()
    for word in (str(token), before[-1] if before else ""):
        lower = word.lstrip("(").lower()
        if lower in _OPERATORS and word.lstrip("(") != lower:
            return f"; operators are lower case: {lower}"
        if lower in ("in", "is", "has", "contains"):
            return f"; {_no_in(word)}"
        if lower in ("xor", "nor", "nand", "but"):
            return f"; there is no {word!r}: the operators are 'and', 'or' and 'not'"
    if token == "not":
        return "; write 'and not'"
    if token.type in _NAME_TOKENS:
        return "; a name with a space inside stands in double quotes"
    return ""


def _unclosed(text: str) -> int | None:
    opened: list[int] = []
    for token in _PARSER.lex(text):
        if token.type == "LPAR":
            opened.append(token.start_pos or 0)
        elif token.type == "RPAR" and opened:
            opened.pop()
    return opened[-1] if opened else None
