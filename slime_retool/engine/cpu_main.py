"""`sglang.launch_server` on a machine without a GPU.

    python -m slime_retool.engine.cpu_main --model-path ...    (the launcher's own flags)

Two things are otherwise than SGLang has them:

- Host memory is not pinned: torch has none such here, and SGLang asks for some.
- Its processes are forked, not spawned: the launcher has imported by then all that they need, and they would import
  it anew, which takes each of them longer than the rest of its start. There is no GPU whose state a fork would break.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
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


def _fork(method: str | None, force: bool = False) -> None:
    """In the place of `multiprocessing.set_start_method`: the default was set below, and stays."""


def main() -> None:
    """Start the server; flags are those of this process."""
    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = _itself  # type: ignore[assignment, method-assign]
    # Threads of OpenMP do not come along in a fork, and whoever waits for them hangs: the launcher starts none.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(threads))
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = _fork
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main()
