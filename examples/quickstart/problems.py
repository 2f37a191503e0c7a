"""Integer problems that one line of Python solves: the quickstart's training and evaluation material.

Eight kinds of question, each with two phrasings. A kind is named in `KINDS` with the way its numbers are
drawn and the `print(...)` line that answers it. All have two operands of two digits, an answer of at most
three, and one layout (phrase, number, word, number), so that what a model learns about copying from one kind
serves the others. Answers are computed here, from our own numbers; no text is evaluated.

Splits: a question belongs to exactly one of "eval", "sft" and "rl". Which one depends on its text alone
(`split_of`), so the splits are disjoint whatever seeds and sizes they are drawn with.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

SPLITS = ("eval", "sft", "rl")


@dataclass(frozen=True)
class Problem:
    """One question with its integer answer and the line of Python that prints it."""

    question: str
    answer: int
    kind: str
    code: str


@dataclass(frozen=True)
class Kind:
    """How to draw a family of problems: numbers, two phrasings, code and the answer."""

    draw: Callable[[random.Random], tuple[int, int]]
    phrasings: tuple[str, str]
    code: str  # formatted with the drawn numbers, as the phrasings are
    solve: Callable[[int, int], int]


def _two_digit_pair(rng: random.Random) -> tuple[int, int]:
    return rng.randint(11, 99), rng.randint(11, 99)


def _large_and_small(rng: random.Random) -> tuple[int, int]:
    return rng.randint(50, 99), rng.randint(11, 49)


KINDS: dict[str, Kind] = {
    "sum": Kind(
        _two_digit_pair,
        ("What is {0} plus {1}?", "Add {0} to {1}."),
        "print({0}+{1})",
        lambda a, b: a + b,
    ),
    "difference": Kind(
        _large_and_small,
        ("What is {0} minus {1}?", "How much more is {0} than {1}?"),
        "print({0}-{1})",
        lambda a, b: a - b,
    ),
    "remainder": Kind(
        _large_and_small,
        ("What is the remainder of {0} divided by {1}?", "What is left over when {0} is divided by {1}?"),
        "print({0}%{1})",
        lambda a, b: a % b,
    ),
    "digit_sum": Kind(
        _two_digit_pair,
        ("What is the digit sum of {0} times {1}?", "Add up the digits of {0} times {1}."),
        "print(sum(map(int,str({0}*{1}))))",
        lambda a, b: sum(int(digit) for digit in str(a * b)),
    ),
    "distance": Kind(
        _two_digit_pair,
        ("How far apart are {0} and {1}?", "What is the distance between {0} and {1}?"),
        "print(abs({0}-{1}))",
        lambda a, b: abs(a - b),
    ),
    "and": Kind(
        _two_digit_pair,
        ("What is the bitwise and of {0} and {1}?", "Combine the bits of {0} and {1} by and."),
        "print({0}&{1})",
        lambda a, b: a & b,
    ),
    "or": Kind(
        _two_digit_pair,
        ("What is the bitwise or of {0} and {1}?", "Combine the bits of {0} and {1} by or."),
        "print({0}|{1})",
        lambda a, b: a | b,
    ),
    "xor": Kind(
        _two_digit_pair,
        ("What is the bitwise xor of {0} and {1}?", "Combine the bits of {0} and {1} by xor."),
        "print({0}^{1})",
        lambda a, b: a ^ b,
    ),
}


def split_of(question: str) -> str:
    """The split a question belongs to: "eval" (1 in 8), "sft" (3 in 8) or "rl" (4 in 8).

    The first byte of the SHA-256 of the UTF-8 text, modulo 8, decides: 0 is eval, 1 to 3 sft, 4 to 7 rl.
    """
    bucket = hashlib.sha256(question.encode()).digest()[0] % 8
    if bucket == 0:
        return "eval"
    return "sft" if bucket <= 3 else "rl"


def make_problem(kind: str, rng: random.Random) -> Problem:
    """Draw one problem of the named kind.

    Raises ValueError for a kind that is not in `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"problem kind must be one of {sorted(KINDS)}, got {kind!r}: use a listed kind")
    spec = KINDS[kind]
    numbers = spec.draw(rng)
    question = rng.choice(spec.phrasings).format(*numbers)
    return Problem(question, spec.solve(*numbers), kind, spec.code.format(*numbers))


def generate_problems(split: str, seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Problem]:
    """Stream of distinct problems of one split, cycling through `kinds` (repeat a kind to weight it).

    The same arguments give the same stream on every machine.

    Raises ValueError for an unknown split, for an unknown kind, and when a kind has no fresh question left.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}: use a listed split")
    rng = random.Random(f"{split}-{seed}")
    seen: set[str] = set()
    while True:
        for kind in kinds:
            for _ in range(10_000):
                problem = make_problem(kind, rng)
                if split_of(problem.question) == split and problem.question not in seen:
                    break
            else:
                raise ValueError(
                    f"kind {kind!r} has no fresh {split} question after {len(seen)} problems: ask for fewer"
                )
            seen.add(problem.question)
            yield problem
