"""Routed experts of a batch's samples -> what one rank's layers repeat in one micro-batch (routing replay)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bridge.host import send
from megatron_bridge.model_config import ModelArgs, moe_layers, required
from megatron_bridge.routing_replay import unrouted_mark
from slime_retool.trainer.batch import TrainBatch
from slime_retool.types import RoutedExperts


@dataclass(frozen=True, slots=True)
class ExpertsPart:
    """Which choices a rank repeats: those of its layers, for the tokens that its routers see."""

    layers: slice
    """Of the model's layers with experts."""
    tp: int = 1
    """Parts that sequence parallelism cuts a micro-batch's tokens into."""
    tp_rank: int = 0

    def gather(
        self,
        batch: TrainBatch,
        samples: Sequence[int],
        lengths: Sequence[int],
        rows: Tensor | slice,
        device: torch.device | str,
    ) -> Tensor | None:
        """[T / tp, this rank's layers, K] on `device`, aligned with a micro-batch's T tokens; None where none is given.

        lengths: of the micro-batch's whole sequences, padded, and of its padding. rows: [T] out of those that the
        context-parallel rank has. Unrouted are padding, samples without, and each sample's last token: nothing reads
        what the model makes of it.
        """
        given = [(batch.routed_experts[index], length) for index, length in zip(samples, lengths, strict=False)]
        like = next((experts for experts, _ in given if experts is not None), None)
        if like is None:
            return None
        like = like[:, self.layers]
        whole = like.new_full((sum(lengths), *like.shape[1:]), unrouted_mark(like.dtype))
        begin = 0
        for experts, length in given:
            if experts is not None:
                whole[begin : begin + len(experts) - 1] = experts[:-1, self.layers]
            begin += length
        part = whole[rows]
        size = len(part) // self.tp
        return send(part[size * self.tp_rank : size * (self.tp_rank + 1)].contiguous(), device)


def check_experts(batch: TrainBatch, model: ModelArgs) -> None:
    """Raise ValueError for routed experts that the model's routers cannot repeat."""
    layers, top_k, experts = sum(moe_layers(model)), required(model, "moe_router_topk"), required(model, "num_experts")
    code = RoutedExperts.typecode(experts)
    for index, ids in zip(batch.indices, batch.routed_experts, strict=True):
        if ids is None:
            continue
        if tuple(ids.shape[1:]) != (layers, top_k) or (ids.dtype == torch.uint8) != (code == "B"):
            bits = 8 * ids.element_size()
            raise ValueError(
                f"sample {index} has the experts of {ids.shape[1]} layers, top {ids.shape[2]}, in {bits} bits, but the "
                f"model has {layers} layers with experts, top {top_k}, in {8 if code == 'B' else 16} bits: the engine "
                "must serve the model that is trained, and a generate hook must keep what it returns"
            )
        if (wrong := _unknown(ids, experts)) is not None:
            raise ValueError(
                f"sample {index} has expert {wrong}, but the model has {experts} (from 0): the engine must serve the "
                "model that is trained, and unrouted tokens have the mark of `types.RoutedExperts` in all places"
            )


def _unknown(ids: Tensor, experts: int) -> int | None:
    """An id of [T, L, K] that is neither an expert's nor part of an unrouted token's marks; the last token is not read.

    Quick for what is common, no unrouted token before the last: these may be gigabytes.
    """
    ids = ids[:-1]
    if not ids.numel() or (ids.amin() >= 0 and ids.amax() < experts):
        return None
    unrouted = (ids == unrouted_mark(ids.dtype)).all(-1, keepdim=True)
    wrong = ids[((ids < 0) | (ids >= experts)) & ~unrouted]
    return int(wrong[0]) if len(wrong) else None
