"""Every estimator against plain loops over learned tokens (tests/algo_reference.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from algo_reference import Array, Batch, random_batch, reference_advantages
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_retool.algo import advantages
from slime_retool.algo.advantages import AdvantageInputs, Advantages, discounted_suffix_sums, explained_variance
from slime_retool.algo.algorithms import ALGORITHMS
from slime_retool.algo.kl import kl_estimate
from slime_retool.algo.segments import Segments

PLAIN = {"kl_coef": 0.0, "gamma": 1.0, "lam": 1.0, "normalize_std": True, "whiten": False}
RICH = {"kl_coef": 0.3, "gamma": 0.9, "lam": 0.8, "normalize_std": False, "whiten": True}
ESTIMATORS = tuple(ALGORITHMS)
SEEDS = st.integers(0, 2**32 - 1)
moderate = settings(max_examples=25, deadline=None)


def compute_advantages(
    estimator: str, segments: Segments, rewards: torch.Tensor, groups: torch.Tensor, *, whiten: bool = False,
    **options: Any,
) -> Advantages:  # fmt: skip
    inputs = AdvantageInputs(segments, rewards, groups, **options)
    return advantages.compute_advantages(ALGORITHMS[estimator], inputs, whiten=whiten)


def compute(estimator: str, batch: Batch, **options: object) -> Advantages:
    kl = kl_estimate(batch.flat("log_probs"), batch.flat("ref"), "k1")
    return compute_advantages(
        estimator, batch.segments, torch.tensor(batch.rewards), torch.tensor(batch.groups),
        kl=kl, values=batch.flat("values"), **options,
    )  # type: ignore[arg-type]  # fmt: skip


def rows(flat: torch.Tensor, masks: list[Array]) -> list[Array]:
    """[N] -> each sample's learned tokens."""
    parts = np.split(flat.double().numpy(), np.cumsum([len(m) for m in masks])[:-1])
    return [part[mask] for part, mask in zip(parts, masks, strict=True)]


def assert_rows_equal(got: list[Array], want: list[list[float]] | list[Array]) -> None:
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, np.array(w, dtype=float), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [PLAIN, RICH, {**RICH, "whiten": False}, {**PLAIN, "normalize_std": False}])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_and_returns_equal_plain_loops(estimator: str, options: dict[str, object]) -> None:
    for seed in range(25):
        batch = random_batch(seed)
        got = compute(estimator, batch, **options)
        advantages, returns = reference_advantages(estimator, batch, **options)  # type: ignore[arg-type]
        assert_rows_equal(rows(got.advantages, batch.masks), advantages)
        assert torch.all(got.advantages[~batch.mask] == 0)
        assert (got.returns is not None) == (estimator == "ppo")
        if got.returns is not None:
            assert_rows_equal(rows(got.returns, batch.masks), returns)
            assert torch.all(got.returns[~batch.mask] == 0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(seed=SEEDS)
@moderate
def test_the_order_of_samples_and_the_names_of_groups_do_not_matter(estimator: str, seed: int) -> None:
    batch, rng = random_batch(seed), np.random.default_rng(seed)
    order = rng.permutation(len(batch.masks)).tolist()
    shuffled = batch.reordered(order)
    shuffled.groups = [7 - 2 * g for g in shuffled.groups]
    want = rows(compute(estimator, batch, **RICH).advantages, batch.masks)
    got = rows(compute(estimator, shuffled, **RICH).advantages, shuffled.masks)
    assert_rows_equal(got, [want[i] for i in order])


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(seed=SEEDS)
@moderate
def test_masked_tokens_and_padding_samples_change_nothing(estimator: str, seed: int) -> None:
    batch = random_batch(seed)
    padded = batch.padded(np.random.default_rng(seed))
    want, got = compute(estimator, batch, **RICH), compute(estimator, padded, **RICH)
    assert_rows_equal(rows(got.advantages, padded.masks)[:-1], rows(want.advantages, batch.masks))
    if want.returns is not None and got.returns is not None:
        assert_rows_equal(rows(got.returns, padded.masks)[:-1], rows(want.returns, batch.masks))


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("reward", [0.1, -0.7, 1e6 / 3])
def test_equal_rewards_of_a_group_give_exactly_zero(estimator: str, reward: float) -> None:
    segments = Segments.of([[0, 1, 1]] * 8)
    groups = torch.tensor([1, 1, 1, 1, 1, 1, 1, 2])
    for normalize_std in (True, False):
        rewards = torch.full((8,), reward, dtype=torch.float64)
        got = compute_advantages(estimator, segments, rewards, groups, normalize_std=normalize_std)
        assert torch.all(got.advantages == 0)


def test_whitening_a_batch_of_equal_advantages_gives_zero() -> None:
    segments = Segments.of([[0, 1, 1], [0, 1]])
    got = compute_advantages("reinforce_plus_plus", segments, torch.full((2,), 0.1), torch.tensor([0, 1]))
    assert torch.all(got.advantages == 0)


def test_whitening_counts_learned_tokens_of_the_whole_batch() -> None:
    segments = Segments.of([[0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0]])
    got = compute_advantages("reinforce_plus_plus", segments, torch.tensor([1.0, -1.0]), torch.tensor([0, 1]))
    learned = got.advantages[segments.mask]
    assert float(learned.mean()) == pytest.approx(0, abs=1e-6) and float(learned.std()) == pytest.approx(1, abs=1e-5)
    assert learned.tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-5)


