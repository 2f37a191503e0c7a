"""A control group around all calls of a sandbox, where this user may make one: the sum of what each call may use.

Each call has limits of its own without it (see `notify` and `deadlines`): moving a process into a group takes the
kernel some 10 ms, so only the zygotes are moved, and what they fork is born there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

_FILES = {"pids": ("pids.max", "pids.max"), "memory": ("memory.max", "memory.limit_in_bytes")}
"""By controller: the limit's file in version 2 and in version 1."""
_MEMORY_SHARE = 0.75
_MIB = 1 << 20
_TRIAL_SECONDS = 1.0


class Cgroup:
    def __init__(self, folders: list[str]) -> None:
        self.folders = folders
        """One, or with version 1 one for each controller."""

    @classmethod
    def make(cls, name: str, limits: dict[str, Any]) -> Cgroup:
        """Raises OSError with the reason where none may be made."""
        values = {"pids": _processes(limits), "memory": _memory(limits)}
        reason: OSError = FileNotFoundError("no cgroup file system is mounted with the controllers pids and memory")
        for version, parents in _parents():
            folders: list[str] = []
            try:
                for controller, parent in parents.items():
                    folder = os.path.join(parent, name)
                    if folder not in folders:
                        os.mkdir(folder)
                        folders.append(folder)
                    with open(os.path.join(folder, _FILES[controller][version == 1]), "w") as file:
                        file.write(str(values[controller]))
                made = cls(folders)
                made._try()
                return made
            except OSError as error:
                reason = error
                remove(folders, _TRIAL_SECONDS)
        raise reason

    def _try(self) -> None:
        """A group may be made where no process may be moved to."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
        try:
            self.add(pid)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def add(self, pid: int) -> None:
        for folder in self.folders:
            with open(os.path.join(folder, "cgroup.procs"), "w") as file:
                file.write(str(pid))


def remove(folders: list[str], seconds: float) -> None:
    """Once the processes in them have ended, for which it waits so long."""
    deadline = time.monotonic() + seconds
    for folder in folders:
        while os.path.isdir(folder):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
                break
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)


def _parents() -> Iterator[tuple[int, dict[str, str]]]:
    """(version, parent folder by controller) where groups could be made, the nearest first."""
    mounts: dict[str, tuple[str, str]] = {}  # by controller, "" for version 2: root inside the file system, mount point
    with open("/proc/self/mountinfo") as file:
        for line in file:
            left, right = (part.split() for part in line.split(" - ", 1))
            if right[0] == "cgroup2":
                mounts.setdefault("", (left[3], left[4]))
            elif right[0] == "cgroup":
                mounts |= {option: (left[3], left[4]) for option in right[2].split(",") if option in _FILES}
    own = {}
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for controller in controllers.split(","):
                if controller in mounts:
                    root, point = mounts[controller]
                    own[controller] = os.path.normpath(f"{point}/{os.path.relpath(path, root)}")
    if "" in own:
        folder = own[""]
        while folder.startswith(mounts[""][1]):
            with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.subtree_control")) as file:
                if set(_FILES) <= set(file.read().split()):
                    yield 2, dict.fromkeys(_FILES, folder)
            folder = os.path.dirname(folder)
    if set(_FILES) <= set(own):
        yield 1, {controller: own[controller] for controller in _FILES}


def _calls(limits: dict[str, Any]) -> int:
    """Processes that there can be at a time."""
    return limits["concurrency"] + limits["max_sessions"] + 2 * limits["prefork"]


def _processes(limits: dict[str, Any]) -> int:
    """Threads of all calls, at most half of what the kernel has numbers for."""
    with open("/proc/sys/kernel/pid_max") as file:
        return min(int(file.read()) // 2, _calls(limits) * limits["max_threads"])


def _memory(limits: dict[str, Any]) -> int:
    """Bytes of all calls, at most three quarters of the machine's."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(_MEMORY_SHARE * machine, _calls(limits) * (limits["memory_mb"] + limits["max_disk_mb"]) * _MIB))
