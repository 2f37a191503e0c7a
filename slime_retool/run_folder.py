"""Folders that a run writes to: what an earlier run left in --output-dir, and the room on a disk.

Results are numbered by rollout: those of an earlier run would pass for metrics and samples of this one.
"""

from __future__ import annotations

import logging
import os
import shutil
from itertools import count
from pathlib import Path

logger = logging.getLogger(__name__)

RESULTS = ("metrics.jsonl", "rollouts", "eval")
FOLLOW = ("tensorboard",)
"""Written at every start; worth nothing without results."""


def set_aside(output_dir: str) -> Path | None:
    """Move an earlier run's files into `output_dir`/earlier_N, the first N that is free. None where there are none."""
    folder = Path(output_dir)
    if not any(_holds_something(folder / name) for name in RESULTS):
        return None
    for number in count(1):
        try:
            aside = folder / f"earlier_{number}"
            aside.mkdir()
            break
        except FileExistsError:
            continue
    for name in (*RESULTS, *FOLLOW):
        if (folder / name).exists():
            os.rename(folder / name, aside / name)
    logger.warning("%s holds the files of an earlier run, which this one does not resume: moved to %s", folder, aside)
    return aside


def _holds_something(path: Path) -> bool:
    return path.stat().st_size > 0 if path.is_file() else path.is_dir() and any(path.iterdir())


def free_bytes(folder: str) -> int:
    """Free for this user on the disk that `folder` is on, or will be."""
    return shutil.disk_usage(nearest_existing(folder)).free


def nearest_existing(path: str) -> str:
    """`path`, absolute, or the nearest part of it that exists."""
    nearest = os.path.abspath(path)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    return nearest
