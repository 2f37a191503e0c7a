"""PPO's critic: the actor's kind of model with a value head in place of its output layer.

The value of token t is the expected return of the state in which it is chosen: it comes from the hidden state at
t - 1, as the token's log-prob does, and is laid out in the same way.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.checkpoint import exists, latest_rollout
from slime_retool.algo.algorithms import VALUE_LOSS
from slime_retool.algo.losses import TotalLoss, ValueInputs
from slime_retool.config import Config
from slime_retool.errors import CheckpointError
from slime_retool.run_folder import critic_folder
from slime_retool.trainer import checkpoint
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.packing import PackedBatch
from slime_retool.trainer.role import LossOutput, ModelRole
from slime_retool.trainer.timeline import Timeline

logger = logging.getLogger(__name__)
HEAD = "output_layer.weight"
"""The value head's name in checkpoints: that of the output layer it replaces, with one row."""


class ValueHead(torch.nn.Module):
    """One fp32 value per position: hidden states [T, 1, H] ([T / tp, 1, H] with sequence parallelism) -> [T, 1, 1].

    The weight begins at 0, so that a new critic says 0 everywhere, whatever the model. It has no bias: it stands
    behind a norm, and one direction of the hidden state is as good.
    """

    def __init__(self, model_config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, model_config.hidden_size, dtype=model_config.params_dtype))
        self._sequence_parallel = model_config.sequence_parallel
        # Each tensor-parallel rank sees its own positions then: Megatron sums such gradients over the group.
        self.weight.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """As the output layer's: (values, no bias)."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self._sequence_parallel:
            # Every rank computes the same loss from the whole, so each takes its own part of the gradient back.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class Critic(ModelRole):
    """The value model; outputs are values [1, T, 1] in fp32."""

    def __init__(self, config: Config, timeline: Timeline, *, dtype: torch.dtype) -> None:
        """`config` is the run's, not that of its role."""
        self._run_config = config
        # The value head takes the output layer's place, so that there is none to tie to the embedding.
        own = replace(config.of_critic(), untie_embeddings_and_output_weights=True)
        super().__init__(own, TotalLoss([(VALUE_LOSS, 1.0)]), timeline, dtype=dtype)

    def _build_module(self) -> Any:
        module = super()._build_module()
        if module.post_process:
            module.output_layer = ValueHead(self.model_config)
        return module

    def loss(self, batch: PackedBatch, output: Tensor) -> LossOutput:
        """Clipped regression on the returns."""
        data, values = batch.data, output.reshape(-1)
        assert data is not None
        inputs = ValueInputs(
            values=values, weights=data.weights, columns=data.columns, value_clip=self.config.value_clip or None
        )
        return LossOutput(*self.total_loss(inputs), values.detach())

    def values(self, batch: TrainBatch) -> Tensor:
        """The value of every token, [N] fp32 on the CPU of every rank; 0 at each sample's first token."""
        return self.forward_only(batch, lambda packed, output: output.reshape(-1))

    def load(self, iteration: int | None = None) -> checkpoint.TrainerState | None:
        """Resume beside the actor, else take first weights (None).

        When the actor resumes from rollout k in --load, the critic resumes from its own checkpoint of rollout k: where
        this run wrote it before, else in --critic-load. Otherwise its weights come from --critic-load if that holds a
        checkpoint (a value model's, or a language model's), else they are the actor's first ones; a value head that is
        not found begins at 0.
        """
        run, root = self._run_config, self.config.load
        actor_at = latest_rollout(run.load) if iteration is None else iteration
        if actor_at is not None:
            root = critic_folder(run.critic_places) or root
        if root is not None and exists(root):
            if actor_at is None:
                self._start_from(root)
                return None
            try:
                return self.resume(root, actor_at)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the actor goes on from rollout {actor_at} of --load {run.load}, and the critic cannot: {error}; "
                    "name another --critic-load, or an empty folder for a new critic"
                ) from error
        source = run.ref_load or run.load
        if actor_at is not None:
            logger.warning("no checkpoint of the critic in --critic-load %s: a new one starts from %s", root, source)
        assert source is not None, "the actor has been loaded from one of them"
        self._start_from(source)
        return None

    def _start_from(self, root: str) -> None:
        has_head = checkpoint.rows_of(root, HEAD) == 1
        checkpoint.load_weights(root, module=self.module, vocab_size=self.vocab_size, skip=() if has_head else (HEAD,))
        self.optimizer.reload_model_params()
