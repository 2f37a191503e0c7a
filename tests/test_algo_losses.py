"""Log-probs and losses against float64 autograd and NumPy."""

from __future__ import annotations

import pytest
import torch
from dist_utils import run_distributed

from slime_retool.algo import losses
from slime_retool.algo.kl import kl_estimate
from slime_retool.algo.log_probs import vocab_parallel_log_probs

T, V, PADDED, TEMPERATURE = 13, 37, 40, 0.7


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(T, PADDED, generator=generator)
    targets = torch.randint(0, V, (T,), generator=generator)
    return logits, targets, torch.randn(T, generator=generator), torch.randn(T, generator=generator)


def _reference() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log-probs, entropy and the gradient of a mixture of both, by torch's own float64 softmax."""
    logits, targets, a, b = _inputs()
    z = logits.double().requires_grad_()
    log_p = torch.log_softmax(z[:, :V] / TEMPERATURE, dim=-1)
    log_probs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (a.double() * log_probs + b.double() * entropy).sum().backward()
    assert z.grad is not None
    return log_probs.detach(), entropy.detach(), z.grad


def _ours(rank: int, world_size: int, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, targets, a, b = _inputs()
    group = torch.distributed.group.WORLD if world_size > 1 else None
    width = PADDED // world_size
    z = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        z, targets, vocab_size=V, temperature=TEMPERATURE, with_entropy=True, tp_group=group, chunk_size=chunk_size
    )
    (a * log_probs + b * entropy).sum().backward()
    assert z.grad is not None
    return log_probs.detach(), entropy.detach(), z.grad


@pytest.mark.parametrize("chunk_size", [1, 5, 1024])
def test_log_probs_entropy_and_gradient_equal_float64_autograd(chunk_size: int) -> None:
    for got, want in zip(_ours(0, 1, chunk_size), _reference(), strict=True):
        assert torch.allclose(got.double(), want, atol=2e-6)


def test_vocabulary_split_over_ranks_changes_nothing() -> None:
    results = run_distributed(_ours, 2, 4)
    log_probs, entropy, grad = _reference()
    for result in results:
        assert torch.allclose(result[0].double(), log_probs, atol=2e-6)
        assert torch.allclose(result[1].double(), entropy, atol=2e-6)
    assert torch.allclose(torch.cat([result[2] for result in results], 1).double(), grad, atol=2e-6)


def test_padded_columns_get_no_gradient() -> None:
    assert torch.all(_ours(0, 1, 4)[2][:, V:] == 0)


def test_bf16_logits_get_a_bf16_gradient() -> None:
    z = torch.randn(4, 8).bfloat16().requires_grad_()
    vocab_parallel_log_probs(z, torch.tensor([0, 1, 2, 3]), vocab_size=8)[0].sum().backward()
    assert z.grad is not None and z.grad.dtype == torch.bfloat16


def test_nan_logits_at_unread_positions_reach_neither_loss_nor_gradient() -> None:
    z = torch.randn(3, 8)
    z[1] = float("nan")
    z.requires_grad_()
    weights = torch.tensor([0.5, 0.0, 0.5])
    log_probs, entropy = vocab_parallel_log_probs(z, torch.tensor([1, 2, 3]), vocab_size=8, with_entropy=True)
    loss = losses.sft_loss(log_probs, weights)[0] - 0.1 * losses.entropy_bonus(entropy, weights)[0]
    loss.backward()
    assert z.grad is not None
    assert torch.isfinite(loss) and torch.isfinite(z.grad).all() and torch.all(z.grad[1] == 0)


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="--rollout-temperature"):
        vocab_parallel_log_probs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), vocab_size=2, temperature=0.0)


def test_at_ratio_one_the_gradient_is_the_policy_gradient() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, metrics = losses.policy_loss(
        log_probs, log_probs.detach(), torch.tensor([2.0, -3.0]), torch.tensor([0.25, 0.75])
    )
    loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-0.5, 2.25] and float(metrics["clip_fraction"]) == 0.0


def test_k3_is_unbiased_and_low_var_kl_is_bounded() -> None:
    p, q = torch.tensor([0.2, 0.3, 0.5]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    for kind in ("k1", "k3"):
        mean = (p * kl_estimate(p.log(), q.log(), kind)).sum()
        assert float(mean) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-12)
    assert float(kl_estimate(torch.tensor(-90.0), torch.tensor(0.0), "low_var_kl")) == 10.0
    with pytest.raises(ValueError, match="--kl-loss-type"):
        kl_estimate(p, q, "k4")


def test_nan_under_weight_zero_changes_neither_loss_nor_gradient() -> None:
    nan = float("nan")
    weights = torch.tensor([0.5, 0.0, 0.5])
    clean, dirty = torch.tensor([-1.0, -1.5, -2.0]), torch.tensor([-1.0, nan, -2.0])
    grads, values = [], []
    for log_probs, other in ((clean, torch.zeros(3)), (dirty, torch.tensor([0.0, nan, 0.0]))):
        x = log_probs.clone().requires_grad_()
        loss = losses.policy_loss(x, other - 1.2, other + 1, weights)[0]
        loss = loss + losses.kl_loss(x, other - 1.1, weights, "low_var_kl")[0] + losses.sft_loss(x, weights)[0]
        loss.backward()
        assert x.grad is not None
        values.append(float(loss))
        grads.append(x.grad)
    assert values[0] == values[1] and torch.equal(grads[0], grads[1]) and grads[0][1] == 0


def test_token_weights_hold_the_whole_denominator() -> None:
    masks = [[0, 1, 1], [0, 1], [0, 0, 0]]
    per_token = losses.token_weights(masks, per_token=True, total_tokens=3, num_samples=3)
    assert per_token == [[0, 1 / 3, 1 / 3], [0, 1 / 3], [0, 0, 0]]
    per_sample = losses.token_weights(masks, per_token=False, total_tokens=3, num_samples=3)
    assert per_sample == [[0, 1 / 6, 1 / 6], [0, 1 / 3], [0, 0, 0]]


def test_without_learned_tokens_every_weight_is_zero() -> None:
    for per_token in (True, False):
        assert losses.token_weights([[0, 0]], per_token=per_token, total_tokens=0, num_samples=1) == [[0.0, 0.0]]
