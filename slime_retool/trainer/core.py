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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.cpu_compat import install_cpu_compat
from megatron_bridge.model import build_gpt_model, output_weight, packed_seq_params, transformer_config
from slime_retool.algo import losses
from slime_retool.algo.log_probs import linear_log_probs
from slime_retool.config import Config
from slime_retool.errors import ConfigError
from slime_retool.trainer import checkpoint, parallel
from slime_retool.trainer.batching import MicroBatch, schedule, split_steps
from slime_retool.trainer.optimizer import build_optimizer, build_scheduler, current_lr, optimizer_step
from slime_retool.trainer.packing import PackedBatch, pack
from slime_retool.types import RolloutBatch, TrainSample

LogProbs = list[list[float]]
"""One list per sample, one value per token; the first token of a sample has 0.0."""

LOSS_METRICS = ("loss", "pg_loss", "clip_fraction", "ppo_kl", "kl_loss", "entropy", "logprob_abs_diff")
"""What a micro-batch reports, as one tensor of weighted sums in this order."""


@dataclass(slots=True)
class StepResult:
    """One optimizer step."""

    metrics: dict[str, float]
    num_micro_batches: int


class Trainer:
    """Model, optimizer and schedule of one process, on its share of the parallel layout."""

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
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self._build()
        self.reference: dict[str, Tensor] | None = None

    def _build(self) -> None:
        from megatron.core import parallel_state as mpu
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.pipeline_parallel import get_forward_backward_func

        config = self.config
        try:
            self.model_config = transformer_config(
                config,
                tp=config.tensor_model_parallel_size,
                pp=config.pipeline_model_parallel_size,
                cp=config.context_parallel_size,
                sequence_parallel=config.sequence_parallel,
                dtype=self.dtype,
                decoder_first_pipeline_num_layers=config.decoder_first_pipeline_num_layers,
                decoder_last_pipeline_num_layers=config.decoder_last_pipeline_num_layers,
                recompute_granularity=config.recompute_granularity,
                recompute_method=config.recompute_method,
                recompute_num_layers=config.recompute_num_layers,
                recompute_modules=config.recompute_modules,
                transformer_impl=config.transformer_impl,
                # Token weights hold the denominator, so Megatron must sum micro-batches and replicas, not average.
                calculate_per_token_loss=True,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.tp_group = mpu.get_tensor_model_parallel_group()
        self.tp_rank, self.tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        self.dp_rank, self.dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.is_first_stage, self.is_last_stage = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        module = build_gpt_model(
            config,
            self.model_config,
            pre_process=self.is_first_stage,
            post_process=self.is_last_stage,
            transformer_impl=config.transformer_impl,
            output="hidden",
            gradient_accumulation_fusion=config.gradient_accumulation_fusion,
        ).to(self.device)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.accumulate_allreduce_grads_in_fp32,
            # Megatron's sharded optimizer takes CUDA tensors only; on the CPU every replica keeps all of it.
            use_distributed_optimizer=config.use_distributed_optimizer and config.on_cuda,
            overlap_grad_reduce=config.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather,
        )
        self.model = DistributedDataParallel(config=self.model_config, ddp_config=ddp_config, module=module)
        self.optimizer = build_optimizer(config, self.model, self.dtype)
        self.scheduler = build_scheduler(config, self.optimizer)
        self.model_config.no_sync_func = self.model.no_sync

        def finalize(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
            finalize_model_grads(model, None, **kwargs)

        self.model_config.finalize_model_grads_func = finalize
        self._forward_backward = get_forward_backward_func()

    @property
    def module(self) -> Any:
        """The bare GPTModel (this rank's part)."""
        return self.model.module

    @property
    def _vocab_size(self) -> int:
        assert self.config.vocab_size is not None, "transformer_config refuses a model without it"
        return self.config.vocab_size

    # Training

    def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
        """Optimize on one rollout; returns metrics, the same on every rank.

        Samples are taken in order in `config.steps_per_rollout` optimizer steps (fewer if there are fewer samples).
        Raises ValueError for an empty batch, or one without what the loss needs.
        """
        config, samples = self.config, batch.samples
        self._check_samples(samples, rollout_id)
        start = time.perf_counter()
        steps = split_steps(len(samples), config.steps_per_rollout)
        old: LogProbs | None = None
        ref: LogProbs | None = None
        if config.loss_type == "policy_loss":
            if config.use_rollout_logprobs:
                old = [sample.rollout_log_probs or [] for sample in samples]
            elif len(steps) > 1:
                # With one step the old policy is the current one, and its log-probs come with the forward itself.
                old = self.log_probs(samples)
            if config.use_kl_loss:
                ref = self.reference_log_probs(samples)
        prepared = time.perf_counter()
        results = [self._train_step(samples, step, old, ref) for step in steps]
        if config.overlap_param_gather:
            # The next forward would gather them; whoever reads weights before that needs them now.
            self.model.start_param_sync(force_sync=True)
        end = time.perf_counter()
        metrics = {f"train/{k}": sum(r.metrics[k] for r in results) / len(results) for k in results[0].metrics}
        if config.use_rollout_logprobs and "train/logprob_abs_diff" in metrics:
            # Later steps compare weights that the engine never had.
            metrics["train/logprob_abs_diff"] = results[0].metrics["logprob_abs_diff"]
        metrics["train/lr"] = results[-1].metrics["lr"]
        metrics["train/skipped_steps"] = sum(r.metrics["skipped_steps"] for r in results)
        metrics["train/steps"] = float(len(steps))
        metrics["train/micro_batches"] = float(sum(r.num_micro_batches for r in results))
        metrics["train/tokens"] = float(sum(sample.length for sample in samples))
        metrics["train/loss_tokens"] = float(sum(sample.num_loss_tokens for sample in samples))
        seconds = self._all_reduce(
            torch.tensor([prepared - start, end - prepared], dtype=torch.float32, device=self.device),
            dist.ReduceOp.MAX,
        ).tolist()
        metrics["perf/log_probs_seconds"], metrics["perf/train_seconds"] = seconds
        metrics["perf/train_tokens_per_second"] = metrics["train/tokens"] / max(seconds[1], 1e-9)
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

    def _train_step(
        self, samples: Sequence[TrainSample], step: range, old: LogProbs | None, ref: LogProbs | None
    ) -> StepResult:
        """One optimizer step on the samples `step`."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        chosen = samples[step.start : step.stop]
        total_tokens = sum(sample.num_loss_tokens for sample in chosen)
        weights = losses.token_weights(
            [sample.loss_mask for sample in chosen],
            per_token=self.config.calculate_per_token_loss,
            total_tokens=total_tokens,
            num_samples=len(chosen),
        )
        micro_batches = self._schedule(chosen)
        packed = [
            pack(
                chosen,
                indices,
                weights=weights,
                total_tokens=total_tokens,
                old_log_probs=None if old is None else old[step.start : step.stop],
                ref_log_probs=None if ref is None else ref[step.start : step.stop],
                multiple=self._multiple,
                device=self.device,
            )
            for indices in micro_batches
        ]
        lr = current_lr(self.optimizer)
        sums = self._run(packed, self._loss)
        total = torch.stack(sums).sum(0) if sums else torch.zeros(len(LOSS_METRICS), device=self.device)
        # Every tensor-parallel rank of a last stage holds the same sums: one of them speaks.
        if self.tp_rank != 0:
            total = torch.zeros_like(total)
        values = self._all_reduce(total, dist.ReduceOp.SUM).tolist()
        norm, updated = optimizer_step(self.optimizer, self.scheduler, self.config.clip_grad)
        metrics = dict(zip(LOSS_METRICS, values, strict=True))
        for name in self._unused_metrics(chosen):
            del metrics[name]
        metrics |= {"grad_norm": norm, "lr": lr, "skipped_steps": float(not updated)}
        return StepResult(metrics, len(micro_batches))

    def _unused_metrics(self, samples: Sequence[TrainSample]) -> set[str]:
        unused = set()
        if self.config.loss_type == "sft_loss":
            unused |= {"pg_loss", "clip_fraction", "ppo_kl"}
        if self.config.loss_type == "sft_loss" or not self.config.use_kl_loss:
            unused.add("kl_loss")
        if any(sample.rollout_log_probs is None for sample in samples):
            unused.add("logprob_abs_diff")
        return unused

    def _loss(self, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss of one micro-batch from hidden states [1, T, H]; Megatron wants (loss, token count, what to report)."""
        config = self.config
        sft = config.loss_type == "sft_loss"
        log_probs, entropy = self._log_probs_of(batch, hidden, with_entropy=True)
        metrics: losses.Metrics = {}
        if sft:
            loss, more = losses.sft_loss(log_probs, batch.weights)
        else:
            old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
            loss, more = losses.policy_loss(
                log_probs,
                old,
                batch.advantages,
                batch.weights,
                eps_clip=config.eps_clip,
                eps_clip_high=config.eps_clip_high,
                eps_clip_c=config.eps_clip_c,
            )
            if batch.ref_log_probs is not None:
                kl, kl_metrics = losses.kl_loss(log_probs, batch.ref_log_probs, batch.weights, config.kl_loss_type)
                loss = loss + config.kl_loss_coef * kl
                metrics |= kl_metrics
        metrics |= more
        bonus, entropy_metrics = losses.entropy_bonus(entropy, batch.weights)
        metrics |= entropy_metrics
        if not sft and config.entropy_coef != 0:
            loss = loss - config.entropy_coef * bonus
        if batch.rollout_log_probs is not None:
            # The engine sampled from the weights before the first step, which the old log-probs belong to.
            same_weights = log_probs
            if batch.old_log_probs is not None and not config.use_rollout_logprobs:
                same_weights = batch.old_log_probs
            metrics |= losses.log_prob_abs_diff(same_weights, batch.rollout_log_probs, batch.token_mean)
        metrics["loss"] = loss.detach()
        zero = loss.new_zeros(())
        report = torch.stack([metrics.get(name, zero) for name in LOSS_METRICS])
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), report

    # Log-probs

    def log_probs(self, samples: Sequence[TrainSample]) -> LogProbs:
        """Log-prob of every learned token given those before it, at the rollout temperature; others 0."""
        packed = [pack(samples, i, multiple=self._multiple, device=self.device) for i in self._schedule(samples)]
        with torch.no_grad():
            per_micro_batch = self._run(packed, self._report_log_probs, forward_only=True)
        offsets = [0]
        for sample in samples:
            offsets.append(offsets[-1] + sample.length)
        # Each value is computed by one last stage; the others add zeros, which is exact.
        flat = torch.zeros(offsets[-1], dtype=torch.float32, device=self.device)
        if self.tp_rank == 0:
            for batch, values in zip(packed, per_micro_batch, strict=False):
                for index, row in zip(batch.indices, batch.split(values.tolist()), strict=True):
                    flat[offsets[index] : offsets[index + 1]] = torch.tensor(row, device=self.device)
        everything = self._all_reduce(flat, dist.ReduceOp.SUM).tolist()
        return [everything[begin:end] for begin, end in zip(offsets[:-1], offsets[1:], strict=True)]

    def reference_log_probs(self, samples: Sequence[TrainSample]) -> LogProbs:
        """`log_probs` under the frozen reference model, whose weights take the model's place for this long."""
        if self.reference is None:
            raise ConfigError("--use-kl-loss needs the reference model: give --ref-load")
        actor = checkpoint.copy_weights(self.module, pinned=self.config.on_cuda)
        checkpoint.set_weights(self.module, self.reference)
        try:
            return self.log_probs(samples)
        finally:
            checkpoint.set_weights(self.module, actor)

    def _report_log_probs(self, batch: PackedBatch, hidden: Tensor, non_loss_data: bool = True) -> Tensor:
        return self._log_probs_of(batch, hidden, with_entropy=False)[0]

    def _log_probs_of(self, batch: PackedBatch, hidden: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [T] from hidden states [1, T, H] at the learned positions; 0 elsewhere."""
        temperature = self.config.rollout_temperature if self.config.loss_type == "policy_loss" else 1.0
        return linear_log_probs(
            hidden[0],
            output_weight(self.module),
            batch.targets,
            vocab_size=self._vocab_size,
            positions=batch.learned,
            temperature=temperature,
            with_entropy=with_entropy,
            tp_group=self.tp_group,
            sequence_parallel=self.model_config.sequence_parallel,
        )

    # Micro-batches

    @property
    def _multiple(self) -> int:
        return self.tp_size if self.model_config.sequence_parallel else 1

    def _schedule(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches."""
        lengths = [sample.length for sample in samples]
        if self.config.use_dynamic_batch_size:
            if self.config.max_tokens_per_gpu is None:
                raise ConfigError("--use-dynamic-batch-size needs --max-tokens-per-gpu")
            return schedule(lengths, self.dp_size, max_tokens=self.config.max_tokens_per_gpu)[self.dp_rank]
        return schedule(lengths, self.dp_size, samples_per_micro_batch=self.config.micro_batch_size)[self.dp_rank]

    def _run(self, packed: list[PackedBatch], on_output: Any, *, forward_only: bool = False) -> list[Any]:
        """Forward (and backward) all micro-batches; on a last stage, what `on_output(batch, hidden)` reports."""

        def forward(batches: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
            batch = next(batches)
            output = model(
                batch.tokens,
                batch.position_ids,
                attention_mask=None,
                packed_seq_params=packed_seq_params(batch.lengths, self.device),
            )
            return output, partial(on_output, batch)

        return self._forward_backward(
            forward_step_func=forward,
            data_iterator=iter(packed),
            model=[self.model],
            num_microbatches=len(packed),
            seq_length=self._multiple,  # not read: stages tell each other the shapes (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        dist.all_reduce(tensor, op=op)
        return tensor

    # Checkpoints

    def save(self, rollout_id: int, extra: dict[str, Any]) -> None:
        """Write `--save`/iter_{rollout_id}; `extra` is JSON-able and comes back from `load`."""
        if self.config.save is None:
            raise ConfigError("saving needs a folder: give --save")
        checkpoint.save(
            self.config.save,
            rollout_id,
            module=self.module,
            optimizer=None if self.config.no_save_optim else self.optimizer,
            scheduler_steps=self.scheduler.num_steps,
            extra=extra,
        )

    def load(self) -> tuple[int, dict[str, Any]]:
        """Resume from --load, else start from the weights in --ref-load.

        Returns (next rollout id, the `extra` of `save`); (0, {}) for a fresh start. Also reads the reference model
        when --use-kl-loss is on. CheckpointError for a missing, incomplete or other model's checkpoint;
        ConfigError when neither folder was given.
        """
        config = self.config
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
            checkpoint.load_weights(config.ref_load, module=self.module, vocab_size=self._vocab_size)
            if wants_reference:
                self.reference = checkpoint.copy_weights(self.module, pinned=config.on_cuda)
        if not resume:
            self.optimizer.reload_model_params()
            return 0, {}
        assert config.load is not None
        state = checkpoint.load(config.load, module=self.module, optimizer=self.optimizer, vocab_size=self._vocab_size)
        if not state.with_optimizer:
            self.optimizer.reload_model_params()
        self.scheduler.num_steps = state.scheduler_steps
        self.scheduler.step(0)
        return state.rollout_id + 1, state.extra

    def shutdown(self) -> None:
        """Leave all process groups."""
        parallel.destroy(self._owns_group)
