"""The GPU kernels behind `megatron_bridge.fused`; sizes are named there. Arithmetic is in fp32."""

from __future__ import annotations

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
def _norm_and_turn(first, second, weight_1, weight_2, cos, sin, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves [ROWS, HALF] of one head."""
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first, second = first * scale * weight_1, second * scale * weight_2
    return _turn(first, second, cos, sin)


@triton.jit
def _gradient_of_head(
    first, second, grad_1, grad_2, weight_1, weight_2, cos, sin, eps, HALF: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """(gradient of both halves, gradient of both halves of the weight, summed over the rows)."""
    grad_1, grad_2 = _turn(grad_1, grad_2, cos, -sin)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first, second = first * scale, second * scale
        of_weight_1, of_weight_2 = tl.sum(grad_1 * first, 0), tl.sum(grad_2 * second, 0)
        grad_1, grad_2 = grad_1 * weight_1, grad_2 * weight_2
        along = ((tl.sum(grad_1 * first, 1) + tl.sum(grad_2 * second, 1)) / (2 * HALF))[:, None]
        grad_1, grad_2 = scale * (grad_1 - first * along), scale * (grad_2 - second * along)
    else:
        of_weight_1, of_weight_2 = tl.sum(grad_1, 0) * 0, tl.sum(grad_2, 0) * 0
    return grad_1, grad_2, of_weight_1, of_weight_2


@triton.jit
def _split_forward(
    mixed, q_weight, k_weight, cos, sin, query, key, value, rows, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of one group. HEADS = R query heads of the group."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    inside = row < rows
    group, groups = tl.program_id(1), tl.num_programs(1)
    width = 2 * HALF
    turn_cos = tl.load(cos + row * HALF + lane, mask=inside, other=0.0)
    turn_sin = tl.load(sin + row * HALF + lane, mask=inside, other=0.0)
    source = mixed + (row * groups + group) * (HEADS + 2) * width + lane
    weight_1, weight_2 = turn_cos, turn_sin  # not read without norms
    if NORM:
        weight_1 = tl.load(q_weight + lane).to(tl.float32)
        weight_2 = tl.load(q_weight + HALF + lane).to(tl.float32)
    target = query + (row * groups + group) * HEADS * width + lane
    for head in range(HEADS):
        first = tl.load(source + head * width, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + head * width + HALF, mask=inside, other=0.0).to(tl.float32)
        first, second = _norm_and_turn(first, second, weight_1, weight_2, turn_cos, turn_sin, eps, HALF, NORM)
        tl.store(target + head * width, first.to(query.dtype.element_ty), mask=inside)
        tl.store(target + head * width + HALF, second.to(query.dtype.element_ty), mask=inside)
    if NORM:
        weight_1 = tl.load(k_weight + lane).to(tl.float32)
        weight_2 = tl.load(k_weight + HALF + lane).to(tl.float32)
    source += HEADS * width
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    first, second = _norm_and_turn(first, second, weight_1, weight_2, turn_cos, turn_sin, eps, HALF, NORM)
    target = key + (row * groups + group) * width + lane
    tl.store(target, first.to(key.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(key.dtype.element_ty), mask=inside)
    source += width
    target = value + (row * groups + group) * width + lane
    tl.store(target, tl.load(source, mask=inside), mask=inside)
    tl.store(target + HALF, tl.load(source + HALF, mask=inside), mask=inside)


@triton.jit
def _split_backward(
    mixed, q_weight, k_weight, cos, sin, grad_query, grad_key, grad_value, grad_mixed, grad_weights, rows, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As in forward; `grad_weights` [programs, 2, D] fp32 gets each program's sum for queries and for keys."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    inside = row < rows
    group, groups = tl.program_id(1), tl.num_programs(1)
    width = 2 * HALF
    turn_cos = tl.load(cos + row * HALF + lane, mask=inside, other=0.0)
    turn_sin = tl.load(sin + row * HALF + lane, mask=inside, other=0.0)
    place = (row * groups + group) * (HEADS + 2) * width + lane
    weight_1, weight_2 = turn_cos, turn_sin  # not read without norms
    if NORM:
        weight_1 = tl.load(q_weight + lane).to(tl.float32)
        weight_2 = tl.load(q_weight + HALF + lane).to(tl.float32)
    total_1 = tl.zeros([HALF], tl.float32)
    total_2 = tl.zeros([HALF], tl.float32)
    coming = grad_query + (row * groups + group) * HEADS * width + lane
    for head in range(HEADS):
        first = tl.load(mixed + place + head * width, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(mixed + place + head * width + HALF, mask=inside, other=0.0).to(tl.float32)
        grad_1 = tl.load(coming + head * width, mask=inside, other=0.0).to(tl.float32)
        grad_2 = tl.load(coming + head * width + HALF, mask=inside, other=0.0).to(tl.float32)
        grad_1, grad_2, of_weight_1, of_weight_2 = _gradient_of_head(
            first, second, grad_1, grad_2, weight_1, weight_2, turn_cos, turn_sin, eps, HALF, NORM
        )
        total_1 += of_weight_1
        total_2 += of_weight_2
        tl.store(grad_mixed + place + head * width, grad_1.to(grad_mixed.dtype.element_ty), mask=inside)
        tl.store(grad_mixed + place + head * width + HALF, grad_2.to(grad_mixed.dtype.element_ty), mask=inside)
    lanes = tl.arange(0, HALF)
    sums = grad_weights + (tl.program_id(0) * groups + group) * 2 * width
    if NORM:
        tl.store(sums + lanes, total_1)
        tl.store(sums + HALF + lanes, total_2)
        weight_1 = tl.load(k_weight + lane).to(tl.float32)
        weight_2 = tl.load(k_weight + HALF + lane).to(tl.float32)
    place += HEADS * width
    coming = grad_key + (row * groups + group) * width + lane
    first = tl.load(mixed + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(mixed + place + HALF, mask=inside, other=0.0).to(tl.float32)
    grad_1 = tl.load(coming, mask=inside, other=0.0).to(tl.float32)
    grad_2 = tl.load(coming + HALF, mask=inside, other=0.0).to(tl.float32)
    grad_1, grad_2, of_weight_1, of_weight_2 = _gradient_of_head(
        first, second, grad_1, grad_2, weight_1, weight_2, turn_cos, turn_sin, eps, HALF, NORM
    )
    if NORM:
        tl.store(sums + width + lanes, of_weight_1)
        tl.store(sums + width + HALF + lanes, of_weight_2)
    tl.store(grad_mixed + place, grad_1.to(grad_mixed.dtype.element_ty), mask=inside)
    tl.store(grad_mixed + place + HALF, grad_2.to(grad_mixed.dtype.element_ty), mask=inside)
    place += width
    coming = grad_value + (row * groups + group) * width + lane
    tl.store(grad_mixed + place, tl.load(coming, mask=inside), mask=inside)
    tl.store(grad_mixed + place + HALF, tl.load(coming + HALF, mask=inside), mask=inside)


def split_norm_rotate_forward(
    mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused.split_norm_rotate`."""
    rows, groups, heads, width = mixed.shape
    mixed = mixed.contiguous()
    query = mixed.new_empty((rows, groups * (heads - 2), width))
    key, value = mixed.new_empty((rows, groups, width)), mixed.new_empty((rows, groups, width))
    if rows:
        norm = q_weight is not None
        _split_forward[(triton.cdiv(rows, ROWS), groups)](
            mixed, q_weight if norm else cos, k_weight if norm else cos, cos, sin, query, key, value, rows, eps,
            heads - 2, width // 2, norm, ROWS, num_warps=FORWARD_WARPS,
        )  # fmt: skip
    return query, key, value


def split_norm_rotate_backward(
    mixed: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float,
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of mixed, q_weight and k_weight."""
    rows, groups, heads, width = mixed.shape
    mixed = mixed.contiguous()
    grad_mixed = torch.empty_like(mixed)
    blocks, norm = triton.cdiv(rows, ROWS), q_weight is not None
    sums = torch.empty((blocks * groups if norm else 0, 2, width), dtype=torch.float32, device=mixed.device)
    if rows:
        _split_backward[(blocks, groups)](
            mixed, q_weight if norm else cos, k_weight if norm else cos, cos, sin, grad_query.contiguous(),
            grad_key.contiguous(), grad_value.contiguous(), grad_mixed, sums, rows, eps,
            heads - 2, width // 2, norm, ROWS, num_warps=BACKWARD_WARPS,
        )  # fmt: skip
    if q_weight is None or k_weight is None:
        return grad_mixed, None, None
    of_query, of_key = sums.sum(0)
    return grad_mixed, of_query.to(q_weight.dtype), of_key.to(k_weight.dtype)


@triton.jit
def _swiglu_forward(x, out, width, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(x, grad, grad_x, width, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    coming = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    of_gate = coming * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(grad_x + row * 2 * width + column, of_gate.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_x + row * 2 * width + width + column, (coming * silu).to(grad_x.dtype.element_ty), mask=inside)


def swiglu_forward(x: Tensor) -> Tensor:
    """See `fused.swiglu`."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], width))
    rows = x.numel() // (2 * width)
    if rows:
        _swiglu_forward[(rows, triton.cdiv(width, COLUMNS))](x, out, width, COLUMNS, num_warps=8)
    return out


def swiglu_backward(x: Tensor, grad: Tensor) -> Tensor:
    """Gradient of x."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    grad_x = torch.empty_like(x)
    rows = x.numel() // (2 * width)
    if rows:
        _swiglu_backward[(rows, triton.cdiv(width, COLUMNS))](
            x, grad.contiguous(), grad_x, width, COLUMNS, num_warps=8
        )  # fmt: skip
    return grad_x
