"""The GPU kernels behind `algo.softmax`. Each reads every logit once; nothing as wide as the vocabulary is written
but the gradient. N rows, V columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
LOWEST = tl.constexpr(-1e38)
"""Start of a running maximum: finite, so that (start - maximum) * 0 is 0."""


@triton.jit
def _row_sums(
    logits, local, out, num_rows, inverse_temperature, width: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row. Every lane keeps a running maximum and its sums; lanes meet at the end."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * width
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        inside = begin + lanes < width
        z = tl.load(base + begin + lanes, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        z = tl.where(inside, z, LOWEST)
        new_top = tl.maximum(top, z)
        scale = tl.exp(top - new_top)
        # A lane outside has z = LOWEST: exp is 0, or 1 where the lane never was inside (then its weight is 0 below).
        exp = tl.where(inside, tl.exp(z - new_top), 0.0)
        if WITH_ENTROPY:
            weighted = scale * (weighted + (top - new_top) * total) + exp * (z - new_top)
        total = total * scale + exp
        top = new_top
    row_top = tl.max(top, axis=0)
    scale = tl.exp(top - row_top)
    tl.store(out + row, row_top)
    tl.store(out + num_rows + row, tl.sum(total * scale, axis=0))
    if WITH_ENTROPY:
        tl.store(out + 2 * num_rows + row, tl.sum(scale * (weighted + (top - row_top) * total), axis=0))
    target = tl.load(local + row)
    if target >= 0:
        tl.store(out + 3 * num_rows + row, tl.load(base + target).to(tl.float32) * inverse_temperature)


@triton.jit
def _gradient(
    logits, out, local, log_sums, entropy, grad_log_probs, grad_entropy, inverse_temperature,
    width: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and block of columns."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    offsets = row.to(tl.int64) * width + columns
    z = tl.load(logits + offsets, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
    log_p = z - tl.load(log_sums + row)
    of_log_prob = tl.load(grad_log_probs + row)
    factor = of_log_prob
    if WITH_ENTROPY:
        factor = of_log_prob + tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    grad = tl.where(columns == tl.load(local + row), of_log_prob, 0.0) - tl.exp(log_p) * factor
    unread = of_log_prob == 0.0
    if WITH_ENTROPY:
        unread = unread & (tl.load(grad_entropy + row) == 0.0)
    grad = tl.where(unread, 0.0, grad)
    tl.store(out + offsets, (grad * inverse_temperature).to(out.dtype.element_ty), mask=inside)


def row_sums_cuda(logits: Tensor, local: Tensor, inverse_temperature: float, with_entropy: bool) -> Tensor:
    """See `softmax.row_sums`; `logits` are left alone."""
    rows, width = logits.shape
    assert logits.is_contiguous()
    out = torch.zeros((4, rows), dtype=torch.float32, device=logits.device)
    _row_sums[(rows,)](logits, local, out, rows, inverse_temperature, width, with_entropy, BLOCK, num_warps=8)
    return out


def logits_gradient_cuda(
    logits: Tensor, local: Tensor, log_sums: Tensor, entropy: Tensor, grad_log_probs: Tensor,
    grad_entropy: Tensor | None, inverse_temperature: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """See `softmax.logits_gradient`; in place when `dtype` is that of the logits."""
    rows, width = logits.shape
    assert logits.is_contiguous()
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    if width:
        _gradient[(rows, triton.cdiv(width, BLOCK))](
            logits, out, local, log_sums, entropy, grad_log_probs.contiguous(),
            log_sums if grad_entropy is None else grad_entropy.contiguous(),
            inverse_temperature, width, grad_entropy is not None, BLOCK, num_warps=8,
        )  # fmt: skip
    return out
