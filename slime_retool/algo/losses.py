"""Losses as pure functions: per-token values in, (weighted sum, weighted sums of metrics) out. T = tokens.

`weights` [T] holds the whole denominator: mask / (number of loss tokens of the global batch), or mask / (loss tokens
of the token's sample * samples of the global batch); see `token_weights`. Sums over all micro-batches and
data-parallel ranks are therefore the loss itself, and nothing is divided afterwards. Where the weight is 0, values
are never read: NaN or infinity there changes neither the loss nor a gradient.

Anything else that scales single tokens (importance weights, see `importance`) multiplies the advantages, so that the
denominator and the mask stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime_retool.algo.kl import kl_estimate

Metrics = dict[str, Tensor]
"""Weighted sums, detached."""

POLICY_LOSSES = ("ppo", "gspo", "cispo")

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this size: exp() stays finite, and 0 advantage times a huge ratio stays 0."""


def token_weights(
    loss_masks: Sequence[Sequence[int]],
    *,
    per_token: bool,
    total_tokens: int,
    num_samples: int,
    constant_length: int | None = None,
) -> list[list[float]]:
    """Weight of every token of some samples; the global batch has `total_tokens` loss tokens in `num_samples` samples.

    - per_token: mask / total_tokens (DAPO, https://arxiv.org/abs/2503.14476).
    - otherwise the mean over samples of each sample's token mean: mask / (loss tokens of the sample * num_samples)
      (GRPO, https://arxiv.org/abs/2402.03300).
    - with `constant_length`, whatever `per_token` says: mask / (constant_length * num_samples), which favours neither
      short nor long samples (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    A batch without loss tokens has all weights 0. Raises ValueError for a constant_length below 1.
    """
    if constant_length is not None and constant_length < 1:
        raise ValueError(f"the constant length that divides a sample's loss must be at least 1, got {constant_length}")
    out = []
    for mask in loss_masks:
        own = sum(mask)
        divisor = total_tokens if per_token else own * num_samples
        if constant_length is not None:
            divisor = constant_length * num_samples
        out.append([m / divisor if own else 0.0 for m in mask])
    return out


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """sum(values * weights) that never reads a value of weight 0."""
    return (safe(values, weights) * weights).sum()


def safe(values: Tensor, weights: Tensor) -> Tensor:
    """`values` with 0 where the weight is 0, which also stops gradients there (0 * inf would be NaN)."""
    return torch.where(weights > 0, values, 0.0)


def policy_loss(
    log_probs: Tensor,  # [T]
    old_log_probs: Tensor,  # [T]
    advantages: Tensor,  # [T]
    weights: Tensor,  # [T]
    *,
    kind: str = "ppo",
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    sample_of: Tensor | None = None,  # [T] int64, from 0; anything where the weight is 0
    token_counts: Tensor | None = None,  # [samples of the micro-batch], learned tokens of the whole sample
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Metrics]:
    """The policy gradient's surrogate, as a loss. A = advantages, r = exp(log_probs - old_log_probs).

    - ppo: max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high)), https://arxiv.org/abs/1707.06347 eq. 7.
      `eps_clip_high` (default eps_clip) is DAPO's clip-higher (https://arxiv.org/abs/2503.14476). `eps_clip_c` bounds
      the loss of negative advantages by -A c (dual clip, https://arxiv.org/abs/1912.09729).
    - gspo: the same with s = exp(mean of the sample's log ratios) for each of its tokens, in the token form
      s * pi / stop_gradient(pi) (https://arxiv.org/abs/2507.18071 section 4.3): for one advantage per sample its value,
      clipping and gradient are those of the sequence form. Needs `sample_of` and `token_counts`; a sample split over
      context-parallel ranks is summed over `cp_group`, whose ranks must call this for the same samples.
    - cispo: -A stop_gradient(clip(r, 1 - eps_clip, 1 + eps_clip_high)) log_probs: every token keeps its gradient
      (https://arxiv.org/abs/2506.13585 section 3; eps_clip 1 leaves no lower bound).

    Log ratios are clamped to [-20, 20]. Metrics: pg_loss, clip_fraction (tokens where a clip is active), ppo_kl (mean
    of old - new, k1). Raises ValueError for an unknown `kind`.
    """
    log_probs = safe(log_probs, weights)
    advantages = safe(advantages, weights).detach()
    log_ratio = log_probs - safe(old_log_probs, weights).detach()
    ppo_kl = weighted_sum(-log_ratio.detach(), weights)
    if kind == "gspo":
        assert sample_of is not None and token_counts is not None, "gspo needs to know which token is whose"
        own_mean = _sample_means(log_ratio.detach(), weights, sample_of, token_counts, cp_group)
        log_ratio = own_mean + (log_probs - log_probs.detach())
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_ratio = ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high))
    if kind == "cispo":
        losses = -advantages * clipped_ratio.detach() * log_probs
        active = clipped_ratio != ratio
    elif kind in ("ppo", "gspo"):
        unclipped, clipped = -advantages * ratio, -advantages * clipped_ratio
        losses = torch.maximum(unclipped, clipped)
        active = clipped > unclipped
        if eps_clip_c is not None:
            bound = -advantages * eps_clip_c
            dual = (advantages < 0) & (losses > bound)
            losses = torch.where(dual, bound, losses)
            active = active | dual
    else:
        raise ValueError(f"unknown policy loss {kind!r}; it is one of {', '.join(POLICY_LOSSES)}")
    loss = weighted_sum(losses, weights)
    return loss, {
        "pg_loss": loss.detach(),
        "clip_fraction": weighted_sum(active.to(weights.dtype), weights),
        "ppo_kl": ppo_kl,
    }


