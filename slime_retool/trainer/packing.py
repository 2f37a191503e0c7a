"""Samples -> one packed micro-batch, by gathering from flat tensors; and back. T = its tokens, padding included.

Under context parallelism T counts this rank's tokens: every sequence is padded to a multiple of 2 * cp and split as
`megatron_bridge.zigzag` says, after targets were taken from the whole.

Everything in a `PackedBatch` is aligned with the logits: position t of a sequence predicts its token t + 1, so
targets and per-token values are shifted by one to the left within each sequence, and each sequence's last
position has weight 0. A sequence of tokens a b c beside one of d e, padded to 6:

    tokens     a b c | d e | 0        targets   b c 0 | e 0 | 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_bridge.host import send
from megatron_bridge.zigzag import padded_length, zigzag_rows
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.experts import ExpertsPart


@dataclass(slots=True)
class TokenData:
    """Per-token values (fp32) that a loss reads: [N] over a whole rollout, or [T] aligned with the logits."""

    weights: Tensor
    """The loss's whole denominator; 0 = not learned."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """By name: what `algo.losses.TokenInputs` says. `old_log_probs` and `old_values` are those before this rollout's
    first optimizer step."""

    def gather(self, index: Tensor, device: torch.device | str) -> TokenData:
        """Entries at `index`, 0 where it is negative, on `device`."""
        chosen, given = index.clamp(min=0), [self.weights, *self.columns.values()]
        rows = send(torch.stack([values[chosen] for values in given]).masked_fill_(index < 0, 0.0), device)
        return TokenData(rows[0], dict(zip(self.columns, rows[1:], strict=True)))


@dataclass(slots=True)
class PackedBatch:
    """One micro-batch on the trainer's device."""

    lengths: list[int]
    """Tokens of each whole sequence, its padding included; a last one may be padding. Their sum is T * cp."""
    tokens: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, from 0 in each whole sequence
    targets: Tensor  # [T] int64
    target_index: Tensor  # [T] int64, on the CPU: where the target lies among all tokens of the batch; -1 = none
    learned: Tensor  # [M] int64: positions whose target is learned, ascending; nothing else is read from the model
    sample_of: Tensor  # [T] int64: the sequence, from 0, that a position belongs to
    token_counts: Tensor  # [sequences] int64: learned tokens of each, on all ranks
    data: TokenData | None
    """None in a forward-only pass."""
    experts: Tensor | None
    """What `ExpertsPart` asked for; None where no sample has any."""


def pack(
    batch: TrainBatch,
    samples: Sequence[int],
    *,
    data: TokenData | None = None,
    multiple: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
    experts: ExpertsPart | None = None,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Lay some samples of the batch one after the other, and pad their sum to a `multiple` with a sequence of its own.

    Args:
        samples: which samples; none gives `multiple` tokens of padding alone.
        data: per-token values of the whole batch, for a loss.
        multiple: of all ranks' tokens together; a multiple of 2 * cp when cp > 1 (see `packing_multiple`).
        cp, cp_rank: context-parallel size, and which part to return.
        experts: which routed experts this rank's layers repeat; None: none.
    """
    chosen = torch.tensor(samples, dtype=torch.int64)
    real = batch.lengths[chosen]
    padded = torch.tensor([padded_length(length, cp) for length in real.tolist()], dtype=torch.int64)
    padding = _padding(int(padded.sum()), multiple)
    lengths = torch.cat([padded, torch.tensor([padding])]) if padding else padded
    none = torch.zeros(1 if padding else 0, dtype=torch.int64)

    def per_token(of_samples: Tensor) -> Tensor:
        return torch.cat([of_samples, none]).repeat_interleave(lengths)

    position = torch.arange(len(per_token(real))) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    left = per_token(real) - position  # tokens of the sequence from here on, this one included
    source = per_token(batch.starts[chosen]) + position
    rows = zigzag_rows(lengths.tolist(), cp, cp_rank) if cp > 1 else slice(None)
    position, left, source = position[rows], left[rows], source[rows]
    target_index = (source + 1).masked_fill(left <= 1, -1)
    tokens = batch.tokens[source.masked_fill(left <= 0, 0)].long().masked_fill_(left <= 0, 0)
    targets = batch.tokens[target_index.clamp(min=0)].long().masked_fill_(target_index < 0, 0)
    learned = (batch.mask[target_index.clamp(min=0)] & (target_index >= 0)).nonzero()[:, 0]
    return PackedBatch(
        lengths=lengths.tolist(),
        tokens=send(tokens[None], device),
        position_ids=send(position[None], device),
        targets=send(targets, device),
        target_index=target_index,
        learned=send(learned, device),
        sample_of=send(torch.arange(len(lengths)).repeat_interleave(lengths)[rows], device),
        token_counts=send(torch.cat([batch.segments.counts[chosen], none]), device),
        data=None if data is None else data.gather(target_index, device),
        experts=None if experts is None else experts.gather(batch, samples, lengths.tolist(), rows, device),
    )


def packed_tokens(lengths: Iterable[int], *, multiple: int, cp: int) -> int:
    """T of the micro-batch that `pack` makes of samples of these lengths."""
    total = sum(padded_length(length, cp) for length in lengths)
    return (total + _padding(total, multiple)) // cp


def _padding(total: int, multiple: int) -> int:
    """Tokens that a micro-batch of `total` lacks to a multiple, which an empty one has as well."""
    return -total % multiple if total else multiple


def packing_multiple(*, tp: int, cp: int, sequence_parallel: bool) -> int:
    """What the tokens of all context-parallel ranks together must be a multiple of."""
    return (tp if sequence_parallel else 1) * (2 * cp if cp > 1 else 1)


def unpack(parts: Iterable[tuple[Tensor, Tensor]], num_tokens: int) -> Tensor:
    """Values aligned with logits -> one per token [num_tokens] fp32 on the CPU, 0 where no part has the token.

    `parts` are pairs (`target_index` [T] of a packed batch, values [T]).
    """
    flat = torch.zeros(num_tokens, dtype=torch.float32)
    for index, values in parts:
        real = index >= 0
        flat[index[real]] = values.detach().float().cpu()[real]
    return flat
