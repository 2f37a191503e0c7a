"""Training questions that are also in an evaluation set, as they stand there or almost so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

# Scripts without blanks have no words to find: there each letter is one.
_WORD = re.compile(r"[a-z0-9]+|[^\W_]")
_N = 8
_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Leak:
    """What a training question was found to repeat."""

    evaluation: str
    """Name of the evaluation set's question."""
    overlap: float
    """Share of its runs of eight words that the training question holds; 1.0 where all words are the same."""


class EvaluationQuestions:
    """An index of (name, question); `find` is a few dictionary look-ups per word.

    Letters' case, punctuation and LaTeX's backslashes and braces do not count. Questions with fewer than two runs of
    eight words are only found when all their words are the same. Letters other than a to z count as a word each.
    """

    def __init__(self, questions: Iterable[tuple[str, str]]) -> None:
        self._whole: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._holders: dict[str, set[str]] = {}
        for name, question in questions:
            words = _words(question)
            self._whole.setdefault(" ".join(words), name)
            runs = _runs(words)
            self._sizes[name] = len(runs)
            for run in runs:
                self._holders.setdefault(run, set()).add(name)

    def find(self, question: str) -> Leak | None:
        """The evaluation question that `question` repeats most of, when that is at least four fifths."""
        words = _words(question)
        if words and (name := self._whole.get(" ".join(words))) is not None:
            return Leak(name, 1.0)
        shared = Counter(name for run in _runs(words) for name in self._holders.get(run, ()))
        name, overlap = max(
            ((name, count / self._sizes[name]) for name, count in shared.items() if self._sizes[name] > 1),
            key=lambda found: found[1],
            default=("", 0.0),
        )
        return Leak(name, overlap) if overlap >= _SHARE else None


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _runs(words: list[str]) -> set[str]:
    return {" ".join(words[i : i + _N]) for i in range(len(words) - _N + 1)}
