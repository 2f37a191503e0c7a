"""Whole parameters on global rank 0, under Hugging Face names, from their tensor-, expert- and pipeline-parallel parts.

The ranks of the first replica take part: of the first data-parallel replica for most parameters, of the first
expert-data-parallel replica for experts (other ranks, where experts are spread over data-parallel ranks). Shards are
gathered within each stage, then sent from each stage's first rank to the first stage's, one Megatron parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.layout import merge_tp, to_hf, tp_axis
from megatron_bridge.model_config import ModelArgs
from megatron_bridge.names import find_parameter, global_name


def _values(parameter: Tensor) -> Tensor:
    return parameter.detach()


@torch.no_grad()
def hf_named_tensors(
    module: Any, model: ModelArgs, value_of: Callable[[Any], Tensor] = _values
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, full tensor) of every parameter, on global rank 0; nothing on other ranks.

    Collective: every rank iterates to the end. `value_of(parameter)` picks what is gathered: the weight, or for
    example its gradient, of the same shape. Tensors may share memory with the model: use or copy each before the next.
    """
    from megatron.core import parallel_state as mpu

    replicas = (mpu.get_data_parallel_rank(with_context_parallel=True), mpu.get_expert_data_parallel_rank())
    if 0 not in replicas:
        return
    pp_group = mpu.get_pipeline_model_parallel_group()
    pp_rank, pp_size = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    leader = replicas[0] == 0 and mpu.get_tensor_model_parallel_rank() == 0
    first = dist.get_process_group_ranks(pp_group)[0]
    for stage in range(pp_size):
        if stage == pp_rank:
            for name, full in _stage_tensors(module, model, value_of):
                if not leader:
                    continue
                if stage == 0:
                    yield from to_hf(name, full, model)
                    continue
                full = full.contiguous()
                dist.send_object_list([(name, tuple(full.shape), full.dtype)], dst=first, group=pp_group)
                dist.send(full, dst=first, group=pp_group)
            if leader and stage > 0:
                dist.send_object_list([None], dst=first, group=pp_group)
        elif leader and pp_rank == 0:
            yield from _received(dist.get_process_group_ranks(pp_group)[stage], pp_group, model)


def _received(source: int, group: dist.ProcessGroup, model: ModelArgs) -> Iterator[tuple[str, Tensor]]:
    while True:
        header: list[Any] = [None]
        dist.recv_object_list(header, src=source, group=group)
        if header[0] is None:
            return
        name, shape, dtype = header[0]
        full = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
        dist.recv(full, src=source, group=group)
        yield from to_hf(name, full, model)


def _stage_tensors(module: Any, model: ModelArgs, value_of: Callable[[Any], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(global Megatron name, tensor merged over all ranks of this pipeline stage)."""
    from megatron.core import parallel_state as mpu

    takes_part = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    expert_takes_part = mpu.get_expert_data_parallel_rank() == 0
    layers = module.decoder.layers
    offset = layers[0].layer_number - 1 if len(layers) else 0  # Megatron numbers layers from 1
    local_experts = (model.num_experts or 0) // mpu.get_expert_model_parallel_world_size()
    for local_name, parameter in module.named_parameters():
        name = global_name(local_name, model, offset)
        split = tp_axis(name, model) is not None
        if find_parameter(name, model)[1].expert is None:
            if takes_part:
                shards = _all_gather(value_of(parameter), mpu.get_tensor_model_parallel_group() if split else None)
                yield name, merge_tp(name, shards, model)
        elif expert_takes_part:
            # The group's ranks hold expert-parallel rank 0's expert in all its shards, then rank 1's, ...
            shards = _all_gather(value_of(parameter), mpu.get_expert_tensor_and_model_parallel_group())
            etp = mpu.get_expert_tensor_parallel_world_size()
            for rank, begin in enumerate(range(0, len(shards), etp)):
                expert = global_name(local_name, model, offset, expert_offset=rank * local_experts)
                yield expert, merge_tp(expert, shards[begin : begin + etp], model)


def _all_gather(value: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every rank's tensor, in rank order; only this rank's for None and for a group of one."""
    if group is None or group.size() == 1:
        return [value]
    shards = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(shards, value.contiguous(), group=group)
    return shards
