"""Time and CPU limits of running calls, and what the kernel does not limit by itself: see `_look`."""

from __future__ import annotations

import heapq
import itertools
import os
import time
from typing import Any

from ..child import memory
from .folders import Folders
from .records import Child, Job

_CPUS = os.cpu_count() or 1
_LOOK_EVERY = 0.05
_FIRST_LOOK = 0.01
"""Seconds after a call's start: most have ended."""
_CPU_UNSEEN = 0.002
"""Seconds of CPU time of a session that nobody looks at, its cells together: little can be taken in them."""
_MIN_CPU_CHECK = 0.01
_MANY = 1024
_PER_PAGE_OF_TABLES, _SLACK = 64, 4 << 20
"""Page tables of memory that is not spread on purpose are far below one 64th of it."""


class Deadlines:
    """Kills the process of a call that passes a limit. `run` it when `next` is due."""

    def __init__(self, limits: dict[str, Any], folders: Folders) -> None:
        self._limits, self._folders = limits, folders
        self._heap: list[tuple[float, int, Job]] = []
        self._order = itertools.count()

    @property
    def next(self) -> float:
        """On the clock of `time.monotonic`."""
        return self._heap[0][0] if self._heap else float("inf")

    def arm(self, job: Job, at: float, cpu: float = 0.0) -> None:
        """Look at the job again when it could first have passed a limit. at: now; cpu: seconds it has used so far."""
        due = min(
            job.started + job.request["timeout"],
            at + max(_MIN_CPU_CHECK, (job.request["cpu"] - cpu) / _CPUS),
            at + (_LOOK_EVERY if job.cpu_seen >= 0.0 else _FIRST_LOOK),
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
                continue
            cpu = child.cpu_seconds() - job.cpu_before
            if cpu >= job.request["cpu"]:
                # One thread that always runs passes two equal limits at once: read after the other, the clock says so.
                over = time.monotonic() >= job.started + job.request["timeout"]
                child.kill("timeout" if over else "cpu")
                continue
            if cpu != job.cpu_seen:  # else it has not run since, and is as it was
                job.cpu_seen = cpu
                self._look(child, job)
            self.arm(job, current, cpu)

    def prune(self) -> None:
        """Forget calls that have ended, of which there may be many for one that runs long."""
        if len(self._heap) > _MANY:
            self._heap = [timer for timer in self._heap if timer[2].child is not None]
            heapq.heapify(self._heap)

    def look_last(self, child: Child, job: Job) -> None:
        """At a cell that has answered, before the answer counts, unless it and those before it hardly ran: cells that
        end before the first look add up."""
        if child.cpu_seconds() - child.cpu_looked_at >= _CPU_UNSEEN:
            self._look(child, job)

    def _look(self, child: Child, job: Job) -> None:
        """Page tables, which RLIMIT_AS leaves out: with what it counts they are bounded by the memory limit and a bit.
        Threads, where the kernel asks nobody about them. From here on, the files of the call."""
        child.cpu_looked_at = child.cpu_seconds()
        self._folders.watch(child)
        try:
            with open(f"/proc/{child.pid}/status", "rb", buffering=0) as file:
                size, tables, threads = memory.usage(file.read(memory.STATUS_SIZE))
        except OSError:
            return  # it has ended
        if not size and child.runs():
            if child.leaderless:  # at the last look, too: so long no process takes to end
                return child.kill("leader")
            child.leaderless = True
        limit = (job.request["memory_mb"] or self._limits["memory_mb"]) << 20
        used = min(limit, size - child.kind.address_space) + tables - child.kind.page_tables
        if used > limit + limit // _PER_PAGE_OF_TABLES + _SLACK:
            child.kill("memory")
        elif child.kind.listener is None and threads > self._limits["max_threads"]:
            child.kill("threads")
