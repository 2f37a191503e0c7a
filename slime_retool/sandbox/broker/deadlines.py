"""Time, CPU and disk limits of running calls."""

from __future__ import annotations

import heapq
import itertools
import os
import time
from typing import Any

from .records import Job

_DISK_CHECK = 0.05
_MIN_CPU_CHECK = 0.01
_MANY = 1024


class Deadlines:
    """Kills the process of a call that passes a limit. `run` it when `next` is due.

    work: folder of the calls' working folders, where they are not file systems with bounds of their own.
    """

    def __init__(self, limits: dict[str, Any], work: str | None) -> None:
        self._limits, self._work = limits, work
        self._heap: list[tuple[float, int, Job]] = []
        self._order = itertools.count()

    @property
    def next(self) -> float:
        """On the clock of `time.monotonic`."""
        return self._heap[0][0] if self._heap else float("inf")

    def arm(self, job: Job, at: float) -> None:
        """Look at the job again when it could first have passed a limit; `at`: now."""
        child = job.child
        assert child is not None
        left = job.request["cpu"] - (child.cpu_seconds() - job.cpu_before)
        due = min(
            job.started + job.request["timeout"],
            at + max(_MIN_CPU_CHECK, left / (os.cpu_count() or 1)),
            at + _DISK_CHECK if self._work is not None else float("inf"),
        )
        heapq.heappush(self._heap, (due, next(self._order), job))

    def run(self) -> None:
        current = time.monotonic()
        while self._heap and self._heap[0][0] <= current:
            job = heapq.heappop(self._heap)[2]
            child = job.child
            if child is None or child.killed:
                continue
            if current >= job.started + job.request["timeout"]:
                child.kill("timeout")
            elif child.cpu_seconds() - job.cpu_before >= job.request["cpu"]:
                child.kill("cpu")
            elif self._work is not None and self._disk_exceeded(os.path.join(self._work, str(child.tag))):
                child.kill("disk")
            else:
                self.arm(job, current)

    def prune(self) -> None:
        """Forget calls that have ended, of which there may be many for one that runs long."""
        if len(self._heap) > _MANY:
            self._heap = [timer for timer in self._heap if timer[2].child is not None]
            heapq.heapify(self._heap)

    def _disk_exceeded(self, folder: str) -> bool:
        room, inodes = self._limits["max_disk_mb"] << 20, self._limits["max_inodes"]
        folders = [folder]
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        inodes -= 1
                        room -= entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        if room < 0 or inodes < 0:
                            return True
            except OSError:
                continue  # removed meanwhile
        return False
