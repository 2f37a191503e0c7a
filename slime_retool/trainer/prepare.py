"""From a rollout's samples to what the losses read: weights, log-probs, advantages, returns; and metrics of them.

Everything here is computed on the whole rollout, alike on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_retool.algo.advantages import AdvantageInputs, Advantages, compute_advantages
from slime_retool.algo.importance import importance_weights, mismatch_metrics
from slime_retool.algo.kl import kl_estimate
from slime_retool.algo.losses import token_weights
from slime_retool.algo.segments import Segments
from slime_retool.config import Config
from slime_retool.trainer.actor import Actor
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.batching import split_steps
from slime_retool.trainer.experts import check_experts
from slime_retool.trainer.packing import TokenData
from slime_retool.types import STALENESS


@dataclass(slots=True)
class Prepared:
    """A rollout, ready for its optimizer steps."""

    batch: TrainBatch
    steps: list[range]
    """The samples of each optimizer step."""
    data: TokenData
    returns: Tensor | None = None
    """[N] fp32, the targets of the values; None for an algorithm without values."""
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
    """All that the actor's loss reads, and the returns for the value model's. Collective.

    `values` [N] are the value model's. Raises ValueError for rewards, log-probs, values or experts that cannot be
    trained on.
    """
    config = actor.config
    if config.use_rollout_routing_replay:
        check_experts(batch, config)
    prepared = weigh(config, batch)
    columns, metrics = prepared.data.columns, prepared.metrics
    columns |= _columns_of_samples(config, batch)
    if config.loss.supervised:
        return prepared
    # Where neither a later step nor the advantages need them, the old log-probs come with the forward itself.
    if config.use_rollout_logprobs:
        columns["old_log_probs"] = _rollout_log_probs(batch, "--use-rollout-logprobs")
    elif config.recomputes_log_probs:
        columns["old_log_probs"] = actor.log_probs(batch)
        metrics |= actor.replay_metrics(batch, range(batch.num_samples))
        if batch.rollout_log_probs is not None:
            metrics |= mismatch(
                batch.segments, columns["old_log_probs"], batch.rollout_log_probs, batch.columns.get(STALENESS)
            )
    if config.needs_reference:
        columns["ref_log_probs"] = actor.reference_log_probs(batch)
    advantages = _advantages(config, prepared, values)
    metrics |= _spread_of_advantages(batch.segments, advantages.advantages)
    columns["advantages"], prepared.returns = advantages.advantages, advantages.returns
    if config.use_tis:
        importance, tis_metrics = importance_weights(
            batch.segments,
            columns["old_log_probs"],
            _rollout_log_probs(batch, "--use-tis"),
            level=config.tis_level,
            mode=config.tis_mode,
            low=config.tis_clip_low,
            high=config.tis_clip,
        )
        columns["advantages"] = columns["advantages"] * importance
        metrics |= tis_metrics
    return prepared


def _columns_of_samples(config: Config, batch: TrainBatch) -> dict[str, Tensor]:
    """What the run's losses need of the columns that came with the samples."""
    chosen = {}
    for term, _ in config.loss_terms:
        for name in term.needs:
            if name in batch.columns:
                chosen[name] = batch.columns[name]
            elif name == "rollout_log_probs":
                chosen[name] = _rollout_log_probs(batch, term.flag)
            elif name != "ref_log_probs":  # the trainer's own
                raise ValueError(f"{term.flag} needs the column {name}, but not every sample of the rollout has it")
    return chosen


def _rollout_log_probs(batch: TrainBatch, flag: str) -> Tensor:
    if batch.rollout_log_probs is None:
        raise ValueError(f"{flag} needs the engine's log-probs, but not every sample of the rollout has them")
    return batch.rollout_log_probs


def _advantages(config: Config, prepared: Prepared, values: Tensor | None) -> Advantages:
    batch, columns = prepared.batch, prepared.data.columns
    kl = None
    if config.kl_coef != 0:
        kl = kl_estimate(columns["old_log_probs"], columns["ref_log_probs"], config.kl_loss_type)
        learned = batch.segments.select(kl)
        prepared.metrics["train/kl"] = float(learned.mean()) if len(learned) else 0.0
    inputs = AdvantageInputs(
        batch.segments,
        batch.rewards,
        batch.groups,
        kl=kl,
        kl_coef=config.kl_coef,
        values=values,
        gamma=config.gamma,
        lam=config.lambd,
        normalize_std=not config.disable_grpo_std_normalization,
        args=config,
    )
    return compute_advantages(config.algorithm, inputs, whiten=config.normalize_advantages)


def mismatch(
    segments: Segments, train_log_probs: Tensor, rollout_log_probs: Tensor, staleness: Tensor | None = None
) -> dict[str, float]:
    """How far the trainer's log-probs [N] are from the engine's, under the same weights.

    With `staleness` [N] only tokens of the present weights are compared; `mismatch/stale_abs_diff` is that of the
    others, whose weights the trainer no longer has: how far the policy has moved as well.
    """
    turns, metrics = segments.turn_of(), {}
    if staleness is not None:
        stale = Segments(segments.lengths, segments.mask & (staleness > 0))
        segments = Segments(segments.lengths, segments.mask & (staleness == 0))
        older = mismatch_metrics(stale, train_log_probs, rollout_log_probs)
        metrics["mismatch/stale_abs_diff"] = older["mismatch/abs_diff"]
    metrics |= mismatch_metrics(segments, train_log_probs, rollout_log_probs, turns)
    return metrics | {"train/logprob_abs_diff": metrics["mismatch/abs_diff"]}


def mismatch_of_first_step(prepared: Prepared, log_probs: Tensor) -> dict[str, float]:
    """`mismatch` of the samples of the first optimizer step, whose forward gave `log_probs` [N]."""
    batch, count = prepared.batch, len(prepared.steps[0])
    assert batch.rollout_log_probs is not None
    tokens = int(batch.lengths[:count].sum())
    segments = Segments(batch.lengths[:count], batch.mask[:tokens])
    staleness = batch.columns.get(STALENESS)
    return mismatch(
        segments,
        log_probs[:tokens],
        batch.rollout_log_probs[:tokens],
        None if staleness is None else staleness[:tokens],
    )


def _spread_of_advantages(segments: Segments, advantages: Tensor) -> dict[str, float]:
    """Mean, deviation and extremes over learned tokens."""
    chosen = segments.select(advantages)
    if not len(chosen):
        return {}
    return {
        "train/advantage_mean": float(chosen.mean()),
        "train/advantage_std": float(chosen.std(correction=0)),
        "train/advantage_min": float(chosen.min()),
        "train/advantage_max": float(chosen.max()),
    }
