"""How one parameter's values are laid out: HF tensors <-> Megatron tensor <-> tensor-parallel shards.

g = key/value heads, r = query heads per key/value head, d = head width, F = ffn width, H = hidden size.
A full Megatron tensor is what a torch_dist checkpoint holds:
- QKV: [g * (r + 2) * d, H], for each key/value head its r query heads, then its key, then its value.
- GATED: [2 * F, H], gate then up. A shard of tensor-parallel rank i holds part i of both.
- VOCABULARY: [padded vocabulary, H]; the padding is zero when it comes from HF.
- Experts are parameters of their own; their shards are those of the expert-tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_bridge.model_config import ModelArgs, head_dim, padded_vocab_size, query_groups, required
from megatron_bridge.names import GATED, OUTPUT_LAYER, QKV, VOCABULARY, find_parameter, hf_names


def to_hf(name: str, full: Tensor, model: ModelArgs) -> list[tuple[str, Tensor]]:
    """The HF tensors held by one full (all tensor-parallel shards merged) Megatron tensor.

    `name` carries the global layer number. The result may share memory with `full`. A tied output layer, which the
    last pipeline stage holds as a copy of the embedding, gives nothing.
    """
    parameter = find_parameter(name, model)
    if parameter == OUTPUT_LAYER and not model.untie_embeddings_and_output_weights:
        return []
    parts: Sequence[Tensor] = [full]
    if parameter.kind == QKV:
        parts = split_qkv(full, model)
    elif parameter.kind == GATED:
        parts = full.chunk(2)
    elif parameter.kind == VOCABULARY:
        parts = [full[: required(model, "vocab_size")]]
    return list(zip(hf_names(name, model), parts, strict=True))


def from_hf(name: str, hf: Mapping[str, Tensor], model: ModelArgs, tp: int = 1) -> Tensor:
    """The full Megatron tensor made of HF tensors (`hf` maps at least the needed full HF names).

    tp only decides the padding of the vocabulary.
    """
    parameter = find_parameter(name, model)
    parts = [hf[hf_name] for hf_name in hf_names(name, model)]
    if parameter.kind == QKV:
        return merge_qkv(*parts, groups=query_groups(model))
    if parameter.kind == GATED:
        return torch.cat(parts)
    if parameter.kind == VOCABULARY:
        return pad_vocabulary(parts[0], padded_vocab_size(model, tp))
    return parts[0]


def merge_tp(name: str, shards: Sequence[Tensor], model: ModelArgs, *, stacked: bool = False) -> Tensor:
    """One full tensor from the shards of all tensor-parallel ranks, in rank order.

    `stacked`: several experts' in one, in a dimension before the parameter's own.
    """
    parameter = find_parameter(name, model)
    if parameter.tp_axis is None or len(shards) == 1:
        return shards[0]
    axis = parameter.tp_axis + int(stacked)
    if parameter.kind == GATED:
        halves = [shard.chunk(2, dim=axis) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim=axis)
    return torch.cat(list(shards), dim=axis)


def merge_qkv(query: Tensor, key: Tensor, value: Tensor, *, groups: int) -> Tensor:
    """[g * r * d, ...], [g * d, ...], [g * d, ...] -> [g * (r + 2) * d, ...], interleaved per key/value head."""
    rest = query.shape[1:]
    parts = [part.reshape(groups, -1, *rest) for part in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def split_qkv(qkv: Tensor, model: ModelArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of `merge_qkv`."""
    groups, width, rest = query_groups(model), head_dim(model), qkv.shape[1:]
    per_group = qkv.reshape(groups, -1, *rest)
    query, key, value = per_group.split([per_group.shape[1] - 2 * width, width, width], dim=1)
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def pad_vocabulary(weight: Tensor, rows: int) -> Tensor:
    """[V, H] -> [rows, H] with zeros below."""
    if len(weight) == rows:
        return weight
    return torch.cat([weight, weight.new_zeros(rows - len(weight), *weight.shape[1:])])


def megatron_shape(name: str, model: ModelArgs, tp: int = 1) -> tuple[int, ...]:
    """Shape of the full Megatron tensor."""
    shapes = list(hf_shapes(name, model).values())
    vocabulary = find_parameter(name, model).kind == VOCABULARY
    rows = padded_vocab_size(model, tp) if vocabulary else sum(shape[0] for shape in shapes)
    return (rows, *shapes[0][1:])


def hf_shapes(name: str, model: ModelArgs) -> dict[str, tuple[int, ...]]:
    """{HF name: shape} of the tensors that a Megatron parameter holds."""
    parameter = find_parameter(name, model)
    sizes = {
        "vocabulary": required(model, "vocab_size"),
        "hidden": required(model, "hidden_size"),
        "query": required(model, "num_attention_heads") * head_dim(model),
        "kv": query_groups(model) * head_dim(model),
        "head": head_dim(model),
        "ffn": required(model, "ffn_hidden_size" if parameter.expert is None else "moe_ffn_hidden_size"),
        "shared": model.moe_shared_expert_intermediate_size or 0,
        "experts": model.num_experts or 0,
        "one": 1,
    }
    shapes = [tuple(sizes[axis] for axis in axes.split()) for axes in parameter.hf.values()]
    return dict(zip(hf_names(name, model), shapes, strict=True))
