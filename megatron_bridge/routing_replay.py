"""Routing replay: layers with experts send tokens to given experts, where given, and else to those they choose.

Megatron's routers leave the choice to an object in their `router_replay`, where there is one: it gets the scores and
says which experts are taken. Their weights, the router's losses and the dispatch follow from it as from any choice.
Megatron's own such object has one mode for all tokens, and a queue of what recomputation will ask for. The one here
routes single tokens anew, counts, and is told by autograd which micro-batch is recomputed.

T = tokens that this rank's routers see (with sequence parallelism its own part), L = this rank's layers with experts,
K = experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.model_config import ModelArgs, moe_layers

TopK = tuple[Tensor, Tensor]
"""Scores [T, K] and experts [T, K] int64."""


def unrouted_mark(dtype: torch.dtype) -> int:
    """The id that marks a token to be routed anew: the largest without a sign, of which int16 makes -1."""
    assert dtype in (torch.uint8, torch.int16), dtype
    return 255 if dtype == torch.uint8 else -1


class RoutingReplay:
    """What the routers of one model's part on this rank repeat, pass by pass.

    with replay.repeating(experts):
        output = model(...)
    replay.in_backward(output, experts)
    """

    def __init__(self, gpt: Any, model: ModelArgs) -> None:
        """Join the routers of a built GPTModel."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        layers = [layer for layer in gpt.decoder.layers if isinstance(layer.mlp, MoELayer)]
        before = sum(moe_layers(model)[: gpt.decoder.layers[0].layer_number - 1])
        self.layers = slice(before, before + len(layers))
        """This rank's, among the whole model's layers with experts."""
        self._experts: Tensor | None = None
        self._counts: Tensor | None = None
        self._counting = False
        for place, layer in enumerate(layers):
            # The fused kernel chooses by itself.
            assert not layer.mlp.router.config.moe_router_fusion, "routing replay needs moe_router_fusion off"
            layer.mlp.router.router_replay = _LayerReplay(self, place)

    @contextmanager
    def repeating(self, experts: Tensor | None) -> Iterator[None]:
        """Inside, routers repeat `experts` [T, L, K] (uint8 or int16, `unrouted_mark`); None: they all choose."""
        self._experts, self._counting = experts, True
        try:
            yield
        finally:
            self._experts, self._counting = None, False

    def in_backward(self, output: Tensor, experts: Tensor | None) -> None:
        """Let what the backward pass of the model's `output` recomputes repeat `experts`, too; it is not counted.

        Stages of a pipeline take turns: forward of one micro-batch, backward of an earlier one. A backward pass begins
        with the gradient of its output, and no other pass runs until it has ended.
        """

        def repeat(gradient: Tensor) -> None:
            self._experts = experts

        if output.requires_grad:
            output.register_hook(repeat)

    def take_counts(self, device: torch.device | str) -> Tensor:
        """(choices repeated, those of them that differ from the router's own as a set) since the last call: int64 [2].

        A choice is one token's in one layer.
        """
        counts, self._counts = self._counts, None
        return torch.zeros(2, dtype=torch.int64, device=device) if counts is None else counts

    def choose(self, place: int, scores: Tensor, own: TopK) -> TopK:
        """What the router of layer `place` (on this rank) takes of its `scores` [T, experts]; alone it takes `own`."""
        if self._experts is None:
            return own
        _, own_experts = own
        given = self._experts[:, place]
        assert given.shape == own_experts.shape, (given.shape, own_experts.shape)
        routed = given[:, :1] != unrouted_mark(given.dtype)  # [T, 1]
        chosen = torch.where(routed, given.long(), own_experts)
        if self._counting:
            self._count(routed, chosen, own_experts)
        return scores.gather(1, chosen), chosen

    def _count(self, routed: Tensor, chosen: Tensor, own: Tensor) -> None:
        differs = ~(chosen[:, :, None] == own[:, None, :]).any(2).all(1)
        counts = torch.stack([routed.sum(), differs.sum()])
        self._counts = counts if self._counts is None else self._counts + counts


class _LayerReplay:
    """One router's `router_replay`."""

    def __init__(self, replay: RoutingReplay, place: int) -> None:
        self._replay, self._place = replay, place

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., TopK] | None = None,
    ) -> TopK:
        """As Megatron's `RouterReplay`: scores [T, experts] -> (scores, experts) of the chosen."""
        assert default_compute_topk is not None
        own = default_compute_topk(scores, topk, num_groups, group_topk)
        return self._replay.choose(self._place, scores, own)
