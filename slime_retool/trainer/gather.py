"""Whole parameters under Hugging Face names, from their tensor- and pipeline-parallel parts.

Parameters travel in chunks of `CHUNK_BYTES`: one all-gather over the tensor-parallel group and one transfer between
pipeline stages for many parameters, instead of one each.
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

CHUNK_BYTES = 128 * 2**20
"""Bytes of one rank's shards that are gathered at once (a larger parameter goes alone)."""

Named = tuple[str, Tensor]


def _values(parameter: Tensor) -> Tensor:
    return parameter.detach()


@torch.no_grad()
def hf_named_tensors(
    module: Any, model: ModelArgs, value_of: Callable[[Any], Tensor] = _values, *, everywhere: bool = False
) -> Iterator[Named]:
    """(HF name, full tensor) of every parameter, on global rank 0, or with `everywhere` on every rank.

    Collective: every rank iterates to the end. `value_of(parameter)` picks what is gathered: the weight, or for
    example its gradient, of the same shape. Tensors may share memory with the model: use or copy each before the next.
    With `everywhere` each data-parallel replica gathers for itself; otherwise only the first takes part.
    """
    from megatron.core import parallel_state as mpu

    if not everywhere and mpu.get_data_parallel_rank() != 0:
        return
    pp_group = mpu.get_pipeline_model_parallel_group()
    pp_rank, pp_size = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    stages = dist.get_process_group_ranks(pp_group)  # of this rank's tensor-parallel position
    leader = everywhere or mpu.get_tensor_model_parallel_rank() == 0
    for stage in range(pp_size):
        # The first stage's tensors are where they are wanted, unless every stage wants them.
        travels = leader and pp_size > 1 and (everywhere or stage > 0)
        targets = list(range(pp_size)) if everywhere else [0]
        if stage == pp_rank:
            for chunk in _stage_chunks(module, model, value_of):
                if travels:
                    _send(chunk, pp_group, stages, stage, everywhere)
                if leader and pp_rank in targets:
                    for name, full in chunk:
                        yield from to_hf(name, full, model)
            if travels:
                _send([], pp_group, stages, stage, everywhere)
        elif travels and pp_rank in targets:
            for name, full in _received(pp_group, stages, stage, everywhere):
                yield from to_hf(name, full, model)


def _send(chunk: list[Named], group: dist.ProcessGroup, stages: list[int], stage: int, everywhere: bool) -> None:
    """One chunk of this stage, to all stages or to the first; an empty one ends the stage."""
    header = [[(name, tuple(full.shape), full.dtype) for name, full in chunk]]
    flat = _flatten([full for _, full in chunk])
    if everywhere:
        dist.broadcast_object_list(header, src=stages[stage], group=group)
        if chunk:
            dist.broadcast(flat, src=stages[stage], group=group)
        return
    dist.send_object_list(header, dst=stages[0], group=group)
    if chunk:
        dist.send(flat, dst=stages[0], group=group)


def _received(group: dist.ProcessGroup, stages: list[int], stage: int, everywhere: bool) -> Iterator[Named]:
    source = stages[stage]
    while True:
        header: list[Any] = [None]
        if everywhere:
            dist.broadcast_object_list(header, src=source, group=group)
        else:
            dist.recv_object_list(header, src=source, group=group)
        if not header[0]:
            return
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in header[0]]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=torch.cuda.current_device())
        if everywhere:
            dist.broadcast(flat, src=source, group=group)
        else:
            dist.recv(flat, src=source, group=group)
        for (name, shape, dtype), part in zip(header[0], flat.split(sizes), strict=True):
            yield name, part.view(dtype).view(shape)


def _stage_chunks(module: Any, model: ModelArgs, value_of: Callable[[Any], Tensor]) -> Iterator[list[Named]]:
    """[(global Megatron name, tensor merged over the tensor-parallel group)] of this pipeline stage, chunk by chunk."""
    layers = module.decoder.layers
    offset = layers[0].layer_number - 1 if len(layers) else 0  # Megatron numbers layers from 1
    chunk: list[Named] = []
    size = 0
    for local_name, parameter in module.named_parameters():
        value = value_of(parameter)
        # One dtype per chunk, so that every part of the flat buffer is aligned for its dtype.
        if chunk and (size + value.nbytes > CHUNK_BYTES or value.dtype != chunk[0][1].dtype):
            yield _merged(chunk, model)
            chunk, size = [], 0
        chunk.append((global_name(local_name, offset), value))
        size += value.nbytes
    if chunk:
        yield _merged(chunk, model)


def _merged(chunk: list[Named], model: ModelArgs) -> list[Named]:
    """The chunk with every sharded parameter whole: one all-gather of all shards."""
    from megatron.core import parallel_state as mpu

    size = mpu.get_tensor_model_parallel_world_size()
    sharded = [(name, value) for name, value in chunk if tp_axis(name, model) is not None]
    if size == 1 or not sharded:
        return chunk
    flat = _flatten([value for _, value in sharded])
    gathered = flat.new_empty(size * len(flat))
    dist.all_gather_into_tensor(gathered, flat, group=mpu.get_tensor_model_parallel_group())
    sizes = [value.nbytes for _, value in sharded]
    per_rank = [part.split(sizes) for part in gathered.chunk(size)]
    whole = {
        name: merge_tp(name, [parts[i].view(value.dtype).view(value.shape) for parts in per_rank], model)
        for i, (name, value) in enumerate(sharded)
    }
    return [(name, whole.get(name, value)) for name, value in chunk]


def _flatten(tensors: list[Tensor]) -> Tensor:
    """All tensors' bytes, one after the other [sum of nbytes]."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
