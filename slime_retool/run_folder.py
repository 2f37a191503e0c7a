"""Folders that a run writes to: what an earlier run left in --output-dir, the checkpoint to go on from, room on a disk.

Results are numbered by rollout: those of an earlier run would pass for metrics and samples of this one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from megatron_bridge.checkpoint import candidates, checkpoint_name, damage, exists
from slime_retool.errors import CheckpointError

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
"""Of a trainer's checkpoint: rollout id, scheduler step, and the run's own state (`extra`)."""
RESULTS = ("metrics.jsonl", "rollouts", "eval", "traces")
SKIPPED_ROWS = "skipped_rows.jsonl"
"""Written as soon as the data are read, before an earlier run's results are moved."""
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


def forget_skipped_rows(output_dir: str) -> None:
    """Delete an earlier run's list of them, which would pass for this one's."""
    (Path(output_dir) / SKIPPED_ROWS).unlink(missing_ok=True)


def critic_folder(places: Sequence[str]) -> str | None:
    """The first of `places` with checkpoints of a run: the critic's beside the actor's is there or nowhere.

    None where there is none: the critic finds its first weights elsewhere.
    """
    return next((place for place in places if exists(place) and candidates(place)), None)


def resume_point(load: str | None, critic_places: Sequence[str] = ()) -> int | None:
    """The rollout of the checkpoint in `load` to go on from: the newest that is whole, and so is the critic's.

    critic_places: where that may be (`Config.critic_places`). None where none was saved in `load`. A damaged one is
    passed over with a warning. Raises CheckpointError where all are, and ValueError where the file that names the
    newest is damaged.
    """
    if load is None or not exists(load):
        return None
    critic = critic_folder(critic_places)
    folders = [load] if critic is None else [load, critic]
    problems: list[str] = []
    for rollout_id in candidates(load):
        found = (damage(Path(folder) / checkpoint_name(rollout_id)) for folder in folders)
        problem = next((problem for problem in found if problem is not None), None)
        if problem is None:
            if problems:
                logger.warning("%s: going on from the checkpoint of rollout %d", "; ".join(problems), rollout_id)
            return rollout_id
        problems.append(problem)
    if problems:
        raise CheckpointError(f"no checkpoint in {' or '.join(folders)} is whole: {'; '.join(problems)}")
    return None


def saved_extra(load: str, rollout_id: int) -> dict[str, Any]:
    """What a run kept beside the tensors of a checkpoint; empty where it is not to be read."""
    try:
        state = json.loads((Path(load) / checkpoint_name(rollout_id) / STATE_FILE).read_text())
        return dict(state["extra"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # the trainers say what is wrong with it


def free_bytes(folder: str) -> int:
    """Free for this user on the disk that `folder` is on, or will be."""
    return shutil.disk_usage(nearest_existing(folder)).free


def nearest_existing(path: str) -> str:
    """`path`, absolute, or the nearest part of it that exists."""
    nearest = os.path.abspath(path)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    return nearest
