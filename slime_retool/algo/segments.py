"""Where samples lie in a flat tensor, and which of their tokens are learned.

S samples, N tokens in all (prompts, responses and observations, end to end), M learned tokens among them. Two samples
of 4 and 3 tokens, the first with an observation between two turns:

    lengths    4             3            S = 2
    mask       0 1 0 1       0 1 1        N = 7
    sample_of  0 0 0 0       1 1 1
    learned      1   3         5 6        M = 4
    remaining    1   0         1 0

Token t's log-prob, value and KL sit at index t. What lies under mask False may be anything, NaN included: the methods
below gather the learned tokens first and compute afterwards, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Layout of a batch of samples laid end to end.

    Raises ValueError when lengths and mask disagree, a sample is empty, or a sample's first token (which nothing
    predicts) is to be learned.
    """

    lengths: Tensor  # [S] int64, all tokens of a sample
    mask: Tensor  # [N] bool, True = written by the model and learned
    sample_of: Tensor = field(init=False)  # [N] int64, the sample a token belongs to
    learned: Tensor = field(init=False)  # [M] int64, indices of the learned tokens, ascending
    counts: Tensor = field(init=False)  # [S] int64, learned tokens of a sample

    def __post_init__(self) -> None:
        lengths, mask = self.lengths, self.mask
        if mask.dtype != torch.bool or lengths.dtype != torch.int64:
            raise ValueError(f"lengths must be int64 and the mask bool, got {lengths.dtype} and {mask.dtype}")
        if int(lengths.sum()) != len(mask) or bool((lengths < 1).any()):
            raise ValueError(
                f"sample lengths must be positive and sum to the mask's length, got a sum of {int(lengths.sum())} "
                f"(least {int(lengths.min())}) for {len(mask)} tokens"
            )
        sample_of = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        first_tokens = lengths.cumsum(0) - lengths
        if bool(mask[first_tokens].any()):
            samples = mask[first_tokens].nonzero()[:5, 0].tolist()
            raise ValueError(f"nothing predicts a sample's first token, yet samples {samples} learn it; mask it out")
        learned = mask.nonzero()[:, 0]
        object.__setattr__(self, "sample_of", sample_of)
        object.__setattr__(self, "learned", learned)
        object.__setattr__(self, "counts", torch.bincount(sample_of[learned], minlength=len(lengths)))

    @classmethod
    def of(cls, loss_masks: Sequence[Sequence[int]]) -> Segments:
        """The layout of samples given as lists of 0 and 1, one entry per token."""
        lengths = torch.tensor([len(mask) for mask in loss_masks], dtype=torch.int64)
        return cls(lengths, torch.tensor(list(chain.from_iterable(loss_masks)), dtype=torch.int64) != 0)

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """All tokens (N)."""
        return len(self.mask)

    @property
    def num_learned(self) -> int:
        """Learned tokens (M)."""
        return len(self.learned)

    def learned_of(self, per_sample: Tensor) -> Tensor:
        """A value per sample [S] -> the same for each of its learned tokens [M]."""
        return per_sample[self.sample_of[self.learned]]

    def select(self, values: Tensor) -> Tensor:
        """Values of the learned tokens, [N] -> [M], in float64 and without gradient."""
        if values.shape != self.mask.shape:
            raise ValueError(f"expected one value for each of {self.num_tokens} tokens, got {tuple(values.shape)}")
        return values.detach()[self.learned].double()

    def place(self, learned_values: Tensor) -> Tensor:
        """The way back, [M] -> [N] in float32: 0 where nothing is learned."""
        out = torch.zeros(self.num_tokens, dtype=torch.float32, device=self.mask.device)
        out[self.learned] = learned_values.float()
        return out

    def sum_learned(self, learned_values: Tensor) -> Tensor:
        """Sums over each sample's learned tokens, [M] -> [S], float64."""
        out = torch.zeros(self.num_samples, dtype=torch.float64, device=self.mask.device)
        return out.index_add_(0, self.sample_of[self.learned], learned_values.double())

    def remaining(self) -> Tensor:
        """How many learned tokens of the same sample follow each learned token, [M] int64."""
        ends = self.learned_of(self.counts.cumsum(0))
        return ends - 1 - torch.arange(self.num_learned, device=self.mask.device)

    def turn_of(self) -> Tensor:
        """The number, from 0, of each learned token's turn within its sample, [N] int64; -1 where nothing is learned.

        A turn is a run of learned tokens: turns are parted by observations or by the template's own tokens.
        """
        starts = self.mask.clone()
        starts[1:] &= ~self.mask[:-1]  # a sample's first token is never learned, so runs do not cross samples
        started = starts.long().cumsum(0)
        first_tokens = self.lengths.cumsum(0) - self.lengths
        return torch.where(self.mask, started - 1 - started[first_tokens][self.sample_of], -1)
