"""Compiled kernels, kept on the disk for the next start: where each library of trainers and engines puts its own."""

from __future__ import annotations

import os
from pathlib import Path

from slime_retool.errors import ConfigError

DEFAULT = "~/.cache/slime-retool/kernels"
LOST = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention"}
"""Environment variable -> folder, of libraries that by themselves keep nothing, or in /tmp."""
KEPT = {
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep-gemm",
    "CUDA_CACHE_PATH": "cuda",
}
"""Of those that keep theirs in the user's home, where an image may have put some before."""
SWITCHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}


def kernel_cache_environment(folder: str | None) -> dict[str, str]:
    """Environment of a process that compiles kernels, with --kernel-cache-dir `folder`.

    What this process's own environment says of a cache stays.
    """
    root, folders = _root(folder).absolute(), LOST if folder is None else LOST | KEPT
    variables = {name: str(root / part) for name, part in folders.items()} | SWITCHES
    return {name: value for name, value in variables.items() if name not in os.environ}


def make_kernel_cache(folder: str | None) -> None:
    """Make the folder, for this user alone. Raises ConfigError where others may write: what lies there is run."""
    root = _root(folder)
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


def _root(folder: str | None) -> Path:
    return Path(DEFAULT).expanduser() if folder is None else Path(folder)
