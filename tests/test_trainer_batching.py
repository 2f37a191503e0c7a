"""Invariants of the micro-batch schedule, and packing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.batching import schedule, split_steps
from slime_retool.trainer.packing import TokenData, pack, packed_tokens, packing_multiple, unpack
from slime_retool.types import TrainSample

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def _common_invariants(result: list[list[list[int]]], lengths: list[int], dp_size: int) -> None:
    assert len(result) == dp_size
    assert sorted(i for rank in result for batch in rank for i in batch) == list(range(len(lengths)))
    counts = {len(rank) for rank in result}
    assert len(counts) == 1 and counts.pop() >= 1
    loads = [sum(lengths[i] for batch in rank for i in batch) for rank in result]
    heaviest_batch = max((sum(lengths[i] for i in batch) for rank in result for batch in rank), default=0)
    assert max(loads) - min(loads) <= heaviest_batch


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 80))
def test_dynamic_schedule_keeps_its_promises(lengths: list[int], dp_size: int, max_tokens: int) -> None:
    result = schedule(lengths, dp_size, max_tokens=max_tokens)
    _common_invariants(result, lengths, dp_size)
    for rank in result:
        for batch in rank:
            assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= max_tokens
    assert result == schedule(list(lengths), dp_size, max_tokens=max_tokens)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 6))
def test_fixed_schedule_keeps_its_promises(lengths: list[int], dp_size: int, size: int) -> None:
    result = schedule(lengths, dp_size, samples_per_micro_batch=size)
    _common_invariants(result, lengths, dp_size)
    assert all(len(batch) <= size for rank in result for batch in rank)
    assert len(result[0]) == max(1, -(-len(lengths) // (dp_size * size)))


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 200))
def test_dynamic_schedule_needs_at_most_twice_the_fewest_micro_batches(
    lengths: list[int], dp_size: int, max_tokens: int
) -> None:
    fewest = sum(n >= max_tokens for n in lengths) + -(-sum(n for n in lengths if n < max_tokens) // max_tokens)
    per_rank = len(schedule(lengths, dp_size, max_tokens=max_tokens)[0])
    assert per_rank <= max(1, -(-2 * fewest // dp_size))


class Counted(int):
    """A length that counts how often it is compared."""

    comparisons = 0

    def _count(name: str) -> Any:  # type: ignore[misc]
        def compare(self: Counted, other: int) -> bool:
            Counted.comparisons += 1
            return getattr(int, name)(self, other)

        return compare

    __lt__, __le__, __gt__, __ge__, __eq__ = map(_count, ("__lt__", "__le__", "__gt__", "__ge__", "__eq__"))
    __hash__ = int.__hash__


def test_the_schedule_of_many_samples_does_not_compare_each_with_every_other() -> None:
    rng = random.Random(0)
    lengths = [Counted(rng.randint(200, 16384)) for _ in range(4000)]
    Counted.comparisons = 0
    schedule(lengths, 8, max_tokens=16384)
    assert Counted.comparisons < 40 * len(lengths)  # log2(4000) = 12; a pair each would be 8 million


def test_equal_lengths_are_shared_out_evenly() -> None:
    result = schedule([10] * 8, 2, max_tokens=20)
    assert [len(batch) for rank in result for batch in rank] == [2, 2, 2, 2]


def test_fewer_samples_than_ranks_leave_empty_micro_batches() -> None:
    assert sorted(schedule([5], 3, max_tokens=8)) == [[[]], [[]], [[0]]]


@pytest.mark.parametrize("arguments", [{}, {"max_tokens": 4, "samples_per_micro_batch": 1}, {"max_tokens": 0}])
def test_meaningless_limits_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        schedule([1], 1, **arguments)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 10))
def test_steps_are_nearly_equal_and_in_order(samples: int, steps: int) -> None:
    ranges = split_steps(samples, steps)
    assert [i for r in ranges for i in r] == list(range(samples))
    assert len(ranges) == min(samples, steps)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def _batch() -> TrainBatch:
    return TrainBatch.from_samples(
        [
            TrainSample([11, 12, 13], [0, 1, 1], rollout_log_probs=[0.0, -0.5, -0.25], reward=2.0, group_index=7),
            TrainSample([21, 22], [0, 1], rollout_log_probs=[0.0, -1.0], group_index=8),
        ]
    )


def _data() -> TokenData:
    old_log_probs = _batch().rollout_log_probs
    assert old_log_probs is not None
    return TokenData(torch.tensor([0, 0.25, 0.25, 0, 0.5]), {"old_log_probs": old_log_probs})


def test_samples_lie_end_to_end_in_flat_tensors() -> None:
    batch = _batch()
    assert batch.tokens.tolist() == [11, 12, 13, 21, 22] and batch.mask.tolist() == [False, True, True, False, True]
    assert batch.lengths.tolist() == [3, 2] and batch.starts.tolist() == [0, 3]
    assert batch.rewards.tolist() == [2, 0] and batch.groups.tolist() == [7, 8]
    assert batch.rollout_log_probs is not None and batch.rollout_log_probs.tolist() == [0, -0.5, -0.25, 0, -1.0]
    assert batch.columns == {}


def test_log_probs_that_one_sample_lacks_are_left_out() -> None:
    samples = [TrainSample([1, 2], [0, 1], rollout_log_probs=[0.0, -1.0]), TrainSample([1, 2], [0, 1])]
    assert TrainBatch.from_samples(samples).rollout_log_probs is None


def test_packing_shifts_targets_within_each_sequence_and_pads_with_its_own() -> None:
    packed = pack(_batch(), [0, 1], data=_data(), multiple=4)
    assert packed.tokens.tolist() == [[11, 12, 13, 21, 22, 0, 0, 0]]
    assert packed.lengths == [3, 2, 3]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed.targets.tolist() == [12, 13, 0, 22, 0, 0, 0, 0]
    assert packed.data is not None and packed.data.columns.keys() == {"old_log_probs"}
    assert packed.data.weights.tolist() == [0.25, 0.25, 0, 0.5, 0, 0, 0, 0]
    assert packed.data.columns["old_log_probs"].tolist() == [-0.5, -0.25, 0, -1.0, 0, 0, 0, 0]


def test_packing_says_which_positions_are_learned_and_whose_they_are() -> None:
    packed = pack(_batch(), [1, 0], multiple=4)
    assert packed.learned.tolist() == [0, 2, 3]
    assert packed.sample_of.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert packed.token_counts.tolist() == [1, 2, 0]


def test_an_empty_micro_batch_is_padding_without_weight() -> None:
    packed = pack(_batch(), [], data=_data(), multiple=2)
    assert packed.lengths == [2] and packed.tokens.shape == (1, 2)
    assert packed.data is not None and packed.data.weights.tolist() == [0, 0]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_unpacking_turns_values_at_logits_back_into_values_of_tokens(
    lengths: list[int], multiple: int, rng: random.Random
) -> None:
    """Whatever micro-batches the samples are spread over: what `pack` shifts to the left comes back to its token."""
    batch = TrainBatch.from_samples([TrainSample(list(range(1, n + 1)), [0] * n) for n in lengths])
    values = torch.rand(batch.num_tokens)
    values[batch.starts] = 0
    order = rng.sample(range(len(lengths)), len(lengths))
    cut = rng.randint(0, len(order))
    data = TokenData(weights=values)
    packed = [pack(batch, part, data=data, multiple=multiple) for part in (order[:cut], order[cut:])]
    assert torch.equal(unpack([(p.target_index, p.data.weights) for p in packed if p.data], len(values)), values)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 6), st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]), st.booleans(),
)  # fmt: skip
def test_the_tokens_of_a_micro_batch_are_known_before_it_is_packed(
    lengths: list[int], count: int, tp: int, cp: int, sequence_parallel: bool
) -> None:
    """Pipeline stages rely on it."""
    batch = TrainBatch.from_samples([TrainSample(list(range(1, n + 1)), [0] * n) for n in lengths])
    multiple = packing_multiple(tp=tp, cp=cp, sequence_parallel=sequence_parallel)
    chosen = range(len(lengths))[:count]
    known = packed_tokens([lengths[index] for index in chosen], multiple=multiple, cp=cp)
    assert all(pack(batch, chosen, multiple=multiple, cp=cp, cp_rank=r).tokens.shape == (1, known) for r in range(cp))
