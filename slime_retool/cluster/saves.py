"""When a run saves, and the checkpoint that is being written beside its next steps."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from megatron_bridge.checkpoint import prune
from slime_retool.config import Config
from slime_retool.config.schedule import saves_after
from slime_retool.run_folder import resume_point

if TYPE_CHECKING:
    from slime_retool.cluster.trainers import Trainers

logger = logging.getLogger(__name__)


class Saves:
    """One save at a time; old checkpoints are deleted when those of all models are complete, which go on together."""

    def __init__(self, config: Config, trainers: Trainers) -> None:
        self._config, self._trainers = config, trainers
        self._last_time = time.monotonic()
        self.last: int | None = None
        """The rollout of the newest save, be it complete or not."""
        self.writing = False
        """Whether `look` has not yet seen the end of it."""
        self._begun: set[int] = set()
        """Rollouts after which this run saved, or tried to."""

    def due(self, rollout_id: int) -> bool:
        """Whether a checkpoint follows this rollout: --save-interval, --save-seconds, or the last one."""
        config = self._config
        if config.save is None:
            return False
        late = config.save_seconds is not None and time.monotonic() - self._last_time >= config.save_seconds
        return late or saves_after(config, rollout_id)

    def save(self, rollout_id: int, extra: dict[str, Any]) -> dict[str, float]:
        """Begin a checkpoint, after the end of the one before. Returns how long the loop waited, in metrics.

        Trainers must have their devices. Raises SaveError when either does not fit on the disk.
        """
        begin = time.monotonic()
        metrics = self.look(wait=True)
        waited = time.monotonic() - begin
        self._begun.add(rollout_id)
        self._trainers.save(rollout_id, extra, background=not self._config.no_async_save)
        self.last, self._last_time = rollout_id, begin
        stall = time.monotonic() - begin
        if self._config.no_async_save:
            metrics["perf/save_seconds"] = stall
            self._prune()
        else:
            self.writing = True
        return metrics | {"perf/save_stall_seconds": stall, "perf/save_wait_seconds": waited}

    def look(self, *, wait: bool = False) -> dict[str, float]:
        """Metrics of the save that has ended since the last look, if any; `wait`: for the one that goes on.

        Raises SaveError when it failed.
        """
        if not self.writing:
            return {}
        seconds = self._trainers.finish_save(wait=wait)
        if seconds is None:
            return {}
        self.writing = False
        self._prune()
        return {"perf/save_seconds": seconds}

    def newest_whole(self) -> int | None:
        """The rollout of the newest whole checkpoint of this run, after its trainers have ended; None without one.

        A save that they did not finish is forgotten.
        """
        self.writing, self.last = False, None
        config = self._config
        if not self._begun:
            return None
        rollout_id = resume_point(config.save, config.going_on.critic_places)
        return rollout_id if rollout_id in self._begun else None

    def _prune(self) -> None:
        if self._config.save_keep is not None:
            for folder in self._config.save_folders.values():
                prune(folder, self._config.save_keep)
