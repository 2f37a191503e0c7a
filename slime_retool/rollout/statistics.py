"""Metrics of repeated samples: n answers to each of P problems, each answer right (1) or wrong (0). Pure Python.

Intervals are for the question "what would new problems like these give": answers to one problem are not
independent, so the problems, not the answers, are counted as observations (https://arxiv.org/abs/2411.00640).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist, fmean, stdev

Z = NormalDist().inv_cdf(0.975)
"""Deviations on each side of the mean that hold 95 % of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems, with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def estimate(per_problem: Sequence[float]) -> Estimate:
    """Mean of one value per problem, each in [0, 1], with its interval.

    The normal interval mean +- z s / sqrt(P), s the deviation (divisor P - 1) of the problems' values, cut to [0, 1].
    Where that has no width (one problem, or all alike) the Wilson interval of P observations takes its place,
    since "all right" in a few problems does not prove that the next one is. Raises ValueError for no problems.
    """
    if not per_problem:
        raise ValueError("an estimate needs at least one problem, got none")
    count, mean = len(per_problem), fmean(per_problem)
    if count == 1 or min(per_problem) == max(per_problem):
        return Estimate(mean, *wilson_interval(mean, count))
    half = Z * stdev(per_problem) / math.sqrt(count)
    return Estimate(mean, max(0.0, mean - half), min(1.0, mean + half))


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share in `count` observations (https://doi.org/10.1080/01621459.1927.10502953).

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    """
    if count < 1 or not 0 <= share <= 1:
        raise ValueError(f"a share in [0, 1] of at least 1 observation is needed, got {share} of {count}")
    centre = share + Z * Z / (2 * count)
    half = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def pass_at_k(n: int, right: int, k: int) -> float:
    """Chance that k answers drawn without replacement from n, of which `right` are right, hold a right one.

    1 - C(n - right, k) / C(n, k), https://arxiv.org/abs/2107.03374 eq. 1.
    """
    _check_draw(n, k)
    if not 0 <= right <= n:
        raise ValueError(f"{right} right answers of {n} are not possible")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_at_k(answers: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """Chance that the most frequent answer among k of these n is right, exactly (no resampling).

    Every subset of k counts alike. Ties are broken by lot. None is no answer and takes no part in the vote; a subset
    without any answer is wrong. Answers that are equal should be equally right; where a scorer disagrees with
    itself, the answer counts by the share of its right ones.
    """
    n = len(answers)
    _check_draw(n, k)
    if len(right) != n:
        raise ValueError(f"{n} answers came with {len(right)} verdicts; they must be as many")
    votes = Counter(answer for answer in answers if answer is not None)
    right_votes = Counter(a for a, r in zip(answers, right, strict=True) if a is not None and r)
    # By number of votes, the right ones of all answers that have so many: their chances are alike.
    shares: Counter[int] = Counter()
    for answer, number in right_votes.items():
        shares[votes[answer]] += number
    silent = n - votes.total()
    won = Fraction(0)
    for count, number in shares.items():
        others = list(votes.values())
        others.remove(count)
        for most in range(1, min(count, k) + 1):
            ways = _ways(others, silent, k - most, most)
            by_lot = sum(Fraction(drawn, ties + 1) for ties, drawn in enumerate(ways))
            won += Fraction(number, count) * math.comb(count, most) * by_lot
    return float(won / math.comb(n, k))


def _ways(others: Sequence[int], silent: int, left: int, most: int) -> list[int]:
    """Ways to draw `left` more answers with at most `most` of each other kind, by the number of kinds that reach it.

    Kinds that cannot reach it are drawn as freely as the silent ones, all together.
    """
    rivals = [count for count in others if count >= most]
    free = silent + sum(others) - sum(rivals)
    # ways[drawn][ties] of the rivals so far; what can no more come to `left` is left out.
    ways: dict[int, list[int]] = {0: [1]}
    for rest, count in zip(reversed(range(len(rivals))), rivals, strict=True):
        needed = left - free - rest * most
        low, high = max(0, needed - max(ways, default=0)), min(most, left - min(ways, default=0))
        choices = {more: math.comb(count, more) for more in range(low, high + 1)}
        after: dict[int, list[int]] = {}
        for drawn, row in ways.items():
            for more in range(max(0, needed - drawn), min(most, left - drawn) + 1):
                _add(after.setdefault(drawn + more, []), row, choices[more], int(more == most))
        ways = after
    total: list[int] = []
    for drawn, row in ways.items():
        _add(total, row, math.comb(free, left - drawn), 0)
    return total


def _add(to: list[int], row: Sequence[int], factor: int, shift: int) -> None:
    """`to` += `factor` * `row`, moved up by `shift` places."""
    to += [0] * (len(row) + shift - len(to))
    for place, number in enumerate(row, start=shift):
        to[place] += factor * number


def _check_draw(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the {n} answers of a problem, got {k}")


def powers_up_to(n: int) -> list[int]:
    """The k that are reported for n answers: 1, 2, 4, ... and n itself."""
    return [*(1 << i for i in range(n.bit_length()) if 1 << i < n), n]
