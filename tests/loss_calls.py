"""The losses of slime_retool.algo called with tensors, for tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slime_retool.algo import losses
from slime_retool.algo.algorithms import ALGORITHMS, loaded


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor, *, kind: str = "ppo", **options: Any
) -> losses.LossValue:
    """The loss of the algorithm `kind`."""
    columns = {"old_log_probs": old_log_probs, "advantages": advantages}
    inputs = losses.LossInputs(log_probs=log_probs, weights=weights, columns=columns, **options)
    return loaded(ALGORITHMS[kind].loss.function)(inputs)


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, weights: Tensor, kind: str) -> losses.LossValue:
    columns = {"ref_log_probs": ref_log_probs}
    return losses.kl_loss(losses.LossInputs(log_probs=log_probs, weights=weights, columns=columns, kl_type=kind))


def distillation_loss(log_probs: Tensor, teacher_log_probs: Tensor, weights: Tensor) -> losses.LossValue:
    columns = {"teacher_log_probs": teacher_log_probs}
    return losses.distillation_loss(losses.LossInputs(log_probs=log_probs, weights=weights, columns=columns))


def sft_loss(log_probs: Tensor, weights: Tensor) -> losses.LossValue:
    return losses.sft_loss(losses.LossInputs(log_probs=log_probs, weights=weights, columns={}))


def entropy_bonus(entropy: Tensor, weights: Tensor) -> losses.LossValue:
    return losses.entropy_bonus(losses.LossInputs(log_probs=entropy, entropy=entropy, weights=weights, columns={}))


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, value_clip: float | None = None
) -> losses.LossValue:
    columns = {"old_values": old_values, "returns": returns}
    return losses.value_loss(
        losses.ValueInputs(values=values, weights=weights, columns=columns, value_clip=value_clip)
    )
