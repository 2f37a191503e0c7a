"""Whole parameters on global rank 0, under Hugging Face names, from their tensor- and pipeline-parallel parts.

The ranks of the first data-parallel replica take part: shards are gathered within each stage's tensor-parallel
group, then sent from each stage to the first, one Megatron parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.layout import merge_tp, to_hf, tp_axis
from megatron_bridge.model_config import ModelArgs
from megatron_bridge.names import global_name


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

    if mpu.get_data_parallel_rank() != 0:
        return
    pp_group = mpu.get_pipeline_model_parallel_group()
    pp_rank, pp_size = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    leader = mpu.get_tensor_model_parallel_rank() == 0
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
    """(global Megatron name, tensor merged over the tensor-parallel group) of this pipeline stage."""
    from megatron.core import parallel_state as mpu

    group, size = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_world_size()
    layers = module.decoder.layers
    offset = layers[0].layer_number - 1 if len(layers) else 0  # Megatron numbers layers from 1
    for local_name, parameter in module.named_parameters():
        name = global_name(local_name, model, offset)
        value = value_of(parameter)
        if size > 1 and tp_axis(name, model) is not None:
            shards = [torch.empty_like(value) for _ in range(size)]
            dist.all_gather(shards, value.contiguous(), group=group)
            value = merge_tp(name, shards, model)
        yield name, value
