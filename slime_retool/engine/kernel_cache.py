"""Compiled kernels, kept on the disk for the next start: where each library of trainers and engines puts its own."""

from __future__ import annotations

import os
from pathlib import Path

from slime_retool.errors import ConfigError

FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "DG_JIT_CACHE_DIR": "deep-gemm",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",
    "CUDA_CACHE_PATH": "cuda",
}
"""Environment variable -> folder inside of --kernel-cache-dir."""
SWITCHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
"""flash-attn-4 keeps nothing unless it is told to."""


def kernel_cache_environment(folder: str) -> dict[str, str]:
    """Environment of a process that compiles kernels. What this process's own environment says of a cache stays."""
    root = Path(folder).expanduser().absolute()
    return {
        name: value
        for name, value in {**{name: str(root / part) for name, part in FOLDERS.items()}, **SWITCHES}.items()
        if name not in os.environ
    }


def make_kernel_cache(folder: str) -> None:
    """Make the folder, for this user alone. Raises ConfigError where others may write: what lies there is run."""
    root = Path(folder).expanduser()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except OSError as error:
        raise ConfigError(f"--kernel-cache-dir {root} cannot be made ({error}); name another place") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"--kernel-cache-dir {root}: others may write to it, and what lies there is run; "
            f"name a folder of your own, or `chmod go-w {root}`"
        )
