r"""Names that the symbolic library reads as one: R and r, y and y', x_A and x_a, A and A^T."""

from __future__ import annotations

import re

_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau phi chi psi omega"
_LETTER = rf"\\(?:{'|'.join(f'[{n[0].upper()}{n[0]}]{n[1:]}' for n in _GREEK.split())})(?![A-Za-z])|[A-Za-z]"
_TOKEN = re.compile(
    r"(?P<transposed>\^\s*\{?\s*)T(?P<closed>\s*\}?)"
    rf"|(?P<name>(?:{_LETTER})(?:_\w|_\{{\w+\}})?'*)(?P<call>\s*\()?"
    r"|\\math[a-z]+\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_FREE = "zwvutsrqponmlkcba"
"""Letters that are no constant, differential or usual name of a function."""


def told_apart(truth: str, answer: str) -> tuple[str, str] | None:
    """Both expressions, each name that the library would take for another one as a letter that neither has.

    None when no such letter is left.
    """
    written = {match["name"] or "" for text in (truth, answer) for match in _TOKEN.finditer(text)}
    used = "".join(name.lower() for name in written if not name.startswith("\\"))
    free = [letter for letter in _FREE if letter not in used]
    letters: dict[str, str] = {}

    def letter(name: str) -> str:
        if name not in letters:
            letters[name] = free.pop(0) if free else ""
        return letters[name]

    def renamed(match: re.Match[str]) -> str:
        name, call = match["name"] or "", match["call"] or ""
        if match["transposed"]:
            return f"{match['transposed']}{letter('^T')}{match['closed']}"
        if "'" in name or (name.lower() != name and name.lower() in written and not call):
            return f" {letter(name)}{call}"
        return match[0]

    apart = _TOKEN.sub(renamed, truth), _TOKEN.sub(renamed, answer)
    return None if "" in letters.values() else apart
