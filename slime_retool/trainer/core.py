"""The trainer: one object in each training process, all of them called with the same arguments.

    trainer = Trainer(config, rank=rank, world_size=n, local_rank=0, init_method="tcp://127.0.0.1:29500")
    rollout_id, extra = trainer.load()
    metrics = trainer.train(batch, rollout_id)
    trainer.save(rollout_id, {"data": ...})
    trainer.shutdown()

Every rank gets the whole batch and computes the same schedule, so nothing is scattered. Token weights hold the
loss's denominator before the forward (`algo.losses.token_weights`); gradients are summed over micro-batches,
data- and context-parallel ranks and divided by nothing.

PPO's critic lives in the same processes (`roles` "all"), or in a group of its own: then the actor's processes have
`roles` "actor", the critic's "critic", and the caller carries values and returns between them:

    values = critic.values(batch)
    returns = actor.prepare(batch, rollout_id, values)
    actor.optimize(rollout_id)                           # these two at once
    critic.train_critic(batch, rollout_id, values, returns)
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.checkpoint import checkpoint_name
from slime_retool.algo.advantages import explained_variance
from slime_retool.config import Config
from slime_retool.errors import ConfigError
from slime_retool.trainer import parallel
from slime_retool.trainer.actor import Actor
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.checkpoint_writer import CheckpointWriter, retire
from slime_retool.trainer.critic import Critic
from slime_retool.trainer.dump import dump_trained
from slime_retool.trainer.prepare import Prepared, mismatch_of_first_step, prepare, weigh
from slime_retool.trainer.report import memory_metrics, speed_metrics
from slime_retool.trainer.role import ModelRole, StepResult
from slime_retool.trainer.timeline import Timeline
from slime_retool.types import RolloutBatch, TrainSample

ROLES = ("all", "actor", "critic")
WRITE_TIMEOUT = timedelta(hours=1)
"""The slowest rank's disk may take this long for a checkpoint."""


