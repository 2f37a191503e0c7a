"""`sglang.launch_server` on a machine without a GPU, where torch has no pinned host memory and SGLang asks for some.

    python -m slime_retool.engine.unpinned_main --model-path ...    (the launcher's own flags)

Schedulers are spawned: they import this module too, before anything of SGLang.
"""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


def _unpinned(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same without its argument `pin_memory`."""

    @functools.wraps(factory)
    def make(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return factory(*args, **options)

    return make


def _itself(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


for _name in FACTORIES:
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = _itself  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    # This module stays `__main__`, which is what spawned processes import.
    runpy.run_module("sglang.launch_server", run_name="__main__")
