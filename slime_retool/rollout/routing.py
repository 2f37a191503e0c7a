"""The engine's choice of experts as it travels: from its reply, and in checkpoints and dumps.

A reply holds 2 kB of it for each token of a model as Qwen3-30B-A3B, so it is decoded by what takes a hundredth of the
time of Python's own base64.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pybase64

from megatron_bridge.model_config import moe_layers, required
from slime_retool.config import Config
from slime_retool.errors import EngineError
from slime_retool.types import RoutedExperts, TrainSample


@dataclass(frozen=True, slots=True)
class RouterShape:
    """What the engine chooses among, in which of its layers."""

    moe_layers: tuple[bool, ...]
    """For each layer of the model whether it has experts."""
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, config: Config) -> RouterShape:
        return cls(moe_layers(config), required(config, "moe_router_topk"), required(config, "num_experts"))

    def parse(self, text: Any, rows: int) -> RoutedExperts:
        """What SGLang returns as `routed_experts`: base64 of int32 [rows, all layers, top_k], little-endian.

        Raises EngineError for anything else.
        """
        shape = (rows, len(self.moe_layers), self.top_k)
        if text is None:
            raise EngineError(
                "the engine returned no experts although asked to; start it with --enable-return-routed-experts"
            )
        try:
            ids = np.frombuffer(pybase64.b64decode(text, validate=True), "<i4").reshape(shape)
        except (ValueError, TypeError) as error:
            raise EngineError(f"the engine's experts are not of {shape} (tokens, layers, top k): {error}") from error
        if not all(self.moe_layers):
            ids = ids[:, list(self.moe_layers)]
        if ids.size and not 0 <= ids.min() <= ids.max() < self.num_experts:
            raise EngineError(f"the engine chose experts {ids.min()} to {ids.max()}, the model has {self.num_experts}")
        typecode = RoutedExperts.typecode(self.num_experts)
        return RoutedExperts(array(typecode, ids.astype(typecode).tobytes()), sum(self.moe_layers), self.top_k)


def routed_share(samples: Sequence[TrainSample]) -> float:
    """Share of all tokens of which the engine's choice is known."""
    known = sum(sample.routed_experts.num_routed for sample in samples if sample.routed_experts is not None)
    return known / max(sum(sample.length for sample in samples), 1)


def pack_experts(routed: RoutedExperts | None) -> dict[str, Any] | None:
    """JSON-able. Not compressed: the ids of many experts hardly get smaller."""
    if routed is None:
        return None
    ids = pybase64.b64encode(routed.ids.tobytes()).decode()
    return {"layers": routed.layers, "top_k": routed.top_k, "typecode": routed.ids.typecode, "ids": ids}


def unpack_experts(state: dict[str, Any] | None) -> RoutedExperts | None:
    """What `pack_experts` packed. Raises ValueError, LookupError or TypeError for what it did not."""
    if state is None:
        return None
    ids: array[int] = array(state["typecode"])
    ids.frombytes(pybase64.b64decode(state["ids"], validate=True))
    return RoutedExperts(ids, state["layers"], state["top_k"])
