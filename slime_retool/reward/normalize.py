r"""Final answers in one spelling, so that equal ones compare equal.

Covers what Lewkowycz et al., "Solving Quantitative Reasoning Problems with Language Models" (Minerva), Appendix D,
normalise: text wrappers, units and filler words, spacing, degree and percent signs, shorthand \frac12 and \sqrt2,
thousands separators. Beyond it, plain decimal numbers compare by value: 034, 34.0 and 1,000 equal 34, 34 and 1000.
"""

from __future__ import annotations

import re

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boxed|overline)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! $]|\\(?:quad|qquad|left|right|displaystyle|ldots|dots)(?![a-zA-Z])|[~\s$\"]")
_DEGREE_OR_PERCENT = re.compile(r"\^\{?\\circ\}?|\\circ|\\?%|°")
_ARTICLE = re.compile(r"(?<![a-zA-Z\\])(?:an?|the)[ \t]+(?=[a-zA-Z]{2})")
_WORDS = re.compile(
    r"(?<![a-zA-Z\\])(?:square|ways?|integers?|dollars?|cents?|mph|inch(?:es)?|feet|hours?|minutes?|seconds?|km|cm|mm|gm|"
    r"meters?|units?|points?|digits?|degrees?|pounds?|meals?|edges?|students?|multiples?|years?|days?)(?![a-zA-Z])"
)
_POWER_OF_UNIT = re.compile(r"(?<=\d)[ \t]*(?:\\text\{ *)?\b(?:cm|km|mm|m|ft|in)\}?\^\{?[23]\}?$")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]*)\}|(\w))(?:\{([^{}]*)\}|(\w))")
_SHORT_ROOT = re.compile(r"\\sqrt(\w)")
_THOUSANDS = re.compile(r"^[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_NUMBER = re.compile(r"^([+-]?)0*(\d+?)(?:\.(\d*?)0*)?$")
_MAX_LENGTH = 2000


def normalize_answer(answer: str) -> str:
    """The normal form of a final answer; of "x = 5" only what follows the last equals sign."""
    # Nobody's answer is that long; this bounds the work on degenerate text.
    answer = answer.strip()[-_MAX_LENGTH:].rpartition("=")[2]
    answer = answer.replace("{,}", ",").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    answer = _POWER_OF_UNIT.sub("", answer)
    while (unwrapped := _WRAPPER.sub(r" \1 ", answer)) != answer:
        answer = unwrapped
    answer = _ARTICLE.sub("", answer)
    answer = _WORDS.sub("", answer)
    answer = _DEGREE_OR_PERCENT.sub("", answer)
    answer = _SPACING.sub("", answer).rstrip(".")
    answer = _SHORT_FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", answer)
    answer = _SHORT_ROOT.sub(r"\\sqrt{\1}", answer)
    if _THOUSANDS.match(answer):
        answer = answer.replace(",", "")
    return _plain_number(answer)


def _plain_number(text: str) -> str:
    """A decimal number without sign of zero, leading and trailing zeros; other text as it is."""
    match = _NUMBER.match(text)
    if match is None:
        return text
    sign, whole, fraction = match[1], match[2], match[3] or ""
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if sign == "-" and value != "0" else value
