"""One rollout as flat CPU tensors: S samples end to end, N tokens in all. Every trainer rank holds all of it.

T = tokens of a sample, L = the model's layers with experts, K = experts of a token in each.

Token t's log-prob, value or advantage sits at index t of its own sample; entry 0 of each sample is never learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_retool.algo.segments import Segments
from slime_retool.types import RoutedExperts, TrainSample


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples of a rollout, or some of them."""

    segments: Segments
    tokens: Tensor  # [N] int32
    rewards: Tensor  # [S] fp64
    groups: Tensor  # [S] int64
    indices: list[int]  # [S] Sample.index
    rollout_log_probs: Tensor | None  # [N] fp32
    columns: dict[str, Tensor]  # [N] fp32 each
    routed_experts: list[Tensor | None]
    """[S] of [T, L, K] uint8 or int16 each, None for a sample without. In the samples' own memory: they may be hundreds
    of bytes a token, of which a rank needs its own micro-batches' only."""

    @classmethod
    def from_samples(cls, samples: Sequence[TrainSample]) -> TrainBatch:
        """Lay samples end to end. Log-probs and columns are kept when every sample has them."""
        named = set.intersection(*(set(s.columns) for s in samples)) if samples else set()
        sampled = [s.rollout_log_probs for s in samples if s.rollout_log_probs is not None]
        return cls(
            segments=Segments(
                lengths=torch.tensor([s.length for s in samples], dtype=torch.int64),
                mask=_flat([s.loss_mask for s in samples], torch.int8).bool(),
            ),
            tokens=_flat([s.tokens for s in samples], torch.int32),
            rewards=torch.tensor([s.reward for s in samples], dtype=torch.float64),
            groups=torch.tensor([s.group_index for s in samples], dtype=torch.int64),
            indices=[s.index for s in samples],
            rollout_log_probs=_flat(sampled, torch.float32) if sampled and len(sampled) == len(samples) else None,
            columns={name: _flat([s.columns[name] for s in samples], torch.float32) for name in sorted(named)},
            routed_experts=[_experts(s.routed_experts) for s in samples],
        )

    def without_experts(self) -> TrainBatch:
        """The same batch for a model that chooses all experts itself."""
        return replace(self, routed_experts=[None] * self.num_samples)

    @property
    def lengths(self) -> Tensor:  # [S] int64
        return self.segments.lengths

    @property
    def mask(self) -> Tensor:  # [N] bool, True = learned
        return self.segments.mask

    @property
    def starts(self) -> Tensor:  # [S] int64
        """Where each sample begins."""
        return self.lengths.cumsum(0) - self.lengths

    @property
    def num_samples(self) -> int:
        return self.segments.num_samples

    @property
    def num_tokens(self) -> int:
        return self.segments.num_tokens


def _experts(routed: RoutedExperts | None) -> Tensor | None:  # [T, L, K]
    """A view. The 16-bit marks become -1: torch computes little with numbers without a sign."""
    if routed is None:
        return None
    dtype = torch.uint8 if routed.ids.typecode == "B" else torch.int16
    return torch.frombuffer(routed.ids, dtype=dtype).view(-1, routed.layers, routed.top_k)


def _flat(arrays: Sequence[Sequence[int] | Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Arrays of `dtype`'s width, one after the other, as one tensor."""
    joined = bytearray().join(arrays)  # type: ignore[arg-type]  # TrainSample stores array.array
    return torch.frombuffer(joined, dtype=dtype) if joined else torch.empty(0, dtype=dtype)
