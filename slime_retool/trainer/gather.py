"""Whole parameters under Hugging Face names, from their tensor-, expert- and pipeline-parallel parts.

Parameters travel in chunks of `CHUNK_BYTES`: one all-gather over the tensor-parallel group (for experts, over the
expert-parallel ranks and the tensor-parallel ranks within each) and one transfer between pipeline stages for many
parameters, instead of one each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.layout import merge_tp, to_hf
from megatron_bridge.lora import adapted_layers
from megatron_bridge.lora_spec import is_adapter
from megatron_bridge.model import named_weights
from megatron_bridge.model_config import ModelArgs
from megatron_bridge.names import find_parameter, global_name

CHUNK_BYTES = 128 * 2**20
"""Bytes of one rank's shards that are gathered at once (a larger parameter goes alone)."""

Named = tuple[str, Tensor]


@torch.no_grad()
def hf_named_tensors(module: Any, model: ModelArgs, *, everywhere: bool = False) -> Iterator[Named]:
    """(HF name, full tensor) of every weight, on global rank 0, or with `everywhere` on every rank.

    Collective: every rank iterates to the end. LoRA adapters are merged into the weights. Tensors may share memory with
    the model: use or copy each before the next.
    With `everywhere` each data-parallel replica gathers for itself; otherwise only the first takes part, and for
    experts, which are spread over data-parallel ranks, the first expert-data-parallel replica.
    """
    from megatron.core import parallel_state as mpu

    if not (everywhere or _holds_first(dense=True) or _holds_first(dense=False)):
        return
    stages = mpu.get_pipeline_model_parallel_group()  # of this rank's tensor-parallel position
    pp_rank = mpu.get_pipeline_model_parallel_rank()
    leader = everywhere or (_holds_first(dense=True) and mpu.get_tensor_model_parallel_rank() == 0)
    wanted = leader and (everywhere or pp_rank == 0)
    for stage in range(stages.size()):
        # The first stage's tensors are where they are wanted, unless every stage wants them.
        travels = leader and stages.size() > 1 and (everywhere or stage > 0)
        chunks = _stage_chunks(module, model, everywhere) if stage == pp_rank else iter(())
        for chunk in _shared(chunks, stage, stages) if travels else chunks:
            for name, full in chunk if wanted else ():
                yield from to_hf(name, full, model)


def _shared(chunks: Iterator[list[Named]], stage: int, stages: dist.ProcessGroup) -> Iterator[list[Named]]:
    """The chunks that the ranks of one pipeline stage have, on the ranks of all stages."""
    source = dist.get_global_rank(stages, stage)
    sends = dist.get_rank() == source
    while True:
        chunk = next(chunks, [])
        header: list[Any] = [[(name, full.shape, full.dtype) for name, full in chunk]]
        dist.broadcast_object_list(header, src=source, group=stages)
        if not header[0]:
            return
        sizes = [shape.numel() * dtype.itemsize for _, shape, dtype in header[0]]
        flat = _flatten([full for _, full in chunk])
        if not sends:
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=torch.cuda.current_device())
        dist.broadcast(flat, src=source, group=stages)
        parts = zip(header[0], flat.split(sizes), strict=True)
        yield chunk if sends else [(name, part.view(dtype).view(shape)) for (name, shape, dtype), part in parts]


def _holds_first(*, dense: bool) -> bool:
    """Whether this rank is in the first replica of the experts, or (`dense`) of everything else."""
    from megatron.core import parallel_state as mpu

    if dense:
        return mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    return mpu.get_expert_data_parallel_rank() == 0


def _stage_chunks(module: Any, model: ModelArgs, everywhere: bool) -> Iterator[list[Named]]:
    """[(global Megatron name, tensor merged over all ranks)] of this pipeline stage, chunk by chunk.

    Every rank has the same chunks; what belongs to groups that it has no part in is left out.
    """
    from megatron.core import parallel_state as mpu

    layers = module.decoder.layers
    offset = layers[0].layer_number - 1 if len(layers) else 0  # Megatron numbers layers from 1
    ep = mpu.get_expert_model_parallel_world_size()
    dense, experts = everywhere or _holds_first(dense=True), everywhere or _holds_first(dense=False)
    chunk: list[Named] = []
    size = 0

    def merged() -> list[Named]:
        out = _merged_dense([(n, v) for n, v in chunk if _expert_of(n, model) is None], model) if dense else []
        if experts:
            out += _merged_experts([(n, v) for n, v in chunk if _expert_of(n, model) is not None], model, ep)
        return out

    adapted = adapted_layers(module)
    for local_name, parameter in named_weights(module):
        if is_adapter(local_name):
            continue
        value = adapted[local_name].merged_weight() if local_name in adapted else parameter.detach()
        name = global_name(local_name, model, offset)
        wanted = value.nbytes * (1 if _expert_of(name, model) is None else ep)
        # One dtype per chunk, so that every part of the flat buffer is aligned for its dtype.
        if chunk and (size + wanted > CHUNK_BYTES or value.dtype != chunk[0][1].dtype):
            yield merged()
            chunk, size = [], 0
        chunk.append((name, value))
        size += wanted
    if chunk:
        yield merged()


def _expert_of(name: str, model: ModelArgs) -> int | None:
    return find_parameter(name, model).expert


def _merged_dense(chunk: list[Named], model: ModelArgs) -> list[Named]:
    """Every sharded parameter whole: one all-gather of all shards."""
    from megatron.core import parallel_state as mpu

    sharded = [(name, value) for name, value in chunk if find_parameter(name, model).tp_axis is not None]
    gathered = _all_gather([value for _, value in sharded], mpu.get_tensor_model_parallel_group())
    whole = {name: merge_tp(name, shards, model) for (name, _), shards in zip(sharded, gathered, strict=True)}
    return [(name, whole.get(name, value)) for name, value in chunk]


def _merged_experts(chunk: list[Named], model: ModelArgs, ep: int) -> list[Named]:
    """The experts of all ranks. Those of `chunk` bear the numbers that expert-parallel rank 0 would give them."""
    from megatron.core import parallel_state as mpu

    # The group's ranks hold expert-parallel rank 0's experts in all their shards, then rank 1's, ...
    gathered = _all_gather([value for _, value in chunk], mpu.get_expert_tensor_and_model_parallel_group())
    etp, local_experts = mpu.get_expert_tensor_parallel_world_size(), (model.num_experts or 0) // ep
    out = []
    for (name, _), shards in zip(chunk, gathered, strict=True):
        for rank in range(ep):
            full_name = global_name(name, model, expert_offset=rank * local_experts)
            out.append((full_name, merge_tp(full_name, shards[rank * etp : (rank + 1) * etp], model)))
    return out


def _all_gather(values: list[Tensor], group: dist.ProcessGroup) -> list[list[Tensor]]:
    """For each tensor those of all ranks of the group, in rank order: one collective for all."""
    if group.size() == 1 or not values:
        return [[value] for value in values]
    flat = _flatten(values)
    gathered = flat.new_empty(group.size() * len(flat))
    dist.all_gather_into_tensor(gathered, flat, group=group)
    sizes = [value.nbytes for value in values]
    per_rank = [part.split(sizes) for part in gathered.chunk(group.size())]
    return [[parts[i].view(value.dtype).view(value.shape) for parts in per_rank] for i, value in enumerate(values)]


def _flatten(tensors: list[Tensor]) -> Tensor:
    """All tensors' bytes, one after the other [sum of nbytes]."""
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
