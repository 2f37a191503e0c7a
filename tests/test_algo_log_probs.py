"""Log-probs and entropies from hidden states: values, gradients and memory."""

from __future__ import annotations

from typing import Any

import loss_calls
import pytest
import torch
from dist_utils import run_distributed
from torch.utils._python_dispatch import TorchDispatchMode
from triton_utils import run_in_interpreter

from slime_retool.algo import log_probs as module
from slime_retool.algo.log_probs import linear_log_probs

T, H, V, PADDED, TEMPERATURE = 14, 6, 37, 40, 0.7
READ = [0, 1, 4, 5, 6, 9, 12]


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, weight (with padding rows), targets, and factors of log-probs and entropies in the loss."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(T, H, generator=generator), torch.randn(PADDED, H, generator=generator)
    targets = torch.randint(0, V, (T,), generator=generator)
    return hidden, weight, targets, torch.randn(T, generator=generator), torch.randn(T, generator=generator)


def _reference(positions: list[int]) -> tuple[torch.Tensor, ...]:
    """log-probs, entropies, and gradients of hidden and weight, by torch's own float64 softmax."""
    hidden, weight, targets, a, b = _inputs()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = torch.log_softmax((hidden @ weight[:V].T) / TEMPERATURE, dim=-1)
    read = torch.zeros(T, dtype=torch.float64).index_fill_(0, torch.tensor(positions), 1.0)
    log_probs = log_p.gather(1, targets[:, None])[:, 0] * read
    entropy = -(log_p.exp() * log_p).sum(-1) * read
    (a.double() * log_probs + b.double() * entropy).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def _ours(
    rank: int, world_size: int, positions: list[int] | None, chunk_size: int, sequence_parallel: bool = False
) -> tuple[torch.Tensor, ...]:
    hidden, weight, targets, a, b = _inputs()
    group = torch.distributed.group.WORLD if world_size > 1 else None
    rows, part = PADDED // world_size, T // world_size
    if sequence_parallel:
        hidden = hidden[rank * part : (rank + 1) * part]
    hidden = hidden.clone().requires_grad_()
    weight = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    log_probs, entropy = linear_log_probs(
        hidden, weight, targets, vocab_size=V,
        positions=None if positions is None else torch.tensor(positions, dtype=torch.int64),
        temperature=TEMPERATURE, with_entropy=True, tp_group=group, sequence_parallel=sequence_parallel,
        chunk_size=chunk_size,
    )  # fmt: skip
    (a * log_probs + b * entropy).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_size", [1, 5, 1024])
