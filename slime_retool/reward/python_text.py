"""Answers as Python prints them (a model copies what its tool shows), in LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable

from slime_retool.reward.boxed import closing, split_outside

_NO_NAME = r"(?<![A-Za-z\\])"
_ARGUMENT = r"([^(),]*)"
_SOLUTION = r"\s*\w+\s*:[^:{}]*"


def _equations(match: re.Match[str]) -> str:
    return match[1].replace(":", "=")


_REWRITTEN: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    # Markdown, and a string as it is shown
    (r"^\s*(\*\*|\*|__|_|`)(?![*_`])(.*[^*_`])\1[\s.]*$", r"\2"), (r"^\s*(['\"])([^'\"]*)\1\s*$", r"\2"),
    # numbers
    (rf"{_NO_NAME}(?:c?math|numpy|np|sympy|sp|fractions)\.(?=[A-Za-z])", ""), (r"(?<=\d)_(\d{3})(?!\d)", r"\1"),
    (rf"{_NO_NAME}(?:float\d*|int\d*|Float|Integer|mpf|Decimal|Fraction|Rational)\('?([^()',]*)'?\)", r"\1"),
    (r"(?<![\w.])(\d+(?:\.\d*)?)[eE]([+-]?\d{1,3})(?![\w.])", r"\1\\cdot 10^{\2}"),
    (rf"{_NO_NAME}(?:oo|inf)(?![A-Za-z])", r"\\infty "), (rf"{_NO_NAME}factorial\((\d+)\)", r"\1!"),
    (rf"{_NO_NAME}(?:Fraction|Rational)\({_ARGUMENT},{_ARGUMENT}\)", r"\\frac{\1}{\2}"),
    (rf"{_NO_NAME}(?:binomial|comb)\({_ARGUMENT},{_ARGUMENT}\)", r"\\binom{\1}{\2}"),
    (rf"{_NO_NAME}cbrt\({_ARGUMENT}\)", r"\\sqrt[3]{\1}"),
    (rf"{_NO_NAME}root\({_ARGUMENT},\s*{_ARGUMENT}\)", r"\\sqrt[\2]{\1}"),
    (rf"{_NO_NAME}[Aa]bs\({_ARGUMENT}\)", r"|\1|"),
    # what holds several
    (rf"^\s*\[?\{{({_SOLUTION}(?:,{_SOLUTION})*)\}}\]?\s*$", _equations),
    (rf"^\s*Eq\({_ARGUMENT},(.*)\)\s*$", r"\1 = \2"),
    (r"^\s*(?:EmptySet|set\(\))\s*$", r"\\emptyset"), (r"^\s*Reals\s*$", r"\\mathbb{R}"),
    (r"^\s*(?:Matrix|array|FiniteSet|(?:frozen)?set)\((.*)\)\s*$", r"\1"),
    # signs and functions
    (r"\*\*\s*(?:\(((?:[^()]|\([^()]*\))*)\)|([+-]?\w+(?:\.\d+)?))", r"^{\1\2}"), (r"!=", r"\\ne "),
    (r"<=", r"\\le "), (r">=", r"\\ge "), (r"(?<=\d)(?:j|\*I)(?![A-Za-z])", "i"),
    (rf"{_NO_NAME}log\({_ARGUMENT},\s*{_ARGUMENT}\)", r"\\log_{\2}{\1}"), (rf"{_NO_NAME}log(?=\()", r"\\ln"),
    (rf"{_NO_NAME}a(?:rc)?(sin|cos|tan)(?=\()", r"\\arc\1"),
    (rf"{_NO_NAME}(sqrt|pi|exp|log|ln|sin|cos|tan)(?![A-Za-z])", r"\\\1"),
    *2 * [(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}")],  # one in another, too
)  # fmt: skip
_SET = re.compile(rf"{_NO_NAME}(Union|Interval(?:\.open|\.Lopen|\.Ropen)?)\(")
_OPEN_ENDS = {"Interval": "", "Interval.open": "()", "Interval.Lopen": "(", "Interval.Ropen": ")"}


def from_python(text: str) -> str:
    """Text without Python's names of functions, signs, sets and types; LaTeX stays as it is."""
    text = _sets(text)
    if "\\begin" not in text:  # & parts a matrix
        text = re.sub(r"\)\s*&\s*\(", ") and (", re.sub(r"\)\s*\|\s*\(", ") or (", text))
    for pattern, written in _REWRITTEN:
        text = re.sub(pattern, written, text)
    return text


def constants_as_named(truth: str, answer: str) -> str:
    """`answer` with sympy's E and I as e and i, where the truth has those letters and not these."""
    letters = re.sub(r"\\[A-Za-z]+", "", truth)
    for python, name in (("E", "e"), ("I", "i")):
        if name in letters and python not in letters:
            answer = re.sub(rf"{_NO_NAME}{python}(?![A-Za-z])", name, answer)
    return answer


def _sets(text: str) -> str:
    r"""Interval(0, 1) as [0, 1], Union(A, B) as A \cup B; the innermost first."""
    for match in reversed([*_SET.finditer(text)]):
        end = closing(text, match.end() - 1, "([{", ")]}")
        parts = split_outside(text[match.end() : end], ",") if end >= 0 else []
        if match[1] == "Union" and parts:
            written = " \\cup ".join(parts)
        elif len(parts) == 2:
            left = "(" if "(" in _OPEN_ENDS[match[1]] or "oo" in parts[0] else "["
            right = ")" if ")" in _OPEN_ENDS[match[1]] or "oo" in parts[1] else "]"
            written = f"{left}{parts[0]},{parts[1]}{right}"
        else:
            return text
        text = text[: match.start()] + written + text[end + 1 :]
    return text
