"""Whether the kernel has killed for want of memory: the only one who sends SIGKILL to a call for what the call did."""

from __future__ import annotations

import re

_OOM_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)


class OomKills:
    """The kernel's count of them, on the whole machine and in every memory cgroup."""

    def __init__(self) -> None:
        self._seen = self._last = _count()

    def turn(self) -> None:
        """Forget those that are older than two turns."""
        self._seen, self._last = self._last, _count()

    def take(self) -> bool:
        """Whether there was one lately that nobody has taken."""
        found = _count() > self._seen
        self._seen += found
        self._last = max(self._last, self._seen)
        return found


def _count() -> int:
    try:
        with open("/proc/vmstat", "rb") as file:
            found = _OOM_KILLS.search(file.read())
    except OSError:
        return 0
    return int(found[1]) if found else 0
