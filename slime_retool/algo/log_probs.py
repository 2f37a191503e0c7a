"""Log-probabilities and entropies of tokens from logits whose vocabulary is split over tensor-parallel ranks.

T positions, V = vocabulary columns on this rank. Softmax is computed in fp32 for `chunk_size` positions at a time,
in forward and backward, so that fp32 copies of the logits never exist as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_SIZE = 1024


def vocab_parallel_log_probs(
    logits: Tensor,  # [T, V]
    targets: Tensor,  # [T] int64, ids of the whole vocabulary
    *,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at the targets, and the entropy of the distribution.

    Rank r of `tp_group` holds columns [r * V, (r + 1) * V); None means that this rank holds all. Columns from
    `vocab_size` on are padding: they take no part in the softmax and get no gradient.

    Returns (log_probs [T], entropy [T]), both fp32, the same on every rank of the group. Without `with_entropy`
    the entropy is zeros. Both are differentiable; every rank gets the gradient of its own columns, given that
    every rank computes the same loss from the result.
    """
    if temperature <= 0:
        raise ValueError(f"the temperature must be above 0, got {temperature}; set --rollout-temperature")
    log_probs, entropy = _VocabParallelLogProbs.apply(
        logits, targets, vocab_size, temperature, with_entropy, tp_group, chunk_size
    )
    return log_probs, entropy


def _reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


class _VocabParallelLogProbs(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z), H = -sum_j p_j log p_j:

    d log p_t / d z_j = [j = t] - p_j          d H / d z_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, temperature: float, with_entropy: bool,
        group: dist.ProcessGroup | None, chunk_size: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        start = (group.rank() if group is not None else 0) * logits.shape[-1]
        real = max(0, min(logits.shape[-1], vocab_size - start))  # columns of this rank that are not padding
        local = targets - start
        mine = (local >= 0) & (local < real)
        local = local.clamp(0, max(real - 1, 0))
        log_probs = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
        log_sums = torch.empty_like(log_probs)
        entropy = torch.zeros_like(log_probs)
        for begin in range(0, len(targets), chunk_size):
            part = slice(begin, begin + chunk_size)
            z = logits[part, :real].float() / temperature
            if real:
                top = z.max(dim=-1).values
            else:
                top = torch.full((len(z),), -torch.inf, device=z.device)
            _reduce(top, dist.ReduceOp.MAX, group)
            # Sums over the vocabulary, reduced together: exp, exp * z, logit of the target.
            z_shifted = z - top[:, None]
            exp = z_shifted.exp()
            target_z = torch.zeros_like(top)
            if real:
                target_z = z_shifted.gather(1, local[part, None])[:, 0].masked_fill(~mine[part], 0.0)
            sums = torch.stack(
                [exp.sum(-1), (exp * z_shifted).sum(-1) if with_entropy else target_z.new_zeros(len(z)), target_z]
            )
            _reduce(sums, dist.ReduceOp.SUM, group)
            log_sum = sums[0].log()
            log_probs[part] = sums[2] - log_sum
            log_sums[part] = log_sum + top
            if with_entropy:
                entropy[part] = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, local, mine, log_sums, entropy)
        ctx.temperature, ctx.with_entropy, ctx.real, ctx.chunk_size = temperature, with_entropy, real, chunk_size
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, local, mine, log_sums, entropy = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for begin in range(0, len(local), ctx.chunk_size):
            part = slice(begin, begin + ctx.chunk_size)
            log_p = logits[part, : ctx.real].float() / ctx.temperature - log_sums[part, None]
            p = log_p.exp()
            g = -p * grad_log_probs[part, None]
            if ctx.with_entropy:
                g -= p * (log_p + entropy[part, None]) * grad_entropy[part, None]
            if ctx.real:
                at_target = grad_log_probs[part].masked_fill(~mine[part], 0.0)
                g.scatter_add_(1, local[part, None], at_target[:, None])
            # 0 * NaN is NaN: a position that the loss does not read must pass nothing on, whatever its logits are.
            unread = (grad_log_probs[part] == 0) & (grad_entropy[part] == 0)
            g = (g / ctx.temperature).masked_fill(unread[:, None], 0.0)
            grad[part, : ctx.real] = g.to(grad.dtype)
        return grad, None, None, None, None, None, None
