r"""Whether two final answers mean the same.

An answer is read as a structure (a list or set, a tuple or interval, a union, a matrix) of leaves. Structures are
compared here, exactly: a tuple is ordered, a set is not, [1,2] is not (1,2). Leaves are equal as text, as exact
rational numbers, or, where neither decides, by `symbolic` (the math-verify library).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from slime_retool.reward.normalize import compact, join_digit_groups, spell, unwrap
from slime_retool.reward.rational import rational

Symbolic = Callable[[str, str], bool]
"""(ground truth, answer), both one LaTeX expression -> whether they are equal."""

_MAX_ITEMS = 64
_MAX_DEPTH = 32
"""What is nested deeper equals nothing but the same text."""
_MAX_SYMBOLIC = 400
"""Longer expressions are compared as text alone."""

_OPEN, _CLOSE = "([{", ")]}"
_WORD_SEPARATOR = re.compile(r"\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_NAMES = r"\(\s*\w(?:\s*,\s*\w)*\s*\)"
_NAME = rf"(?:{_NAMES}|\\?[A-Za-z]+'*(?:\s*_\s*(?:\w|\{{\w+\}}))?(?:\s*{_NAMES})?|\\text\s*\{{[^{{}}]*\}})"
_ASSIGNMENT = re.compile(rf"^\s*{_NAME}\s*(?:=|:=|\\in(?![A-Za-z]))\s*(?=\S)")
_ARITHMETIC = re.compile(r"^[\d\s.+*/^(){}-]*(?:\\(?:cdot|frac|sqrt)[\d\s.+*/^(){}-]*)*=\s*(?=\S)")
_CHAIN = re.compile(
    r"^(?P<low>[^<>]+?)(?P<a><|\\le(?![A-Za-z]))(?P<name>\s*[A-Za-z]\s*)(?P<b><|\\le(?![A-Za-z]))(?P<high>[^<>]+)$"
)
_HALF_LINE = re.compile(r"^\s*[A-Za-z]\s*(?P<sign><|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z]))(?P<bound>[^<>=]+)$")
_MATRIX = re.compile(
    r"^\\begin\{(?:[bpv]?matrix|array)\}(?:\{[lcr|]*\})?(?P<body>.*)\\end\{(?:[bpv]?matrix|array)\}$", re.DOTALL
)
# Some published sets lost one of the two backslashes: \2 can only be a row break.
_ROW_BREAK = re.compile(r"\\\\|\\(?=[\s\d+-])")
_IN_BASE = re.compile(r"^([0-9A-Fa-f]+)_(?:\{(\d+)\}|(\d))$")
_LETTERS = re.compile(r"^[A-Za-z]+$")


@dataclass(frozen=True, slots=True)
class Leaf:
    text: str
    """With its spaces, as the symbolic comparison reads it."""
    equation: str = ""
    """Where `text` is the right-hand side of "y = ...": the whole."""


@dataclass(frozen=True, slots=True)
class Group:
    kind: str
    """Its brackets ("()", "[)", ...) for what is ordered; "set", "union" (unordered); "row", "matrix"."""
    items: tuple[Leaf | Group, ...]


Answer = Leaf | Group


def same_answer(ground_truth: str, answer: str, symbolic: Symbolic) -> bool:
    """Whether `answer` (LaTeX, without its box) means `ground_truth`. An empty one equals nothing."""
    if compact(spell(answer)) == compact(spell(ground_truth)) != "":
        return True
    return _same(parse_answer(ground_truth), parse_answer(answer), symbolic)


def parse_answer(text: str) -> Answer:
    r"""The structure of an answer. Of "x = 5" and "x \in [0,1]" what follows; \pm stands for two values."""
    return _parse(spell(text))


def _parse(text: str, depth: int = 0) -> Answer:
    if depth == _MAX_DEPTH:
        return Leaf("")
    parse = partial(_parse, depth=depth + 1)
    alternatives = " or " in text or "{ or }" in text
    text = unwrap(_WORD_SEPARATOR.sub(",", text).strip().strip(","))
    value = _right_hand_side(text)
    if (number := join_digit_groups(value)) != value:
        return Leaf(number)
    if match := _MATRIX.match(value):
        rows = [tuple(parse(cell) for cell in row.split("&")) for row in _ROW_BREAK.split(match["body"]) if row.strip()]
        return Group("matrix", tuple(Group("row", row) for row in rows))
    if parts := _split(text, ","):
        items = _flat(parse(part) for part in parts)
        half_lines = alternatives and all(_HALF_LINE.match(part) or _CHAIN.match(part) for part in parts)
        return Group("union" if half_lines else "set", items)
    equation, text = text, _interval(value)
    if parts := _split(text, "\\cup"):
        return Group("union", tuple(parse(part) for part in parts))
    inner, brackets = _inside(text)
    if brackets == "{}":
        return Group("set", _flat(parse(part) for part in _split(inner, ",") or ([inner] if inner.strip() else [])))
    if brackets and (parts := _split(inner, ",")):
        return Group(brackets, tuple(parse(part) for part in parts))
    if brackets == "()" and inner.strip():
        return parse(inner)
    if re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        first = re.sub(r"\\pm(?![A-Za-z])", "+", re.sub(r"\\mp(?![A-Za-z])", "-", text))
        second = re.sub(r"\\pm(?![A-Za-z])", "-", re.sub(r"\\mp(?![A-Za-z])", "+", text))
        return Group("set", (Leaf(first.strip()), Leaf(second.strip())))
    return Leaf(text, equation if text != equation else "")


def _flat(items: object) -> tuple[Answer, ...]:
    """Sets inside a set that come of \\pm are its elements."""
    flat: list[Answer] = []
    for item in items:  # type: ignore[attr-defined]
        flat += item.items if isinstance(item, Group) and item.kind == "set" else [item]
    return tuple(flat)


def _right_hand_side(text: str) -> str:
    while match := _ASSIGNMENT.match(text) or _ARITHMETIC.match(text):
        text = text[match.end() :]
    return text.strip()


def _interval(text: str) -> str:
    """An inequality in one variable as the interval it stands for."""
    if match := _CHAIN.match(text):
        left, right = ("(" if match["a"] == "<" else "["), (")" if match["b"] == "<" else "]")
        return f"{left}{match['low']},{match['high']}{right}"
    if match := _HALF_LINE.match(text):
        sign, bound = match["sign"], match["bound"]
        if sign in ("<", "\\le"):
            return f"(-\\infty,{bound}{')' if sign == '<' else ']'}"
        return f"{'(' if sign == '>' else '['}{bound},\\infty)"
    return text


def _inside(text: str) -> tuple[str, str]:
    """(what stands inside, the two brackets) when one pair encloses all of `text`, else ("", "")."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return (text[2:-2], "{}") if _match(text, 1) == len(text) - 1 else ("", "")
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _match(text, 0) == len(text) - 1:
        return text[1:-1], text[0] + text[-1]
    return "", ""


