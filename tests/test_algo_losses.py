"""Losses against float64 autograd and NumPy."""

from __future__ import annotations

import loss_calls
import pytest
import torch

from slime_retool.algo import losses
from slime_retool.algo.algorithms import KL_TYPES
from slime_retool.algo.kl import kl_estimate
from slime_retool.algo.segments import Segments


def test_at_ratio_one_the_gradient_is_the_policy_gradient() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, metrics = loss_calls.policy_loss(
        log_probs, log_probs.detach(), torch.tensor([2.0, -3.0]), torch.tensor([0.25, 0.75])
    )
    loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-0.5, 2.25] and float(metrics["clip_fraction"]) == 0.0


@pytest.mark.parametrize("kind", KL_TYPES)
def test_no_gap_between_two_policies_is_too_wide_for_an_estimate(kind: str) -> None:
    log_probs = torch.tensor([-1000.0, -100.0, -1e-3], requires_grad=True)
    estimate = kl_estimate(log_probs, torch.tensor([-1e-3, -1e-3, -1000.0]), kind)
    estimate.sum().backward()
    assert estimate.isfinite().all() and log_probs.grad.isfinite().all()


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
        loss = loss_calls.policy_loss(x, other - 1.2, other + 1, weights)[0]
        loss = loss + loss_calls.kl_loss(x, other - 1.1, weights, "low_var_kl")[0] + loss_calls.sft_loss(x, weights)[0]
        loss.backward()
        assert x.grad is not None
        values.append(float(loss))
        grads.append(x.grad)
    assert values[0] == values[1] and torch.equal(grads[0], grads[1]) and grads[0][1] == 0


def test_token_weights_hold_the_whole_denominator() -> None:
    segments = Segments.of([[0, 1, 1], [0, 1], [0, 0, 0]])
    per_token = losses.token_weights(segments, per_token=True)
    assert per_token.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 1 / 3, 0, 0, 0])
    per_sample = losses.token_weights(segments, per_token=False)  # the third sample has nothing to learn: no divisor
    assert per_sample.tolist() == pytest.approx([0, 1 / 4, 1 / 4, 0, 1 / 2, 0, 0, 0])


@pytest.mark.parametrize("per_token", [True, False])
def test_each_optimizer_step_has_its_own_denominator(per_token: bool) -> None:
    masks = [[0, 1, 1], [0, 1], [0, 0, 0], [0, 1, 1, 1]]
    got = losses.token_weights(Segments.of(masks), torch.tensor([0, 1, 1, 0]), per_token=per_token).split([3, 2, 3, 4])
    first = losses.token_weights(Segments.of([masks[0], masks[3]]), per_token=per_token)
    second = losses.token_weights(Segments.of(masks[1:3]), per_token=per_token)
    assert torch.equal(torch.cat([got[0], got[3]]), first) and torch.equal(torch.cat([got[1], got[2]]), second)


def test_without_learned_tokens_every_weight_is_zero() -> None:
    for per_token in (True, False):
        assert losses.token_weights(Segments.of([[0, 0]]), per_token=per_token).tolist() == [0.0, 0.0]
