"""Log-probabilities and entropies of tokens from hidden states, without logits of all positions at once.

T positions, N of them read, H hidden size, V vocabulary columns on this tensor-parallel rank. The output layer's
product with the hidden states is made for `chunk_size` positions at a time, in forward and again in backward, so
memory grows with T * H, never with T * V, unless there is room to keep some. Softmax is in fp32, and so are the logits
of bf16 weights on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.arithmetic import LOGIT_CHUNK_BYTES
from slime_retool.algo.softmax import logits_gradient, row_sums


def linear_log_probs(
    hidden: Tensor,  # [T, H]; [T / tp, H] with sequence_parallel
    weight: Tensor,  # [V, H]
    targets: Tensor,  # [T] int64, ids of the whole vocabulary
    *,
    vocab_size: int,
    positions: Tensor | None = None,  # [N] int64, ascending
    temperature: float = 1.0,
    with_entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    keep_bytes: int = 0,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at the targets, and the entropy of that distribution.

    Rank r of `tp_group` holds rows [r * V, (r + 1) * V) of the output layer; None means that this rank holds all.
    Rows from `vocab_size` on are padding: they take no part and get no gradient. `positions` are the positions
    that the caller reads (None: all): nothing is computed for the others, whose results are 0 and whose hidden states
    may be NaN. With `sequence_parallel` the ranks of the group hold consecutive parts of the hidden states.
    `keep_bytes` is memory for logits that the backward then need not make again, chunk by chunk from the first.

    Returns (log_probs [T], entropy [T]), fp32, the same on every rank of the group; entropy is zeros without
    `with_entropy`. Both are differentiable, given that every rank of the group computes the same loss from them.
    Where the weight has Megatron's fp32 `main_grad`, its gradient is added there, chunk by chunk, and autograd gets
    zeros, so that Megatron's hooks run as for any parameter; else the gradient goes to autograd.
    """
    assert temperature > 0, temperature
    tp = tp_group.size() if tp_group is not None else 1
    if chunk_size is None:
        rows = LOGIT_CHUNK_BYTES // (4 * max(1, len(weight)))
        chunk_size = max(1, rows // 128 * 128 or rows)  # whole tiles of a GPU's matrix product
    log_probs, entropy = _LinearLogProbs.apply(
        hidden, weight, targets, positions, vocab_size, 1.0 / temperature, with_entropy,
        tp_group if tp > 1 else None, sequence_parallel and tp > 1, chunk_size,
        keep_bytes if torch.is_grad_enabled() else 0,
    )  # fmt: skip
    return log_probs, entropy


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, positions: Tensor | None, vocab_size: int,
        inverse_temperature: float, with_entropy: bool, group: dist.ProcessGroup | None, sequence_parallel: bool,
        chunk_size: int, keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.sequence_parallel, ctx.group = hidden.shape, sequence_parallel, group
        ctx.with_entropy, ctx.chunk_size, ctx.inverse_temperature = with_entropy, chunk_size, inverse_temperature
        if sequence_parallel:
            hidden = _all_gather(hidden, group)
        assert len(hidden) == len(targets), "one target for each position"
        if positions is not None:
            hidden, targets = hidden[positions], targets[positions]
        start = (group.rank() if group is not None else 0) * len(weight)
        real = max(0, min(len(weight), vocab_size - start))  # rows of this rank that are not padding
        local = torch.where((targets >= start) & (targets < start + real), targets - start, -1)
        sums = torch.empty((4, len(hidden)), dtype=torch.float32, device=hidden.device)
        kept: list[Tensor] = []
        for begin in range(0, len(hidden), chunk_size):
            part = slice(begin, begin + chunk_size)
            logits = _logits(hidden[part], weight[:real])
            keep_bytes -= logits.nbytes
            if keep_bytes >= 0:
                kept.append(logits if logits.is_cuda else logits.clone())  # the CPU's row_sums overwrites them
            sums[:, part] = row_sums(logits, local[part], inverse_temperature, with_entropy)
            del logits
        # Neither inputs nor outputs: autograd has no part in them.
        ctx.kept = kept
        top = sums[0]
        if group is not None:
            top = sums[0].clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            # This rank's sums, relative to the top of all ranks.
            shift = torch.where(sums[1] > 0, sums[0] - top, 0.0)
            sums[2] += shift * sums[1]
            sums[1:3] *= shift.exp()
            rest = sums[1:].contiguous()
            dist.all_reduce(rest, group=group)
            sums = torch.cat([top[None], rest])
        log_sums = sums[1].log() + top
        log_probs = sums[3] - log_sums
        entropy = sums[1].log() - sums[2] / sums[1] if with_entropy else torch.zeros_like(log_probs)
        ctx.real, ctx.main_grad = real, _main_grad(weight)
        ctx.save_for_backward(hidden, weight, local, log_sums, entropy, positions)
        if positions is None:
            return log_probs, entropy
        total = ctx.shape[0] * (group.size() if sequence_parallel and group is not None else 1)
        return _spread(log_probs, positions, total), _spread(entropy, positions, total)

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, local, log_sums, entropy, positions = ctx.saved_tensors
        if not ctx.with_entropy:
            grad_entropy = None

        def read(grad: Tensor) -> Tensor:
            return grad.float() if positions is None else grad.float()[positions]

        by_log_prob = torch.zeros_like(log_sums) if grad_log_probs is None else read(grad_log_probs)
        by_entropy = None if grad_entropy is None else read(grad_entropy)
        # 0 * NaN is NaN: a position with no gradient must pass nothing on, whatever its hidden state is.
        unread = by_log_prob == 0
        if by_entropy is not None:
            unread &= by_entropy == 0
        hidden = hidden.masked_fill(unread[:, None], 0.0)
        log_sums, entropy = log_sums.masked_fill(unread, 0.0), entropy.masked_fill(unread, 0.0)
        rows = weight[: ctx.real]
        grad_hidden = torch.empty_like(hidden)
        wants_weight = ctx.needs_input_grad[1]
        grad_weight = None
        if wants_weight:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.main_grad is None else ctx.main_grad
        for begin in range(0, len(hidden), ctx.chunk_size):
            part = slice(begin, begin + ctx.chunk_size)
            logits = ctx.kept.pop(0) if ctx.kept else _logits(hidden[part], rows)
            grad = logits_gradient(
                logits, local[part], log_sums[part], entropy[part], by_log_prob[part],
                None if by_entropy is None else by_entropy[part], ctx.inverse_temperature, hidden.dtype,
            )  # fmt: skip
            torch.mm(grad, rows, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight[: ctx.real], grad.t(), hidden[part])
            del logits, grad
        if positions is not None:
            total = ctx.shape[0] * (ctx.group.size() if ctx.sequence_parallel else 1)
            grad_hidden = grad_hidden.new_zeros((total, ctx.shape[1])).index_copy_(0, positions, grad_hidden)
        if ctx.sequence_parallel:
            whole, grad_hidden = grad_hidden, grad_hidden.new_empty(ctx.shape)
            dist.reduce_scatter_tensor(grad_hidden, whole, group=ctx.group)
        elif ctx.group is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)
        if wants_weight and ctx.main_grad is not None:
            # The gradient is where it belongs. Megatron's hook adds what autograd brings, and must run.
            grad_weight = torch.zeros_like(weight)
        elif grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *[None] * 9


def _main_grad(weight: Tensor) -> Tensor | None:
    """Megatron's gradient buffer of the parameter, if it accumulates in fp32."""
    if not weight.requires_grad or not hasattr(weight, "main_grad"):
        return None
    return weight.main_grad if weight.main_grad.dtype == torch.float32 else None


def _logits(hidden: Tensor, rows: Tensor) -> Tensor:
    """[N, H], [V, H] -> [N, V] in fp32; rounding them to bf16 would cost up to 0.06 at a logit of 20."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, rows.t(), out_dtype=torch.float32)
    return torch.mm(hidden, rows.t())


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, accumulated in the dtype of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _spread(values: Tensor, positions: Tensor, total: int) -> Tensor:
    """[N] -> [total], zeros elsewhere."""
    return values.new_zeros(total).index_copy_(0, positions, values)


def _all_gather(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    assert group is not None
    whole = part.new_empty((len(part) * group.size(), *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole
