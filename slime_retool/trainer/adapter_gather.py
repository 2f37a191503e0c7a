"""Whole LoRA adapters, from their tensor-, expert- and pipeline-parallel parts.

They are small: one rank after the other tells all others what it holds, in one broadcast each. Of copies (of what
every tensor-parallel rank holds, and of data-parallel replicas) the first rank's is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.lora import adapter_shards
from megatron_bridge.lora_spec import LORA_A, LORA_B
from megatron_bridge.model_config import ModelArgs
from megatron_bridge.names import find_parameter, global_name
from slime_retool.trainer.gather import flatten, layer_offset


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of one adapter."""

    name: str
    """Global: `decoder.layers.3.mlp.experts.experts.7.linear_fc1.lora_b`."""
    axis: int | None
    """The dimension that is split."""
    rank: int
    """Which of the parts along it this is."""
    shape: torch.Size
    dtype: torch.dtype


@torch.no_grad()
def whole_adapters(
    module: Any, model: ModelArgs, value_of: Callable[[Tensor], Tensor] = lambda values: values
) -> dict[str, Tensor]:
    """{global name: whole tensor} of every adapter of the model, on every rank. Collective.

    value_of: what to gather in place of an adapter's own values; in its shape.
    """
    own = [(shard, value_of(values).detach()) for shard, values in _own_shards(module, model)]
    everyone: list[list[Shard]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, [shard for shard, _ in own])
    device = next(module.parameters()).device
    parts: dict[str, list[tuple[Shard, Tensor]]] = {}
    for source, shards in enumerate(everyone):
        sizes = [shard.shape.numel() * shard.dtype.itemsize for shard in shards]
        if not shards:
            continue
        if source == dist.get_rank():
            flat = flatten([values for _, values in own])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.broadcast(flat, src=source)
        for shard, part in zip(shards, flat.split(sizes), strict=True):
            parts.setdefault(shard.name, []).append((shard, part.view(shard.dtype).view(shard.shape)))
    return {name: _joined(found) for name, found in sorted(parts.items(), key=_position)}


def _position(item: tuple[str, Any]) -> tuple[Any, ...]:
    """Numbers in names count as numbers."""
    return tuple((0, int(word), "") if word.isdigit() else (1, 0, word) for word in item[0].split("."))


def _joined(parts: list[tuple[Shard, Tensor]]) -> Tensor:
    axis = parts[0][0].axis
    if axis is None:
        (only,) = parts
        return only[1]
    return torch.cat([values for _, values in sorted(parts, key=lambda part: part[0].rank)], dim=axis)


def _own_shards(module: Any, model: ModelArgs) -> Iterator[tuple[Shard, Tensor]]:
    """What this rank tells the others."""
    from megatron.core import parallel_state as mpu

    before = layer_offset(module)
    experts = (model.num_experts or 0) // mpu.get_expert_model_parallel_world_size()
    expert_offset = experts * mpu.get_expert_model_parallel_rank()
    for local_name, axis, values in adapter_shards(module):
        name = global_name(local_name, model, before, expert_offset)
        if find_parameter(f"{name.rpartition('.')[0]}.weight", model).expert is None:
            rank, copy = mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_rank(with_context_parallel=True)
        else:
            rank, copy = mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_data_parallel_rank()
        if copy == 0 and (axis is not None or rank == 0):
            yield Shard(name, axis, rank, values.shape, values.dtype), values


def in_pairs(adapters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(global name of the adapted layer, its A, its B)."""
    for name, a in adapters.items():
        layer, _, part = name.rpartition(".")
        if part == LORA_A:
            yield layer, a, adapters[f"{layer}.{LORA_B}"]
