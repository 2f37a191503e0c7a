"""Checksums of weights under their Hugging Face names, computed alike in an engine and in the trainer.

The checksum of a tensor x, its elements' bits read as integers in row-major order, in the dtype that the engine holds:

    sum of x[i] * w(i) over all i, modulo 2**64        w(i): the odd 64-bit number that scrambles i

An odd w(i) makes any change of one element show; a change of several, also of their order, is missed once in 2**47
or less by chance. It finds mistakes, not forgeries, and is made where the tensor lies: 8 GB of weights take a GPU a
fraction of a second, where SHA-256 takes a processor's core ten. The trainer casts its tensor to the engine's dtype
and calls `tensor_checksum`.

`report` runs inside an SGLang scheduler, as its `--custom-weight-loader` (an extension point of SGLang: a
function of the model and a list of named tensors, called by `/update_weights_from_tensor`). It changes no
weight. SGLang fuses projections; `hf_weights` takes them apart again:

    qkv_proj       rows [q | k | v]            -> q_proj, k_proj, v_proj
    gate_up_proj   rows [gate | up]            -> gate_proj, up_proj
    embed_tokens, lm_head                      -> without the rows that pad the vocabulary
    experts.w13_weight, w2_weight              -> gate_proj, up_proj and down_proj of each expert (`expert_weights`)
    a tied head is the embedding and is reported once, as `model.embed_tokens.weight`

Tensor-parallel workers put their shares together: rows of these, columns of o_proj and down_proj. Where there are more
workers than K/V heads, neighbours hold copies of the same head. Experts come together one after the other.

An engine on a CPU pads an MLP or expert whose width is not a multiple of 32; its down_proj then has another checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slime_retool.engine.expert_weights import ExpertShard, matrix_names

Gather = Callable[[Any], list[Any]]
"""A worker's tensor -> those of all tensor-parallel workers, in order."""
ROWS_OF_INPUT = ("o_proj", "down_proj")
"""Matrices that are split by columns (their input) over the workers."""
SHARED = ".shared_experts"
"""GLM-4.5's name of the expert that SGLang may lay after the others."""

CHUNK = 2**22
"""Elements at a time: 100 MB of temporaries."""
_SCRAMBLE = ((0x9E3779B97F4A7C15 - 2**64, 32), (0xBF58476D1CE4E5B9 - 2**64, 29))
"""Multipliers, as signed numbers, and shifts, in the manner of SplitMix64 (Steele, Lea and Flood, 2014)."""

REPORT_LOADER = "slime_retool.engine.checksum.report"
"""What to pass as `--custom-weight-loader` and as `load_format`."""


def tensor_checksum(tensor: Any) -> str:
    """16 hex digits for a torch tensor, see above; the same on every device."""
    import torch

    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().reshape(-1).view(integers[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), CHUNK):
        chunk = bits[begin : begin + CHUNK].to(torch.int64)
        weights = torch.arange(begin, begin + chunk.numel(), dtype=torch.int64, device=bits.device)
        for factor, shift in _SCRAMBLE:  # all arithmetic is modulo 2**64, as torch's integers are
            weights.mul_(factor).bitwise_xor_(weights >> shift)
        total += chunk.mul_(weights.bitwise_or_(1)).sum()
    return f"{int(total) & (2**64 - 1):016x}"


def hf_weights(model: Any, workers: int = 1, gather: Gather = lambda tensor: [tensor]) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, whole tensor) of every parameter of an SGLang model that is split over `workers`.

    ValueError for experts that are not there as they were loaded.
    """
    import torch

    parents = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner_name, _, kind = name.rpartition(".")  # "model.layers.0.self_attn.qkv_proj", "weight"
        prefix, _, leaf = owner_name.rpartition(".")
        owner = parents[owner_name]
        if kind == "w13_weight":
            yield from _experts(owner_name, ExpertShard.of(owner), gather)
            continue
        if kind == "w2_weight":
            continue  # came with the other
        if leaf == "qkv_proj":
            query, key_value = owner.q_proj_shard_size, owner.kv_proj_shard_size
            q, k, v = (gather(part) for part in parameter.data.split([query, key_value, key_value]))
            copies = owner.num_kv_head_replicas
            pieces = {"q_proj": q, "k_proj": k[::copies], "v_proj": v[::copies]}
        elif leaf == "gate_up_proj":
            gate, up = parameter.data.split([size // workers for size in owner.output_sizes])
            pieces = {"gate_proj": gather(gate), "up_proj": gather(up)}
        elif leaf in ("embed_tokens", "lm_head"):
            pieces = {leaf: [torch.cat(gather(parameter.data))[: owner.org_vocab_size]]}
        elif leaf in ROWS_OF_INPUT and kind == "weight":
            pieces = {leaf: [torch.cat(gather(parameter.data), dim=1)]}
        else:
            pieces = {leaf: [parameter.data]}
        for piece, shares in pieces.items():
            whole = shares[0] if len(shares) == 1 else torch.cat(shares)
            yield ".".join(part for part in (prefix, piece, kind) if part), whole


def _experts(name: str, shard: ExpertShard, gather: Gather) -> Iterator[tuple[str, Any]]:
    """Every expert of the layer, from all workers' shares; a shared one that lies among them under its own name."""
    import torch

    place = torch.tensor([shard.first, shard.part], device=shard.down.device)
    places = [tuple(each.tolist()) for each in gather(place)]
    firsts = sorted({first for first, _ in places})
    split = ((shard.gate, 0), (shard.up, 0), (shard.down, 1))
    for matrix, (values, split_by) in zip(matrix_names(name), split, strict=True):
        for number, value in enumerate(values):
            shares = dict(zip(places, gather(value), strict=True))
            is_shared = number >= shard.routed
            for first in firsts[:1] if is_shared else firsts:
                parts = [shares[place] for place in sorted(shares) if place[0] == first]
                whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=split_by)
                expert = f"{name.removesuffix('.experts')}{SHARED}" if is_shared else f"{name}.{first + number}"
                yield f"{expert}.{matrix}.weight", whole


def _gather(tensor: Any, group: Any) -> list[Any]:
    """Shares of all workers of SGLang's tensor-parallel group."""
    import torch

    if group.world_size == 1:
        return [tensor]
    tensor = tensor.contiguous()
    shares = [torch.empty_like(tensor) for _ in range(group.world_size)]
    torch.distributed.all_gather(shares, tensor, group=group.device_group)
    return shares


def report(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """`write_report` to the file named by the (empty) first tensor's name."""
    write_report(named_tensors[0][0], model)


def write_report(path: str, model: Any, further: Iterable[tuple[str, Any]] = ()) -> None:
    """Write `{"checksums": {name: hex}}` or `{"error": text}` to a file.

    Every worker is called, the first one writes. Never raises: an exception here would end the engine.
    further: (name, tensor) of what every worker has whole, beside the model's parameters.
    """
    answer: dict[str, Any]
    try:
        from sglang.srt.distributed import get_tp_group

        group = get_tp_group()
        leads = group.rank_in_group == 0
        weights = hf_weights(model, group.world_size, lambda tensor: _gather(tensor, group))
        sums = {name: tensor_checksum(tensor) if leads else "" for name, tensor in weights}
        if not leads:
            return
        answer = {"checksums": sums | {name: tensor_checksum(tensor) for name, tensor in further}}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with open(path + ".part", "w") as file:
        json.dump(answer, file)
    os.replace(path + ".part", path)
