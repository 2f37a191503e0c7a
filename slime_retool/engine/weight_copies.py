"""Brings up to date what an SGLang model has made of its weights and keeps.

SGLang 0.5.15 casts the router of GLM-4.5's family to fp32 at the first forward pass and uses that copy from then on, so
a weight update would leave the router of the first weights (`_weight_fp32` in sglang/srt/models/glm4_moe.py says so).

`refresh` runs inside an SGLang scheduler, as its `--custom-weight-loader` (an extension point of SGLang, see
`engine.checksum`), after the weights of an update have arrived.
"""

from __future__ import annotations

from typing import Any

REFRESH_LOADER = "slime_retool.engine.weight_copies.refresh"
"""What to pass as `--custom-weight-loader` and as `load_format`."""
COPY = "_weight_fp32"
"""A module's buffer with its `weight` in fp32; None, or the weight itself where that is fp32, before it differs."""


def refresh(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Copy weights into their copies, in place: a CUDA graph reads the memory that it was recorded with."""
    for module in model.modules():
        copy = dict(module.named_buffers(recurse=False)).get(COPY)
        if copy is not None:
            copy.copy_(module.weight.data)
