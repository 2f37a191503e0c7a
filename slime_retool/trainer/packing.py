"""Samples -> one packed micro-batch. T = tokens of the micro-batch, padding included.

Everything in a `PackedBatch` is aligned with the logits: position t of a sequence predicts its token t + 1, so
targets, weights and log-probs are shifted by one to the left within each sequence, and each sequence's last
position has weight 0. A sequence of tokens a b c beside one of d e, padded to 6:

    tokens     a b c | d e | 0        targets   b c 0 | e 0 | 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_retool.types import TrainSample


@dataclass(slots=True)
class PackedBatch:
    """One micro-batch on the trainer's device."""

    indices: list[int]
    """Which samples, in the order of their sequences."""
    lengths: list[int]
    """Tokens of each sequence; a last one beyond `indices` is padding. Their sum is T."""
    tokens: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, from 0 in each sequence
    targets: Tensor  # [T] int64
    weights: Tensor  # [T] fp32: the loss's whole denominator; 0 = not learned
    token_mean: Tensor  # [T] fp32: mask / loss tokens of the global batch, for means over tokens
    advantages: Tensor  # [T] fp32
    learned: Tensor  # [N] int64: positions whose target is learned, ascending; nothing else is read from the model
    rollout_log_probs: Tensor | None  # [T] fp32
    old_log_probs: Tensor | None  # [T] fp32
    ref_log_probs: Tensor | None  # [T] fp32

    def split(self, per_position: Sequence[float]) -> list[list[float]]:
        """Values aligned with the logits [T] -> one list per sample, entry t belonging to token t (entry 0 is 0.0)."""
        out, begin = [], 0
        for length in self.lengths[: len(self.indices)]:
            out.append([0.0, *per_position[begin : begin + length - 1]])
            begin += length
        return out


def pack(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    *,
    weights: Sequence[Sequence[float]] | None = None,
    total_tokens: int = 0,
    old_log_probs: Sequence[Sequence[float]] | None = None,
    ref_log_probs: Sequence[Sequence[float]] | None = None,
    multiple: int = 1,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Lay the samples `indices` one after the other, and pad T to a `multiple` with a sequence of its own.

    Args:
        samples: the whole global batch; all sequences of lists below are indexed like it, with one value per token.
        indices: the samples of this micro-batch; none gives `multiple` tokens of padding alone.
        weights: loss weights (`algo.losses.token_weights`); None for a forward-only pass.
        total_tokens: loss tokens of the global batch.
        multiple: the tensor-parallel size, with sequence parallelism.
    """
    chosen = [samples[i] for i in indices]
    lengths = [sample.length for sample in chosen]
    padding = -sum(lengths) % multiple if chosen else multiple
    if padding:
        lengths.append(padding)
    pad_float = [0.0] * padding

    def shifted(rows: Sequence[Sequence[float]]) -> Tensor:
        flat: list[float] = []
        for row in rows:
            flat += row[1:]
            flat.append(0.0)
        return torch.tensor(flat + pad_float, dtype=torch.float32, device=device)

    def of(values: Sequence[Sequence[float]] | None) -> Tensor | None:
        return None if values is None else shifted([values[i] for i in indices])

    with_rollout = bool(samples) and all(sample.rollout_log_probs is not None for sample in samples)
    scale = 1.0 / total_tokens if total_tokens else 0.0
    token_weights = of(weights) if weights is not None else shifted([[0.0] * s.length for s in chosen])
    assert token_weights is not None
    tokens = [token for sample in chosen for token in sample.tokens] + [0] * padding
    targets = [token for sample in chosen for token in (*sample.tokens[1:], 0)] + [0] * padding
    learned, begin = [], 0
    for sample in chosen:
        learned += [begin + t for t, mask in enumerate(sample.loss_mask[1:]) if mask]
        begin += sample.length
    positions = [position for length in lengths for position in range(length)]
    return PackedBatch(
        indices=list(indices),
        lengths=lengths,
        tokens=torch.tensor([tokens], dtype=torch.int64, device=device),
        position_ids=torch.tensor([positions], dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        weights=token_weights,
        token_mean=shifted([[m * scale for m in sample.loss_mask] for sample in chosen]),
        advantages=shifted([[sample.advantage] * sample.length for sample in chosen]),
        learned=torch.tensor(learned, dtype=torch.int64, device=device),
        rollout_log_probs=shifted([s.rollout_log_probs or [] for s in chosen]) if with_rollout else None,
        old_log_probs=of(old_log_probs),
        ref_log_probs=of(ref_log_probs),
    )
