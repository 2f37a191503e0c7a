"""Environment variables of the processes that train."""

from __future__ import annotations

import os

from slime_retool.engine.kernel_cache import kernel_cache_environment

PINNED_MEMORY = "pinned_use_cuda_host_register:True,pinned_num_register_threads:16"
"""Page-locks the host memory that a trainer's parts move to at 11 GiB/s instead of 2.5 (docs/performance.md)."""


def trainer_environment(*, colocate: bool, kernel_cache_dir: str | None) -> dict[str, str]:
    """Variables of every trainer on a GPU. What the user set for torch's allocator comes after ours, and so wins."""
    # Micro-batches differ in size, which leaves holes in memory of fixed segments. Segments that grow cannot be handed
    # to an engine by CUDA IPC in every container (it needs pidfd_getfd).
    segments = "" if colocate else "expandable_segments:True"
    settings = (PINNED_MEMORY, segments, os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
    return {
        # SGLang's workers turn cuMem off; a NCCL group whose members disagree fails at its first broadcast.
        "NCCL_CUMEM_ENABLE": "0",
        # Megatron orders tensor-parallel communication and computation by a single hardware queue.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": ",".join(setting for setting in settings if setting),
        **kernel_cache_environment(kernel_cache_dir),
    }
