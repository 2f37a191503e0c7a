"""Value and gradient of every loss against float64 plain loops and central differences (tests/algo_reference.py).

Batches are random in lengths, masks and groups; NaN and infinity lie under every mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import loss_calls
import numpy as np
import pytest
import torch
from algo_reference import (
    Array,
    Batch,
    clipped_surrogate,
    kl_value,
    numeric_gradient,
    random_batch,
)
from dist_utils import run_distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_retool.algo import losses
from slime_retool.algo.advantages import AdvantageInputs, compute_advantages
from slime_retool.algo.algorithms import ALGORITHMS
from slime_retool.algo.segments import Segments

Loss = Callable[[Tensor], tuple[Tensor, losses.Metrics]]
Reference = Callable[[list[Array]], float]
CLIPS = [(0.2, None, None), (0.2, 0.28, None), (0.1, 0.3, 1.5), (1.0, 2.0, None)]


@pytest.fixture(params=range(12))
def batch(request: pytest.FixtureRequest) -> Batch:
    return random_batch(request.param)


def tensor(rows: list[Array]) -> Tensor:
    return torch.tensor(np.concatenate(rows), dtype=torch.float64)


def per_token(batch: Batch, weights: list[Array], value: Callable[[int, int], float]) -> float:
    """Weighted sum of value(sample, token) over learned tokens."""
    return math.fsum(
        weights[i][t] * value(i, t) for i, mask in enumerate(batch.masks) for t in np.flatnonzero(mask)
    )  # fmt: skip


def check(batch: Batch, name: str, loss: Loss, reference: Reference) -> losses.Metrics:
    """`loss` of field `name` has the reference's value and gradient, and exactly no gradient under the mask."""
    x = batch.flat(name).requires_grad_()
    value, metrics = loss(x)
    value.backward()
    assert x.grad is not None
    assert float(value.detach()) == pytest.approx(reference(batch.fields[name]), abs=1e-9)
    want = np.concatenate(numeric_gradient(reference, [row.copy() for row in batch.fields[name]], batch.masks))
    np.testing.assert_allclose(x.grad.numpy(), want, atol=1e-6, rtol=1e-6)
    assert torch.all(x.grad[~batch.mask] == 0)
    assert all(math.isfinite(float(v)) and not v.requires_grad for v in metrics.values())
    return metrics


def local_sample_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """(sample of each token, poisoned where nothing is learned; learned tokens of each sample)."""
    segments = batch.segments
    return torch.where(segments.mask, segments.sample_of, 10**6), segments.counts


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize(("low", "high", "c"), CLIPS)
def test_ppo(batch: Batch, low: float, high: float | None, c: float | None, token_level: bool) -> None:
    f, weights = batch.fields, batch.weights(per_token=token_level)

    def reference(new: list[Array]) -> float:
        def token(i: int, t: int) -> float:
            ratio = math.exp(new[i][t] - f["old"][i][t])
            return clipped_surrogate(ratio, f["advantages"][i][t], low, low if high is None else high, c)

        return per_token(batch, weights, token)

    metrics = check(
        batch, "log_probs",
        lambda x: loss_calls.policy_loss(
            x, batch.flat("old"), batch.flat("advantages"), tensor(weights),
            eps_clip=low, eps_clip_high=high, eps_clip_c=c,
        ),
        reference,
    )  # fmt: skip
    log_ratio = per_token(batch, weights, lambda i, t: f["old"][i][t] - f["log_probs"][i][t])
    assert float(metrics["ppo_kl"]) == pytest.approx(log_ratio, abs=1e-9)

    def clipped(i: int, t: int) -> float:
        free = -f["advantages"][i][t] * math.exp(f["log_probs"][i][t] - f["old"][i][t])
        ratio = math.exp(f["log_probs"][i][t] - f["old"][i][t])
        bound = clipped_surrogate(ratio, f["advantages"][i][t], low, low if high is None else high, c)
        return float(abs(bound - free) > 1e-12)

    assert float(metrics["clip_fraction"]) == pytest.approx(per_token(batch, weights, clipped), abs=1e-9)


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize(("low", "high"), [(0.2, None), (0.05, 0.4)])
def test_gspo_with_one_advantage_per_sample_is_the_clipped_sequence_ratio(
    batch: Batch, low: float, high: float | None, token_level: bool
) -> None:
    """https://arxiv.org/abs/2507.18071 section 4.1: s_i = exp(mean log ratio), differentiated through the mean."""
    weights = batch.weights(per_token=token_level)
    advantages = [np.where(m, r, math.nan) for m, r in zip(batch.masks, batch.rewards, strict=True)]
    batch.fields["advantages"] = advantages

    def reference(new: list[Array]) -> float:
        total = 0.0
        for i, mask in enumerate(batch.masks):
            if mask.any():
                s = math.exp(float(np.mean(new[i][mask] - batch.fields["old"][i][mask])))
                surrogate = clipped_surrogate(s, batch.rewards[i], low, low if high is None else high, None)
                total += float(weights[i].sum()) * surrogate
        return total

    sample_of, counts = local_sample_of(batch)
    check(
        batch, "log_probs",
        lambda x: loss_calls.policy_loss(
            x, batch.flat("old"), batch.flat("advantages"), tensor(weights), kind="gspo",
            eps_clip=low, eps_clip_high=high, sample_of=sample_of, token_counts=counts,
        ),
        reference,
    )  # fmt: skip


