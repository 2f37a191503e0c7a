"""Whole parameters under Hugging Face names, from their tensor-, expert- and pipeline-parallel parts.

Parameters travel in chunks of a bounded size, many of them in one collective: a gather over the tensor-parallel group
(for experts, over the expert-parallel ranks and the tensor-parallel ranks within each), then a transfer between
pipeline stages. Experts are taken as stacks, one matrix of consecutive experts; a stack too large for a chunk travels
in parts. So no rank holds more than a few chunks beside its own parameters, however many experts there are. With
`everywhere` every rank gets every chunk; without, chunks only go towards global rank 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.grouped_experts import stacked
from megatron_bridge.layout import merge_tp, to_hf
from megatron_bridge.lora import adapted_layers
from megatron_bridge.lora_spec import is_adapter
from megatron_bridge.model import named_weights
from megatron_bridge.model_config import ModelArgs
from megatron_bridge.names import find_parameter, global_name, hf_names, split_expert, split_name
from slime_retool.engine.expert_weights import DOWN, GATE_UP, Stack, matrix_names

CHUNK_BYTES = 128 * 2**20
"""Bytes of whole parameters that are gathered at once (a larger parameter goes alone)."""

EXPERTS = ".mlp.experts."
"""In the local name of every parameter of an expert, and of no other."""

Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Whole:
    """A parameter put together, or a stack of the same matrix of consecutive experts.

    name: global Megatron name, of a stack's first expert.
    value: with the experts of a stack in a dimension before the matrix's own.
    """

    name: str
    value: Tensor
    is_stack: bool


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank holds of a parameter, or of a matrix of consecutive experts of its own (`local_names`).

    name: global Megatron name, of the first expert as expert-parallel rank 0 would number it.
    whole_bytes: those of the whole, the experts of all ranks included.
    """

    name: str
    local_names: tuple[str, ...]
    is_stack: bool
    dtype: torch.dtype
    whole_bytes: int


@torch.no_grad()
def hf_named_tensors(
    module: Any, model: ModelArgs, *, everywhere: bool = False, stacked: bool = False, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Named]:
    """(HF name, full tensor) of every weight, on global rank 0, or with `everywhere` on every rank.

    Collective: every rank iterates to the end. LoRA adapters are merged into the weights. Tensors may share memory with
    the model: use or copy each before the next.
    With `everywhere` each data-parallel replica gathers for itself; otherwise only the first takes part, and for
    experts, which are spread over data-parallel ranks, the first expert-data-parallel replica.
    With `stacked` experts come as `engine.expert_weights.Stack`s of at most `chunk_bytes` (one expert at least).
    """
    from megatron.core import parallel_state as mpu

    if not (everywhere or _holds_first(dense=True) or _holds_first(dense=False)):
        return
    stages = mpu.get_pipeline_model_parallel_group()  # of this rank's tensor-parallel position
    pp_rank = mpu.get_pipeline_model_parallel_rank()
    leader = everywhere or (_holds_first(dense=True) and mpu.get_tensor_model_parallel_rank() == 0)
    for stage in range(stages.size()):
        chunks = _stage_chunks(module, model, everywhere, chunk_bytes) if stage == pp_rank else iter(())
        if leader and everywhere:
            chunks = _shared(chunks, stage, stages)
        elif leader and stage > 0 and pp_rank in (0, stage):
            chunks = _sent(chunks, stage, stages)
        wanted = leader and (everywhere or pp_rank == 0)
        for chunk in chunks:
            for whole in chunk if wanted else ():
                yield from _under_hf_names(whole, model, stacked)


def _under_hf_names(whole: _Whole, model: ModelArgs, stacked: bool) -> Iterator[Named]:
    if not whole.is_stack:
        yield from to_hf(whole.name, whole.value, model)
    elif stacked and (stack := _stack_of(whole, model)) is not None:
        yield str(stack), whole.value
    else:
        for number, value in enumerate(whole.value):
            yield from to_hf(global_name(whole.name, model, expert_offset=number), value, model)


_EXPERT_MATRIX = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def _stack_of(whole: _Whole, model: ModelArgs) -> Stack | None:
    """The stack as engines know it; None for matrices that they hold in another way."""
    matches = [_EXPERT_MATRIX.fullmatch(name) for name in hf_names(whole.name, model)]
    found = [match for match in matches if match is not None]
    if not found or len(found) < len(matches):
        return None
    gate, up, down = matrix_names(found[0][1])
    kind = {(gate, up): GATE_UP, (down,): DOWN}.get(tuple(match[3] for match in found))
    if kind is None:
        return None
    first = int(found[0][2])
    return Stack(found[0][1], kind, first, first + len(whole.value))


