r"""Whether two final answers mean the same.

An answer is read as a structure (a list or set, a tuple or interval, a union, a matrix) of leaves. Structures are
compared here, exactly: a tuple is ordered, a set is not, [1,2] is not (1,2). Leaves are equal as text, as exact
rational numbers, or, where neither decides, by `symbolic` (the math-verify library).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain

from slime_retool.reward.boxed import closing, split_outside
from slime_retool.reward.letters import told_apart
from slime_retool.reward.normalize import ELLIPSIS, compact, join_digit_groups, rational, spell, unwrap
from slime_retool.reward.python_text import constants_as_named

Symbolic = Callable[[str, str], bool]
"""(ground truth, answer), both one LaTeX expression -> whether they are equal."""

_MAX_DEPTH = 32
"""What is nested deeper equals nothing but the same text."""
_MAX_SYMBOLIC = 400
"""Longer expressions are compared as text alone."""

_OPEN, _CLOSE = "([{", ")]}"
_AND, _OR = "\x01", "\x02"
"""Stand for the words while an answer is read."""
_WORD_SEPARATOR = re.compile(r"\\text\s*\{\s*(?:,\s*)?(and|or)\s*\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z])")
_NAMES = r"\(\s*\w(?:\s*,\s*\w)*\s*\)"
_NAME = rf"(?:{_NAMES}|\\?[A-Za-z]+'*(?:\s*_\s*(?:\w|\{{\w+\}}))?(?:\s*{_NAMES})?|\\text\s*\{{[^{{}}]*\}})"
_ASSIGNMENT = re.compile(rf"^\s*(?P<name>{_NAME})\s*(?:=|:=|\\in(?![A-Za-z]))\s*(?=\S)")
_ARITHMETIC = re.compile(r"^[\d\s.+*/^(){}-]*(?:\\(?:cdot|frac|sqrt)[\d\s.+*/^(){}-]*)*=\s*(?=\S)")
_RELATION = re.compile(r"(<|>|\\[lg]e(?![A-Za-z]))")
_RISING, _FALLING, _CLOSED = {"<", "\\le"}, {">", "\\ge"}, {"\\le", "\\ge"}
_VARIABLE = re.compile(r"^(?:[A-Za-z]|\\(?!pi(?![a-z])|infty)[a-z]+)(?:_(?:\w|\{\w+\}))?$")
_MATRIX = re.compile(
    r"^\\begin\{(?:[bpv]?matrix|array)\}(?:\{[lcr|]*\})?(?P<body>.*)\\end\{(?:[bpv]?matrix|array)\}$", re.DOTALL
)
# Some published sets lost one of the two backslashes: \2 can only be a row break.
_ROW_BREAK = re.compile(r"\\\\|\\(?=[\s\d+-])")
_IN_BASE = re.compile(r"^([0-9A-Fa-f]+)_(?:\{(\d+)\}|(\d))$")
_LETTERS = re.compile(r"^[A-Za-z]+$")
_WORDS = re.compile(r"\\text(?![A-Za-z])|(?<![A-Za-z\\])[A-Za-z]{3,}\s|\s[A-Za-z]{3,}")
_SYMBOL = re.compile(r"\s*(?:\\(?!text)|\(|[A-Za-z]{1,2}(?![A-Za-z]))")
"""What begins with a name that is a variable's or a function's, not a word as in "Area = 5"."""
_SIGNS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class Leaf:
    text: str
    """With its spaces, as the symbolic comparison reads it."""
    equation: str = ""
    """Where `text` is the right-hand side of "y = ...": the whole."""
    names: frozenset[str] = frozenset()
    """The left-hand sides."""


@dataclass(frozen=True, slots=True)
class Group:
    kind: str
    """Its brackets ("()", "[)", ...) for what is ordered; "set", "union" (unordered); "row", "matrix"."""
    items: tuple[Leaf | Group, ...]
    names: frozenset[str] = frozenset()
    of_signs: bool = False
    r"""The two values of one that was written with \pm: elements of the set in which they stand."""


Answer = Leaf | Group
_LOWEST, _HIGHEST = Leaf("-\\infty"), Leaf("\\infty")


def same_answer(ground_truth: str, answer: str, symbolic: Symbolic) -> bool:
    """Whether `answer` (LaTeX, without its box) means `ground_truth`. An empty one equals nothing.

    A unit or a name that only one of them has does not count; where both have one, it must be the same.
    """
    (truth, true_unit), (stated, unit) = spell(ground_truth), spell(answer)
    stated = constants_as_named(truth, stated)
    if true_unit and unit and true_unit != unit:
        return False
    return compact(stated) == compact(truth) != "" or _same(_parse(truth), _parse(stated), symbolic)


def _parse(text: str, depth: int = 0) -> Answer:
    r"""The structure of an answer. Of "x = 5" and "x \in [0,1]" what follows; \pm stands for two values."""
    if depth == _MAX_DEPTH:
        return Leaf("")
    parse = partial(_parse, depth=depth + 1)
    text = _WORD_SEPARATOR.sub(lambda match: _AND if (match[1] or match[2]) == "and" else _OR, text)
    if (condition := _condition(text, depth)) is not None:
        return condition
    whole = unwrap(text.replace(_AND, ",").replace(_OR, ",").strip().strip(","))
    value, names = _right_hand_side(whole)
    if (number := join_digit_groups(value)) != value:
        return Leaf(number, names=names)
    if match := _MATRIX.match(value):
        rows = [tuple(parse(cell) for cell in row.split("&")) for row in _ROW_BREAK.split(match["body"]) if row.strip()]
        return Group("matrix", tuple(Group("row", row) for row in rows), names)
    if parts := split_outside(whole, ","):
        return Group("set", _flat(map(parse, parts)))
    if parts := split_outside(value, "\\cup"):
        return Group("union", tuple(map(parse, parts)), names)
    inner, brackets = _inside(value)
    if brackets == "{}":
        return Group("set", _flat(map(parse, split_outside(inner, ",") or ([inner] if inner.strip() else []))), names)
    if brackets and (parts := split_outside(inner, ",")):
        return Group(brackets, tuple(map(parse, parts)), names)
    if brackets == "[]" and inner.strip():
        return Group(brackets, (parse(inner),), names)
    if brackets == "()" and inner.strip():
        alone = parse(inner)
        return replace(alone, names=names | alone.names)
    if value == "\\mathbb{R}":
        return Group("()", (_LOWEST, _HIGHEST), names)
    if _SIGNS.search(value):
        both = (value.replace("\\pm", plus).replace("\\mp", minus) for plus, minus in ("+-", "-+"))
        return Group("set", tuple(Leaf(text.strip()) for text in both), names, of_signs=True)
    return Leaf(value, whole if value != whole else "", names)


def _flat(items: Iterable[Answer]) -> tuple[Answer, ...]:
    """Sets inside a set that come of \\pm are its elements."""
    parts = (item.items if isinstance(item, Group) and item.of_signs else [item] for item in items)
    return tuple(chain.from_iterable(parts))


def _right_hand_side(text: str) -> tuple[str, frozenset[str]]:
    names = set()
    while match := _ASSIGNMENT.match(text) or _ARITHMETIC.match(text):
        name = match.groupdict().get("name", "")
        if _SYMBOL.match(name):
            names.add(compact(name))
        text = text[match.end() :]
    return unwrap(text.strip()), frozenset(names)


def _condition(text: str, depth: int) -> Group | None:
    """What one variable may be, by inequalities and "and" and "or" between them; None for all other text.

    An interval, or a union of intervals.
    """
    text = unwrap(text.strip().strip(",").strip())
    if depth == _MAX_DEPTH or not _RELATION.search(text):
        return None
    inner, brackets = _inside(text)
    if brackets == "()":
        return _condition(inner, depth + 1)
    if parts := split_outside(text, _OR):
        parts = [each for part in parts for each in split_outside(part, ",") or [part] if each.strip()]
        return _union([_condition(part, depth + 1) for part in parts])
    if parts := split_outside(text, _AND):
        return _intersection([_condition(part, depth + 1) for part in parts])
    sides, signs = _RELATION.split(text)[::2], _RELATION.findall(text)
    if "=" in text or split_outside(text, ",") or not all(side.strip() for side in sides):
        return None
    if set(signs) <= _FALLING:
        sides, signs = sides[::-1], signs[::-1]
    elif not set(signs) <= _RISING:
        return None
    sides = [unwrap(side.strip()) for side in sides]
    if len(sides) == 3 and _VARIABLE.match(sides[1]):
        low, name, high = sides
    elif len(sides) == 2 and (names := [side for side in sides if _VARIABLE.match(side)]):
        name = max(names)  # of a < x the one that is later in the alphabet
        low, high = ("-\\infty", sides[1]) if sides[0] == name else (sides[0], "\\infty")
    else:
        return None
    left = "[" if signs[0] in _CLOSED and compact(low) != "-\\infty" else "("
    right = "]" if signs[-1] in _CLOSED and compact(high) != "\\infty" else ")"
    ends = _parse(low, depth + 1), _parse(high, depth + 1)
    return Group(left + right, ends, frozenset([compact(name)]))


def _union(conditions: Sequence[Group | None]) -> Group | None:
    parts: list[Answer] = []
    for condition in conditions:
        if condition is None:
            return None
        parts += condition.items if condition.kind == "union" else [condition]
    return Group("union", tuple(parts))


def _intersection(conditions: Sequence[Group | None]) -> Group | None:
    """Of intervals of one variable that give each end at most once."""
    names: set[frozenset[str]] = set()
    lows: list[tuple[str, Answer]] = []
    highs: list[tuple[str, Answer]] = []
    for condition in conditions:
        if condition is None or condition.kind == "union":
            return None
        names.add(condition.names)
        lows += [(condition.kind[0], condition.items[0])] if condition.items[0] != _LOWEST else []
        highs += [(condition.kind[1], condition.items[1])] if condition.items[1] != _HIGHEST else []
    if len(names) > 1 or len(lows) > 1 or len(highs) > 1:
        return None
    (left, low), (right, high) = [*lows, ("(", _LOWEST)][0], [*highs, (")", _HIGHEST)][0]
    return Group(left + right, (low, high), names.pop())


def _inside(text: str) -> tuple[str, str]:
    """(what stands inside, the two brackets) when one pair encloses all of `text`, else ("", "")."""
    width = 2 if text.startswith("\\{") and text.endswith("\\}") else 1
    if width == 2 or (text[:1] in ("(", "[") and text[-1:] in (")", "]")):
        if closing(text, width - 1, _OPEN, _CLOSE) == len(text) - 1:
            return text[width:-width], text[width - 1] + text[-1]
    return "", ""


def _same(truth: Answer, answer: Answer, symbolic: Symbolic) -> bool:
    if isinstance(truth, Leaf) and isinstance(answer, Leaf):
        return _same_leaf(truth, answer, symbolic)
    if truth.names and answer.names and not truth.names & answer.names:
        return False
    if isinstance(truth, Leaf) or isinstance(answer, Leaf):
        group, leaf = (answer, truth) if isinstance(truth, Leaf) else (truth, answer)
        assert isinstance(group, Group)
        return group.kind in ("set", "row", "[]") and len(group.items) == 1 and _same(group.items[0], leaf, symbolic)
    if answer.kind == "[]" and truth.kind == "()" and len(answer.items) == 1:
        return _same(truth, answer.items[0], symbolic)
    as_python = answer.kind == "[]" and truth.kind in ("set", "row", "matrix")
    if not (as_python or truth.kind == answer.kind) or len(truth.items) != len(answer.items):
        return False
    if truth.kind not in ("set", "union"):
        return all(_same(a, b, symbolic) for a, b in zip(truth.items, answer.items, strict=True))
    return _same_elements(truth.items, list(answer.items), symbolic)


def _same_elements(truth: Sequence[Answer], answer: list[Answer], symbolic: Symbolic) -> bool:
    """Equality of what has no order. Equality is transitive, so the first partner found is as good as any."""
    for item in truth:
        ways: tuple[Symbolic, ...] = (lambda *_: False, symbolic)
        partner = next((i for way in ways for i, other in enumerate(answer) if _same(item, other, way)), None)
        if partner is None:
            return False
        del answer[partner]
    return True


def _same_leaf(true_leaf: Leaf, leaf: Leaf, symbolic: Symbolic) -> bool:
    truth, answer = true_leaf.text, leaf.text
    other_names = true_leaf.names and leaf.names and not true_leaf.names & leaf.names
    if other_names or ("=" in truth) != ("=" in answer):
        # An equation with two sides of its own equals another one, never a value.
        truth, answer = true_leaf.equation or truth, leaf.equation or answer
        if "=" not in truth or "=" not in answer:
            return False
    a, b = compact(truth), compact(answer)
    if not a or not b:
        return False
    if a == b:
        return True
    if _in_base(a) or _in_base(b):
        # Digits, never the value: a question about digits in base 9 is not answered by decimal ones.
        (a, _, base_a), (b, _, base_b) = (re.sub(r"[{}]", "", text).partition("_") for text in (a, b))
        return a == b and (base_a == base_b or not base_a or not base_b)
    values = _values(truth, a), _values(answer, b)
    if all(values):
        if "%" in truth and "%" in answer:
            return rational(a) == rational(b)
        return bool(values[0] & values[1])
    if len(a) > 2 and _LETTERS.match(a) or len(b) > 2 and _LETTERS.match(b):
        return a.casefold() == b.casefold()
    if " " in a + b or ELLIPSIS in a + b or _WORDS.search(truth) or _WORDS.search(answer):
        return False
    apart = told_apart(truth, answer) if max(len(truth), len(answer)) <= _MAX_SYMBOLIC else None
    return apart is not None and symbolic(*apart)


def _in_base(text: str) -> bool:
    """Whether digits stand before their base: a_{12} is one of base 12, and a_1 the first of some a."""
    match = _IN_BASE.match(text)
    if match is None:
        return False
    base = int(match[2] or match[3])
    return base >= 2 and all(int(digit, 36) < base for digit in match[1])


def _values(text: str, number: str) -> set[Fraction]:
    """The exact values that a number can stand for: 50% is 50 (of a hundred) or 0.5. Empty for other text."""
    value = rational(number)
    if value is None:
        return set()
    return {value, value / 100} if "%" in text else {value}