def test_gae_steps_from_the_last_token_before_an_observation_to_the_first_after_it() -> None:
    nan = float("nan")
    segments = Segments.of([[0, 1, 0, 0, 1]])
    values = torch.tensor([nan, 0.5, nan, nan, 0.25])
    got = compute_advantages("ppo", segments, torch.tensor([1.0]), torch.tensor([0]), values=values, gamma=0.5, lam=0.5)
    last = 1.0 - 0.25
    first = 0.5 * 0.25 - 0.5 + 0.25 * last
    assert got.advantages.tolist() == [0.0, first, 0.0, 0.0, last]
    assert got.returns is not None and got.returns.tolist() == [0.0, first + 0.5, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.97, 1.0])
def test_the_scan_equals_the_recurrence_for_any_lengths(discount: float) -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 2, 3, 4, 5, 64, 65, 1000]
    values = [rng.standard_normal(n) for n in lengths]
    remaining = torch.tensor([n - 1 - t for n in lengths for t in range(n)])
    got = discounted_suffix_sums(torch.tensor(np.concatenate(values)), remaining, discount).tolist()
    want = []
    for row in values:
        running, out = 0.0, []
        for value in row[::-1]:
            running = value + discount * running
            out.append(running)
        want += out[::-1]
    assert got == pytest.approx(want, abs=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_batch_without_learned_tokens_has_no_advantages(estimator: str) -> None:
    segments, nan = Segments.of([[0, 0], [0]]), torch.full((3,), float("nan"))
    got = compute_advantages(
        estimator,
        segments,
        torch.tensor([1.0, 0.0]),
        torch.tensor([0, 0]),
        kl=nan,
        kl_coef=0.1,
        values=nan,
        whiten=True,
    )
    assert torch.all(got.advantages == 0)


def test_explained_variance_is_one_for_a_perfect_critic_and_reads_learned_tokens_only() -> None:
    segments, nan = Segments.of([[0, 1, 1, 0, 1]]), float("nan")
    returns = torch.tensor([nan, 1.0, 2.0, nan, 4.0])
    assert explained_variance(segments, returns, returns) == 1.0
    values = torch.tensor([nan, 1.5, 1.5, nan, 3.0])
    want = 1 - np.var([-0.5, 0.5, 1.0]) / np.var([1.0, 2.0, 4.0])
    assert explained_variance(segments, values, returns) == pytest.approx(want)
    assert explained_variance(segments, values, torch.ones(5)) == 0.0


def test_bad_input_is_refused_with_the_value_seen() -> None:
    segments, zeros = Segments.of([[0, 1], [0, 1]]), torch.zeros(2)
    with pytest.raises(ValueError, match=r"samples \[1\]"):
        compute_advantages("grpo", segments, torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="2 samples"):
        compute_advantages("grpo", segments, torch.zeros(3), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="--ref-load"):
        compute_advantages("grpo", segments, zeros, torch.tensor([0, 0]), kl_coef=0.1)
    with pytest.raises(ValueError, match="needs values"):
        compute_advantages("ppo", segments, zeros, torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="4 tokens"):
        compute_advantages("ppo", segments, zeros, torch.tensor([0, 0]), values=zeros)
