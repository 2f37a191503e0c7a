"""The trainer: one object in each training process, all of them called with the same arguments.

    trainer = Trainer(config, rank=rank, world_size=n, local_rank=0, master_addr="127.0.0.1", master_port=29500)
    rollout_id, extra = trainer.load()
    metrics = trainer.train(batch, rollout_id)
    trainer.save(rollout_id, {"data": ...})
    trainer.shutdown()

Every rank gets the whole batch and computes the same schedule, so nothing is scattered. Token weights hold the
loss's denominator before the forward (`algo.losses.token_weights`); gradients are summed over micro-batches and
data-parallel ranks and divided by nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.cpu_compat import install_cpu_compat
from slime_retool.algo import losses
from slime_retool.algo.advantages import grpo_advantages
from slime_retool.config import Config
from slime_retool.errors import ConfigError
from slime_retool.trainer import checkpoint, parallel
from slime_retool.trainer.actor import Actor
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.batching import split_steps
from slime_retool.trainer.packing import TokenData
from slime_retool.types import RolloutBatch, TrainSample


class Trainer:
    """The models of one process, and what a rollout does to them."""

    def __init__(
        self, config: Config, *, rank: int, world_size: int, local_rank: int, master_addr: str, master_port: int
    ) -> None:
        """Join the process group, build the model with random weights; call `load` next.

        Where torch.distributed is already initialised, that group is used and left alone by `shutdown`.
        Raises ConfigError for sizes that cannot be built.
        """
        install_cpu_compat()
        self.config = config
        self._owns_group = parallel.init_distributed(
            config, rank=rank, world_size=world_size, local_rank=local_rank, master_addr=master_addr,
            master_port=master_port,
        )  # fmt: skip
        parallel.init_parallel_groups(config)
        parallel.seed_everything(config.seed)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", local_rank) if config.on_cuda else torch.device("cpu")
        bf16 = config.precision == "bf16" or (config.precision == "auto" and config.on_cuda)
        if bf16 and not config.on_cuda:
            raise ConfigError("--precision bf16 needs a GPU: the CPU trains in fp32; use --precision auto")
        dtype = torch.bfloat16 if bf16 else torch.float32
        self.actor = Actor(config, device=self.device, dtype=dtype)

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
        config, samples = self.config, batch.samples
        self._check_samples(samples, rollout_id)
        start = time.perf_counter()
        data = TrainBatch.from_samples(samples)
        steps = split_steps(data.num_samples, config.steps_per_rollout)
        tokens = self._token_data(data, samples, steps)
        prepared = time.perf_counter()
        results = [self.actor.optimize(data, step, tokens) for step in steps]
        end = time.perf_counter()
        unused = self._unused_metrics(tokens)
        metrics = {
            f"train/{name}": sum(r.metrics[name] for r in results) / len(results)
            for name in results[0].metrics
            if name not in unused
        }
        if config.use_rollout_logprobs and "train/logprob_abs_diff" in metrics:
            # Later steps compare weights that the engine never had.
            metrics["train/logprob_abs_diff"] = results[0].metrics["logprob_abs_diff"]
        metrics["train/lr"] = results[-1].metrics["lr"]
        metrics["train/skipped_steps"] = sum(r.metrics["skipped_steps"] for r in results)
        metrics["train/steps"] = float(len(steps))
        metrics["train/micro_batches"] = float(sum(r.num_micro_batches for r in results))
        metrics["train/tokens"] = float(data.num_tokens)
        metrics["train/loss_tokens"] = float(data.num_loss_tokens)
        seconds = torch.tensor([prepared - start, end - prepared], dtype=torch.float32, device=self.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        metrics["perf/log_probs_seconds"], metrics["perf/train_seconds"] = seconds.tolist()
        metrics["perf/train_tokens_per_second"] = metrics["train/tokens"] / max(float(seconds[1]), 1e-9)
        return metrics

    def _check_samples(self, samples: Sequence[TrainSample], rollout_id: int) -> None:
        if not samples:
            raise ValueError(f"rollout {rollout_id} has no samples to train on; look at its filters and failures")
        if self.config.loss_type == "policy_loss" and self.config.use_rollout_logprobs:
            missing = [sample.index for sample in samples if sample.rollout_log_probs is None]
            if missing:
                raise ValueError(
                    f"--use-rollout-logprobs needs the engine's log-probs, but samples {missing[:5]} have none"
                )

    def _token_data(self, batch: TrainBatch, samples: Sequence[TrainSample], steps: list[range]) -> TokenData:
        """Everything that the losses read, for the whole rollout."""
        config = self.config
        weights, token_mean = [], []
        for step in steps:
            masks = [sample.loss_mask for sample in samples[step.start : step.stop]]
            total = sum(map(sum, masks))
            for per_token, into in ((config.calculate_per_token_loss, weights), (True, token_mean)):
                rows = losses.token_weights(
                    masks, per_token=per_token, total_tokens=total, num_samples=sum(any(mask) for mask in masks)
                )
                into += [value for row in rows for value in row]
        data = TokenData(
            weights=torch.tensor(weights, dtype=torch.float32),
            token_mean=torch.tensor(token_mean, dtype=torch.float32),
            rollout_log_probs=batch.rollout_log_probs,
        )
        if config.loss_type == "policy_loss":
            if config.use_rollout_logprobs:
                data.old_log_probs = batch.rollout_log_probs
            elif len(steps) > 1:
                # With one step the old policy is the current one, and its log-probs come with the forward itself.
                data.old_log_probs = self.actor.log_probs(batch)
            if config.use_kl_loss:
                data.ref_log_probs = self.actor.reference_log_probs(batch)
            per_sample = grpo_advantages(
                batch.rewards.tolist(),
                batch.groups.tolist(),
                normalize_std=not config.disable_grpo_std_normalization,
            )
            data.advantages = torch.tensor(per_sample, dtype=torch.float32).repeat_interleave(batch.lengths)
        return data

    def _unused_metrics(self, data: TokenData) -> set[str]:
        unused = set()
        if self.config.loss_type == "sft_loss":
            unused |= {"pg_loss", "clip_fraction", "ppo_kl"}
        if data.ref_log_probs is None:
            unused.add("kl_loss")
        if data.rollout_log_probs is None:
            unused.add("logprob_abs_diff")
        return unused

    def log_probs(self, samples: Sequence[TrainSample]) -> Tensor:
        """The actor's log-prob of every token of the samples, laid end to end: [N] fp32, on every rank."""
        return self.actor.log_probs(TrainBatch.from_samples(samples))

    # Checkpoints

    def save(self, rollout_id: int, extra: dict[str, Any]) -> None:
        """Write `--save`/iter_{rollout_id}; `extra` is JSON-able and comes back from `load`."""
        if self.config.save is None:
            raise ConfigError("saving needs a folder: give --save")
        checkpoint.save(
            self.config.save,
            rollout_id,
            module=self.actor.module,
            optimizer=None if self.config.no_save_optim else self.actor.optimizer,
            scheduler_steps=self.actor.scheduler.num_steps,
            extra=extra,
        )

    def load(self) -> tuple[int, dict[str, Any]]:
        """Resume from --load, else start from the weights in --ref-load.

        Returns (next rollout id, the `extra` of `save`); (0, {}) for a fresh start. Also reads the reference model
        when --use-kl-loss is on. CheckpointError for a missing, incomplete or other model's checkpoint;
        ConfigError when neither folder was given.
        """
        config, actor = self.config, self.actor
        resume = config.load is not None and checkpoint.exists(config.load)
        wants_reference = config.use_kl_loss and config.loss_type == "policy_loss"
        if not resume and config.ref_load is None:
            raise ConfigError(
                f"no weights to start from: --load {config.load} holds no checkpoint and --ref-load is not given; "
                "convert one with tools/convert_hf_to_torch_dist.py and pass it as --ref-load"
            )
        if wants_reference and config.ref_load is None:
            raise ConfigError("--use-kl-loss needs the reference model: give --ref-load")
        if wants_reference or not resume:
            assert config.ref_load is not None
            checkpoint.load_weights(config.ref_load, module=actor.module, vocab_size=actor.vocab_size)
            if wants_reference:
                actor.reference = checkpoint.copy_weights(actor.module, pinned=config.on_cuda)
        if not resume:
            actor.optimizer.reload_model_params()
            return 0, {}
        assert config.load is not None
        state = checkpoint.load(
            config.load, module=actor.module, optimizer=actor.optimizer, vocab_size=actor.vocab_size
        )
        if not state.with_optimizer:
            actor.optimizer.reload_model_params()
        actor.scheduler.num_steps = state.scheduler_steps
        actor.scheduler.step(0)
        return state.rollout_id + 1, state.extra

    def shutdown(self) -> None:
        """Leave all process groups."""
        parallel.destroy(self._owns_group)
