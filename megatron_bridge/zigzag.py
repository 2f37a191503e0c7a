"""Context parallelism: which tokens of packed sequences each rank holds. Torch only, no megatron.

With cp ranks, a sequence (its length a multiple of 2 * cp) is cut into 2 * cp equal chunks; rank r holds chunks r and
2 * cp - 1 - r, so that causal attention costs every rank the same. Ranks hold their parts of all sequences one after
the other, as Transformer Engine expects them. Two sequences of 8 and 4 tokens at cp = 2:

    whole    0 1 | 2 3 | 4 5 | 6 7 || 8 | 9 | 10 | 11
    rank 0   0 1 6 7 || 8 11                              rank 1   2 3 4 5 || 9 10

T = tokens of all sequences, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def padded_length(length: int, cp: int) -> int:
    """The length rounded up to what can be split over `cp` ranks."""
    multiple = 2 * cp if cp > 1 else 1
    return -(-length // multiple) * multiple


def _chunks(lengths: Sequence[int], cp: int, rank: int) -> Iterator[tuple[int, int, int]]:
    """The rank's chunks in its order: (first row of their sequence in the whole, rows of a chunk, its number)."""
    begin = 0
    for length in lengths:
        assert length == padded_length(length, cp), (length, cp)
        for chunk in (rank, 2 * cp - 1 - rank):
            yield begin, length // (2 * cp), chunk
        begin += length


def zigzag_rows(lengths: Sequence[int], cp: int, rank: int) -> Tensor:
    """Rows [T / cp] of the whole [T] that the rank holds, in its order."""
    chunks = _chunks(lengths, cp, rank)
    return torch.cat([torch.arange(begin + chunk * n, begin + (chunk + 1) * n) for begin, n, chunk in chunks])


@dataclass(frozen=True)
class ChunkLayout:
    """What the rank's chunks attend to: chunk i of a sequence to the sequence's chunks 0 to i."""

    kv_rows: Tensor
    """For each chunk the rows of its keys, out of [T] rows gathered rank by rank; one chunk after the other."""
    cu_seqlens_q: Tensor  # [chunks + 1] int32
    cu_seqlens_k: Tensor  # [chunks + 1] int32
    lengths_q: list[int]
    lengths_k: list[int]


def chunk_layout(lengths: Sequence[int], cp: int, rank: int, device: torch.device | str | None = None) -> ChunkLayout:
    """The layout for packed sequences of these lengths, on `device`."""
    gathered = torch.cat([zigzag_rows(lengths, cp, other) for other in range(cp)])
    place_of = torch.empty_like(gathered)  # whole row -> gathered row
    place_of[gathered] = torch.arange(len(gathered))
    chunks = list(_chunks(lengths, cp, rank))
    lengths_q, lengths_k = [size for _, size, _ in chunks], [(chunk + 1) * size for _, size, chunk in chunks]
    keys = [place_of[begin : begin + (chunk + 1) * size] for begin, size, chunk in chunks]

    def ends(of: list[int]) -> Tensor:
        return torch.tensor([0, *of], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

    return ChunkLayout(torch.cat(keys).to(device), ends(lengths_q), ends(lengths_k), lengths_q, lengths_k)
