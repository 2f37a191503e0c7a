r"""One spelling for the many ways in which LaTeX writes the same answer.

Covers what Lewkowycz et al., "Solving Quantitative Reasoning Problems with Language Models" (Minerva), Appendix D,
normalise: text wrappers, units and filler words, spacing, degree and percent signs, shorthand \frac12 and \sqrt2,
thousands separators. Unlike there, nothing that changes the value is removed: not a repeating decimal's bar, not the
left-hand side of an equation that has two sides of its own.
"""

from __future__ import annotations

import re

MAX_LENGTH = 2000
"""Only the last so many characters of an answer are looked at: this bounds the work on degenerate text."""

_SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "÷": "/", "π": "\\pi ", "∞": "\\infty ", "√": "\\sqrt ",
    "≤": "\\le ", "≥": "\\ge ", "±": "\\pm ", "∪": "\\cup ", "∈": "\\in ", "°": "^\\circ ", "²": "^2", "³": "^3",
    "½": "\\frac{1}{2}", "“": "", "”": "", "，": ",", "（": "(", "）": ")", "\u00a0": " ", "\u2009": " ",
})  # fmt: skip
_MACROS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge",
    "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "varnothing": "emptyset", "times": "cdot",
    "degree": "circ", "langle": "(", "rangle": ")", "neq": "ne", "textrm": "text", "textbf": "text", "textit": "text",
    "textsf": "text", "texttt": "text", "textnormal": "text", "mbox": "text", "hbox": "text", "mathrm": "text",
    "operatorname": "text", "mathbf": "text", "mathit": "text", "boldsymbol": "text", "emph": "text",
    "underline": "text", "fbox": "text", "boxed": "text", "bmatrix": "pmatrix",
}  # fmt: skip
_GONE = (
    "left", "right", "big", "Big", "bigl", "bigr", "Bigl", "Bigr", "bigg", "Bigg", "biggl", "biggr", "displaystyle",
    "textstyle", "limits", "quad", "qquad", "ldots", "dots", "cdots", "enspace", "thinspace", "nobreak",
)  # fmt: skip
_MACRO = re.compile(r"\\([A-Za-z]+)")
_PLAIN = {"[": "[", "]": "]", "(": "(", ")": ")", "{": "\\{", "}": "\\}"}
_THIN_SPACE = re.compile(r"\\[!,;:]|\{,\}|\{\s*\}")
_MATH_MARKS = re.compile(r"\\?\$|\\\(|\\\)|^\s*\\\[|(?<!\\)\\\]\s*$")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\d})])\s*(?:\\text\s*\{(?=[^{}]*[A-Za-z%])[^{}]*\}|(?:cm|km|mm|m|ft|in|kg|g|s|h)\b)"
    r"\s*(?:\^\s*\{?\s*[23]\s*\}?)?\s*\.?\s*$"
)
_PLAIN_UNIT = re.compile(
    r"(?<=[\d})])\s+(?!(?:pi|sqrt|sin|cos|tan|cot|log|ln|mod|choose|or|and)\b)[A-Za-z]{2,}(?:[ /]+[A-Za-z]+)*\.?\s*$"
)
_WRAPPER = re.compile(r"(?:\\text\s*)?\{")
_ANGLE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\circ\b")
_DIGIT_GROUPS = re.compile(r"^(\s*[+-]?\s*\d{1,3}(?:,\d{3})+)(?![\d,])(?=[^,]*$)")
_THIN_GROUPS = re.compile(r"(?<![\d.])(\d{1,3}(?: \d{3})+)(?![\d ])")
_MIXED = re.compile(r"^\s*([+-]?\d+)\s+(\d+)/(\d+)\s*$")
_ARTICLE = re.compile(r"^\s*(?:an?|the)\s+(?=[A-Za-z]{2})", re.IGNORECASE)
_SHORT_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}|(\w))(?:\{([^{}]*)\}|(\w))")
_SHORT_ROOT = re.compile(r"\\sqrt(\w)")
_LONE_SCRIPT = re.compile(r"([\^_])\{(\w)\}")


def spell(answer: str) -> str:
    r"""The answer in one choice of LaTeX macros, with its spaces.

    Without math marks, sizes of brackets, degree signs, a unit behind a number, and separators in a number. Text groups
    stay as \text{...}.
    """
    text = answer.translate(_SIGNS)[-MAX_LENGTH:]
    text = _MACRO.sub(_macro, text)
    text = _THIN_SPACE.sub(lambda m: "," if m[0] == "{,}" else "", text).replace("\\ ", " ").replace("~", " ")
    text = _MATH_MARKS.sub("", text)
    text = _ANGLE.sub("", text).strip().rstrip(".").strip()
    for unit in (_UNIT, _PLAIN_UNIT):
        text = unit.sub("", text).rstrip()
    text = _THIN_GROUPS.sub(lambda m: m[1].replace(" ", ""), text)
    return join_digit_groups(_MIXED.sub(r"\1\\frac{\2}{\3}", unwrap(text)))


def join_digit_groups(text: str) -> str:
    """A number that begins `text` without its thousands separators; text that may be a list stays as it is."""
    return _DIGIT_GROUPS.sub(lambda m: m[1].replace(",", ""), text)


def unwrap(text: str) -> str:
    r"""Without braces or a \text{...} around everything."""
    while True:
        opening = _WRAPPER.match(text)
        if opening is None or closing_brace(text, opening.end() - 1) != len(text) - 1:
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


def _macro(match: re.Match[str]) -> str:
    name = match[1]
    if name in _GONE:
        return ""
    name = _MACROS.get(name, name)
    return _PLAIN.get(name, f"\\{name}")


def closing_brace(text: str, start: int) -> int:
    """Where the brace at `start` is closed; -1 when it is not."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] in "{}" and text[position - 1 : position] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return position
    return -1
