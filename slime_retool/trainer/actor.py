"""The policy: its losses, its log-probs, and those of the frozen reference model in its place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from megatron_bridge.checkpoint import exists
from megatron_bridge.lora import adapters_off
from megatron_bridge.lora_spec import is_adapter
from megatron_bridge.model import output_weight
from megatron_bridge.routing_replay import RoutingReplay
from slime_retool.algo.log_probs import linear_log_probs
from slime_retool.algo.losses import LossInputs, TotalLoss
from slime_retool.config import Config
from slime_retool.errors import ConfigError
from slime_retool.trainer import checkpoint
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.packing import PackedBatch
from slime_retool.trainer.role import LossOutput, ModelRole
from slime_retool.trainer.timeline import Timeline


class Actor(ModelRole):
    """The model that generates and is trained; outputs are hidden states [1, T, H]."""

    def __init__(self, config: Config, timeline: Timeline, *, dtype: torch.dtype) -> None:
        super().__init__(config, TotalLoss(config.loss_terms), timeline, dtype=dtype)
        self.reference: dict[str, Tensor] | None = None
        """Weights of the reference model in host memory; None with LoRA, whose frozen weights are that model."""
        if config.use_rollout_routing_replay:
            self.replay = RoutingReplay(self.module, config)

    def loss(self, batch: PackedBatch, output: Tensor) -> LossOutput:
        """What `--loss-type` names, and the terms that are on beside it."""
        config, data = self.config, batch.data
        assert data is not None
        log_probs, entropy = self._log_probs_of(batch, output, with_entropy=True)
        inputs = LossInputs(
            log_probs=log_probs,
            entropy=entropy,
            weights=data.weights,
            columns={"old_log_probs": log_probs.detach()} | data.columns,
            sample_of=batch.sample_of,
            token_counts=batch.token_counts,
            cp_group=self.cp_group,
            eps_clip=config.eps_clip,
            eps_clip_high=config.eps_clip_high,
            eps_clip_c=config.eps_clip_c,
            kl_type=config.kl_loss_type,
            args=config,
        )
        return LossOutput(*self.total_loss(inputs), log_probs.detach())

    # Log-probs

    def log_probs(self, batch: TrainBatch) -> Tensor:
        """Log-prob of every learned token given those before it, at the rollout temperature; others 0.

        [N] fp32, on the CPU of every rank.
        """
        with self.timeline.span("pass"):
            return self.forward_only(batch, lambda packed, output: self._log_probs_of(packed, output)[0])

    def reference_log_probs(self, batch: TrainBatch) -> Tensor:
        """`log_probs` under the frozen reference model, whose weights take the model's place for this long.

        It chooses its own experts: with those of other weights it would be another model than the one to stay close to.
        """
        with self.timeline.span("reference"), self._as_reference():
            return self.log_probs(batch.without_experts())

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """The module is the reference model inside."""
        if self.config.lora is not None:
            with adapters_off(self.module):
                yield
            return
        if self.reference is None:
            raise ConfigError("log-probs of the reference model need its weights: give --ref-load")
        own = checkpoint.copy_weights(self.module, pinned=self.config.on_cuda)
        checkpoint.set_weights(self.module, self.reference)
        try:
            yield
        finally:
            checkpoint.set_weights(self.module, own)

    def _log_probs_of(self, batch: PackedBatch, hidden: Tensor, *, with_entropy: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [T] from hidden states [1, T, H] at the learned positions; 0 elsewhere."""
        return linear_log_probs(
            hidden[0],
            output_weight(self.module),
            batch.targets,
            vocab_size=self.vocab_size,
            positions=batch.learned,
            temperature=1.0 if self.config.loss.supervised else self.config.rollout_temperature,
            with_entropy=with_entropy,
            tp_group=self.tp_group,
            sequence_parallel=self.model_config.sequence_parallel,
            keep_bytes=int(self.config.keep_logits_gib * 2**30),
        )

    # Checkpoints

    def load(self, iteration: int | None = None) -> checkpoint.TrainerState | None:
        """Resume from --load, else take the weights in --ref-load (None). Also reads the reference model if needed.

        With LoRA the frozen weights are always --ref-load's, and --load holds the adapters, which name the one of its
        checkpoints that they were trained on.
        CheckpointError for a missing, incomplete or other model's checkpoint; ConfigError where there is no
        checkpoint to begin with.
        """
        config = self.config
        resume = config.load is not None and exists(config.load)
        if not resume and config.ref_load is None:
            raise ConfigError(
                f"no weights to start from: --load {config.load} holds no checkpoint and --ref-load is not given; "
                "convert one with `slime-retool convert to-megatron` and pass it as --ref-load"
            )
        if config.needs_reference or not resume or config.lora is not None:
            assert config.ref_load is not None, "`validate` refuses a run that needs it and has none"
            source = config.ref_load
            if config.lora is not None:
                source = checkpoint.base_of(config.lora, source, config.load if resume else None, iteration)
                self.lora = replace(config.lora, base=os.path.abspath(source))
            adapters = [name for name, _ in self.module.named_parameters() if is_adapter(name)]
            checkpoint.load_weights(source, module=self.module, vocab_size=self.vocab_size, skip=adapters)
            if config.needs_reference and config.lora is None:
                self.reference = checkpoint.copy_weights(self.module, pinned=config.on_cuda)
        if not resume:
            self.optimizer.reload_model_params()
            return None
        assert config.load is not None
        return self.resume(config.load, iteration)
