"""Which sample is computed where: a schedule of micro-batches with stated invariants. Plain Python.

`schedule` promises, for any lengths:

1. every sample is in exactly one micro-batch;
2. every data-parallel rank has the same number of micro-batches, at least one (some may be empty: the trainer
   then computes a masked dummy, so that collectives match);
3. no micro-batch has more than `max_tokens` tokens, except one that holds a single longer sample;
   or, with `samples_per_micro_batch`, none has more samples than that;
4. the heaviest rank has at most one micro-batch's worth of tokens more than the lightest;
5. the result depends on nothing but the arguments.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

MicroBatch = list[int]
"""Indices of samples, the longest sample first: attention kernels then end together, not with one long sequence."""


def split_steps(num_samples: int, num_steps: int) -> list[range]:
    """Consecutive, nearly equal, non-empty ranges of samples: one for each optimizer step; fewer if samples run out."""
    steps = max(1, min(num_steps, num_samples))
    bounds = [num_samples * step // steps for step in range(steps + 1)]
    return [range(begin, end) for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]


def schedule(
    lengths: Sequence[int],
    dp_size: int,
    *,
    max_tokens: int | None = None,
    samples_per_micro_batch: int | None = None,
) -> list[list[MicroBatch]]:
    """Micro-batches of every data-parallel rank: result[rank][micro_batch] is a list of sample indices.

    Give exactly one of `max_tokens` (dynamic batching) and `samples_per_micro_batch`. ValueError otherwise.
    """
    if dp_size < 1 or (max_tokens is None) == (samples_per_micro_batch is None):
        raise ValueError(
            f"schedule needs dp_size >= 1 and either max_tokens or samples_per_micro_batch, "
            f"got {dp_size}, {max_tokens}, {samples_per_micro_batch}"
        )
    limit = max_tokens if max_tokens is not None else samples_per_micro_batch
    assert limit is not None
    if limit < 1:
        raise ValueError(f"micro-batches must hold at least 1, got {limit}; raise the limit")
    if samples_per_micro_batch is not None:
        per_rank = max(1, -(-len(lengths) // (dp_size * samples_per_micro_batch)))
        bins = _balanced_bins(lengths, dp_size * per_rank, max_samples=samples_per_micro_batch)
    else:
        fitted = _best_fit(lengths, limit)
        per_rank = max(1, -(-len(fitted) // dp_size))
        bins = _balanced_bins(lengths, dp_size * per_rank)
        if not all(len(b) <= 1 or sum(lengths[i] for i in b) <= limit for b in bins):
            bins = _fill_empty(fitted + [[] for _ in range(dp_size * per_rank - len(fitted))], lengths)
    return _deal(bins, lengths, dp_size)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _best_fit(lengths: Sequence[int], max_tokens: int) -> list[MicroBatch]:
    """Best-fit decreasing: few bins of at most `max_tokens`; a longer sample gets a bin of its own."""
    bins: list[MicroBatch] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), the fullest first
    for index in _longest_first(lengths):
        tightest = bisect.bisect_left(rooms, (lengths[index], 0))
        if tightest < len(rooms):
            left, b = rooms.pop(tightest)
        else:
            left, b = max_tokens, len(bins)
            bins.append([])
        bins[b].append(index)
        bisect.insort(rooms, (left - lengths[index], b))
    return bins


def _balanced_bins(lengths: Sequence[int], count: int, max_samples: int | None = None) -> list[MicroBatch]:
    """Longest first, each into the lightest bin that still takes one."""
    bins: list[MicroBatch] = [[] for _ in range(count)]
    heap = [(0, 0, b) for b in range(count)]  # tokens, samples, bin
    for index in _longest_first(lengths):
        tokens, samples, b = heapq.heappop(heap)
        bins[b].append(index)
        if max_samples is None or samples + 1 < max_samples:
            heapq.heappush(heap, (tokens + lengths[index], samples + 1, b))
    return bins


def _fill_empty(bins: list[MicroBatch], lengths: Sequence[int]) -> list[MicroBatch]:
    """Move the shortest sample of the heaviest bin with several samples into each empty bin."""
    for empty in (b for b in bins if not b):
        crowded = [b for b in bins if len(b) > 1]
        if not crowded:
            break
        heaviest = max(crowded, key=lambda b: (sum(lengths[i] for i in b), -min(b)))
        empty.append(heaviest.pop())
    return bins


def _deal(bins: list[MicroBatch], lengths: Sequence[int], dp_size: int) -> list[list[MicroBatch]]:
    """Deal bins in rounds, heaviest first, each round's heaviest to the rank with the fewest tokens so far."""
    tokens = [sum(lengths[i] for i in b) for b in bins]
    order = sorted(range(len(bins)), key=lambda b: (-tokens[b], b))
    ranks: list[list[MicroBatch]] = [[] for _ in range(dp_size)]
    load = [0] * dp_size
    for begin in range(0, len(order), dp_size):
        lightest_first = sorted(range(dp_size), key=lambda rank: (load[rank], rank))
        for rank, b in zip(lightest_first, order[begin : begin + dp_size], strict=True):
            ranks[rank].append(sorted(bins[b], key=lambda i: (-lengths[i], i)))
            load[rank] += tokens[b]
    return ranks
