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
FOLLOW = ("tensorboard", "wandb_id.txt")
"""Written at every start; worth nothing without results."""


def set_aside(output_dir: str) -> Path | None:
    """Move an earlier run's files into `output_dir`/earlier_N, the first N that is free. None where there are none."""
    folder = Path(output_dir)
    results = [folder / name for name in RESULTS if (folder / name).exists()]
    if not any(any(path.iterdir()) if path.is_dir() else path.stat().st_size for path in results):
        return None
    aside = next(place for number in count(1) if not (place := folder / f"earlier_{number}").exists())
    aside.mkdir()
    for name in (*RESULTS, *FOLLOW):
        if (folder / name).exists():
            os.rename(folder / name, aside / name)
    logger.warning("%s holds the files of an earlier run, which this one does not resume: moved to %s", folder, aside)
    return aside


def free_bytes(folder: str) -> int:
    """Free for this user on the disk that `folder` is on, or will be."""
    return shutil.disk_usage(nearest_existing(folder)).free


def nearest_existing(path: str) -> str:
    """`path`, absolute, or the nearest part of it that exists."""
    nearest = os.path.abspath(path)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    return nearest
