"""One trainable model of a run: module, data-parallel wrapper, optimizer, schedule; forward and backward over batches.

Several such roles may live in one process; they share Megatron's parallel groups.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.lora import add_adapters
from megatron_bridge.model import build_gpt_model, packed_seq_params
from megatron_bridge.model_config import moe_layers
from megatron_bridge.routing_replay import RoutingReplay
from megatron_bridge.transformer_config import transformer_config
from megatron_bridge.zigzag import padded_length
from slime_retool.algo.losses import TotalLoss
from slime_retool.config import Config
from slime_retool.errors import ConfigError
from slime_retool.trainer import checkpoint
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.batching import MicroBatch, schedule
from slime_retool.trainer.checkpoint_writer import Staged, stage
from slime_retool.trainer.experts import ExpertsPart
from slime_retool.trainer.host_copies import HostCopies
from slime_retool.trainer.optimizer import build_optimizer, build_scheduler, optimizer_step
from slime_retool.trainer.optimizer_state import optimizer_kind
from slime_retool.trainer.packing import PackedBatch, TokenData, pack, packed_tokens, packing_multiple, unpack
from slime_retool.trainer.timeline import Timeline

_REPORT_WIDTH = 8

PerToken = Callable[[PackedBatch, Tensor], Tensor]
"""(micro-batch, the model's output) -> one value per position [T]."""


@dataclass(slots=True)
class LossOutput:
    """One micro-batch's."""

    loss: Tensor  # scalar, to be summed over micro-batches, data- and context-parallel ranks
    metrics: dict[str, Tensor]
    """Weighted sums, to be summed like the loss, which is among them."""
    per_token: Tensor  # [T] fp32, detached: what the loss was computed from (log-probs, or values)


@dataclass(slots=True)
class StepResult:
    """One optimizer step."""

    metrics: dict[str, float]
    num_micro_batches: int
    per_token: Tensor | None
    """[N] fp32 on the CPU, where asked for: log-probs or values under the weights before the step."""
    replay: dict[str, float]
    """`ModelRole.replay_metrics` of its samples."""


class ModelRole(ABC):
    """Model and optimizer of one process, on its share of the parallel layout; methods are collective.

    Megatron's groups must exist. `config` is the run's as this role sees it (its own learning rate, folders, ...).
    """

    def __init__(self, config: Config, total_loss: TotalLoss, timeline: Timeline, *, dtype: torch.dtype) -> None:
        """Build everything, with random weights. Raises ConfigError for sizes that cannot be built."""
        from megatron.core import parallel_state as mpu
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config, self.total_loss, self.timeline, self.dtype = config, total_loss, timeline, dtype
        self.device = device = timeline.device
        self.tp_group = mpu.get_tensor_model_parallel_group()
        self.tp_rank, self.tp_size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        self.dp_rank, self.dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.cp_rank, self.cp_size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        self.cp_group = mpu.get_context_parallel_group() if self.cp_size > 1 else None
        try:
            self.model_config = transformer_config(
                config,
                tp=config.tensor_model_parallel_size,
                pp=config.pipeline_model_parallel_size,
                cp=config.context_parallel_size,
                ep=config.expert_model_parallel_size,
                etp=config.expert_tensor_parallel_size,
                sequence_parallel=config.sequence_parallel,
                dtype=dtype,
                decoder_first_pipeline_num_layers=config.decoder_first_pipeline_num_layers,
                decoder_last_pipeline_num_layers=config.decoder_last_pipeline_num_layers,
                transformer_impl=config.transformer_impl,
                recompute_granularity=None if config.recompute_granularity == "none" else config.recompute_granularity,
                recompute_method=config.recompute_method,
                recompute_num_layers=config.recompute_num_layers,
                recompute_modules=list(config.recompute_modules) or None,
            )
            module = self._build_module()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.model = _data_parallel(config, self.model_config, module.to(device))
        self.lora = config.lora
        """As checkpoints say what adapters these are."""
        self.replay: RoutingReplay | None = None
        """Of a model that repeats the batch's routed experts."""
        self.optimizer = build_optimizer(config, self.model, dtype)
        self.scheduler = build_scheduler(config, self.optimizer)
        self._has_stepped = False
        """Whether the optimizer has any state. A step that is skipped gives it none."""
        self._forward_backward = get_forward_backward_func()

    def _build_module(self) -> Any:
        """This rank's part of the model. Raises ValueError for sizes that cannot be built."""
        from megatron.core import parallel_state as mpu

        lora = self.config.lora
        module = build_gpt_model(
            self.config,
            self.model_config,
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            transformer_impl=self.config.transformer_impl,
            attention_backend=self.config.attention_backend,
            output="hidden",
            # Frozen weights have no gradient buffer to add to.
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion and lora is None,
        )
        if lora is not None:
            add_adapters(module, lora, seed=self.config.seed)
        return module

    @abstractmethod
    def loss(self, batch: PackedBatch, output: Tensor) -> LossOutput:
        """Loss of one micro-batch from the model's output, on a last pipeline stage."""

    @abstractmethod
    def load(self, iteration: int | None = None) -> checkpoint.TrainerState | None:
        """Resume (from the policy's checkpoint of rollout `iteration`, if given), or take the first weights (None).

        CheckpointError or ConfigError where neither is possible.
        """

    @property
    def module(self) -> Any:
        """The bare model (this rank's part)."""
        return self.model.module

    @property
    def vocab_size(self) -> int:
        assert self.config.vocab_size is not None, "transformer_config refuses a model without it"
        return self.config.vocab_size

    # Checkpoints

    def stage(self, rollout_id: int, extra: dict[str, Any], copies: HostCopies, after: Path | None = None) -> Staged:
        """Copy what `--save`/iter_{rollout_id} is to hold to the host; see `checkpoint_writer`."""
        assert self.config.save is not None, "a run without --save has no checkpoint due"
        with_optimizer = self._has_stepped and not self.config.no_save_optim
        kind = optimizer_kind(self.optimizer) if with_optimizer else None
        return stage(
            self.config.save,
            checkpoint.TrainerState(rollout_id, self.scheduler.num_steps, with_optimizer, extra, kind),
            module=self.module,
            optimizer=self.optimizer if with_optimizer else None,
            copies=copies,
            lora=self.lora,
            after=after,
        )

    @property
    def sizes_to_save(self) -> list[int]:
        """Bytes of every tensor that this rank copies for a checkpoint, about, in this order: data-parallel copies are
        written by their first rank."""
        from megatron.core import parallel_state as mpu

        if mpu.get_data_parallel_rank(with_context_parallel=True):
            return []
        # Of frozen ones a checkpoint has nothing.
        numbers = [p.numel() for p in self.module.parameters() if p.requires_grad]
        states = 0 if self.config.no_save_optim else 2 if self.dtype == torch.float32 else 3  # moments, master weight
        return [4 * n for n in numbers for _ in range(states)] + [self.dtype.itemsize * n for n in numbers]

    def resume(self, root: str, iteration: int | None = None) -> checkpoint.TrainerState:
        """Go on from the newest checkpoint under `root`, or that of rollout `iteration`."""
        state = checkpoint.load(
            root, module=self.module, optimizer=self.optimizer, vocab_size=self.vocab_size, iteration=iteration,
            lora=self.lora,
        )  # fmt: skip
        self._has_stepped = state.with_optimizer
        if not state.with_optimizer:
            self.optimizer.reload_model_params()
        self.scheduler.num_steps = state.scheduler_steps
        self.scheduler.step(0)
        return state

    # Passes over a batch

    def forward_only(self, batch: TrainBatch, per_position: PerToken) -> Tensor:
        """A value for every token of the batch, [N] fp32 on the CPU of every rank; 0 at each sample's first token.

        `per_position` gives values aligned with the logits (position t speaks of token t + 1).
        """
        parts: list[tuple[Tensor, Tensor]] = []

        def on_output(packed: PackedBatch, output: Tensor, **kwargs: Any) -> Tensor:
            values = per_position(packed, output)
            parts.append((packed.target_index, values))
            return values.new_zeros(())

        with torch.no_grad():
            self._run(batch, self.micro_batches(batch, range(batch.num_samples)), None, on_output, forward_only=True)
        return self._everywhere(parts, batch.num_tokens)

    def optimize(
        self, batch: TrainBatch, samples: range, data: TokenData, *, with_per_token: bool = False
    ) -> StepResult:
        """One optimizer step on some samples of the batch; `data` [N] is the whole batch's."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts: list[tuple[Tensor, Tensor]] = []
        reports: list[Tensor] = []

        def on_output(packed: PackedBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            result = self.loss(packed, output)
            zero = result.loss.new_zeros(())
            reports.append(torch.stack([result.metrics.get(name, zero) for name in self.total_loss.names]))
            if with_per_token:
                parts.append((packed.target_index, result.per_token))
            # Megatron wants (loss, number of tokens, what to report).
            return result.loss, torch.zeros((), dtype=torch.int, device=zero.device), zero

        micro_batches = self.micro_batches(batch, samples)
        lr = float(self.optimizer.param_groups[0]["lr"])  # of this step, in all groups
        self._run(batch, micro_batches, data, on_output)
        metrics = self._sum_of_all_ranks(reports)
        with self.timeline.work("optimizer"):
            norm, updated = optimizer_step(self.optimizer, self.scheduler, self.config.clip_grad)
        self._has_stepped |= updated
        # With --loss-constant-length the weights do not add up to 1.
        tokens = slice(*(int(batch.lengths[:end].sum()) for end in (samples.start, samples.stop)))
        total_weight = float(data.weights[tokens].double().sum())
        for name in self.total_loss.means:
            metrics[name] /= total_weight or 1.0
        metrics |= {"grad_norm": norm, "lr": lr, "skipped_steps": float(not updated)}
        per_token = self._everywhere(parts, batch.num_tokens) if with_per_token else None
        return StepResult(metrics, len(micro_batches), per_token, self.replay_metrics(batch, samples))

    def replay_metrics(self, batch: TrainBatch, samples: range) -> dict[str, float]:
        """How the last pass, which was over these samples, routed their tokens; collective. {} without replay."""
        if self.replay is None:
            return {}
        # Tensor-parallel ranks route different tokens, stages different layers: nothing is counted twice.
        counts = self.replay.take_counts(self.device)
        dist.all_reduce(counts)
        repeated, differing = counts.tolist()
        predicting = int((batch.lengths[samples.start : samples.stop] - 1).sum())
        choices = predicting * sum(moe_layers(self.config))
        return {
            "mismatch/experts_replayed": repeated / choices if choices else 0.0,
            "mismatch/experts_differ": differing / repeated if repeated else 0.0,
        }

    def _sum_of_all_ranks(self, reports: list[Tensor]) -> dict[str, float]:
        """The metrics of all micro-batches. Every tensor-parallel rank of a last stage has the same: one speaks."""
        names = self.total_loss.names
        total = torch.zeros(len(names), device=self.device)
        if reports and self.tp_rank == 0:
            # Rows of another width are added in another order: no metric may depend on which others are on.
            padding = -len(names) % _REPORT_WIDTH
            total = torch.nn.functional.pad(torch.stack(reports), (0, padding)).sum(0)[: len(names)]
        dist.all_reduce(total)
        return dict(zip(names, total.tolist(), strict=True))

    def settle(self) -> None:
        """Let the parameters be whole after optimizer steps, for whoever reads them before the next forward."""
        if self.config.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)

    def micro_batches(self, batch: TrainBatch, samples: range) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches of some samples; as many on every rank.

        Context-parallel ranks share them, so --max-tokens-per-gpu holds for a part of each sequence.
        """
        lengths = [padded_length(n, self.cp_size) for n in batch.lengths[samples.start : samples.stop].tolist()]
        if self.config.use_dynamic_batch_size:
            assert self.config.max_tokens_per_gpu is not None, "`validate` refuses --use-dynamic-batch-size without it"
            bins = schedule(lengths, self.dp_size, max_tokens=self.config.max_tokens_per_gpu * self.cp_size)
        else:
            bins = schedule(lengths, self.dp_size, samples_per_micro_batch=self.config.micro_batch_size)
        return [[samples.start + index for index in chosen] for chosen in bins[self.dp_rank]]

    def _run(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[MicroBatch],
        data: TokenData | None,
        on_output: Callable[..., Any],
        *,
        forward_only: bool = False,
    ) -> None:
        """Forward (and backward) all micro-batches; a last stage calls `on_output(packed, output)` for each."""
        timeline = self.timeline
        multiple = packing_multiple(
            tp=self.tp_size, cp=self.cp_size, sequence_parallel=self.model_config.sequence_parallel
        )
        cp = {"cp": self.cp_size, "cp_rank": self.cp_rank}
        replay, experts = self.replay, None
        if replay is not None:
            replay.take_counts(self.device)  # those of an earlier pass
            split = self.tp_size if self.model_config.sequence_parallel else 1
            experts = ExpertsPart(replay.layers, tp=split, tp_rank=self.tp_rank if split > 1 else 0)

        def forward(batches: Iterator[PackedBatch], model: Any) -> tuple[Tensor, Any]:
            packed = next(batches)
            size = {"tokens": packed.tokens.numel()}
            backward = None if forward_only else timeline.backward(**size)

            def on_last_stage(tensor: Tensor, **kwargs: Any) -> Any:
                with timeline.work("outputs" if forward_only else "loss", **size):
                    result = on_output(packed, tensor, **kwargs)
                if not forward_only:
                    timeline.watch_backward(result[0], backward)
                return result

            with timeline.work("forward", **size), replay.repeating(packed.experts) if replay else nullcontext():
                output = model(
                    packed.tokens,
                    packed.position_ids,
                    attention_mask=None,
                    packed_seq_params=packed_seq_params(
                        packed.lengths, self.device, **cp, positions=packed.position_ids[0]
                    ),
                )
            if replay is not None:
                replay.in_backward(output, packed.experts)
            timeline.watch_backward(output, backward)
            return output, on_last_stage

        communication: dict[str, Any] = {}
        if self.config.pipeline_model_parallel_size > 1:
            communication = self._communication(batch, micro_batches, multiple)
        self._forward_backward(
            forward_step_func=forward,
            data_iterator=(
                pack(batch, chosen, data=data, multiple=multiple, **cp, experts=experts, device=self.device)
                for chosen in micro_batches
            ),
            model=[self.model],
            num_microbatches=len(micro_batches),
            seq_length=multiple,  # not read where lengths vary (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            **communication,
        )

    def _communication(self, batch: TrainBatch, micro_batches: Sequence[MicroBatch], multiple: int) -> dict[str, Any]:
        """How this pass's pipeline stages communicate, for Megatron's schedule."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        from slime_retool.trainer.pipeline import KnownShapes

        split = self.tp_size if self.model_config.sequence_parallel else 1
        lengths = [batch.lengths[chosen].tolist() for chosen in micro_batches]
        tokens = [packed_tokens(each, multiple=multiple, cp=self.cp_size) // split for each in lengths]
        shapes = [(count, 1, self.model_config.hidden_size) for count in tokens]
        # Beside a communicator Megatron's schedule wants the groups that it takes itself without one.
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return {"p2p_communicator": KnownShapes(self.model_config, shapes), "pg_collection": groups}

    def _everywhere(self, parts: list[tuple[Tensor, Tensor]], num_tokens: int) -> Tensor:
        """Each value is computed by one rank (and its tensor-parallel peers); the others add zeros, which is exact."""
        flat = unpack(parts if self.tp_rank == 0 else [], num_tokens).to(self.device)
        dist.all_reduce(flat)
        return flat.cpu()


def _data_parallel(config: Config, model_config: Any, module: Any) -> Any:
    """The module in Megatron's wrapper, which sums gradients over replicas; its hooks stand in `model_config`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.accumulate_allreduce_grads_in_fp32,
        # Megatron's sharded optimizer takes CUDA tensors only; on the CPU every replica keeps all of it.
        use_distributed_optimizer=config.use_distributed_optimizer and config.on_cuda,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
    )
    model = DistributedDataParallel(config=model_config, ddp_config=ddp_config, module=module)

    def finalize(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
        finalize_model_grads(model, None, **kwargs)

    model_config.no_sync_func, model_config.finalize_model_grads_func = model.no_sync, finalize
    return model