def _shared(chunks: Iterator[list[_Whole]], stage: int, stages: dist.ProcessGroup) -> Iterator[list[_Whole]]:
    """The chunks that the ranks of one pipeline stage have, on the ranks of all stages."""
    if stages.size() == 1:
        yield from chunks
        return
    source = dist.get_global_rank(stages, stage)
    sends = dist.get_rank() == source
    while True:
        chunk = next(chunks, [])
        header: list[Any] = [_header(chunk)]
        dist.broadcast_object_list(header, src=source, group=stages)
        if not header[0]:
            return
        flat = flatten([whole.value for whole in chunk]) if sends else _room_for(header[0])
        dist.broadcast(flat, src=source, group=stages)
        yield chunk if sends else _opened(header[0], flat)


def _sent(chunks: Iterator[list[_Whole]], stage: int, stages: dist.ProcessGroup) -> Iterator[list[_Whole]]:
    """On the first stage the chunks that another one has; on that one nothing, once they are sent."""
    first, source = dist.get_global_rank(stages, 0), dist.get_global_rank(stages, stage)
    if dist.get_rank() == source:
        for chunk in chunks:
            dist.send_object_list([_header(chunk)], dst=first, group=stages)
            dist.send(flatten([whole.value for whole in chunk]), dst=first, group=stages)
        dist.send_object_list([[]], dst=first, group=stages)
        return
    while True:
        header: list[Any] = [None]
        dist.recv_object_list(header, src=source, group=stages)
        if not header[0]:
            return
        flat = _room_for(header[0])
        dist.recv(flat, src=source, group=stages)
        yield _opened(header[0], flat)


_Header = list[tuple[str, bool, torch.Size, torch.dtype]]


def _header(chunk: list[_Whole]) -> _Header:
    return [(whole.name, whole.is_stack, whole.value.shape, whole.value.dtype) for whole in chunk]


def _sizes(header: _Header) -> list[int]:
    return [shape.numel() * dtype.itemsize for _, _, shape, dtype in header]


def _room_for(header: _Header) -> Tensor:
    return torch.empty(sum(_sizes(header)), dtype=torch.uint8, device=torch.cuda.current_device())


def _opened(header: _Header, flat: Tensor) -> list[_Whole]:
    parts = flat.split(_sizes(header))
    return [
        _Whole(name, part.view(dtype).view(shape), is_stack)
        for (name, is_stack, shape, dtype), part in zip(header, parts, strict=True)
    ]


def _holds_first(*, dense: bool) -> bool:
    """Whether this rank is in the first replica of the experts, or (`dense`) of everything else."""
    from megatron.core import parallel_state as mpu

    if dense:
        return mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    return mpu.get_expert_data_parallel_rank() == 0


def _stage_chunks(module: Any, model: ModelArgs, everywhere: bool, chunk_bytes: int) -> Iterator[list[_Whole]]:
    """What this pipeline stage holds, put together over all ranks, chunk by chunk.

    Every rank has the same chunks. They are empty where it receives nothing; what belongs to groups that it has no part
    in is left out.
    """
    dense, experts = everywhere or _holds_first(dense=True), everywhere or _holds_first(dense=False)
    parameters, adapted = dict(named_weights(module)), adapted_layers(module)

    def value(part: _Part) -> Tensor:
        values = [
            adapted[name].merged_weight() if name in adapted else parameters[name].detach() for name in part.local_names
        ]
        return stacked(values) if part.is_stack else values[0]

    for chunk in _in_chunks(_parts(parameters, model, chunk_bytes, layer_offset(module)), chunk_bytes):
        whole = []
        if dense:
            own = [part for part in chunk if not part.is_stack]
            whole += _whole_dense(own, [value(part) for part in own], model, everywhere)
        if experts:
            own = [part for part in chunk if part.is_stack]
            whole += _whole_experts(own, [value(part) for part in own], model, everywhere)
        yield whole


def layer_offset(module: Any) -> int:
    """Number of layers before this pipeline stage."""
    layers = module.decoder.layers
    return layers[0].layer_number - 1 if len(layers) else 0  # Megatron numbers layers from 1


