"""From a rollout's samples to what the losses read: weights, log-probs, advantages, returns; and figures about them.

Everything here is computed on the whole rollout, alike on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_retool.algo.advantages import compute_advantages
from slime_retool.algo.importance import importance_weights, mismatch_metrics
from slime_retool.algo.kl import kl_estimate
from slime_retool.algo.losses import token_weights
from slime_retool.algo.segments import Segments
from slime_retool.config import Config
from slime_retool.trainer.actor import Actor
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.batching import split_steps
from slime_retool.trainer.packing import TokenData


@dataclass(slots=True)
class Prepared:
    """A rollout, ready for its optimizer steps."""

    batch: TrainBatch
    steps: list[range]
    """The samples of each optimizer step."""
    data: TokenData
    metrics: dict[str, float] = field(default_factory=dict)


def weigh(config: Config, batch: TrainBatch) -> Prepared:
    """The optimizer steps of a rollout, and the loss's denominators."""
    steps = split_steps(batch.num_samples, config.steps_per_rollout)
    step_of = torch.arange(len(steps)).repeat_interleave(torch.tensor([len(step) for step in steps]))
    weights = token_weights(
        batch.segments,
        step_of,
        per_token=config.calculate_per_token_loss,
        constant_length=config.loss_constant_length,
    )
    return Prepared(batch, steps, TokenData(weights=weights))


def prepare(actor: Actor, batch: TrainBatch, values: Tensor | None) -> Prepared:
    """All that the actor's loss reads, and the returns for the critic's. Collective.

    `values` [N] are the critic's. Raises ValueError for rewards, log-probs or values that cannot be trained on.
    """
    config = actor.config
    prepared = weigh(config, batch)
    if config.loss_type == "sft_loss":
        return prepared
    segments, data = batch.segments, prepared.data
    _require_log_probs(config, batch)
    # Where neither a later step nor the advantages need them, the old log-probs come with the forward itself.
    if config.use_rollout_logprobs:
        data.old_log_probs = batch.rollout_log_probs
    elif len(prepared.steps) > 1 or config.use_tis or config.kl_coef != 0:
        data.old_log_probs = actor.log_probs(batch)
        if batch.rollout_log_probs is not None:
            prepared.metrics |= mismatch(segments, data.old_log_probs, batch.rollout_log_probs)
    if actor.needs_reference:
        data.ref_log_probs = actor.reference_log_probs(batch)
    if config.distill_coef != 0:
        data.teacher_log_probs = batch.teacher_log_probs
    kl = None
    if config.kl_coef != 0:
        assert data.old_log_probs is not None and data.ref_log_probs is not None
        kl = kl_estimate(data.old_log_probs, data.ref_log_probs, config.kl_loss_type)
        prepared.metrics["train/kl"] = float(segments.select(kl).mean()) if segments.num_learned else 0.0
    result = compute_advantages(
        config.advantage_estimator,
        segments,
        batch.rewards,
        batch.groups,
        kl=kl,
        kl_coef=config.kl_coef,
        values=values,
        gamma=config.gamma,
        lam=config.lambd,
        normalize_std=not config.disable_grpo_std_normalization,
        whiten=config.normalize_advantages,
    )
    prepared.metrics |= _spread_of("advantage", segments, result.advantages)
    data.advantages, data.returns = result.advantages, result.returns
    if config.use_tis:
        assert data.old_log_probs is not None and batch.rollout_log_probs is not None
        importance, figures = importance_weights(
            segments,
            data.old_log_probs,
            batch.rollout_log_probs,
            level=config.tis_level,
            mode=config.tis_mode,
            low=config.tis_clip_low,
            high=config.tis_clip,
        )
        data.advantages = data.advantages * importance
        prepared.metrics |= figures
    return prepared


def mismatch(segments: Segments, train_log_probs: Tensor, rollout_log_probs: Tensor) -> dict[str, float]:
    """How far the trainer's log-probs [N] are from the engine's, under the same weights."""
    figures = mismatch_metrics(segments, train_log_probs, rollout_log_probs, segments.turn_of())
    return figures | {"train/logprob_abs_diff": figures["mismatch/abs_diff"]}


def mismatch_of_first_step(prepared: Prepared, log_probs: Tensor) -> dict[str, float]:
    """`mismatch` of the samples of the first optimizer step, whose forward gave `log_probs` [N]."""
    batch, count = prepared.batch, len(prepared.steps[0])
    assert batch.rollout_log_probs is not None
    tokens = int(batch.lengths[:count].sum())
    segments = Segments(batch.lengths[:count], batch.mask[:tokens])
    return mismatch(segments, log_probs[:tokens], batch.rollout_log_probs[:tokens])


def _require_log_probs(config: Config, batch: TrainBatch) -> None:
    for flag, wanted, present in (
        ("--use-rollout-logprobs", config.use_rollout_logprobs, batch.rollout_log_probs),
        ("--use-tis", config.use_tis, batch.rollout_log_probs),
        ("--distill-coef", config.distill_coef != 0, batch.teacher_log_probs),
    ):
        if wanted and present is None:
            whose = "a teacher's" if flag == "--distill-coef" else "the engine's"
            raise ValueError(f"{flag} needs {whose} log-probs, but not every sample of the rollout has them")


def _spread_of(name: str, segments: Segments, values: Tensor) -> dict[str, float]:
    """Mean, deviation and extremes over learned tokens."""
    chosen = segments.select(values)
    if not len(chosen):
        return {}
    return {
        f"train/{name}_mean": float(chosen.mean()),
        f"train/{name}_std": float(chosen.std(correction=0)),
        f"train/{name}_min": float(chosen.min()),
        f"train/{name}_max": float(chosen.max()),
    }
