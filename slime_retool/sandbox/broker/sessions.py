"""The sessions that the broker keeps, and the names of those it lost."""

from __future__ import annotations

import collections
import time
from typing import Any

from .records import Job, Session

_MAX_TOMBSTONES = 10_000


class Sessions:
    """By name, least recently used first.

    A session whose variables are gone stays known by name: later cells are refused, not run afresh.
    """

    def __init__(self, limits: dict[str, Any]) -> None:
        self._limits = limits
        self._open: collections.OrderedDict[str, Session] = collections.OrderedDict()
        self._lost: collections.OrderedDict[str, str] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session: object) -> bool:
        return isinstance(session, Session) and self._open.get(session.id) is session

    def get(self, name: str) -> Session | None:
        return self._open.get(name)

    def why_lost(self, name: str) -> str | None:
        return self._lost.get(name)

    def open(self, name: str) -> Session:
        session = self._open[name] = Session(name)
        return session

    @property
    def full(self) -> bool:
        return len(self._open) >= self._limits["sessions"]

    def evictable(self) -> Session | None:
        return next((session for session in self._open.values() if session.current is None), None)

    def expired(self) -> list[Session]:
        before = time.monotonic() - self._limits["session_idle"]
        return [s for s in self._open.values() if s.current is None and s.last_used <= before]

    def used(self, session: Session) -> None:
        session.last_used = time.monotonic()
        self._open.move_to_end(session.id)

    def mark_lost(self, session: Session, why: str) -> None:
        self._lost[session.id] = why
        while len(self._lost) > _MAX_TOMBSTONES:
            self._lost.popitem(last=False)

    def forget_loss(self, name: str) -> None:
        self._lost.pop(name, None)

    def end(self, session: Session) -> list[Job]:
        """End its process. Returns its calls that have not started."""
        del self._open[session.id]
        if session.child is not None:
            session.child.kill("closed")
        current = session.current
        waiting = list(session.waiting)
        session.waiting.clear()
        return [current, *waiting] if current is not None and current.child is None else waiting