def _match(text: str, start: int) -> int:
    """Where the bracket at `start` is closed, by a bracket of any kind, as in [0,1); -1 when it is not."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] in _OPEN:
            depth += 1
        elif text[position] in _CLOSE:
            depth -= 1
            if depth == 0:
                return position
    return -1


def _split(text: str, separator: str) -> list[str]:
    """The parts of `text` between separators outside all brackets; empty when there is no separator."""
    parts, depth, begin, position = [], 0, 0, 0
    while position < len(text):
        if depth == 0 and text.startswith(separator, position):
            parts.append(text[begin:position])
            position = begin = position + len(separator)
            continue
        depth += (text[position] in _OPEN) - (text[position] in _CLOSE)
        position += 1
    if not parts or len(parts) >= _MAX_ITEMS:
        return []
    return [*parts, text[begin:]]


def _same(truth: Answer, answer: Answer, symbolic: Symbolic) -> bool:
    if isinstance(truth, Leaf) and isinstance(answer, Leaf):
        return _same_leaf(truth, answer, symbolic)
    if isinstance(truth, Leaf) or isinstance(answer, Leaf):
        group, leaf = (answer, truth) if isinstance(truth, Leaf) else (truth, answer)
        if not isinstance(group, Group) or group.kind != "set" or len(group.items) != 1:
            return False
        return _same(group.items[0], leaf, symbolic)
    if truth.kind != answer.kind or len(truth.items) != len(answer.items):
        return False
    if truth.kind not in ("set", "union"):
        return all(_same(a, b, symbolic) for a, b in zip(truth.items, answer.items, strict=True))
    return _same_elements(truth.items, list(answer.items), symbolic)


def _same_elements(truth: Sequence[Answer], answer: list[Answer], symbolic: Symbolic) -> bool:
    """Equality of what has no order. Equality is transitive, so the first partner found is as good as any."""
    for item in truth:
        partner = next((i for i, other in enumerate(answer) if _same(item, other, _never)), None)
        if partner is None:
            partner = next((i for i, other in enumerate(answer) if _same(item, other, symbolic)), None)
        if partner is None:
            return False
        del answer[partner]
    return True


def _never(ground_truth: str, answer: str) -> bool:
    return False


def _same_leaf(true_leaf: Leaf, leaf: Leaf, symbolic: Symbolic) -> bool:
    truth, answer = true_leaf.text, leaf.text
    if ("=" in truth) != ("=" in answer):
        # An equation with two sides of its own equals another one, never a value.
        truth, answer = true_leaf.equation or truth, leaf.equation or answer
        if "=" not in truth or "=" not in answer:
            return False
    a, b = compact(truth), compact(answer)
    if not a or not b:
        return False
    if a == b:
        return True
    if _IN_BASE.match(a) or _IN_BASE.match(b):
        return _same_in_base(a, b)
    values = _values(truth, a), _values(answer, b)
    if all(values):
        return bool(values[0] & values[1])
    if len(a) > 2 and _LETTERS.match(a) or len(b) > 2 and _LETTERS.match(b):
        return a.casefold() == b.casefold()
    if " " in a + b:
        return False
    if (values[0] and not re.search(r"\d|\\", b)) or max(len(truth), len(answer)) > _MAX_SYMBOLIC:
        return False
    return symbolic(truth, answer)


def _values(text: str, number: str) -> set[Fraction]:
    """The exact values that a number can stand for: 50% is 50 (of a hundred) or 0.5. Empty for other text."""
    value = rational(number)
    if value is None:
        return set()
    return {value, value / 100} if "%" in text else {value}


def _same_in_base(a: str, b: str) -> bool:
    """Digits are compared, never the value: a question about digits in base 9 is not answered by decimal ones."""
    bases = []
    digits = []
    for text in (a, b):
        match = _IN_BASE.match(text)
        digits.append(match[1] if match else text)
        bases.append((match[2] or match[3]) if match else None)
    return digits[0] == digits[1] and (None in bases or bases[0] == bases[1])
