"""The engine's choice of experts, from its reply to the train sample (--use-rollout-routing-replay)."""

from __future__ import annotations

from array import array

import pytest

from slime_retool.types import RoutedExperts, Sample, TrainSample

L, K = 2, 3  # layers with experts, experts per token


def routed(*tokens: int, typecode: str = "B") -> RoutedExperts:
    """One token each, whose L x K entries count up from the number."""
    return RoutedExperts(array(typecode, [n + i for n in tokens for i in range(L * K)]), L, K)


# The type


@pytest.mark.parametrize(("experts", "typecode"), [(4, "B"), (255, "B"), (256, "H"), (65535, "H")])
def test_the_largest_value_of_the_type_is_no_experts_id(experts, typecode):
    found = RoutedExperts.typecode(experts)
    nobody = RoutedExperts.unrouted(2, L, K, found)
    assert found == typecode and set(nobody.ids) == {nobody.mark}
    assert experts - 1 < nobody.mark == 256**nobody.ids.itemsize - 1
    assert len(nobody) == 2 and nobody.num_routed == 0


def test_more_experts_than_16_bits_hold_are_refused():
    with pytest.raises(ValueError, match="at most 65535 experts, got 65536"):
        RoutedExperts.typecode(65536)


@pytest.mark.parametrize("typecode", ["B", "H"])
def test_tokens_are_cut_out_put_in_and_filled_up(typecode):
    some = routed(0, 10, 20, typecode=typecode)
    assert some[1:] == routed(10, 20, typecode=typecode) and some[:-1] == routed(0, 10, typecode=typecode)
    assert len(some[2:1]) == 0
    some.resize(5)
    assert len(some) == 5 and some.num_routed == 3 and some[:3] == routed(0, 10, 20, typecode=typecode)
    some.put(2, routed(30, 40, typecode=typecode))
    some.resize(4)
    assert some == routed(0, 10, 30, 40, typecode=typecode) and some.num_routed == 4
    part = some[:1]
    part.put(0, routed(50, typecode=typecode))
    assert some[:1] == routed(0, typecode=typecode), "a slice is a copy"


@pytest.mark.parametrize(
    ("start", "other"),
    [
        (-1, routed(1)),
        (2, routed(1, 2)),
        (0, routed(1, typecode="H")),
        (0, RoutedExperts(array("B", range(6)), K, L)),
    ],
)
def test_what_does_not_fit_is_not_put_in(start, other):
    some = routed(0, 10, 20)
    with pytest.raises(ValueError, match="cannot stand from token"):
        some.put(start, other)
    assert some == routed(0, 10, 20)


@pytest.mark.parametrize("ids", [array("B", range(7)), array("i", range(6))])
def test_entries_that_are_no_whole_tokens_are_refused(ids):
    with pytest.raises(ValueError, match="2 layers x top 3"):
        RoutedExperts(ids, L, K)


# On a sample


def test_a_sample_has_one_entry_per_token_and_what_is_appended_is_unrouted():
    sample = Sample(prompt="p", tokens=[1, 2])
    sample.append([3, 4], log_probs=[-1.0, -2.0])
    sample.put_routed_experts(0, routed(0, 10, 20))
    assert len(sample.routed_experts) == 4 and sample.routed_experts.num_routed == 3
    sample.append([5], log_probs=None)
    sample.put_routed_experts(3, routed(30))
    assert sample.routed_experts[:4] == routed(0, 10, 20, 30) and sample.routed_experts.num_routed == 4
    train = TrainSample.from_sample(sample, reward=1.0)
    assert train.routed_experts == sample.routed_experts and len(train.routed_experts) == train.length == 5
    sample.reset()
    assert sample.routed_experts is None


def test_a_sample_with_fewer_entries_than_tokens_is_refused():
    sample = Sample(prompt="p", tokens=[1, 2, 3], routed_experts=routed(0, 10))
    with pytest.raises(ValueError, match="one entry per token, got 2 of 3 tokens"):
        TrainSample.from_sample(sample, reward=1.0)
    with pytest.raises(ValueError, match="one entry per token"):
        TrainSample(tokens=[1, 2, 3], loss_mask=[0, 1, 1], routed_experts=routed(0, 10))
