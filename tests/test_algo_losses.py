"""Losses against float64 autograd and NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slime_retool.algo import losses


def _policy_numpy(
    new: np.ndarray, old: np.ndarray, adv: np.ndarray, low: float, high: float, c: float | None
) -> np.ndarray:
    """Per-token PPO loss, one scalar at a time."""
    out = []
    for n, o, a in zip(new, old, adv, strict=True):
        ratio = math.exp(n - o)
        objective = min(a * ratio, a * min(max(ratio, 1 - low), 1 + high))
        if c is not None and a < 0:
            objective = max(objective, c * a)
        out.append(-objective)
    return np.array(out)


@pytest.mark.parametrize(("low", "high", "c"), [(0.2, None, None), (0.2, 0.28, None), (0.1, 0.3, 1.5)])
def test_policy_loss_equals_the_ppo_formula(low: float, high: float | None, c: float | None) -> None:
    rng = np.random.default_rng(0)
    new, old, adv = -rng.random(50) * 3, -rng.random(50) * 3, rng.standard_normal(50)
    weights = rng.random(50) * (rng.random(50) > 0.3)
    want = _policy_numpy(new, old, adv, low, low if high is None else high, c)
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (new, old, adv, weights)]
    loss, metrics = losses.policy_loss(*tensors, eps_clip=low, eps_clip_high=high, eps_clip_c=c)
    assert float(loss) == pytest.approx(float((want * weights).sum()), abs=1e-12)
    assert float(metrics["ppo_kl"]) == pytest.approx(float(((old - new) * weights).sum()), abs=1e-12)
    free = -adv * np.exp(new - old)
    assert float(metrics["clip_fraction"]) == pytest.approx(float((np.abs(want - free) > 1e-12) @ weights), abs=1e-6)


def test_at_ratio_one_the_gradient_is_the_policy_gradient() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, metrics = losses.policy_loss(
        log_probs, log_probs.detach(), torch.tensor([2.0, -3.0]), torch.tensor([0.25, 0.75])
    )
    loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-0.5, 2.25] and float(metrics["clip_fraction"]) == 0.0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_estimators_equal_their_formulas(kind: str) -> None:
    rng = np.random.default_rng(1)
    new, ref = -rng.random(40) * 4, -rng.random(40) * 4
    d = ref - new
    want = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1, "low_var_kl": np.minimum(np.exp(d) - d - 1, 10)}[kind]
    got = losses.kl_estimate(torch.tensor(new), torch.tensor(ref), kind)
    assert np.allclose(got.numpy(), want, atol=1e-12)


def test_k3_is_unbiased_and_low_var_kl_is_bounded() -> None:
    p, q = torch.tensor([0.2, 0.3, 0.5]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    for kind in ("k1", "k3"):
        mean = (p * losses.kl_estimate(p.log(), q.log(), kind)).sum()
        assert float(mean) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-12)
    assert float(losses.kl_estimate(torch.tensor(-90.0), torch.tensor(0.0), "low_var_kl")) == 10.0
    with pytest.raises(ValueError, match="--kl-loss-type"):
        losses.kl_estimate(p, q, "k4")


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