def _sample_means(
    values: Tensor, weights: Tensor, sample_of: Tensor, token_counts: Tensor, cp_group: dist.ProcessGroup | None
) -> Tensor:
    """Each learned token's mean over its whole sample [T], 0 elsewhere."""
    own = torch.where(weights > 0, sample_of, 0)
    # In float64 the order of the additions, which a GPU does not fix, is lost in rounding.
    sums = torch.zeros(len(token_counts), dtype=torch.float64, device=values.device)
    sums.index_add_(0, own, safe(values, weights).double())
    if cp_group is not None and cp_group.size() > 1:
        dist.all_reduce(sums, group=cp_group)
    means = (sums / token_counts.clamp(min=1)).to(values.dtype)
    return safe(means[own], weights)


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, weights: Tensor, kind: str) -> tuple[Tensor, Metrics]:
    """Weighted sum of `kl.kl_estimate` between policy and reference. Metric: kl_loss."""
    loss = weighted_sum(kl_estimate(safe(log_probs, weights), safe(ref_log_probs, weights), kind), weights)
    return loss, {"kl_loss": loss.detach()}


def value_loss(
    values: Tensor,  # [T]
    old_values: Tensor,  # [T]
    returns: Tensor,  # [T]
    weights: Tensor,  # [T]
    *,
    value_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """The critic's regression, max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 with c = `value_clip`.

    Without `value_clip` only (V - R)^2 / 2. The clip keeps V near the values that the returns were computed from
    (https://arxiv.org/abs/2005.12729, section 3). Metrics: value_loss, value_clip_fraction (tokens whose clipped
    error is the larger one).
    """
    values = safe(values, weights)
    old_values, returns = safe(old_values, weights).detach(), safe(returns, weights).detach()
    errors = (values - returns).square()
    active = torch.zeros_like(weights)
    if value_clip is not None:
        near = values.clamp(old_values - value_clip, old_values + value_clip)
        clipped_errors = (near - returns).square()
        active = (clipped_errors > errors).to(weights.dtype)
        errors = torch.maximum(errors, clipped_errors)
    loss = weighted_sum(errors / 2, weights)
    return loss, {"value_loss": loss.detach(), "value_clip_fraction": weighted_sum(active, weights)}


def entropy_bonus(entropy: Tensor, weights: Tensor) -> tuple[Tensor, Metrics]:
    """Weighted sum of per-token entropies [T] (to be subtracted from a loss). Metric: entropy."""
    total = weighted_sum(entropy, weights)
    return total, {"entropy": total.detach()}


def sft_loss(log_probs: Tensor, weights: Tensor) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood. No metrics beside the loss."""
    return weighted_sum(-log_probs, weights), {}


def distillation_loss(log_probs: Tensor, teacher_log_probs: Tensor, weights: Tensor) -> tuple[Tensor, Metrics]:
    """On-policy distillation: weighted sum of (log p_student - log p_teacher)^2 / 2 at the student's own tokens.

    Its gradient, (log p_student - log p_teacher) grad log p_student, is that of the per-token reverse KL
    KL(student || teacher) for tokens sampled from the student (https://arxiv.org/abs/2306.13649). The same gradient
    as an advantage: `advantages.distillation_advantages`. Metrics: distill_loss, reverse_kl (k1).
    """
    student, teacher = safe(log_probs, weights), safe(teacher_log_probs, weights)
    loss = weighted_sum(kl_estimate(student, teacher, "k2"), weights)
    reverse_kl = weighted_sum(kl_estimate(student.detach(), teacher, "k1"), weights)
    return loss, {"distill_loss": loss.detach(), "reverse_kl": reverse_kl}


def log_prob_abs_diff(log_probs: Tensor, rollout_log_probs: Tensor, token_mean: Tensor) -> Metrics:
    """Mean |trainer - engine| log-prob over learned tokens; `token_mean` = mask / loss tokens of the global batch."""
    return {"logprob_abs_diff": weighted_sum((log_probs.detach() - rollout_log_probs).abs(), token_mean)}
