r"""One spelling for the many ways in which LaTeX, or Python (`python_text`), writes the same answer.

Covers what Lewkowycz et al., "Solving Quantitative Reasoning Problems with Language Models" (Minerva), Appendix D,
normalise. Unlike there, nothing that changes the value is removed: not a repeating decimal's bar, not the left-hand
side of an equation that has two sides of its own, not a word that is no unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from slime_retool.reward.boxed import closing
from slime_retool.reward.python_text import from_python

MAX_LENGTH = 2000
"""Only the last so many characters of an answer are looked at: this bounds the work on degenerate text."""

ELLIPSIS = "…"
"""A list that goes on, or digits that do, are not those that are there."""
_SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt ",
    "≤": "\\le ", "≥": "\\ge ", "±": "\\pm ", "∪": "\\cup ", "∈": "\\in ", "°": "^\\circ ", "²": "^2", "³": "^3",
    "½": "\\frac{1}{2}", "“": "", "”": "", "，": ",", "（": "(", "）": ")", "\u00a0": " ", "\u2009": " ",
})  # fmt: skip
_MACROS = {
    name: written
    for written, names in {
        "\\frac": "dfrac tfrac cfrac", "\\le": "leq leqslant", "\\ge": "geq geqslant", "\\ne": "neq",
        "<": "lt", ">": "gt",
        "\\{": "lbrace", "\\}": "rbrace", "[": "lbrack", "]": "rbrack", "(": "langle", ")": "rangle",
        "\\cdot": "times", "\\circ": "degree", "\\emptyset": "varnothing", ELLIPSIS: "ldots dots cdots dotsc dotsb",
        "\\text": "textrm textbf textit textsf texttt textnormal mbox hbox mathrm operatorname mathbf mathit "
        "boldsymbol emph underline fbox boxed",
        "": "left right big Big bigl bigr Bigl Bigr bigg Bigg biggl biggr displaystyle textstyle limits quad qquad "
        "enspace thinspace nobreak",
    }.items()
    for name in names.split()
}  # fmt: skip
_REWRITTEN: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^\s*\\\$\s*(?=[\d.])(.*)$", r"\1\\text{ dollar}"), (r"\^\s*\{?\s*\\circ\s*\}?\s*$", r"\\text{ deg}"),
    (r"\{,\}", ","), (r"\\[!,;:]|\{\s*\}", ""), (r"\\ |~", " "),
    (r"\\?\$|\\\(|\\\)|^\s*\\\[|(?<!\\)\\\]\s*$", ""), (r"\^\s*\{?\s*\\circ\s*\}?|(?<=\d)\s*\\circ\b", " "),
    (r"\.\.\.+", ELLIPSIS), (r"^\s+|[\s.]+$", ""), (r"\^\s*(?:\\prime|\{\s*\\prime\s*\})", "'"),
    (r"^\\\{\s*\\\}$", r"\\emptyset"),
    # feet and inches, as minutes and seconds of a degree
    (r"(?<=\d)\s*(?:''|\")$", r"\\text{ in}"), (r"(?<=\d)\s*'$", r"\\text{ ft}"),
    (r"(?<=\d)\s*(?:\\text\s*\{\s*)?percent\s*\}?$", r"\\%"),
    # numbers
    (r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d ])", lambda match: match[0].replace(" ", "")),
    (r"^\s*([+-]?\d+)\s+(\d+)/(\d+)\s*$", r"\1\\frac{\2}{\3}"),
    *((rf"(?<=\d)\s*(?:\\text\s*\{{\s*)?{name}(?![a-z])\s*\}}?", rf"\\cdot 10^{{{power}}}")
      for name, power in (("thousand", 3), ("million", 6), ("billion", 9), ("trillion", 12))),
)  # fmt: skip
_UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|in inch inche|"
        "ft foot feet|yd yard|mi mile|mg milligram|g gram|kg kilogram|lb pound|oz ounce|ml milliliter|l L liter litre|"
        "s sec second|min minute|h hr hour|day|week|month|year|am|pm|°C C celsius|°F F fahrenheit|K kelvin|"
        "rad radian|deg degree|percent|cent|dollar USD|euro EUR|unit|mph|N newton|J joule|W watt|"
        "V volt|A ampere|Hz hertz|Pa pascal|mol mole|apple|orange|ball|marble|book|student|people person|men man|"
        "women woman|children child|boy|girl|way|time|cup|gallon gal|point|digit|coin|card|ticket|page|mark|vote|"
        "per /|^2 square sq|^3 cubic"
    ).split("|")
    for name in names.split()
}
"""Each way to write a unit, or what is counted, without its plural s: its first name."""
_SET_BUILDER = re.compile(
    r"^\s*\\?\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|[:|])(.*(?:[<>]|\\[lg]e(?![a-z])).*?)\\?\}\s*$"
)
_UNITS_BEHIND = (
    re.compile(r"(?<=[\d})])\s*((?!\^|\s)(?:\\text\s*\{[^{}]*\}|[A-Za-z/ .]|\^\s*\{?\s*[23]\s*\}?)+)$"),
    re.compile(r"(?<=[A-Za-z])\s*(\\text\s*\{[^{}]*\}(?:\\text\s*\{[^{}]*\}|[/ .]|\^\s*\{?\s*[23]\s*\}?)*)$"),
)
"""Behind a number, and behind a letter, as in 5\\pi\\text{ cm}^2, where letters alone would be factors."""
_MACRO = re.compile(r"\\([A-Za-z]+)")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LETTER = re.compile(r"\\text\s*\{\s*([A-Za-z])\s*\}")
_WRAPPER = re.compile(r"(?:\\text\s*)?\{")
_DIGIT_GROUPS = re.compile(r"^(\s*[+-]?\s*\d{1,3}(?:,\d{3})+)(?![\d,])(?=[^,]*$)")
_ARTICLE = re.compile(r"^\s*(?:an?|the)\s+(?=[A-Za-z]{2})", re.IGNORECASE)
_SHORT_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}|(\w))(?:\{([^{}]*)\}|(\w))")
_SHORT_ROOT = re.compile(r"\\sqrt(\w)")
_LONE_SCRIPT = re.compile(r"([\^_])\{(\w)\}")

_DIGITS = 400
"""Longer numbers are compared as text."""
_POWER_OF_TEN = re.compile(r"(?:\\cdot|\*)10\^(?:\{([+-]?\d{1,3})\}|(\d))$")
_DECIMAL = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?"
_FRACTION = re.compile(rf"^(\d*)\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}}$|^({_DECIMAL})(?:/({_DECIMAL}))?$")
_REPEATING = re.compile(r"^(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}$")


def spell(answer: str) -> tuple[str, str]:
    r"""(the answer in one choice of LaTeX macros, with its spaces; the unit behind it, or "").

    Without math marks, sizes of brackets, degree signs and separators in a number. Text groups stay as \text{...}.
    """
    text = _MACRO.sub(lambda match: _MACROS.get(match[1], match[0]), answer.translate(_SIGNS)[-MAX_LENGTH:])
    text = from_python(_SET_BUILDER.sub(r"\1", text))
    for pattern, written in _REWRITTEN:
        text = re.sub(pattern, written, text)
    text = unwrap(text)
    found = (_without_unit(pattern, text) for pattern in _UNITS_BEHIND)
    text, unit = next((each for each in found if each[1]), (text, "percent" if text.endswith("%") else ""))
    return join_digit_groups(unwrap(_LETTER.sub(r"\1", text))), unit


def _without_unit(pattern: re.Pattern[str], text: str) -> tuple[str, str]:
    match = pattern.search(text)
    if match is None:
        return text, ""
    names = []
    for word in re.findall(r"[A-Za-z]+|/|\^\s*\{?\s*\d", re.sub(r"(?<=\w)\.(?=\w)", "", _TEXT.sub(r" \1 ", match[1]))):
        name = re.sub(r"[\s{]", "", word)
        spelled = (name,) if len(name) == 1 else (name, name.lower(), name.lower().removesuffix("s"))
        known = next((_UNITS[each] for each in spelled if each in _UNITS), None)
        if known is None or (len(match[0]) == 1 and name.isalpha()):  # 2m is a product
            return text, ""
        names.append(known)
    unit = re.sub(r"(^|per )(\^\d) (\w+)", r"\1\3 \2", " ".join(names).removeprefix("deg "))
    return (text[: match.start()], unit) if names else (text, "")


def join_digit_groups(text: str) -> str:
    """A number that begins `text` without its thousands separators; text that may be a list stays as it is."""
    return _DIGIT_GROUPS.sub(lambda m: m[1].replace(",", ""), text)


def unwrap(text: str) -> str:
    r"""Without braces or a \text{...} around everything."""
    while True:
        opening = _WRAPPER.match(text)
        plain = text.replace("\\{", "  ").replace("\\}", "  ")
        if opening is None or closing(plain, opening.end() - 1, "{", "}") != len(text) - 1:
            return text
        text = text[opening.end() : -1].strip()


def compact(text: str) -> str:
    """What `spell` gives, without text wrappers, optional braces and spaces, for comparison as a string.

    Only numbers that stand side by side stay apart: 1 2 is not 12.
    """
    while (unwrapped := _TEXT.sub(r" \1 ", text)) != text:
        text = unwrapped
    text = _ARTICLE.sub("", text)
    apart = "" if "\\" in text else " "
    text = re.sub(r"(?<=\d)\s+(?=\d)", "\0", re.sub(r"[\"]|\\?%", "", text))
    text = re.sub(r"\s", "", text).replace("\0", apart).rstrip(".")
    text = unwrap(text)
    text = _SHORT_FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    return _LONE_SCRIPT.sub(r"\1\2", text).replace("+\\infty", "\\infty")


def rational(text: str) -> Fraction | None:
    r"""The exact value of a number as `compact` spells it: a decimal, also a repeating one, a fraction, a \cdot 10^n.

    None for anything else. 2\frac{1}{2} is a mixed number, as in every school book, and not a product.
    """
    digits = text.lstrip("+-")
    sign = (-1) ** text[: len(text) - len(digits)].count("-")
    digits = _POWER_OF_TEN.sub(r"e\1\2", digits)
    if len(digits) > _DIGITS:
        return None
    if match := _REPEATING.match(digits):
        whole, fixed, period = match.groups()
        repeated = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
        return sign * (Fraction(f"{whole or 0}.{fixed or 0}") + repeated)
    match = _FRACTION.match(digits)
    if match is None:
        return None
    whole, above, below = match[1] or "0", match[2] or match[4], match[3] or match[5] or "1"
    if Fraction(below) == 0 or (whole != "0" and "-" in above + below):
        return None
    return sign * (Fraction(whole) + Fraction(above) / Fraction(below))
