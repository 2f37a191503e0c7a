"""What a chunk of logits is asked for: sums over the vocabulary in forward, its gradient in backward.

N rows of logits, V columns of this tensor-parallel rank, z = logits * inverse_temperature. On the CPU these are a few
torch calls; on a GPU each is one kernel that reads the logits once (`softmax_triton`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(logits: Tensor, local: Tensor, inverse_temperature: float, with_entropy: bool) -> Tensor:
    """Four numbers of each row, [4, N] fp32: top = max z, sum exp(z - top), sum exp(z - top) (z - top), z at `local`.

    logits [N, V] (overwritten); local [N] int64: a column, or -1 for a target that another rank holds (gives 0).
    Without `with_entropy` the third is 0. V = 0 gives top = -inf.
    """
    if logits.shape[1] == 0:
        out = logits.new_zeros((4, len(logits)), dtype=torch.float32)
        out[0] = -torch.inf
        return out
    if logits.is_cuda:
        from slime_retool.algo.softmax_triton import row_sums_cuda

        return row_sums_cuda(logits, local, inverse_temperature, with_entropy)
    z = logits.float().mul_(inverse_temperature)
    at_target = z.gather(1, local.clamp(min=0)[:, None])[:, 0].masked_fill(local < 0, 0.0)
    top = z.amax(dim=-1)
    z.sub_(top[:, None])
    weighted = torch.zeros_like(top)
    if with_entropy:
        exp = z.exp()
        return torch.stack([top, exp.sum(-1), exp.mul_(z).sum(-1), at_target])
    return torch.stack([top, z.exp_().sum(-1), weighted, at_target])


def logits_gradient(
    logits: Tensor,  # [N, V], overwritten
    local: Tensor,  # [N]
    log_sums: Tensor,  # [N] fp32, log sum exp z over all ranks' columns
    entropy: Tensor,  # [N] fp32
    grad_log_probs: Tensor,  # [N] fp32
    grad_entropy: Tensor | None,  # [N] fp32
    inverse_temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits [N, V] in `dtype`, from the gradients of log-prob and entropy.

    With p = softmax(z), H = -sum_j p_j log p_j, and t the target:
    d log p_t / d z_j = [j = t] - p_j;  d H / d z_j = -p_j (log p_j + H).
    A row with no gradient gives 0, whatever its logits are: 0 * NaN would be NaN.
    """
    if logits.is_cuda:
        from slime_retool.algo.softmax_triton import logits_gradient_cuda

        return logits_gradient_cuda(
            logits, local, log_sums, entropy, grad_log_probs, grad_entropy, inverse_temperature, dtype
        )
    if logits.shape[1] == 0:
        return logits.to(dtype)
    log_p = logits.float().mul_(inverse_temperature).sub_(log_sums[:, None])
    if grad_entropy is None:
        grad = log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        p = log_p.exp()
        factor = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None])
        grad = p.mul_(factor).neg_()
    grad.scatter_add_(1, local.clamp(min=0)[:, None], grad_log_probs.masked_fill(local < 0, 0.0)[:, None])
    unread = grad_log_probs == 0 if grad_entropy is None else (grad_log_probs == 0) & (grad_entropy == 0)
    return grad.mul_(inverse_temperature).masked_fill_(unread[:, None], 0.0).to(dtype)