def test_gspo_with_token_advantages_moves_each_token_by_its_own(batch: Batch) -> None:
    """Section 4.3 there: s_{i,t} = stop_gradient(s_i) pi_t / stop_gradient(pi_t)."""
    f, weights = batch.fields, batch.weights(per_token=True)
    means = [
        float(np.mean(f["log_probs"][i][m] - f["old"][i][m])) if m.any() else 0.0 for i, m in enumerate(batch.masks)
    ]

    def reference(new: list[Array]) -> float:
        def token(i: int, t: int) -> float:
            ratio = math.exp(means[i] + new[i][t] - f["log_probs"][i][t])
            return clipped_surrogate(ratio, f["advantages"][i][t], 0.3, 0.3, None)

        return per_token(batch, weights, token)

    sample_of, counts = local_sample_of(batch)
    check(
        batch, "log_probs",
        lambda x: loss_calls.policy_loss(
            x, batch.flat("old"), batch.flat("advantages"), tensor(weights), kind="gspo", eps_clip=0.3,
            sample_of=sample_of, token_counts=counts,
        ),
        reference,
    )  # fmt: skip


@pytest.mark.parametrize(("low", "high"), [(0.2, None), (1.0, 0.5)])
def test_cispo(batch: Batch, low: float, high: float | None) -> None:
    top = 1 + (low if high is None else high)
    f, weights = batch.fields, batch.weights(per_token=True)

    def reference(new: list[Array]) -> float:
        def token(i: int, t: int) -> float:
            ratio = math.exp(f["log_probs"][i][t] - f["old"][i][t])
            return -min(max(ratio, 1 - low), top) * f["advantages"][i][t] * new[i][t]

        return per_token(batch, weights, token)

    check(
        batch, "log_probs",
        lambda x: loss_calls.policy_loss(
            x, batch.flat("old"), batch.flat("advantages"), tensor(weights), kind="cispo",
            eps_clip=low, eps_clip_high=high,
        ),
        reference,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_loss(batch: Batch, kind: str) -> None:
    weights = batch.weights(per_token=False)
    check(
        batch, "log_probs",
        lambda x: loss_calls.kl_loss(x, batch.flat("ref"), tensor(weights), kind),
        lambda new: per_token(
            batch, weights, lambda i, t: kl_value(kind, new[i][t], batch.fields["ref"][i][t])
        ),
    )  # fmt: skip


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_value_loss(batch: Batch, clip: float | None) -> None:
    f, weights = batch.fields, batch.weights(per_token=True)

    def error(value: float, i: int, t: int) -> float:
        return 0.5 * (value - f["returns"][i][t]) ** 2

    def near(value: float, i: int, t: int) -> float:
        old = f["old_values"][i][t]
        return value if clip is None else min(max(value, old - clip), old + clip)

    metrics = check(
        batch, "values",
        lambda x: loss_calls.value_loss(
            x, batch.flat("old_values"), batch.flat("returns"), tensor(weights), value_clip=clip
        ),
        lambda v: per_token(
            batch, weights, lambda i, t: max(error(v[i][t], i, t), error(near(v[i][t], i, t), i, t))
        ),
    )  # fmt: skip
    fraction = per_token(
        batch, weights,
        lambda i, t: error(near(f["values"][i][t], i, t), i, t) > error(f["values"][i][t], i, t),
    )  # fmt: skip
    assert float(metrics["value_clip_fraction"]) == pytest.approx(fraction, abs=1e-9)


def test_sft_entropy_and_distillation(batch: Batch) -> None:
    weights, ref = batch.weights(per_token=True), batch.fields["ref"]
    check(
        batch, "log_probs", lambda x: loss_calls.sft_loss(x, tensor(weights)),
        lambda new: -per_token(batch, weights, lambda i, t: new[i][t]),
    )  # fmt: skip
    check(
        batch, "log_probs", lambda x: loss_calls.entropy_bonus(x, tensor(weights)),
        lambda new: per_token(batch, weights, lambda i, t: new[i][t]),
    )  # fmt: skip
    metrics = check(
        batch, "log_probs", lambda x: loss_calls.distillation_loss(x, batch.flat("ref"), tensor(weights)),
        lambda new: per_token(batch, weights, lambda i, t: 0.5 * (new[i][t] - ref[i][t]) ** 2),
    )  # fmt: skip
    want = per_token(batch, weights, lambda i, t: batch.fields["log_probs"][i][t] - ref[i][t])
    assert float(metrics["reverse_kl"]) == pytest.approx(want, abs=1e-9)


def test_distillation_as_loss_and_as_advantage_have_one_gradient_in_expectation() -> None:
    """Over a whole vocabulary both are the gradient of KL(student || teacher), by torch's own softmax."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64).log_softmax(0)

    def gradient(loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        z = logits.clone().requires_grad_()
        loss_of(z.log_softmax(0)).backward()
        assert z.grad is not None
        return z.grad

    p = logits.softmax(0)  # every token once, weighted by how often the student samples it
    want = gradient(lambda log_p: (log_p.exp() * (log_p - teacher)).sum())
    as_loss = gradient(lambda log_p: loss_calls.distillation_loss(log_p, teacher, p)[0])
    as_advantage = gradient(lambda log_p: loss_calls.policy_loss(log_p, log_p.detach(), teacher - log_p.detach(), p)[0])
    assert torch.allclose(as_loss, want, atol=1e-12) and torch.allclose(as_advantage, want, atol=1e-12)


ALL_LOSSES: dict[str, Callable[[Tensor, Batch, Tensor], Tensor]] = {
    "ppo": lambda x, b, w: loss_calls.policy_loss(x, b.flat("old"), b.flat("advantages"), w, eps_clip_c=3.0)[0],
    "gspo": lambda x, b, w: loss_calls.policy_loss(
        x, b.flat("old"), b.flat("advantages"), w, kind="gspo",
        sample_of=local_sample_of(b)[0], token_counts=local_sample_of(b)[1],
    )[0],
    "cispo": lambda x, b, w: loss_calls.policy_loss(x, b.flat("old"), b.flat("advantages"), w, kind="cispo")[0],
    "k3": lambda x, b, w: loss_calls.kl_loss(x, b.flat("ref"), w, "k3")[0],
    "value": lambda x, b, w: loss_calls.value_loss(x, b.flat("old_values"), b.flat("returns"), w, value_clip=0.2)[0],
    "sft": lambda x, b, w: loss_calls.sft_loss(x, w)[0],
    "entropy": lambda x, b, w: loss_calls.entropy_bonus(x, w)[0],
    "distillation": lambda x, b, w: loss_calls.distillation_loss(x, b.flat("ref"), w)[0],
}  # fmt: skip


def value_and_gradient(name: str, batch: Batch) -> tuple[float, Tensor]:
    """The loss averaged over learned tokens, and its gradient at learned tokens."""
    x = batch.flat("log_probs").requires_grad_()
    loss = ALL_LOSSES[name](x, batch, tensor(batch.weights(per_token=True)))
    loss.backward()
    assert x.grad is not None and torch.all(x.grad[~batch.mask] == 0)
    return float(loss.detach()), x.grad[batch.mask]


@pytest.mark.parametrize("name", ALL_LOSSES)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_padding_observations_and_the_order_of_samples_change_no_loss_and_no_gradient(name: str, seed: int) -> None:
    batch, rng = random_batch(seed), np.random.default_rng(seed)
    value, gradient = value_and_gradient(name, batch)
    padded_value, padded_gradient = value_and_gradient(name, batch.padded(rng))
    assert padded_value == pytest.approx(value, abs=1e-9) and torch.allclose(padded_gradient, gradient, atol=1e-9)
    order = rng.permutation(len(batch.masks)).tolist()
    shuffled_value, shuffled_gradient = value_and_gradient(name, batch.reordered(order))
    assert shuffled_value == pytest.approx(value, abs=1e-9)
    parts = gradient.split(batch.segments.counts.tolist())
    assert torch.allclose(shuffled_gradient, torch.cat([parts[i] for i in order]), atol=1e-9)


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_a_batch_without_learned_tokens_has_loss_and_gradient_zero(name: str) -> None:
    batch = random_batch(0)
    batch.masks = [np.zeros(len(mask), dtype=bool) for mask in batch.masks]
    for rows in batch.fields.values():
        rows[:] = [np.full(len(row), math.nan) for row in rows]
    value, gradient = value_and_gradient(name, batch)
    assert value == 0.0 and len(gradient) == 0


def test_a_far_off_policy_token_of_advantage_zero_stays_harmless() -> None:
    x = torch.tensor([0.0, -1.0], requires_grad=True)
    for kind in ("ppo", "cispo"):
        loss, _ = loss_calls.policy_loss(
            x, torch.tensor([-2000.0, -1.0]), torch.tensor([0.0, 1.0]), torch.full((2,), 0.5), kind=kind
        )
        (gradient,) = torch.autograd.grad(loss, x)
        assert torch.isfinite(loss) and gradient.tolist() == [0.0, -0.5]


# Samples split over context-parallel ranks


def _gspo_share(rank: int, world_size: int, seed: int) -> tuple[float, Tensor]:
    """This rank's part of a batch: every world_size-th token. One rank alone whitens the advantages."""
    batch = random_batch(seed)
    segments = batch.segments
    if rank == 0:
        inputs = AdvantageInputs(segments, torch.tensor(batch.rewards), torch.tensor(batch.groups))
        compute_advantages(ALGORITHMS["reinforce_plus_plus"], inputs)
    share = slice(rank, None, world_size)
    x = batch.flat("log_probs")[share].clone().requires_grad_()
    loss, _ = loss_calls.policy_loss(
        x, batch.flat("old")[share], batch.flat("advantages")[share],
        tensor(batch.weights(per_token=False))[share], kind="gspo", sample_of=segments.sample_of[share],
        token_counts=segments.counts, cp_group=torch.distributed.group.WORLD if world_size > 1 else None,
    )  # fmt: skip
    loss.backward()
    assert x.grad is not None
    return float(loss.detach()), x.grad


def test_gspo_of_samples_split_over_ranks_equals_one_rank_and_advantages_need_no_other_rank() -> None:
    parts = run_distributed(_gspo_share, 2, 3)
    value, gradient = _gspo_share(0, 1, 3)
    assert sum(part[0] for part in parts) == pytest.approx(value, abs=1e-12) and value != 0
    for rank, (_, part) in enumerate(parts):
        assert torch.allclose(part, gradient[rank::2], atol=1e-12)


# Denominators


def test_the_denominator_counts_learned_tokens_and_no_observation() -> None:
    mask = [0, *[1] * 10, *[0] * 90]
    row = losses.token_weights(Segments.of([mask]), per_token=False)
    assert row.tolist() == pytest.approx([0, *[0.1] * 10, *[0] * 90])


def test_a_constant_length_weighs_every_token_alike_whatever_its_sample() -> None:
    segments = Segments.of([[0, 1, 1], [0, 1], [0, 0]])
    got = losses.token_weights(segments, per_token=False, constant_length=4)
    assert got.tolist() == pytest.approx([0, 1 / 8, 1 / 8, 0, 1 / 8, 0, 0])
    with pytest.raises(AssertionError):
        losses.token_weights(segments, per_token=False, constant_length=0)


def test_padding_rows_do_not_change_the_loss() -> None:
    segments = Segments.of([[0, 1, 1], [0, 1, 0], [0, 0]])
    weights = losses.token_weights(segments, per_token=True)
    log_probs = torch.where(segments.mask, -2.0, math.nan)
    assert float(loss_calls.sft_loss(log_probs, weights)[0]) == pytest.approx(2.0)