@pytest.mark.parametrize("positions", [None, READ])
def test_values_and_gradients_equal_float64_autograd(positions: list[int] | None, chunk_size: int) -> None:
    want = _reference(list(range(T)) if positions is None else positions)
    for got, expected in zip(_ours(0, 1, positions, chunk_size), want, strict=True):
        assert torch.allclose(got.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_vocabulary_split_over_ranks_changes_nothing(sequence_parallel: bool) -> None:
    results = run_distributed(_ours, 2, READ, 3, sequence_parallel)
    log_probs, entropy, grad_hidden, grad_weight = _reference(READ)
    for result in results:
        assert torch.allclose(result[0].double(), log_probs, atol=2e-6)
        assert torch.allclose(result[1].double(), entropy, atol=2e-6)
    hiddens = [result[2].double() for result in results]
    for hidden in [torch.cat(hiddens)] if sequence_parallel else hiddens:
        assert torch.allclose(hidden, grad_hidden, atol=5e-6)
    assert torch.allclose(torch.cat([result[3] for result in results]).double(), grad_weight, atol=5e-6)


def test_padding_rows_get_no_gradient() -> None:
    assert torch.all(_ours(0, 1, None, 4)[3][V:] == 0)


def test_no_position_read_gives_zero_gradients() -> None:
    assert all(torch.all(tensor == 0) for tensor in _ours(0, 1, [], 4))


def test_the_gradient_is_added_to_megatrons_buffer_once() -> None:
    hidden, weight, targets, a, _ = _inputs()
    grads = {}
    for buffered in (False, True):
        parameter = torch.nn.Parameter(weight.clone())
        if buffered:
            parameter.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
        log_probs, _ = linear_log_probs(hidden, parameter, targets, vocab_size=V, chunk_size=4)
        (a * log_probs).sum().backward()
        assert parameter.grad is not None
        grads[buffered] = parameter.main_grad - 1 + parameter.grad if buffered else parameter.grad
    assert torch.allclose(grads[True], grads[False], atol=2e-6)


@pytest.mark.parametrize("positions", [None, [0, 2]])
def test_nan_at_positions_the_loss_does_not_read_reaches_nothing(positions: list[int] | None) -> None:
    hidden, weight = torch.randn(3, H), torch.randn(8, H).requires_grad_()
    hidden[1] = float("nan")
    hidden.requires_grad_()
    weights = torch.tensor([0.5, 0.0, 0.5])
    log_probs, entropy = linear_log_probs(
        hidden, weight, torch.tensor([1, 2, 3]), vocab_size=8, with_entropy=True,
        positions=None if positions is None else torch.tensor(positions, dtype=torch.int64),
    )  # fmt: skip
    loss = loss_calls.sft_loss(log_probs, weights)[0] - 0.1 * loss_calls.entropy_bonus(entropy, weights)[0]
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert torch.isfinite(loss) and torch.isfinite(weight.grad).all() and torch.isfinite(hidden.grad).all()
    assert torch.all(hidden.grad[1] == 0)


@pytest.mark.parametrize("chunks_kept", [1, 2, 99])
def test_kept_logits_give_the_same_gradients_without_a_second_product(
    chunks_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, targets, a, b = _inputs()
    hidden[0] = float("nan")
    a[0] = b[0] = 0.0
    chunks, products = -(-T // 2), []
    whole = module._logits

    def counted(*args: torch.Tensor) -> torch.Tensor:
        products.append(1)
        return whole(*args)

    monkeypatch.setattr(module, "_logits", counted)

    def gradients(keep_bytes: int) -> list[torch.Tensor]:
        products.clear()
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        log_probs, entropy = linear_log_probs(
            *inputs, targets, vocab_size=V, with_entropy=True, chunk_size=2, keep_bytes=keep_bytes
        )
        (a * log_probs + b * entropy)[1:].sum().backward()
        return [x.grad for x in inputs if x.grad is not None]

    want = gradients(0)
    assert len(products) == 2 * chunks and all(torch.isfinite(grad).all() for grad in want)
    got = gradients(chunks_kept * 2 * V * 4)
    assert len(products) == 2 * chunks - min(chunks_kept, chunks)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_bf16_inputs_get_bf16_gradients_and_fp32_values() -> None:
    hidden, weight = torch.randn(4, H).bfloat16().requires_grad_(), torch.randn(8, H).bfloat16().requires_grad_()
    log_probs, _ = linear_log_probs(hidden, weight, torch.tensor([0, 1, 2, 3]), vocab_size=8)
    log_probs.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert log_probs.dtype == torch.float32 and hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any tensor made while it is on has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_is_as_large_as_all_logits() -> None:
    tokens, hidden_size, vocab, chunk = 512, 4, 1000, 16
    hidden, weight = torch.randn(tokens, hidden_size).requires_grad_(), torch.randn(vocab, hidden_size).requires_grad_()
    with LargestTensor() as largest:
        log_probs, entropy = linear_log_probs(
            hidden, weight, torch.randint(0, vocab, (tokens,)), vocab_size=vocab, with_entropy=True, chunk_size=chunk
        )
        (log_probs - entropy).sum().backward()
    assert largest.elements == chunk * vocab


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(AssertionError):  # the flag refuses it with a message
        linear_log_probs(
            torch.zeros(1, 2), torch.zeros(2, 2), torch.zeros(1, dtype=torch.int64), vocab_size=2, temperature=0.0
        )


KERNELS = """
import torch
from slime_retool.algo import softmax, softmax_triton

torch.manual_seed(0)
N, V, inverse_temperature = 3, 5000, 1 / 0.7
logits = 4 * torch.randn(N, V)
local, log_sums = torch.tensor([7, -1, 4999]), torch.logsumexp(logits * inverse_temperature, -1)
entropy, a, b = torch.rand(N), torch.randn(N), torch.randn(N)
for with_entropy in (False, True):
    want = softmax.row_sums(logits.clone(), local, inverse_temperature, with_entropy)
    got = softmax_triton.row_sums_cuda(logits, local, inverse_temperature, with_entropy)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-4), (got, want)
    args = (local, log_sums, entropy, a, b if with_entropy else None, inverse_temperature, torch.float32)
    want = softmax.logits_gradient(logits.clone(), *args)
    got = softmax_triton.logits_gradient_cuda(logits.clone(), *args)
    assert torch.allclose(got, want, atol=1e-6), (got - want).abs().max()
print("equal")
"""


def test_gpu_kernels_equal_the_plain_ones_in_tritons_interpreter() -> None:
    run_in_interpreter(KERNELS)
