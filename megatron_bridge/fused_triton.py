"""The GPU kernels behind `megatron_bridge.fused`; sizes are named there. Arithmetic is in fp32."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Rows of one program of the QKV kernels: few enough that a head of them stays in registers."""
FORWARD_WARPS, BACKWARD_WARPS = 4, 1
"""Warps of the QKV kernels: with 16 rows on an H200, backward takes 0.21 ms with one warp, 0.29 ms with four."""
COLUMNS = 2048
"""Columns of one program of the SwiGLU kernels."""


@triton.jit
def _turn(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _load(at, half, inside):
    """Both halves of one head or row, `half` elements apart, in fp32."""
    return tl.load(at, inside, 0.0).to(tl.float32), tl.load(at + half, inside, 0.0).to(tl.float32)


@triton.jit
def _store(at, half, first, second, inside):
    tl.store(at, first, mask=inside)
    tl.store(at + half, second, mask=inside)


@triton.jit
def _load_weight(weight, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves [1, HALF] of a norm's weight; not read without norms."""
    first = tl.zeros([1, HALF], tl.float32)
    second = first
    if NORM:
        lane = tl.arange(0, HALF)[None, :]
        first, second = tl.load(weight + lane).to(tl.float32), tl.load(weight + HALF + lane).to(tl.float32)
    return first, second


@triton.jit
def _scale(first, second, eps, HALF: tl.constexpr):
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    return tl.rsqrt(squares / (2 * HALF) + eps)[:, None]


@triton.jit
def _forward_of_head(
    source, target, weight_1, weight_2, cos, sin, inside, eps, HALF: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    first, second = _load(source, HALF, inside)
    if NORM:
        scale = _scale(first, second, eps, HALF)
        first, second = first * scale * weight_1, second * scale * weight_2
    first, second = _turn(first, second, cos, sin)
    _store(target, HALF, first, second, inside)


@triton.jit
def _backward_of_head(
    source, coming, target, weight_1, weight_2, cos, sin, inside, eps, HALF: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Returns the gradient of both halves of the weight, summed over the rows."""
    first, second = _load(source, HALF, inside)
    grad_1, grad_2 = _load(coming, HALF, inside)
    grad_1, grad_2 = _turn(grad_1, grad_2, cos, -sin)
    if NORM:
        scale = _scale(first, second, eps, HALF)
        first, second = first * scale, second * scale
        of_weight_1, of_weight_2 = tl.sum(grad_1 * first, 0), tl.sum(grad_2 * second, 0)
        grad_1, grad_2 = grad_1 * weight_1, grad_2 * weight_2
        along = ((tl.sum(grad_1 * first, 1) + tl.sum(grad_2 * second, 1)) / (2 * HALF))[:, None]
        grad_1, grad_2 = scale * (grad_1 - first * along), scale * (grad_2 - second * along)
    else:
        of_weight_1, of_weight_2 = tl.sum(grad_1, 0) * 0, tl.sum(grad_2, 0) * 0
    _store(target, HALF, grad_1, grad_2, inside)
    return of_weight_1, of_weight_2


@triton.jit
def _split_forward(
    mixed, q_weight, k_weight, cos, sin, query, key, value, rows, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of one group. HEADS = R query heads of the group."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    inside, width = row < rows, 2 * HALF
    turn_cos = tl.load(cos + row * HALF + lane, mask=inside, other=0.0)
    turn_sin = tl.load(sin + row * HALF + lane, mask=inside, other=0.0)
    group = row * tl.num_programs(1) + tl.program_id(1)
    source, target = mixed + group * (HEADS + 2) * width + lane, query + group * HEADS * width + lane
    weight_1, weight_2 = _load_weight(q_weight, HALF, NORM)
    for head in range(HEADS):
        at = head * width
        _forward_of_head(source + at, target + at, weight_1, weight_2, turn_cos, turn_sin, inside, eps, HALF, NORM)
    source, target = source + HEADS * width, key + group * width + lane
    weight_1, weight_2 = _load_weight(k_weight, HALF, NORM)
    _forward_of_head(source, target, weight_1, weight_2, turn_cos, turn_sin, inside, eps, HALF, NORM)
    source, target = source + width, value + group * width + lane
    _store(target, HALF, tl.load(source, mask=inside), tl.load(source + HALF, mask=inside), inside)


@triton.jit
def _split_backward(
    mixed, q_weight, k_weight, cos, sin, grad_query, grad_key, grad_value, grad_mixed, grad_weights, rows, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As in forward; `grad_weights` [programs, 2, D] fp32 gets each program's sum for queries and for keys."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    inside, width = row < rows, 2 * HALF
    turn_cos = tl.load(cos + row * HALF + lane, mask=inside, other=0.0)
    turn_sin = tl.load(sin + row * HALF + lane, mask=inside, other=0.0)
    group = row * tl.num_programs(1) + tl.program_id(1)
    place, coming = group * (HEADS + 2) * width + lane, grad_query + group * HEADS * width + lane
    source, target = mixed + place, grad_mixed + place
    weight_1, weight_2 = _load_weight(q_weight, HALF, NORM)
    total_1, total_2 = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    for head in range(HEADS):
        at = head * width
        of_weight_1, of_weight_2 = _backward_of_head(
            source + at, coming + at, target + at, weight_1, weight_2, turn_cos, turn_sin, inside, eps, HALF, NORM
        )
        total_1 += of_weight_1
        total_2 += of_weight_2
    source, target, coming = source + HEADS * width, target + HEADS * width, grad_key + group * width + lane
    weight_1, weight_2 = _load_weight(k_weight, HALF, NORM)
    of_weight_1, of_weight_2 = _backward_of_head(
        source, coming, target, weight_1, weight_2, turn_cos, turn_sin, inside, eps, HALF, NORM
    )
    if NORM:
        sums = grad_weights + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2 * width
        sums += tl.arange(0, HALF)
        tl.store(sums, total_1)
        tl.store(sums + HALF, total_2)
        tl.store(sums + width, of_weight_1)
        tl.store(sums + width + HALF, of_weight_2)
    target, coming = target + width, grad_value + group * width + lane
    _store(target, HALF, tl.load(coming, mask=inside), tl.load(coming + HALF, mask=inside), inside)


class SplitNormRotate(torch.autograd.Function):
    """See `fused.split_norm_rotate`."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(mixed, q_weight, k_weight, cos, sin)
        ctx.eps = eps
        rows, groups, heads, width = mixed.shape
        query = mixed.new_empty((rows, groups * (heads - 2), width))
        key, value = mixed.new_empty((rows, groups, width)), mixed.new_empty((rows, groups, width))
        if rows:
            norm = q_weight is not None
            _split_forward[(triton.cdiv(rows, ROWS), groups)](
                mixed.contiguous(), q_weight if norm else cos, k_weight if norm else cos, cos, sin, query, key, value,
                rows, eps, heads - 2, width // 2, norm, ROWS, num_warps=FORWARD_WARPS,
            )  # fmt: skip
        return query, key, value

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        mixed, q_weight, k_weight, cos, sin = ctx.saved_tensors
        rows, groups, heads, width = mixed.shape
        mixed = mixed.contiguous()
        grad_mixed = torch.empty_like(mixed)
        blocks, norm = triton.cdiv(rows, ROWS), q_weight is not None
        sums = torch.empty((blocks * groups if norm else 0, 2, width), dtype=torch.float32, device=mixed.device)
        if rows:
            _split_backward[(blocks, groups)](
                mixed, q_weight if norm else cos, k_weight if norm else cos, cos, sin, grad_query.contiguous(),
                grad_key.contiguous(), grad_value.contiguous(), grad_mixed, sums, rows, ctx.eps,
                heads - 2, width // 2, norm, ROWS, num_warps=BACKWARD_WARPS,
            )  # fmt: skip
        if not norm:
            return grad_mixed, None, None, None, None, None
        of_query, of_key = sums.sum(0)
        return grad_mixed, of_query.to(q_weight.dtype), of_key.to(k_weight.dtype), None, None, None


@triton.jit
def _swiglu_forward(x, out, width, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate, up = _load(x + row * 2 * width + column, width, inside)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_backward(x, grad, grad_x, width, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate, up = _load(x + row * 2 * width + column, width, inside)
    coming = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    of_gate = coming * up * (sigmoid + silu * (1.0 - sigmoid))
    _store(grad_x + row * 2 * width + column, width, of_gate, coming * silu, inside)


class SwiGLU(torch.autograd.Function):
    """See `fused.swiglu`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        width = x.shape[-1] // 2
        out = x.new_empty((*x.shape[:-1], width))
        if out.numel():
            grid = (out.numel() // width, triton.cdiv(width, COLUMNS))
            _swiglu_forward[grid](x.contiguous(), out, width, COLUMNS, num_warps=8)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x = ctx.saved_tensors[0].contiguous()
        width = x.shape[-1] // 2
        grad_x = torch.empty_like(x)
        if grad.numel():
            grid = (grad.numel() // width, triton.cdiv(width, COLUMNS))
            _swiglu_backward[grid](x, grad.contiguous(), grad_x, width, COLUMNS, num_warps=8)
        return grad_x
