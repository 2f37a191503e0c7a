"""Losses as pure functions: per-token values in, (weighted sum, weighted sums of metrics) out. T = tokens.

`weights` [T] holds the whole denominator: mask / (number of loss tokens of the global batch), or mask / (loss tokens
of the token's sample * samples of the global batch); see `token_weights`. Sums over all micro-batches and
data-parallel ranks are therefore the loss itself, and nothing is divided afterwards. Where the weight is 0, values
are never read: NaN or infinity there changes neither the loss nor a gradient.

Anything else that scales single tokens (importance weights, see `importance`) multiplies the advantages, so that the
denominator and the mask stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_retool.algo.algorithms import LossTerm, loaded
from slime_retool.algo.kl import kl_estimate
from slime_retool.algo.segments import Segments

Metrics = dict[str, Tensor]
"""Weighted sums, detached."""

LossValue = tuple[Tensor, Metrics]

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this size: exp() stays finite, and 0 advantage times a huge ratio stays 0."""


def token_weights(
    segments: Segments,
    step_of: Tensor | None = None,  # [S] int64, from 0: the optimizer step that each sample belongs to
    *,
    per_token: bool,
    constant_length: int | None = None,
) -> Tensor:
    """Weight of every token [N] fp32; the denominator is that of the token's own optimizer step (None: there is one).

    A step has L learned tokens in the n of its samples that have any:

    - per_token: mask / L (DAPO, https://arxiv.org/abs/2503.14476).
    - otherwise the mean over samples of each sample's token mean: mask / (learned tokens of the sample * n)
      (GRPO, https://arxiv.org/abs/2402.03300).
    - with `constant_length`, whatever `per_token` says: mask / (constant_length * n), which favours neither short nor
      long samples (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    A step without learned tokens has all weights 0.
    """
    assert constant_length is None or constant_length >= 1, constant_length
    if step_of is None:
        step_of = torch.zeros_like(segments.counts)
    counts = segments.counts.double()
    tokens = torch.bincount(step_of, weights=counts)[step_of]
    samples = torch.bincount(step_of, weights=(counts > 0).double())[step_of]
    if constant_length is not None:
        divisor = constant_length * samples
    else:
        divisor = tokens if per_token else counts * samples
    return segments.place(segments.learned_of(1 / divisor))


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """sum(values * weights) that never reads a value of weight 0."""
    return (safe(values, weights) * weights).sum()


