"""`slime-retool doctor`: what this host has of what a run needs."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from slime_retool.config.devices import gpus_shown
from slime_retool.sandbox import Sandbox, SandboxPolicy, SandboxUnavailable
from slime_retool.sandbox.host.policy import ISOLATION_LEVELS

REQUIRED = ("torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers", "datasets", "aiohttp")
OPTIONAL = ("transformer-engine", "flash-attn-4", "wandb", "tensorboard", "math-verify", "numpy", "sympy")


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per requirement. Returns 1 when a required one is missing."""
    argparse.ArgumentParser(prog="slime-retool doctor", description=__doc__).parse_args(argv)
    missing = 0
    print(f"{'python':<22}{sys.version.split()[0]}")
    for name in REQUIRED + OPTIONAL:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "missing" if name in REQUIRED else "not installed (optional)"
            missing += name in REQUIRED
        print(f"{name:<22}{version}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    print(f"{'GPUs':<22}{gpus_shown() or 'none: runs use the CPU and gloo'}")
    print(f"{'CPU cores':<22}{os.cpu_count()}")
    print(f"{'memory':<22}{memory / 1e9:.0f} GB")
    if sys.dont_write_bytecode:
        advice = "unset PYTHONDONTWRITEBYTECODE, or run python -m compileall on the packages"
        print(f"{'bytecode':<22}not kept: every process compiles what it imports, seconds of each start; {advice}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        print(f"{'/dev/shm free':<22}{shutil.disk_usage(shared).free / 1e9:.1f} GB")
    for level in ISOLATION_LEVELS[:2]:
        print(f"{f'sandbox {level}':<22}{asyncio.run(_sandbox(level))}")
    if missing:
        print(f"\n{missing} required package(s) missing: run `make install` (CPU) or pip install -e '.[gpu]'")
    return int(missing > 0)


async def _sandbox(level: str) -> str:
    """What shuts model-written code in here, by a sandbox of this level."""
    try:
        async with Sandbox(SandboxPolicy(isolation=level, packages=())) as box:
            stats = await box.stats()
    except SandboxUnavailable as error:
        return f"not available: {error}"
    one = "threads and pipes refused beyond their limit" if stats["asked"] else "threads counted 20 times a second"
    group = stats["cgroup"]
    total = f"no cgroup ({group})"
    if isinstance(group, list):
        total = f"a cgroup below {' and '.join(map(os.path.dirname, group))}"
    return f"available; of a call, {one}; around all calls, {total}"