class Trainer:
    """The models of one process, and what a rollout does to them."""

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        init_method: str,
        roles: str = "all",
    ) -> None:
        """Join the process group, build the models with random weights; call `load` next.

        `init_method` is torch.distributed's: where the ranks meet. `roles` is one of `ROLES`. Where torch.distributed
        is already initialised, that group is used and left alone by `shutdown`. Raises ConfigError for sizes that
        cannot be built.
        """
        assert roles in ROLES, roles
        if config.on_cuda and not config.optimizer_cpu_offload:
            # A batch's CPU tensors are small: waking other threads costs more than their help (70 ms instead of 5 for
            # the advantages of 60,000 tokens on a host of 16 cores), and the GPU waits meanwhile.
            torch.set_num_threads(1)
        self.config = config
        self._owns_group = parallel.init_distributed(
            config, rank=rank, world_size=world_size, local_rank=local_rank, init_method=init_method
        )
        parallel.init_parallel_groups(config)
        parallel.seed_everything(config.seed)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", local_rank) if config.on_cuda else torch.device("cpu")
        if config.in_bf16 and not config.on_cuda:
            raise ConfigError("--precision bf16 needs a GPU: the CPU trains in fp32; use --precision auto")
        dtype = torch.bfloat16 if config.in_bf16 else torch.float32
        self.timeline = Timeline(self.device)
        self._actor = Actor(config, self.timeline, dtype=dtype) if roles != "critic" else None
        wants_critic = roles == "critic" or (roles == "all" and config.uses_critic)
        self._critic = Critic(config, self.timeline, dtype=dtype) if wants_critic else None
        self.writer = CheckpointWriter(pinned=config.on_cuda, timeout=WRITE_TIMEOUT)
        self._prepared: Prepared | None = None
        self._prepare_seconds = self._values_seconds = 0.0

    @property
    def actor(self) -> Actor:
        assert self._actor is not None, "these are the critic's processes"
        return self._actor

    @property
    def critic(self) -> Critic:
        assert self._critic is not None, "there is no critic here"
        return self._critic

    @property
    def roles(self) -> list[ModelRole]:
        """The models that live here."""
        return [role for role in (self._actor, self._critic) if role is not None]

    @property
    def module(self) -> Any:
        """The actor's bare GPTModel (this rank's part)."""
        return self.actor.module

    # Training

    def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
        """Optimize on one rollout; returns metrics, the same on every rank.

        Samples are taken in order in `config.steps_per_rollout` optimizer steps (fewer if there are fewer samples).
        Raises ValueError for an empty batch, or one without what the loss needs.
        """
        if self._critic is None:
            self.prepare(batch, rollout_id)
            return self.optimize(rollout_id)
        values = self.values(batch)
        returns = self.prepare(batch, rollout_id, values)
        assert returns is not None
        # Both need only what `prepare` has left, so their order does not matter.
        metrics = self.optimize(rollout_id) | self.train_critic(batch, rollout_id, values, returns)
        # The critic's part counts as well.
        return metrics | {name: max(value, metrics[name]) for name, value in memory_metrics(self.device).items()}

    def values(self, batch: RolloutBatch) -> Tensor:
        """The critic's value of every token [N], on every rank."""
        with self.timeline.span("values") as span:
            values = self.critic.values(TrainBatch.from_samples(batch.samples))
        self._values_seconds = span["seconds"]
        return values

    def prepare(self, batch: RolloutBatch, rollout_id: int, values: Tensor | None = None) -> Tensor | None:
        """Compute log-probs and advantages; with `values`, returns the critic's targets [N]. `optimize` comes next."""
        if not batch.samples:
            raise ValueError(f"rollout {rollout_id} has no samples to train on; look at its filters and failures")
        with self.timeline.span("log_probs") as span:
            self._prepared = prepare(self.actor, TrainBatch.from_samples(batch.samples), values)
        self._prepare_seconds = span["seconds"]
        return self._prepared.returns

    def optimize(self, rollout_id: int) -> dict[str, float]:
        """The actor's optimizer steps on what was prepared (none in the critic's warm-up). Returns metrics."""
        prepared, config = self._prepared, self.config
        assert prepared is not None, "prepare comes first"
        self._prepared = None
        metrics = dict(prepared.metrics)
        batch = prepared.batch
        metrics["train/tokens"] = float(batch.num_tokens)
        metrics["train/loss_tokens"] = float(batch.segments.num_learned)
        seconds = [self._values_seconds, self._prepare_seconds, 0.0]
        log_probs = prepared.data.columns["old_log_probs"] if config.recomputes_log_probs else None
        if rollout_id >= config.policy_starts_at:
            compares = (
                not config.loss.supervised
                and batch.rollout_log_probs is not None
                and "train/logprob_abs_diff" not in metrics
            )
            with self.timeline.span("train") as span:
                results = _steps(self.actor, prepared, first_per_token=compares)
            seconds[2] = span["seconds"]
            if compares:
                assert results[0].per_token is not None
                metrics |= mismatch_of_first_step(prepared, results[0].per_token)
                log_probs = results[0].per_token if len(results) == 1 else None
            # Of the pass whose log-probs are compared with the engine's: that of `prepare`, or the first step's.
            metrics = results[0].replay | metrics | _averages("train", results)
        if self.rank == 0 and config.dumps(rollout_id) and not config.loss.supervised:
            path = config.dump_path("trained", rollout_id)
            dump_trained(path, batch, log_probs, prepared.data.columns["advantages"])
        total = torch.tensor(seconds, dtype=torch.float32, device=self.device)
        dist.all_reduce(total, dist.ReduceOp.MAX)
        values_seconds, prepare_seconds, metrics["perf/train_seconds"] = total.tolist()
        metrics["perf/log_probs_seconds"] = values_seconds + prepare_seconds
        if seconds[2]:
            metrics |= speed_metrics(config, batch, metrics["perf/train_seconds"], self.device)
        return metrics | memory_metrics(self.device)

    def train_critic(self, batch: RolloutBatch, rollout_id: int, values: Tensor, returns: Tensor) -> dict[str, float]:
        """The critic's optimizer steps towards `returns` [N]; `values` [N] are those it gave before."""
        prepared = weigh(self.config, TrainBatch.from_samples(batch.samples))
        segments = prepared.batch.segments
        prepared.data.columns |= {"old_values": values, "returns": returns}
        with self.timeline.span("train critic") as span:
            results = _steps(self.critic, prepared)
        metrics = _averages("critic", results) | {"perf/critic_seconds": span["seconds"]}
        if self._actor is None:  # in its processes `optimize` has them
            metrics["perf/log_probs_seconds"] = self._values_seconds
        metrics["critic/explained_variance"] = explained_variance(segments, values, returns)
        if segments.num_learned:
            metrics["critic/value_mean"] = float(segments.select(values).mean())
            metrics["critic/return_mean"] = float(segments.select(returns).mean())
        return metrics

    def log_probs(self, samples: Sequence[TrainSample]) -> Tensor:
        """The actor's log-prob of every learned token of the samples, laid end to end: [N] fp32, on every rank."""
        return self.actor.log_probs(TrainBatch.from_samples(samples))

    # Checkpoints

    def save(self, rollout_id: int, extra: dict[str, Any], *, background: bool = False) -> None:
        """Write iter_{rollout_id} of every model here; `extra` is JSON-able and comes back from `load`.

        With `background` it returns as soon as the state is copied to host memory; `finish_save` comes before the next
        one. Raises SaveError when the disk does not take it.
        """
        self.writer.copies.clear()
        counterpart = None
        if self._critic is None and self.config.uses_critic:
            # The critic's processes write theirs beside us: a checkpoint of the actor never lacks the critic's.
            critic_save = self.config.of_critic().save
            assert critic_save is not None
            counterpart = Path(critic_save) / checkpoint_name(rollout_id)
        if self._actor is None and self.rank == 0:
            # The actor's processes wait for our folder, and begin after this call: one of an earlier try is not it.
            assert self.critic.config.save is not None
            retire(self.critic.config.save, rollout_id)
        # The critic first, for the same reason.
        staged = [
            role.stage(rollout_id, extra, self.writer.copies, counterpart if role is self._actor else None)
            for role in reversed(self.roles)
        ]
        self.writer.write(staged, background=background)

    def finish_save(self, wait: bool = True) -> float | None:
        """Seconds that the last save in the background took to write; None where there is none.

        Without `wait` also None while it goes on. Raises SaveError when it failed.
        """
        return self.writer.finish(wait=wait)

    def load(self, iteration: int | None = None) -> tuple[int, dict[str, Any]]:
        """Resume every model here, from the newest checkpoint or that of rollout `iteration`, or take first weights.

        Returns (next rollout id, the `extra` of `save`); (0, {}) for a fresh start. CheckpointError for a missing,
        incomplete or other model's checkpoint; ConfigError when no folder with weights was given.
        """
        states = [role.load(iteration) for role in self.roles]
        if self.config.on_cuda and self.config.save is not None and not self.config.no_async_save:
            # Page-locked beside the first rollout, or the first save would wait for it.
            self.writer.copies.reserve([size for role in reversed(self.roles) for size in role.sizes_to_save])
        state = states[0]
        return (0, {}) if state is None else (state.rollout_id + 1, state.extra)

    def shutdown(self) -> None:
        """Leave all process groups, unless a save is still being written over one of them: it ends with the process."""
        if not self.writer.busy:
            self.writer.close()
            parallel.destroy(self._owns_group)


def _steps(role: ModelRole, prepared: Prepared, *, first_per_token: bool = False) -> list[StepResult]:
    results = [
        role.optimize(prepared.batch, step, prepared.data, with_per_token=first_per_token and index == 0)
        for index, step in enumerate(prepared.steps)
    ]
    role.settle()
    return results


def _averages(prefix: str, results: list[StepResult]) -> dict[str, float]:
    """Means over optimizer steps of what they report, under names that begin with `prefix`."""
    metrics = {
        f"{prefix}/{name}": sum(result.metrics[name] for result in results) / len(results)
        for name in results[0].metrics
    }
    metrics[f"{prefix}/lr"] = results[-1].metrics["lr"]
    metrics[f"{prefix}/skipped_steps"] = sum(result.metrics["skipped_steps"] for result in results)
    metrics[f"{prefix}/steps"] = float(len(results))
    metrics[f"{prefix}/micro_batches"] = float(sum(result.num_micro_batches for result in results))
    return metrics