def _parts(parameters: dict[str, Tensor], model: ModelArgs, chunk_bytes: int, offset: int) -> Iterator[_Part]:
    """This rank's parameters but for adapters, those of experts in stacks that fit a chunk once they are whole."""
    from megatron.core import parallel_state as mpu

    tp, etp = mpu.get_tensor_model_parallel_world_size(), mpu.get_expert_tensor_parallel_world_size()
    ep = mpu.get_expert_model_parallel_world_size()
    groups: dict[tuple[int | None, str], list[tuple[str, str]]] = {}
    """(global name, local name) of a parameter, and of the same matrix of all experts of this rank."""
    for local_name in parameters:
        if not is_adapter(local_name):
            name = global_name(local_name, model, offset)
            layer, rest = split_name(name)
            groups.setdefault((layer, split_expert(rest)[1]), []).append((name, local_name))
    for group in groups.values():
        group.sort(key=lambda names: _expert(names[0]) or 0)  # modules register experts in any order
        name, value = group[0][0], parameters[group[0][1]]
        is_stack = _expert(name) is not None
        shards = etp * ep if is_stack else 1 if find_parameter(name, model).tp_axis is None else tp
        step = max(1, chunk_bytes // (value.nbytes * shards))
        for begin in range(0, len(group), step):
            run = group[begin : begin + step]
            local_names = tuple(local_name for _, local_name in run)
            yield _Part(run[0][0], local_names, is_stack, value.dtype, len(run) * value.nbytes * shards)


def _expert(name: str) -> int | None:
    """The number of the expert whose parameter it is."""
    return split_expert(split_name(name)[1])[0]


def _in_chunks(parts: Iterator[_Part], chunk_bytes: int) -> Iterator[list[_Part]]:
    chunk: list[_Part] = []
    size = 0
    for part in parts:
        # One dtype per chunk, so that every part of the flat buffer is aligned for its dtype.
        if chunk and (size + part.whole_bytes > chunk_bytes or part.dtype != chunk[0].dtype):
            yield chunk
            chunk, size = [], 0
        chunk.append(part)
        size += part.whole_bytes
    if chunk:
        yield chunk


def _whole_dense(parts: list[_Part], values: list[Tensor], model: ModelArgs, everywhere: bool) -> list[_Whole]:
    """Every sharded parameter whole: one gather of all shards. Nothing on a rank that does not receive it."""
    from megatron.core import parallel_state as mpu

    group = mpu.get_tensor_model_parallel_group()
    sharded = [number for number, part in enumerate(parts) if find_parameter(part.name, model).tp_axis is not None]
    gathered = _gather([values[number] for number in sharded], group, everywhere)
    if gathered is None:
        return []
    for number, shards in zip(sharded, gathered, strict=True):
        values[number] = merge_tp(parts[number].name, shards, model)
    return [_Whole(part.name, value, False) for part, value in zip(parts, values, strict=True)]


def _whole_experts(parts: list[_Part], values: list[Tensor], model: ModelArgs, everywhere: bool) -> list[_Whole]:
    """The experts of all expert-parallel ranks, those of each as a stack. Nothing where they are not received."""
    from megatron.core import parallel_state as mpu

    # The group's ranks hold expert-parallel rank 0's experts in all their shards, then rank 1's, ...
    gathered = _gather(values, mpu.get_expert_tensor_and_model_parallel_group(), everywhere)
    if gathered is None:
        return []
    ep, etp = mpu.get_expert_model_parallel_world_size(), mpu.get_expert_tensor_parallel_world_size()
    local_experts = (model.num_experts or 0) // ep
    out = []
    for part, shards in zip(parts, gathered, strict=True):
        for rank in range(ep):
            name = global_name(part.name, model, expert_offset=rank * local_experts)
            out.append(_Whole(name, merge_tp(name, shards[rank * etp : (rank + 1) * etp], model, stacked=True), True))
    return out


def _gather(values: Sequence[Tensor], group: dist.ProcessGroup, everywhere: bool) -> list[list[Tensor]] | None:
    """For each tensor those of all ranks of the group, in rank order: one collective for all.

    On the group's first rank, or `everywhere`; None on the other ranks.
    """
    if group.size() == 1 or not values:
        return [[value] for value in values]
    flat = flatten(values)
    first = dist.get_global_rank(group, 0)
    receives = everywhere or dist.get_rank() == first
    gathered = flat.new_empty(group.size() * len(flat)) if receives else None
    if everywhere:
        dist.all_gather_into_tensor(gathered, flat, group=group)
    else:
        dist.gather(flat, None if gathered is None else list(gathered.chunk(group.size())), dst=first, group=group)
    if gathered is None:
        return None
    sizes = [value.nbytes for value in values]
    per_rank = [part.split(sizes) for part in gathered.chunk(group.size())]
    return [[parts[i].view(value.dtype).view(value.shape) for parts in per_rank] for i, value in enumerate(values)]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors' bytes, one after the other [sum of nbytes]."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
