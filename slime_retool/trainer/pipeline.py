"""Activations between pipeline stages, without asking for their shapes. Imports Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

Shape = tuple[int, int, int]
"""[tokens, 1, hidden size]"""
NOTHING: Shape = (0, 0, 0)


class KnownShapes(P2PCommunicator):
    """Megatron's communicator for one pass over micro-batches whose shapes every stage knows beforehand.

    For lengths that vary, Megatron's own sends every shape ahead and waits for the GPU to receive it. The host then
    is late: between two micro-batches the GPU stands still until the host has prepared the next. Without
    questions the host queues the whole pass, and stages wait for each other on the GPU alone.
    """

    def __init__(self, config: Any, shapes: Sequence[Shape]) -> None:
        """`shapes` are those of the micro-batches' hidden states on this rank, in the order of the pass."""
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        # In 1F1B both directions keep the order of the micro-batches (https://arxiv.org/abs/2104.04473, figure 4).
        self._forward, self._backward = iter(shapes), iter(shapes)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        """What is received from the stage before (activations) and from the one after (their gradients)."""
        return next(self._forward) if recv_prev else NOTHING, next(self._backward) if recv_next else NOTHING
