"""mean@k, pass@k, maj@k and their intervals against closed forms and full enumeration."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_retool.rollout import statistics
from slime_retool.rollout.statistics import estimate, majority_at_k, pass_at_k, powers_up_to, wilson_interval


@given(n=st.integers(1, 9), data=st.data())
@settings(max_examples=60, deadline=None)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n, data):
    right = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    answers = [True] * right + [False] * (n - right)
    subsets = list(itertools.combinations(answers, k))
    assert pass_at_k(n, right, k) == pytest.approx(fmean(any(subset) for subset in subsets), abs=1e-12)


def test_pass_at_1_is_the_mean_and_pass_at_n_says_whether_any_is_right():
    assert pass_at_k(30, 12, 1) == pytest.approx(0.4)
    assert pass_at_k(30, 1, 30) == 1.0 and pass_at_k(30, 0, 30) == 0.0
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - math.comb(7, 5) / math.comb(10, 5))


def enumerated_majority(answers, right, k):
    scores = []
    for subset in itertools.combinations(range(len(answers)), k):
        votes = Counter(answers[i] for i in subset if answers[i] is not None)
        if not votes:
            scores.append(0.0)
            continue
        top = max(votes.values())
        winners = [answer for answer, count in votes.items() if count == top]
        verdict = dict(zip(answers, right, strict=True))
        scores.append(fmean(float(verdict[winner]) for winner in winners))
    return fmean(scores)


@given(answers=st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), data=st.data())
@settings(max_examples=80, deadline=None)
def test_majority_at_k_is_the_mean_over_all_subsets(answers, data):
    verdicts = {answer: data.draw(st.booleans()) for answer in dict.fromkeys(answers)}
    right = [answer is not None and verdicts[answer] for answer in answers]
    k = data.draw(st.integers(1, len(answers)))
    assert majority_at_k(answers, right, k) == pytest.approx(enumerated_majority(answers, right, k), abs=1e-12)


def resampled_majority(answers, right, k, draws=1000):
    source, scores = random.Random(0), []
    for _ in range(draws):
        drawn = source.sample(range(len(answers)), k)
        votes = Counter(answers[i] for i in drawn)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        scores.append(fmean(float(right[answers.index(winner)]) for winner in winners))
    return fmean(scores)


def test_the_majority_of_hundreds_of_answers_of_many_kinds_takes_little_work(monkeypatch):
    """Kinds by Zipf's law. Drawing from all 85 kinds in turn, for every right one, takes 35 million multiplications."""
    source = random.Random(1)
    kinds = list(range(85))
    answers = kinds + source.choices(kinds, [1 / (kind + 1) for kind in kinds], k=256 - len(kinds))
    right = [answer % 2 == 1 for answer in answers]
    work = []
    add = statistics._add
    monkeypatch.setattr(statistics, "_add", lambda to, row, *more: work.append(len(row)) or add(to, row, *more))
    for k in powers_up_to(256):
        exact = majority_at_k(answers, right, k)
        assert exact == pytest.approx(resampled_majority(answers, right, k), abs=0.05)
    assert sum(work) < 3_000_000


def test_the_number_of_ways_to_draw_may_exceed_any_float():
    answers = ["7"] * 1000 + ["8"] * 1000
    assert majority_at_k(answers, [answer == "7" for answer in answers], 1000) == pytest.approx(0.5)


def test_a_clear_majority_wins_and_a_tie_is_drawn_by_lot():
    assert majority_at_k(["7", "7", "8"], [True, True, False], 3) == 1.0
    assert majority_at_k(["7", "8"], [True, False], 2) == 0.5
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    assert majority_at_k(["7", None, None], [True, False, False], 3) == 1.0


def test_majority_of_one_is_the_mean():
    answers, right = ["1", "2", "2", None], [True, False, False, False]
    assert majority_at_k(answers, right, 1) == pytest.approx(0.25)


def test_the_interval_is_students_over_problems():
    values = [0.0, 0.5, 1.0, 1.0, 1.0]
    mean = sum(values) / 5
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / 4)
    result = estimate(values)
    assert result.mean == pytest.approx(mean)
    assert result.low == pytest.approx(max(0.0, mean - 2.7764451051978 * deviation / math.sqrt(5)))
    assert result.high == 1.0  # cut
    wide = estimate([10 * v for v in values], shares=False)
    assert (wide.low, wide.high) == pytest.approx(
        [10 * (mean + sign * 2.7764451051978 * deviation / math.sqrt(5)) for sign in (-1, 1)]
    )


def test_of_values_that_are_no_shares_one_problem_says_nothing():
    assert estimate([3.0], shares=False).mean == 3.0 and math.isnan(estimate([3.0], shares=False).low)


def test_intervals_of_few_problems_cover_the_truth_as_often_as_they_say():
    source = random.Random(1)
    hits = 0
    for _ in range(2000):
        values = [source.gauss(0.5, 0.1) for _ in range(5)]
        result = estimate(values)
        hits += result.low <= 0.5 <= result.high
    assert 0.93 < hits / 2000 < 0.97  # the normal quantile: 0.88


def test_problems_that_are_all_alike_still_leave_doubt():
    result = estimate([1.0] * 30)
    assert result.mean == result.high == 1.0
    assert result.low == pytest.approx(30 / (30 + 1.959963984540054**2))
    assert estimate([0.5]).low < 0.5 < estimate([0.5]).high


def test_wilson_interval_solves_its_own_equation():
    low, high = wilson_interval(0.3, 40)
    for bound in (low, high):
        assert abs(0.3 - bound) == pytest.approx(1.959963984540054 * math.sqrt(bound * (1 - bound) / 40))


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    source = random.Random(0)
    hits = 0
    for _ in range(400):
        rates = [source.betavariate(1, 1) for _ in range(40)]
        values = [fmean(source.random() < rate for _ in range(8)) for rate in rates]
        result = estimate(values)
        hits += result.low <= 0.5 <= result.high
    assert 0.9 < hits / 400 < 0.99


@pytest.mark.parametrize("k", [0, 4])
def test_more_answers_than_there_are_cannot_be_drawn(k):
    with pytest.raises(ValueError, match="between 1 and the 3 answers"):
        pass_at_k(3, 1, k)
    with pytest.raises(ValueError, match="between 1 and the 3 answers"):
        majority_at_k(["a", "b", "c"], [True, False, False], k)


def test_reported_k_are_powers_of_two_and_the_whole():
    assert powers_up_to(1) == [1] and powers_up_to(8) == [1, 2, 4, 8] and powers_up_to(30) == [1, 2, 4, 8, 16, 30]
