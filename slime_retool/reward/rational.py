r"""Exact values of plain numbers: integers, decimals (also repeating ones), fractions, mixed numbers, a \cdot 10^n."""

from __future__ import annotations

import re
from fractions import Fraction

_DIGITS = 400
"""Longer numbers are compared as text."""
_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_PLAIN = re.compile(rf"^{_DECIMAL}$")
_REPEATING = re.compile(r"^(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}$")
_FRACTION = re.compile(rf"^(\d*)\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}}$")
_SLASH = re.compile(rf"^({_DECIMAL})/({_DECIMAL})$")
_SCIENTIFIC = re.compile(
    rf"^({_DECIMAL})(?:\\cdot|\*)10\^(?:\{{([+-]?\d{{1,3}})\}}|(\d))$|^({_DECIMAL})[eE]([+-]?\d{{1,3}})$"
)


def rational(text: str) -> Fraction | None:
    r"""The value of a number as `normalize.compact` spells it; None for anything else.

    2\frac{1}{2} is a mixed number, as in every school book, and not a product.
    """
    sign = 1
    while text[:1] in ("+", "-"):
        sign, text = (-sign if text[0] == "-" else sign), text[1:]
    if len(text) > _DIGITS:
        return None
    while text[:1] == "(" and text[-1:] == ")" and "(" not in text[1:]:
        text = text[1:-1]
    value = _value(text)
    return None if value is None else sign * value


def _value(text: str) -> Fraction | None:
    if _PLAIN.match(text):
        return Fraction(text.rstrip(".") if text[:1] != "." else f"0{text}")
    if match := _FRACTION.match(text):
        whole, above, below = match.groups()
        if Fraction(below) == 0 or (whole and "-" in above + below):
            return None
        return Fraction(whole or 0) + Fraction(above) / Fraction(below)
    if match := _SLASH.match(text):
        return Fraction(match[1]) / Fraction(match[2]) if Fraction(match[2]) != 0 else None
    if match := _REPEATING.match(text):
        whole, fixed, period = match.groups()
        nines = Fraction(int(period), 10 ** len(period) - 1)
        return Fraction(int(whole or 0)) + (Fraction(int(fixed or 0)) + nines) / 10 ** len(fixed)
    if match := _SCIENTIFIC.match(text):
        mantissa, exponent = match[1] or match[4], match[2] or match[3] or match[5]
        return Fraction(mantissa) * Fraction(10) ** int(exponent)
    return None
