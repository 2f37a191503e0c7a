"""Losses as pure functions: per-token values in, (weighted sum, weighted sums of metrics) out. T = tokens.

`weights` [T] holds the whole denominator: mask / (number of loss tokens of the global batch), or mask / (loss tokens
of the token's sample * samples of the global batch); see `token_weights`. Sums over all micro-batches and
data-parallel ranks are therefore the loss itself, and nothing is divided afterwards. Where the weight is 0, values
are never read: NaN or infinity there changes neither the loss nor a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
"""Weighted sums, detached."""


def token_weights(
    loss_masks: Sequence[Sequence[int]], *, per_token: bool, total_tokens: int, num_samples: int
) -> list[list[float]]:
    """Weight of every token of some samples; the global batch has `total_tokens` loss tokens in `num_samples` samples.

    per_token: mask / total_tokens. Otherwise the mean over samples of each sample's token mean:
    mask / (loss tokens of the sample * num_samples). A batch without loss tokens has all weights 0.
    """
    out = []
    for mask in loss_masks:
        own = sum(mask)
        divisor = total_tokens if per_token else own * num_samples
        out.append([m / divisor if own else 0.0 for m in mask])
    return out


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """sum(values * weights) that never reads a value of weight 0."""
    return (torch.where(weights > 0, values, 0.0) * weights).sum()


def safe(values: Tensor, weights: Tensor) -> Tensor:
    """`values` with 0 where the weight is 0, which also stops gradients there (0 * inf would be NaN)."""
    return torch.where(weights > 0, values, 0.0)


def policy_loss(
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [T]
    weights: Tensor,  # [T]
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, https://arxiv.org/abs/1707.06347 eq. 7, as a loss.

    ratio = exp(log_probs - old_log_probs); loss = max(-A ratio, -A clip(ratio, 1 - eps_clip, 1 + eps_clip_high)).
    `eps_clip_high` (default eps_clip) is DAPO's clip-higher (https://arxiv.org/abs/2503.14476). `eps_clip_c`
    bounds the loss of negative advantages by -A c (dual clip, https://arxiv.org/abs/1912.09729).

    Metrics: pg_loss, clip_fraction (tokens where a clip is active), ppo_kl (mean of old - new, k1).
    """
    log_ratio = safe(log_probs, weights) - safe(old_log_probs, weights).detach()
    advantages = safe(advantages, weights)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high))
    losses = torch.maximum(unclipped, clipped)
    active = clipped > unclipped
    if eps_clip_c is not None:
        bound = -advantages * eps_clip_c
        dual = (advantages < 0) & (losses > bound)
        losses = torch.where(dual, bound, losses)
        active = active | dual
    loss = weighted_sum(losses, weights)
    metrics = {
        "pg_loss": loss.detach(),
        "clip_fraction": weighted_sum(active.float(), weights),
        "ppo_kl": weighted_sum(-log_ratio.detach(), weights),
    }
    return loss, metrics


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Per-token estimate [T] of KL(policy || reference), http://joschu.net/blog/kl-approx.html.

    With d = ref_log_probs - log_probs: k1 = -d; k2 = d^2 / 2; k3 = exp(d) - d - 1; low_var_kl is k3 with d clamped to
    [-20, 20] and the result to [-10, 10], so that one token cannot blow up the loss.
    """
    d = ref_log_probs.detach() - log_probs
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return d.exp() - d - 1
    if kind == "low_var_kl":
        d = d.clamp(-20, 20)
        return (d.exp() - d - 1).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator {kind!r}; --kl-loss-type is one of k1, k2, k3, low_var_kl")


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, weights: Tensor, kind: str) -> tuple[Tensor, Metrics]:
    """Weighted sum of `kl_estimate`. Metric: kl_loss."""
    loss = weighted_sum(kl_estimate(safe(log_probs, weights), safe(ref_log_probs, weights), kind), weights)
    return loss, {"kl_loss": loss.detach()}


def entropy_bonus(entropy: Tensor, weights: Tensor) -> tuple[Tensor, Metrics]:
    """Weighted sum of per-token entropies [T] (to be subtracted from a loss). Metric: entropy."""
    total = weighted_sum(entropy, weights)
    return total, {"entropy": total.detach()}


def sft_loss(log_probs: Tensor, weights: Tensor) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood. No metrics beside the loss."""
    return weighted_sum(-log_probs, weights), {}


def log_prob_abs_diff(log_probs: Tensor, rollout_log_probs: Tensor, token_mean: Tensor) -> Metrics:
    """Mean |trainer - engine| log-prob over learned tokens; `token_mean` = mask / loss tokens of the global batch."""
    return {"logprob_abs_diff": weighted_sum((log_probs.detach() - rollout_log_probs).abs(), token_mean)}
