"""Off-policy care: the engine that sampled and the trainer that learns never have quite the same log-probs.

With d_t = train_log_probs - rollout_log_probs at learned token t, the importance weight of sampling from the engine
while learning the trainer's policy is exp(d_t) for a token and exp(sum of d) for a whole sample. See `segments` for
the layout; everything runs in float64 on the global batch, without gradient and without collectives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime_retool.algo.algorithms import TIS_LEVELS, TIS_MODES
from slime_retool.algo.kl import kl_estimate
from slime_retool.algo.segments import Segments

MAX_LOG_WEIGHT = 60.0
"""Log weights are clamped to this size, so that a weight, its square and their sums stay finite."""


def importance_weights(
    segments: Segments,
    train_log_probs: Tensor,  # [N]
    rollout_log_probs: Tensor,  # [N]
    *,
    level: str = "token",
    mode: str = "truncate",
    low: float = 0.0,
    high: float = 2.0,
) -> tuple[Tensor, dict[str, float]]:
    """Weights [N] fp32 to multiply the advantages with (0 where nothing is learned), and figures about them.

    The ratio of a token is, by `level`: token, exp(d_t); sequence, exp(sum of its sample's d); geometric, exp(mean of
    its sample's d). By `mode`: truncate (TIS), clamp(ratio, low, high); mask (MIS), the ratio itself within
    [low, high] and 0 outside, so that the token or the whole sample teaches nothing. The loss's denominator is not
    touched by either.

    Truncated importance sampling: Ionides 2008, https://doi.org/10.1198/106186008X320456; against the engine's
    mismatch: https://fengyao.notion.site/off-policy-rl. Masking at token level is IcePop's; geometric means of a
    sequence's ratios are GSPO's (https://arxiv.org/abs/2507.18071).

    Figures, over learned tokens (token) or samples with learned tokens (sequence, geometric): tis/ratio_mean and
    tis/ratio_max before the limits, tis/weight_mean after them, tis/low_fraction and tis/high_fraction outside each
    limit, tis/ess the effective sample size of the weights as a fraction, (sum w)^2 / (n sum w^2).

    Raises ValueError for log-probs of learned tokens that are not finite.
    """
    assert level in TIS_LEVELS and mode in TIS_MODES and 0 <= low < high, (level, mode, low, high)
    log_ratio = _log_ratio(segments, train_log_probs, rollout_log_probs)  # [M]
    taught = segments.counts > 0
    if level != "token":
        log_ratio = segments.sum_learned(log_ratio)
        if level == "geometric":
            log_ratio = log_ratio / segments.counts.clamp(min=1)
    ratio = log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()  # [M] or [S]
    below, above = ratio < low, ratio > high
    weights = torch.where(below | above, 0.0, ratio) if mode == "mask" else ratio.clamp(low, high)
    counted = slice(None) if level == "token" else taught
    metrics = {
        "tis/ratio_mean": _mean(ratio[counted]),
        "tis/ratio_max": _max(ratio[counted]),
        "tis/weight_mean": _mean(weights[counted]),
        "tis/low_fraction": _mean(below[counted].double()),
        "tis/high_fraction": _mean(above[counted].double()),
        "tis/ess": effective_sample_size(weights[counted]),
    }
    if level != "token":
        weights = segments.learned_of(weights)
    return segments.place(weights), metrics


def mismatch_metrics(
    segments: Segments,
    train_log_probs: Tensor,  # [N]
    rollout_log_probs: Tensor,  # [N]
    turn_of: Tensor | None = None,  # [N] int64, `Segments.turn_of`
) -> dict[str, float]:
    """How far trainer and engine are apart, d = train - rollout, over the learned tokens of the global batch.

    mismatch/abs_diff and abs_diff_max (of |d|), diff (mean d), k3_kl (estimate of KL(engine || trainer) in nats per
    token, exp(d) - d - 1), ess (effective sample size of the token ratios as a fraction), sequence_ess (of whole
    samples). With `turn_of` also mismatch/turn_K/abs_diff for every turn K that has learned tokens: a template or
    cache fault shows as a jump after turn 0. All 0 without learned tokens. Raises ValueError for log-probs of learned
    tokens that are not finite.
    """
    d = _log_ratio(segments, train_log_probs, rollout_log_probs)
    clamped = d.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    sequence = segments.sum_learned(d)[segments.counts > 0].clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    metrics = {
        "mismatch/abs_diff": _mean(d.abs()),
        "mismatch/abs_diff_max": _max(d.abs()),
        "mismatch/diff": _mean(d),
        "mismatch/k3_kl": _mean(kl_estimate(torch.zeros_like(clamped), clamped, "k3")),
        "mismatch/ess": effective_sample_size(clamped.exp()),
        "mismatch/sequence_ess": effective_sample_size(sequence.exp()),
    }
    if turn_of is not None and len(d):
        turns = turn_of[segments.learned]
        counts = torch.bincount(turns)
        sums = torch.bincount(turns, weights=d.abs())
        for turn in counts.nonzero()[:, 0].tolist():
            metrics[f"mismatch/turn_{turn}/abs_diff"] = float(sums[turn] / counts[turn])
    return metrics


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2), Kish: 1 = all equal, 1/n = one rules; 0 when there are none or all are 0."""
    squares = float(weights.square().sum())
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares > 0 else 0.0


def _log_ratio(segments: Segments, train_log_probs: Tensor, rollout_log_probs: Tensor) -> Tensor:
    d = segments.select(train_log_probs) - segments.select(rollout_log_probs)
    finite = d.isfinite()
    if not bool(finite.all()):
        bad = (~finite).nonzero()[:, 0]
        raise ValueError(
            f"{len(bad)} of {len(d)} learned tokens have log-probs that are not finite (first in sample "
            f"{int(segments.sample_of[segments.learned[bad[0]]])}); look at the engine's replies and the trainer's loss"
        )
    return d


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0


def _max(values: Tensor) -> float:
    return float(values.max()) if len(values) else 0.0
