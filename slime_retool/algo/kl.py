"""Estimates of the KL divergence between the policy and a reference, from log-probs of sampled tokens."""

from __future__ import annotations

from torch import Tensor

from slime_retool.algo.algorithms import KL_TYPES


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) for tokens sampled from the policy; any shape.

    From http://joschu.net/blog/kl-approx.html, with d = ref_log_probs - log_probs:

        k1 = -d                   unbiased, of either sign
        k2 = d^2 / 2              biased, low variance; its gradient is that of the KL itself, in expectation
        k3 = exp(d) - d - 1       unbiased, never negative; d at most 20, so that exp(d) stays finite
        low_var_kl                k3 with d clamped to [-20, 20] and the result to [-10, 10]

    Differentiable in `log_probs` only. As a loss, k1 has the gradient of log_probs, whose expected value is 0: it
    measures and does not pull; it belongs in the reward. Raises ValueError for another `kind`.
    """
    d = ref_log_probs.detach() - log_probs
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        d = d.clamp(max=20)
        return d.exp() - d - 1
    if kind == "low_var_kl":
        d = d.clamp(-20, 20)
        return (d.exp() - d - 1).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator {kind!r}; --kl-loss-type is one of {', '.join(KL_TYPES)}")
