"""Importance weights and mismatch figures against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from algo_reference import Batch, random_batch

from slime_retool.algo.algorithms import TIS_LEVELS, TIS_MODES
from slime_retool.algo.importance import effective_sample_size, importance_weights, mismatch_metrics
from slime_retool.algo.segments import Segments
from slime_retool.trainer.prepare import mismatch


def differences(batch: Batch) -> list[list[float]]:
    """train - rollout of each sample's learned tokens; `log_probs` plays the trainer, `old` the engine."""
    return [
        [a - b for a, b in zip(batch.learned("log_probs", i), batch.learned("old", i), strict=True)]
        for i in range(len(batch.masks))
    ]


def kish(weights: list[float]) -> float:
    squares = math.fsum(w * w for w in weights)
    return math.fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


@pytest.mark.parametrize("level", TIS_LEVELS)
@pytest.mark.parametrize("mode", TIS_MODES)
@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (0.5, 1.5)])
def test_weights_and_figures_equal_plain_loops(level: str, mode: str, low: float, high: float) -> None:
    for seed in range(25):
        batch = random_batch(seed)
        want = [0.0] * sum(len(mask) for mask in batch.masks)
        ratios, begin = [], 0
        for mask, d in zip(batch.masks, differences(batch), strict=True):
            if d:
                exponents = {"token": d, "sequence": [math.fsum(d)], "geometric": [math.fsum(d) / len(d)]}[level]
                own = [math.exp(x) for x in exponents]
                ratios += own
                for position, ratio in zip(np.flatnonzero(mask), own * (len(d) // len(own)), strict=True):
                    inside = low <= ratio <= high
                    limited = min(max(ratio, low), high)
                    want[begin + position] = (ratio if inside else 0.0) if mode == "mask" else limited
            begin += len(mask)
        got, metrics = importance_weights(
            batch.segments, batch.flat("log_probs"), batch.flat("old"), level=level, mode=mode, low=low, high=high
        )
        assert got.tolist() == pytest.approx(want, abs=1e-6)
        assert torch.all(got[~batch.mask] == 0)
        if not ratios:
            assert all(value == 0.0 for value in metrics.values())
            continue
        limited = [r if low <= r <= high else (0.0 if mode == "mask" else min(max(r, low), high)) for r in ratios]
        assert metrics == pytest.approx(
            {
                "tis/ratio_mean": float(np.mean(ratios)),
                "tis/ratio_max": max(ratios),
                "tis/weight_mean": float(np.mean(limited)),
                "tis/low_fraction": float(np.mean([r < low for r in ratios])),
                "tis/high_fraction": float(np.mean([r > high for r in ratios])),
                "tis/ess": kish(limited),
            },
            abs=1e-6,
        )


@pytest.mark.parametrize("level", TIS_LEVELS)
@pytest.mark.parametrize("mode", TIS_MODES)
def test_equal_log_probs_give_weights_of_exactly_one(level: str, mode: str) -> None:
    batch = random_batch(5)
    same = batch.flat("old")
    weights, metrics = importance_weights(batch.segments, same, same, level=level, mode=mode)
    assert torch.equal(weights, batch.mask.float())
    assert metrics["tis/ess"] == 1.0 and metrics["tis/high_fraction"] == 0.0


def test_a_sample_far_off_is_masked_as_a_whole_at_sequence_level() -> None:
    segments = Segments.of([[0, 1, 1], [0, 1, 1]])
    rollout = torch.zeros(6)
    train = torch.tensor([0.0, 0.5, 0.5, 0.0, 0.1, 0.1])
    weights, metrics = importance_weights(segments, train, rollout, level="sequence", mode="mask", low=0.5, high=2.0)
    assert weights.tolist() == pytest.approx([0, 0, 0, 0, math.exp(0.2), math.exp(0.2)])
    assert metrics["tis/high_fraction"] == 0.5


def test_long_samples_neither_overflow_nor_turn_into_nan() -> None:
    segments = Segments.of([[0, *[1] * 3000]])
    for sign in (1.0, -1.0):
        train, rollout = torch.full((3001,), sign), torch.zeros(3001)
        for mode in TIS_MODES:
            weights, metrics = importance_weights(segments, train, rollout, level="sequence", mode=mode, low=0.1)
            assert torch.isfinite(weights).all() and all(math.isfinite(v) for v in metrics.values())
        assert all(math.isfinite(v) for v in mismatch_metrics(segments, train, rollout).values())


def test_mismatch_figures_equal_plain_loops() -> None:
    for seed in range(25):
        batch = random_batch(seed)
        d = [x for row in differences(batch) for x in row]
        got = mismatch_metrics(batch.segments, batch.flat("log_probs"), batch.flat("old"))
        if not d:
            assert all(value == 0.0 for value in got.values())
            continue
        assert got == pytest.approx(
            {
                "mismatch/abs_diff": float(np.mean(np.abs(d))),
                "mismatch/abs_diff_max": float(np.max(np.abs(d))),
                "mismatch/diff": float(np.mean(d)),
                "mismatch/k3_kl": float(np.mean([math.exp(x) - 1 - x for x in d])),
                "mismatch/ess": kish([math.exp(x) for x in d]),
                "mismatch/sequence_ess": kish([math.exp(math.fsum(row)) for row in differences(batch) if row]),
            },
            abs=1e-9,
        )


def test_k3_is_the_divergence_of_the_trainer_from_the_engine() -> None:
    """Averaged over the engine's own samples, the estimate is KL(engine || trainer)."""
    engine, trainer = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    sampled = [0, 0, 1, 2]  # each token as often as the engine samples it
    segments = Segments.of([[0, 1, 1, 1, 1]])
    got = mismatch_metrics(
        segments,
        torch.tensor([0.0, *np.log(trainer[sampled])]),
        torch.tensor([0.0, *np.log(engine[sampled])]),
    )
    assert got["mismatch/k3_kl"] == pytest.approx(float((engine * np.log(engine / trainer)).sum()), abs=1e-7)


def test_mismatch_is_told_apart_by_turn() -> None:
    nan = math.nan
    segments = Segments.of([[0, 1, 1, 0, 1], [0, 1, 0, 0, 1], [0, 1, 0, 0, 0]])
    train = torch.tensor([nan, 1.0, 2.0, nan, 5.0, nan, 3.0, nan, nan, -7.0, nan, 2.0, nan, nan, nan])
    got = mismatch_metrics(segments, train, torch.zeros(15), segments.turn_of())
    assert got["mismatch/turn_0/abs_diff"] == pytest.approx(2.0)
    assert got["mismatch/turn_1/abs_diff"] == pytest.approx(6.0)
    assert not any("turn_2" in name for name in got)


def test_effective_sample_size_is_a_fraction() -> None:
    assert effective_sample_size(torch.ones(7)) == 1.0
    assert effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert effective_sample_size(torch.zeros(3)) == 0.0 and effective_sample_size(torch.zeros(0)) == 0.0


def test_bad_settings_and_log_probs_are_refused() -> None:
    segments, zeros = Segments.of([[0, 1]]), torch.zeros(2)
    for setting in ({"level": "turn"}, {"mode": "drop"}, {"low": 2.0, "high": 1.0}, {"low": -0.5}):
        with pytest.raises(AssertionError):  # the flags refuse them with a message
            importance_weights(segments, zeros, zeros, **setting)
    with pytest.raises(ValueError, match="1 of 1 learned tokens"):
        mismatch_metrics(segments, torch.tensor([0.0, math.nan]), zeros)


def test_tokens_of_older_weights_are_compared_apart() -> None:
    """Two samples; d is 0.1 where the weights are the present ones, and 1.0 where they are older."""
    segments = Segments.of([[0, 1, 1, 0, 1], [0, 1, 1]])
    staleness = torch.tensor([0.0, 1, 0, 0, 0, 0, 2, 0])
    train = torch.where(staleness > 0, 1.0, 0.1) * segments.mask
    got = mismatch(segments, train, torch.zeros(8), staleness)
    assert got["mismatch/abs_diff"] == got["train/logprob_abs_diff"] == pytest.approx(0.1)
    assert got["mismatch/abs_diff_max"] == pytest.approx(0.1)
    assert got["mismatch/stale_abs_diff"] == pytest.approx(1.0)
    assert got["mismatch/turn_0/abs_diff"] == got["mismatch/turn_1/abs_diff"] == pytest.approx(0.1)
    alike = mismatch(segments, train, torch.zeros(8), torch.zeros(8))
    assert alike == mismatch(segments, train, torch.zeros(8)) | {"mismatch/stale_abs_diff": 0.0}
