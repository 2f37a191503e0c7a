"""All experts of a rank in one matrix product.

Transformer Engine multiplies expert by expert: a layer of 128 experts takes 768 launches for a micro-batch forward and
backward, and on the host of an H200 each costs more than the product itself. torch's grouped product is one kernel for
all of them (CUTLASS on Hopper and Blackwell). It takes the experts' matrices as one tensor. Megatron lays parameters
and their gradients into buffers, the last of a module first; registered in reverse, an expert layer's weights are such
a tensor already, and so are their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_bridge.host import send

_ALIGNMENT = 16
"""Bytes that rows of torch's grouped product must be a multiple of."""


def is_aligned(weights: Tensor) -> bool:
    """Whether torch's grouped product takes matrices [..., out, in] of this shape and dtype."""
    return all(width * weights.element_size() % _ALIGNMENT == 0 for width in weights.shape[-2:])


def one_block(tensors: Sequence[Tensor]) -> Tensor | None:
    """[n, ...] on the memory of n contiguous tensors of one shape, where they lie in it one after the other."""
    first = tensors[0]
    step = first.numel() * first.element_size()
    start, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    for index, tensor in enumerate(tensors):
        if tensor.data_ptr() != start + index * step or tensor.untyped_storage().data_ptr() != memory:
            return None
    return first.detach().as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """The same, copied where they lie elsewhere."""
    block = one_block(tensors)
    return torch.stack([tensor.detach() for tensor in tensors]) if block is None else block


def group_ends(tokens_per_expert: Sequence[int], device: torch.device) -> Tensor:
    """Where each expert's rows end: [experts], int32."""
    return send(torch.tensor(tokens_per_expert, dtype=torch.int32).cumsum(0, dtype=torch.int32), device)


class _Product(torch.autograd.Function):
    """x_e W_e^T for every expert e: [T, in], weights [out, in] each -> [T, out].

    Weight gradients are in the dtype of x. With `accumulate` they are added to the weights' `main_grad`, which
    Megatron's DistributedDataParallel provides and is told of.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens_per_expert: Sequence[int], accumulate: bool, *weights: Tensor) -> Tensor:
        ends = group_ends(tokens_per_expert, x.device)
        ctx.save_for_backward(x, ends)
        ctx.weights, ctx.tokens_per_expert, ctx.accumulate = weights, tokens_per_expert, accumulate
        if not len(x):
            return x.new_empty(0, len(weights[0]))
        return F.grouped_mm(x, stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = F.grouped_mm(grad, stacked(ctx.weights), offs=ends) if len(x) else torch.empty_like(x)
        of_weights: Sequence[Tensor | None] = [None] * len(ctx.weights)
        if any(ctx.needs_input_grad[3:]):
            products = _weight_gradients(x, grad, ends, ctx.tokens_per_expert)
            of_weights = _accumulate(ctx.weights, products) if ctx.accumulate else products.unbind()
        return of_x, None, None, *of_weights


def _weight_gradients(x: Tensor, grad: Tensor, ends: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
    """[experts, out, in]."""
    if not len(x):
        return x.new_zeros(len(tokens_per_expert), grad.shape[1], x.shape[1])
    products = F.grouped_mm(grad.transpose(0, 1), x, offs=ends)
    for expert, tokens in enumerate(tokens_per_expert):
        if not tokens:  # nothing promises that a kernel writes the sum of no rows
            products[expert].zero_()
    return products


def _accumulate(weights: Sequence[Any], products: Tensor) -> list[Tensor]:
    """Add to `main_grad`; what autograd is given instead, of the right shape, is read by nobody."""
    sums = [weight.main_grad for weight in weights]
    block = one_block(sums)
    if block is not None:
        block.add_(products)
    else:
        for main_grad, product in zip(sums, products.unbind(), strict=True):
            main_grad.add_(product)
    for weight in weights:
        weight.grad_added_to_main_grad = True
    placeholder = torch.empty_like(weights[0])
    return [placeholder.detach() for _ in weights]


def experts_product(
    x: Tensor, weights: Sequence[Tensor], tokens_per_expert: Sequence[int], *, accumulate: bool = False
) -> Tensor:
    """See `_Product`. Rows of x come one expert after the other, `tokens_per_expert` of each."""
    return _Product.apply(x, tokens_per_expert, accumulate, *weights)


class OneProduct(torch.nn.Module):
    """Takes the place of Transformer Engine's forward pass in its own grouped layer."""

    num_gemms: int
    fuse_wgrad_accumulation: bool

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, None]:
        """As Megatron's wrapper of the layer: (output, no bias)."""
        weights = [self.get_parameter(f"weight{expert}") for expert in range(self.num_gemms)]
        return experts_product(x, weights, m_splits, accumulate=self.fuse_wgrad_accumulation), None


@functools.cache
def _with_one_product(cls: type) -> type:
    return type(f"OneProduct{cls.__name__}", (OneProduct, cls), {})


def takes_one_product(weight: Tensor) -> bool:
    """Whether torch has one kernel for experts of such weights [out, in] on this machine's GPU.

    Elsewhere its product is a loop as well, which waits for the GPU besides.
    """
    return weight.dtype == torch.bfloat16 and is_aligned(weight) and torch.cuda.get_device_capability() >= (9, 0)


def use_one_product(linear: Any) -> None:
    """Make a grouped layer of Megatron's, `weight0` to `weightN` without biases, multiply all experts at once."""
    assert not linear.use_bias
    for expert in reversed(range(linear.num_gemms)):
        name = f"weight{expert}"
        linear.register_parameter(name, linear._parameters.pop(name))
    cls: type = type(linear)
    linear.__class__ = _with_one_product(cls)
