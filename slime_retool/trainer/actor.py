"""The policy: its losses, its log-probs, and those of the frozen reference model in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_retool.algo import losses
from slime_retool.algo.log_probs import vocab_parallel_log_probs
from slime_retool.config import Config
from slime_retool.errors import ConfigError
from slime_retool.trainer import checkpoint
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.packing import PackedBatch
from slime_retool.trainer.role import LossOutput, ModelRole


class Actor(ModelRole):
    """The model that generates and is trained; outputs are logits [1, T, V / tensor-parallel size]."""

    metric_names = ("loss", "pg_loss", "clip_fraction", "ppo_kl", "kl_loss", "entropy", "logprob_abs_diff")

    def __init__(self, config: Config, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.reference: dict[str, Tensor] | None = None
        """Weights of the reference model in host memory."""

    def loss(self, batch: PackedBatch, output: Tensor) -> LossOutput:
        """What `--loss-type` names, with its KL and entropy terms."""
        config, data = self.config, batch.data
        assert data is not None
        sft = config.loss_type == "sft_loss"
        log_probs, entropy = self._log_probs_of(batch, output, with_entropy=True)
        metrics: losses.Metrics = {}
        if sft:
            loss, more = losses.sft_loss(log_probs, data.weights)
        else:
            assert data.advantages is not None
            loss, more = losses.policy_loss(
                log_probs,
                log_probs.detach() if data.old_log_probs is None else data.old_log_probs,
                data.advantages,
                data.weights,
                eps_clip=config.eps_clip,
                eps_clip_high=config.eps_clip_high,
                eps_clip_c=config.eps_clip_c,
            )
            if data.ref_log_probs is not None:
                kl, kl_metrics = losses.kl_loss(log_probs, data.ref_log_probs, data.weights, config.kl_loss_type)
                loss = loss + config.kl_loss_coef * kl
                metrics |= kl_metrics
        metrics |= more
        bonus, entropy_metrics = losses.entropy_bonus(entropy, data.weights)
        metrics |= entropy_metrics
        if not sft and config.entropy_coef != 0:
            loss = loss - config.entropy_coef * bonus
        if data.rollout_log_probs is not None:
            # The engine sampled from the weights before the first step, which the old log-probs belong to.
            same_weights = log_probs
            if data.old_log_probs is not None and not config.use_rollout_logprobs:
                same_weights = data.old_log_probs
            metrics |= losses.log_prob_abs_diff(same_weights, data.rollout_log_probs, data.token_mean)
        return LossOutput(loss, metrics, log_probs.detach())

    def log_probs(self, batch: TrainBatch) -> Tensor:
        """Log-prob of every token given those before it, at the rollout temperature: [N], on every rank."""
        return self.forward_only(batch, lambda packed, output: self._log_probs_of(packed, output)[0])

    def reference_log_probs(self, batch: TrainBatch) -> Tensor:
        """`log_probs` under the frozen reference model, whose weights take the model's place for this long."""
        if self.reference is None:
            raise ConfigError("log-probs of the reference model need its weights: give --ref-load")
        own = checkpoint.copy_weights(self.module, pinned=self.config.on_cuda)
        checkpoint.set_weights(self.module, self.reference)
        try:
            return self.log_probs(batch)
        finally:
            checkpoint.set_weights(self.module, own)

    def _log_probs_of(self, batch: PackedBatch, output: Any, *, with_entropy: bool = False) -> tuple[Tensor, Tensor]:
        return vocab_parallel_log_probs(
            output.reshape(-1, output.shape[-1]),
            batch.targets,
            vocab_size=self.vocab_size,
            temperature=self.config.rollout_temperature if self.config.loss_type == "policy_loss" else 1.0,
            with_entropy=with_entropy,
            tp_group=self.tp_group,
        )
