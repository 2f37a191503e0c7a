"""The layout of samples in a flat tensor."""

from __future__ import annotations

import math

import pytest
import torch
from algo_reference import random_batch

from slime_retool.algo.segments import Segments


def test_the_worked_example() -> None:
    segments = Segments.of([[0, 1, 0, 1], [0, 1, 1]])
    assert segments.lengths.tolist() == [4, 3] and segments.counts.tolist() == [2, 2]
    assert segments.sample_of.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert segments.learned.tolist() == [1, 3, 5, 6] and segments.remaining().tolist() == [1, 0, 1, 0]
    assert segments.turn_of().tolist() == [-1, 0, -1, 1, -1, 0, 0]
    assert segments.learned_of(torch.tensor([5, 6])).tolist() == [5, 5, 6, 6]
    assert (segments.num_samples, segments.num_tokens, segments.num_learned) == (2, 7, 4)


def test_sums_read_learned_tokens_only() -> None:
    for seed in range(20):
        batch = random_batch(seed)
        want = [math.fsum(batch.learned("values", i)) for i in range(len(batch.masks))]
        segments = batch.segments
        assert segments.sum_learned(segments.select(batch.flat("values"))).tolist() == pytest.approx(want, abs=1e-12)


def test_place_undoes_select() -> None:
    segments = Segments.of([[0, 1, 0], [0, 0, 1]])
    values = torch.tensor([9.0, 1.0, math.nan, math.inf, 9.0, 2.0], requires_grad=True)
    selected = segments.select(values)
    assert selected.tolist() == [1.0, 2.0] and not selected.requires_grad
    assert segments.place(selected).tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 2.0]


def test_a_batch_may_learn_nothing_or_be_empty() -> None:
    nothing = Segments.of([[0], [0, 0]])
    assert nothing.sum_learned(nothing.select(torch.full((3,), math.nan))).tolist() == [0.0, 0.0]
    assert nothing.turn_of().tolist() == [-1, -1, -1]
    assert Segments.of([]).num_samples == 0


def test_a_sample_whose_first_token_is_learned_is_refused() -> None:
    with pytest.raises(ValueError, match=r"samples \[1\] learn it"):
        Segments.of([[0, 1], [1, 1]])


def test_lengths_that_do_not_fit_the_mask_are_refused() -> None:
    mask = torch.tensor([False, True, True])
    for lengths in ([2], [3, 0], [4]):
        with pytest.raises(ValueError, match="for 3 tokens"):
            Segments(torch.tensor(lengths), mask)
    with pytest.raises(ValueError, match="bool"):
        Segments(torch.tensor([3]), mask.long())
    with pytest.raises(ValueError, match="each of 3 tokens"):
        Segments(torch.tensor([3]), mask).select(torch.zeros(2))