def safe(values: Tensor, weights: Tensor) -> Tensor:
    """`values` with 0 where the weight is 0, which also stops gradients there (0 * inf would be NaN)."""
    return torch.where(weights > 0, values, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """What every loss reads of one micro-batch."""

    weights: Tensor  # [T]
    columns: Mapping[str, Tensor]  # [T] each
    """By name: `old_log_probs` and `advantages` (in RL), and what the run's terms need beside them."""

    def column(self, name: str) -> Tensor:
        """A column without gradient, 0 where the weight is 0. Raises ValueError for one that is not there."""
        if name not in self.columns:
            raise ValueError(
                f"the loss reads the column {name!r}, and the batch has {', '.join(self.columns) or 'none'}; name it "
                "in `needs` of a Loss record (docs/extending.md)"
            )
        return safe(self.columns[name], self.weights).detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs(TokenInputs):
    """What a policy's loss reads. NaN may stand where the weight is 0, see `safe`."""

    log_probs: Tensor  # [T]
    entropy: Tensor | None = None  # [T]
    sample_of: Tensor | None = None  # [T] int64, from 0; anything where the weight is 0
    token_counts: Tensor | None = None  # [samples of the micro-batch], learned tokens of the whole sample
    cp_group: dist.ProcessGroup | None = None
    """Where samples are split over context-parallel ranks: each calls the same losses for the same samples."""
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    kl_type: str = "k1"
    args: Any = None
    """The run's `Config`, for a loss of your own."""

    def log_ratio(self) -> Tensor:
        """log_probs - old_log_probs [T], 0 where the weight is 0."""
        return safe(self.log_probs, self.weights) - self.column("old_log_probs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInputs(TokenInputs):
    """What a value model's loss reads."""

    values: Tensor  # [T]
    value_clip: float | None = None


class TotalLoss:
    """The weighted sum of some terms, and what they report."""

    def __init__(self, terms: Iterable[tuple[LossTerm, float]]) -> None:
        self._terms: list[tuple[LossTerm, float, Callable[..., LossValue]]] = [
            (term, weight, loaded(term.function)) for term, weight in terms
        ]
        self.means = [name for term, _, _ in self._terms for name in term.means]
        self.names = ["loss", *(name for term, _, _ in self._terms for name in (*term.parts, *term.means))]
        """Names of all metrics, the loss itself first. `means` are means over tokens, the others parts of the loss."""

    def __call__(self, inputs: LossInputs | ValueInputs) -> LossValue:
        """Raises ValueError for a metric that its term has not declared. A term of weight 0 is only measured."""
        loss = torch.zeros((), device=inputs.weights.device)
        metrics: dict[str, Tensor] = {}
        for term, weight, function in self._terms:
            value, reported = function(inputs)
            if undeclared := reported.keys() - {*term.parts, *term.means}:
                raise ValueError(
                    f"{term.flag} reports {', '.join(sorted(undeclared))} without having declared it: name it in "
                    "`parts` or `means` of a Loss record (docs/extending.md)"
                )
            metrics |= reported
            if weight != 0.0:
                loss = loss + weight * value
        return loss, {"loss": loss.detach(), **metrics}


def ppo_loss(inputs: LossInputs) -> LossValue:
    """max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high)) with r = exp(log_probs - old_log_probs).

    https://arxiv.org/abs/1707.06347 eq. 7. `eps_clip_high` (default eps_clip) is DAPO's clip-higher
    (https://arxiv.org/abs/2503.14476). `eps_clip_c` bounds the loss of negative advantages by -A c (dual clip,
    https://arxiv.org/abs/1912.09729). Log ratios are clamped to [-20, 20].

    Metrics, those of `gspo_loss` and `cispo_loss` too: pg_loss, clip_fraction (tokens where a clip is active), ppo_kl
    (mean of old - new, k1).
    """
    log_ratio = inputs.log_ratio()
    return _clipped_objective(inputs, log_ratio, log_ratio)


def gspo_loss(inputs: LossInputs) -> LossValue:
    """`ppo_loss` with s = exp(mean of the sample's log ratios) for each of its tokens.

    In the token form s * pi / stop_gradient(pi) (https://arxiv.org/abs/2507.18071 section 4.3): for one advantage per
    sample its value, clipping and gradient are those of the sequence form.
    """
    assert inputs.sample_of is not None and inputs.token_counts is not None, "gspo needs to know which token is whose"
    log_ratio, log_probs = inputs.log_ratio(), safe(inputs.log_probs, inputs.weights)
    own_mean = _sample_means(
        log_ratio.detach(), inputs.weights, inputs.sample_of, inputs.token_counts, inputs.cp_group
    )
    return _clipped_objective(inputs, own_mean + (log_probs - log_probs.detach()), log_ratio)


def cispo_loss(inputs: LossInputs) -> LossValue:
    """-A stop_gradient(clip(r, 1 - eps_clip, 1 + eps_clip_high)) log_probs: every token keeps its gradient.

    https://arxiv.org/abs/2506.13585 section 3; eps_clip 1 leaves no lower bound.
    """
    log_ratio = inputs.log_ratio()
    ratio, clipped_ratio = _ratios(inputs, log_ratio.detach())
    losses = -inputs.column("advantages") * clipped_ratio * safe(inputs.log_probs, inputs.weights)
    return _policy_value(inputs, losses, clipped_ratio != ratio, log_ratio)


def _clipped_objective(inputs: LossInputs, log_ratio: Tensor, token_log_ratio: Tensor) -> LossValue:
    """PPO's objective with ratios of any kind; `token_log_ratio` is what is reported."""
    ratio, clipped_ratio = _ratios(inputs, log_ratio)
    advantages = inputs.column("advantages")
    unclipped, clipped = -advantages * ratio, -advantages * clipped_ratio
    losses = torch.maximum(unclipped, clipped)
    active = clipped > unclipped
    if inputs.eps_clip_c is not None:
        bound = -advantages * inputs.eps_clip_c
        dual = (advantages < 0) & (losses > bound)
        losses = torch.where(dual, bound, losses)
        active = active | dual
    return _policy_value(inputs, losses, active, token_log_ratio)


def _ratios(inputs: LossInputs, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """(ratio, the same within its bounds)."""
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    high = inputs.eps_clip if inputs.eps_clip_high is None else inputs.eps_clip_high
    return ratio, ratio.clamp(1 - inputs.eps_clip, 1 + high)


def _policy_value(inputs: LossInputs, losses: Tensor, active: Tensor, log_ratio: Tensor) -> LossValue:
    weights = inputs.weights
    loss = weighted_sum(losses, weights)
    return loss, {
        "pg_loss": loss.detach(),
        "clip_fraction": weighted_sum(active.to(weights.dtype), weights),
        "ppo_kl": weighted_sum(-log_ratio.detach(), weights),
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


def kl_loss(inputs: LossInputs) -> LossValue:
    """Weighted sum of `kl.kl_estimate` between policy and reference. Metric: kl_loss."""
    policy = safe(inputs.log_probs, inputs.weights)
    loss = weighted_sum(kl_estimate(policy, inputs.column("ref_log_probs"), inputs.kl_type), inputs.weights)
    return loss, {"kl_loss": loss.detach()}


def distillation_loss(inputs: LossInputs) -> LossValue:
    """On-policy distillation: weighted sum of (log p_student - log p_teacher)^2 / 2 at the student's own tokens.

    Its gradient, (log p_student - log p_teacher) grad log p_student, is that of the per-token reverse KL
    KL(student || teacher) for tokens sampled from the student (https://arxiv.org/abs/2306.13649). Metrics:
    distill_loss, reverse_kl (k1).
    """
    weights = inputs.weights
    student, teacher = safe(inputs.log_probs, weights), inputs.column("teacher_log_probs")
    loss = weighted_sum(kl_estimate(student, teacher, "k2"), weights)
    reverse_kl = weighted_sum(kl_estimate(student.detach(), teacher, "k1"), weights)
    return loss, {"distill_loss": loss.detach(), "reverse_kl": reverse_kl}


def entropy_bonus(inputs: LossInputs) -> LossValue:
    """Weighted sum of per-token entropies (to be subtracted from a loss). Metric: entropy."""
    assert inputs.entropy is not None
    total = weighted_sum(inputs.entropy, inputs.weights)
    return total, {"entropy": total.detach()}


def sft_loss(inputs: LossInputs) -> LossValue:
    """Negative log-likelihood. No metrics beside the loss."""
    return weighted_sum(-inputs.log_probs, inputs.weights), {}


def value_loss(inputs: ValueInputs) -> LossValue:
    """Regression of values, max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 with c = `value_clip`.

    Without `value_clip` only (V - R)^2 / 2. The clip keeps V near the values that the returns R were computed from
    (https://arxiv.org/abs/2005.12729, section 3). Metrics: value_loss, value_clip_fraction (tokens whose clipped
    error is the larger one).
    """
    weights, value_clip = inputs.weights, inputs.value_clip
    values = safe(inputs.values, weights)
    old_values, returns = inputs.column("old_values"), inputs.column("returns")
    errors = (values - returns).square()
    active = torch.zeros_like(weights)
    if value_clip is not None:
        near = values.clamp(old_values - value_clip, old_values + value_clip)
        clipped_errors = (near - returns).square()
        active = (clipped_errors > errors).to(weights.dtype)
        errors = torch.maximum(errors, clipped_errors)
    loss = weighted_sum(errors / 2, weights)
    return loss, {"value_loss": loss.detach(), "value_clip_fraction": weighted_sum(active, weights)}
