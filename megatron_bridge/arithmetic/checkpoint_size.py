"""Disk space of checkpoints."""

from __future__ import annotations

from megatron_bridge.arithmetic.parameters import all_adapter_parameters, total_parameters
from megatron_bridge.lora_spec import LoraSpec
from megatron_bridge.model_config import ModelArgs, required

MOMENTS = 8
"""Adam's bytes of an element: two in fp32, which is what a checkpoint holds."""


def checkpoint_bytes(
    model: ModelArgs, *, bf16: bool, with_optimizer: bool, lora: LoraSpec | None = None, value_head: bool = False
) -> int:
    """Bytes of one checkpoint of a model that is trained in bf16 or in fp32.

    Weights (with `lora` the adapters alone; with `value_head` one row in place of an output layer) and, with the
    optimizer, Adam's moments and the fp32 copy of bf16 weights. Little is left out: the vocabulary's padding and what
    describes the tensors.
    """
    if lora is not None:
        count = all_adapter_parameters(model, lora)
    else:
        count = total_parameters(model)
        if value_head and model.untie_embeddings_and_output_weights:
            count -= (required(model, "vocab_size") - 1) * required(model, "hidden_size")
    weight = 2 if bf16 else 4
    return count * (4 + MOMENTS + (weight if bf16 else 0) if with_optimizer else weight)
