"""Losses against float64 autograd and NumPy."""

from __future__ import annotations

import math

import loss_calls
import pytest
import torch

from slime_retool.algo import losses
from slime_retool.algo.algorithms import KL_TYPES, LossTerm
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


@pytest.mark.parametrize(("advantage", "gap"), [(-1.0, 30.0), (1.0, -30.0)])
def test_ratios_stay_within_e_to_the_20th(advantage: float, gap: float) -> None:
    """At ratios beyond it the loss is -A e^20 or -A e^-20 (a bound that the clip does not take part in)."""
    loss, _ = loss_calls.policy_loss(
        torch.tensor([gap - 31.0]).double(), torch.tensor([-31.0]).double(), torch.tensor([advantage]), torch.ones(1)
    )
    assert float(loss) == pytest.approx(-advantage * math.exp(math.copysign(20.0, gap)), rel=1e-6)


def test_without_flags_the_ratio_is_clipped_at_a_fifth() -> None:
    """The paper's epsilon (https://arxiv.org/abs/1707.06347, section 6.1)."""
    old = torch.zeros(2)
    for new, advantage, value in ((0.5, 1.0, -1.2), (-0.5, -1.0, 0.8)):
        loss, _ = loss_calls.policy_loss(torch.full((2,), new), old, torch.full((2,), advantage), torch.full((2,), 0.5))
        assert float(loss) == pytest.approx(value)


def test_a_loss_that_only_meets_the_dual_bound_is_not_clipped() -> None:
    """Ratio 1 and c = 1: -A r and -A c are equal, so that the token keeps its gradient and counts as free."""
    log_probs = torch.tensor([-1.0], requires_grad=True)
    loss, metrics = loss_calls.policy_loss(
        log_probs, log_probs.detach(), torch.tensor([-2.0]), torch.ones(1), eps_clip_c=1.0
    )
    loss.backward()
    assert log_probs.grad is not None
    assert (float(loss), float(log_probs.grad), float(metrics["clip_fraction"])) == (2.0, 2.0, 0.0)


def test_cispo_counts_the_tokens_whose_ratio_is_bounded() -> None:
    log_ratio = torch.tensor([0.0, 0.1, 0.5, -0.5])  # e^x: 1, 1.105, 1.65, 0.61
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    _, metrics = loss_calls.policy_loss(log_ratio - 1, torch.full((4,), -1.0), torch.ones(4), weights, kind="cispo")
    assert float(metrics["clip_fraction"]) == pytest.approx(0.3 + 0.4)


@pytest.mark.parametrize("missing", ["sample_of", "token_counts"])
def test_gspo_needs_to_know_which_token_is_whose(missing: str) -> None:
    known = {"sample_of": torch.zeros(1, dtype=torch.int64), "token_counts": torch.ones(1)}
    del known[missing]
    with pytest.raises(AssertionError, match="which token is whose"):
        loss_calls.policy_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.ones(1), kind="gspo", **known)


def test_a_context_parallel_group_of_one_rank_needs_no_communication() -> None:
    class Alone:
        def size(self) -> int:
            return 1

    values = [
        loss_calls.policy_loss(
            torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -1.9]), torch.ones(2), torch.ones(2), kind="gspo",
            sample_of=torch.zeros(2, dtype=torch.int64), token_counts=torch.tensor([2]), cp_group=group,
        )[0]
        for group in (None, Alone())
    ]  # fmt: skip
    assert torch.equal(*values)  # no process group exists here: a collective would raise


@pytest.mark.parametrize(("columns", "named"), [({}, "none"), ({"a": torch.ones(1), "b": torch.ones(1)}, "a, b")])
def test_a_column_that_is_not_there_is_named_with_those_that_are(columns: dict[str, torch.Tensor], named: str) -> None:
    inputs = losses.TokenInputs(weights=torch.ones(1), columns=columns)
    with pytest.raises(ValueError, match=rf"reads the column 'old_values', and the batch has {named}; .*`needs`"):
        inputs.column("old_values")


def test_a_constant_length_of_one_is_allowed_and_zero_is_not() -> None:
    segments = Segments.of([[0, 1]])
    assert losses.token_weights(segments, per_token=True, constant_length=1).tolist() == [0.0, 1.0]
    with pytest.raises(AssertionError):  # the flag refuses it with a message
        losses.token_weights(segments, per_token=True, constant_length=0)


# The sum of terms


def term(name: str, factor: float, **reported: tuple[str, ...]) -> LossTerm:
    """Its value is factor * sum(weights * log_probs); it reports its name and `extra`."""

    def function(inputs: losses.LossInputs) -> losses.LossValue:
        value = factor * losses.weighted_sum(inputs.log_probs, inputs.weights)
        return value, {name: value.detach(), "extra": value.detach() + 1}

    return LossTerm(name=name, function=function, **reported)


def total(terms: list[tuple[LossTerm, float]]) -> tuple[losses.TotalLoss, float, float, losses.Metrics]:
    """(the total loss, its value, its gradient by a log-prob of -3 and weight 1, metrics)."""
    log_probs = torch.tensor([-3.0], requires_grad=True)
    whole = losses.TotalLoss(terms)
    loss, metrics = whole(losses.LossInputs(weights=torch.ones(1), columns={}, log_probs=log_probs))
    gradient = 0.0
    if loss.requires_grad:
        (found,) = torch.autograd.grad(loss, log_probs)
        gradient = float(found)
    return whole, float(loss.detach()), gradient, metrics


def test_a_total_loss_is_the_weighted_sum_of_its_terms_with_all_that_they_report() -> None:
    terms = [(term("a", 2.0, parts=("a",), means=("extra",)), 1.0), (term("b", 5.0, parts=("b", "extra")), -0.5)]
    whole, loss, gradient, metrics = total(terms)
    assert (loss, gradient) == (-3 * 2 + 3 * 2.5, 2 - 2.5)
    assert {name: float(value) for name, value in metrics.items()} == {"loss": 1.5, "a": -6.0, "b": -15.0, "extra": -14}
    assert not metrics["loss"].requires_grad
    assert whole.means == ["extra"] and whole.names == ["loss", "a", "extra", "b", "extra"]


def test_a_term_of_weight_zero_is_measured_and_not_part_of_the_loss() -> None:
    terms = [(term("a", 2.0, parts=("a", "extra")), 1.0), (term("b", math.inf, parts=("b", "extra")), 0.0)]
    _, loss, gradient, metrics = total(terms)
    assert (loss, gradient) == (-6.0, 2.0) and float(metrics["b"]) == -math.inf


def test_a_metric_that_a_term_has_not_declared_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="the loss a reports a, extra without having declared it: name it in `parts`"):
        total([(term("a", 2.0), 1.0)])
    with pytest.raises(ValueError, match="the loss a reports extra without"):
        total([(term("a", 2.0, means=("a",)), 1.0)])
