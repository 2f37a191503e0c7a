"""Elementwise parts of a layer, each as one pass over memory: SwiGLU, and what lies between QKV product and attention.

On the CPU these are plain torch; on a GPU one Triton kernel each way (`fused_triton`), because a chain of separate
kernels reads and writes the same activations several times. T = rows (tokens), G = key/value heads of this rank, R =
query heads for each of them, D = head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def split_norm_rotate(
    mixed: Tensor,  # [T, G, R + 2, D]: of each group the query heads, the key head, the value head
    q_weight: Tensor | None,  # [D]
    k_weight: Tensor | None,  # [D]
    cos: Tensor,  # [T, d_rot / 2] fp32
    sin: Tensor,  # [T, d_rot / 2] fp32
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, G * R, D], keys [T, G, D] and values [T, G, D] from a layer's QKV product.

    Each query and key head is normalised (RMSNorm; not without weights) and rotated (rotary embeddings,
    https://arxiv.org/abs/2104.09864): the pair (i, i + d_rot / 2) turns by the token's i-th angle. All in fp32, rounded
    once, to the dtype of `mixed`. Both weights are given, or neither.
    """
    assert (q_weight is None) == (k_weight is None)
    if mixed.is_cuda:
        width = mixed.shape[-1]
        if cos.shape[-1] * 2 == width and width & (width - 1) == 0:
            from megatron_bridge.fused_triton import SplitNormRotate

            return SplitNormRotate.apply(mixed, q_weight, k_weight, cos, sin, eps)
        mark_any_length(mixed, cos, sin)
        return compiled(_split_norm_rotate)(mixed, q_weight, k_weight, cos, sin, eps)
    return _split_norm_rotate(mixed, q_weight, k_weight, cos, sin, eps)


def swiglu(x: Tensor) -> Tensor:
    """[..., 2 F] -> [..., F]: silu of the first half times the second, https://arxiv.org/abs/2002.05202."""
    if x.is_cuda:
        from megatron_bridge.fused_triton import SwiGLU

        return SwiGLU.apply(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in fp32 inside; https://arxiv.org/abs/1910.07467."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, ..., D] fp32; cos and sin [T, d_rot / 2]."""
    half = cos.shape[-1]
    shape = (len(x), *[1] * (x.dim() - 2), half)
    cos, sin = cos.view(shape), sin.view(shape)
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _split_norm_rotate(
    mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, groups, heads, width = mixed.shape
    query, key, value = mixed.split([heads - 2, 1, 1], dim=2)
    query, key = query.float(), key.float()
    if q_weight is not None and k_weight is not None:
        query, key = rms_norm(query, q_weight, eps), rms_norm(key, k_weight, eps)
    query, key = (_rotate(x, cos, sin).to(mixed.dtype) for x in (query, key))
    return query.reshape(rows, -1, width), key.reshape(rows, groups, width), value.reshape(rows, groups, width)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def mark_any_length(*tensors: Tensor) -> None:
    """Every micro-batch has its own number of rows: compile once for all of them. Other sizes are few."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
