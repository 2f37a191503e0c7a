"""One product for all experts against one for each, in float64; gradients by autograd and added to `main_grad`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_bridge.grouped_experts import (
    OneProduct,
    experts_product,
    one_block,
    stacked,
    takes_one_product,
    use_one_product,
)

IN, OUT = 16, 24
SPLITS = [([5, 0, 3, 9], "one without rows"), ([0, 0, 7, 0], "one with all"), ([1, 2, 3, 4], "all"), ([0] * 4, "none")]


def parameters(count: int, dtype: torch.dtype, *, in_buffer: bool) -> list[torch.nn.Parameter]:
    """Random weights; `in_buffer`: all in one memory, with a `main_grad` each in another, as Megatron lays them."""
    memory = torch.randn(count, OUT, IN).to(dtype)
    weights = [torch.nn.Parameter(value if in_buffer else value.clone()) for value in memory]
    sums = torch.ones(count, OUT, IN)
    for weight, main_grad in zip(weights, sums, strict=True):
        weight.main_grad = main_grad if in_buffer else main_grad.clone()  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return weights


def reference(x: torch.Tensor, weights: list[torch.nn.Parameter], splits: list[int], grad: torch.Tensor) -> Any:
    """(output, gradient of x, of every weight), in float64, expert by expert."""
    inputs = x.detach().double().requires_grad_()
    matrices = [weight.detach().double().requires_grad_() for weight in weights]
    parts = zip(inputs.split(splits), matrices, strict=True)
    out = torch.cat([part @ matrix.T for part, matrix in parts])
    out.backward(grad.double())
    return out.detach(), inputs.grad, [torch.zeros(OUT, IN).double() if m.grad is None else m.grad for m in matrices]


@pytest.mark.parametrize("splits", [splits for splits, _ in SPLITS], ids=[name for _, name in SPLITS])
@pytest.mark.parametrize("in_buffer", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_product_and_its_gradients(splits, in_buffer, accumulate, dtype, tolerance):
    torch.manual_seed(0)
    weights = parameters(len(splits), dtype, in_buffer=in_buffer)
    x = torch.randn(sum(splits), IN).to(dtype).requires_grad_()
    grad = torch.randn(sum(splits), OUT).to(dtype)
    out, of_x, of_weights = reference(x, weights, splits, grad)

    found = experts_product(x, weights, splits, accumulate=accumulate)
    found.backward(grad)

    near = dict(rtol=tolerance, atol=4 * tolerance)
    torch.testing.assert_close(found.double(), out, **near)
    torch.testing.assert_close(x.grad.double(), of_x, **near)
    for weight, expected in zip(weights, of_weights, strict=True):
        got = weight.main_grad - 1 if accumulate else weight.grad
        torch.testing.assert_close(got.double(), expected, **near)
        assert weight.grad_added_to_main_grad is accumulate
        assert weight.grad.shape == weight.shape


def test_frozen_weights_get_no_gradient():
    weights = [weight.requires_grad_(False) for weight in parameters(2, torch.float32, in_buffer=True)]
    x = torch.randn(4, IN, requires_grad=True)
    experts_product(x, weights, [2, 2], accumulate=True).sum().backward()
    assert x.grad is not None
    assert all(weight.grad is None and bool((weight.main_grad == 1).all()) for weight in weights)


def test_only_neighbours_in_order_are_one_block():
    memory = torch.arange(24.0).view(4, 3, 2)
    block = one_block(list(memory))
    assert block is not None and block.data_ptr() == memory.data_ptr() and torch.equal(block, memory)
    assert torch.equal(one_block(list(memory[1:3])), memory[1:3])
    for others in (list(memory)[::-1], [memory[0], memory[2]], [memory[0], memory[1].clone()]):
        assert one_block(others) is None
        assert torch.equal(stacked(others), torch.stack(others))
    assert torch.equal(stacked(list(memory.transpose(1, 2))), memory.transpose(1, 2))


class Grouped(torch.nn.Module):
    """What is used of Transformer Engine's layer."""

    use_bias, fuse_wgrad_accumulation = False, False

    def __init__(self, weights: list[torch.nn.Parameter]):
        super().__init__()
        self.num_gemms = len(weights)
        for index, weight in enumerate(weights):
            self.register_parameter(f"weight{index}", weight)


def test_megatrons_buffers_hold_the_experts_of_a_layer_as_one_block():
    """They take a module's parameters from the last to the first."""
    weights = parameters(12, torch.float32, in_buffer=False)
    layer = Grouped(weights)
    use_one_product(layer)
    assert isinstance(layer, OneProduct) and isinstance(layer, Grouped)
    assert [id(layer.get_parameter(f"weight{index}")) for index in range(12)] == [id(weight) for weight in weights]

    buffer = torch.cat([parameter.detach().flatten() for parameter in list(layer.parameters())[::-1]])
    for part, parameter in zip(buffer.split(OUT * IN), list(layer.parameters())[::-1], strict=True):
        parameter.data = part.view(OUT, IN)
    assert one_block(weights) is not None
    x, splits = torch.randn(24, IN), [2] * 12
    out, bias = layer(x, splits)
    expected = torch.cat([part @ weight.T for part, weight in zip(x.split(splits), weights, strict=True)])
    torch.testing.assert_close(out, expected)
    assert bias is None


@pytest.mark.parametrize(
    ("shape", "dtype", "capability", "taken"),
    [
        ((1536, 2048), torch.bfloat16, (9, 0), True),
        ((8, 16), torch.bfloat16, (10, 0), True),
        ((8, 16), torch.bfloat16, (8, 9), False),
        ((8, 16), torch.float32, (9, 0), False),
        ((8, 12), torch.bfloat16, (9, 0), False),  # rows of 24 bytes
        ((12, 16), torch.bfloat16, (9, 0), False),
    ],
)
def test_one_product_is_taken_where_a_gpu_has_a_kernel_for_it(shape, dtype, capability, taken, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert takes_one_product(torch.empty(shape, dtype=dtype)) is taken
