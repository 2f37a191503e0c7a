"""Losses against float64 autograd and NumPy."""

from __future__ import annotations

import pytest
import torch

from slime_retool.algo import losses
from slime_retool.algo.kl import kl_estimate


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
