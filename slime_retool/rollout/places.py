"""Places for requests at an engine: so many at once, the most urgent first, none while the engine is held."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True)
class Use:
    """How places were used since they were made, or since `take_use`."""

    seconds: float = 0.0
    busy_seconds: float = 0.0
    """With at least one request running."""
    request_seconds: float = 0.0
    """Summed over requests: divided by `seconds`, the mean number of those that run."""


class Places:
    """For one event loop. A request runs inside `async with places.place(priority):`."""

    def __init__(self, limit: int) -> None:
        """`limit`: requests at once."""
        self._limit, self._running, self._open = limit, 0, True
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()
        self._empty = asyncio.Event()
        self._empty.set()
        self._use, self._since = Use(), time.monotonic()

    @property
    def running(self) -> int:
        return self._running

    @asynccontextmanager
    async def place(self, priority: int) -> AsyncIterator[None]:
        """Wait for a place; lower numbers come first, equal ones in their order."""
        if not self._open or self._running >= self._limit or self._waiting:
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._numbers), granted))
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():  # granted in the very moment
                    self._change(-1)
                raise
        else:
            self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def hold(self) -> None:
        """Give no place until `let_go`; those that are taken stay."""
        self._open = False

    def let_go(self) -> None:
        """Give places again, the most urgent first."""
        self._open = True
        self._grant()

    async def empty(self, seconds: float) -> bool:
        """Whether nothing runs, now or within so many seconds."""
        if not self._empty.is_set() and seconds > 0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)
        return self._empty.is_set()

    def take_use(self) -> Use:
        """The use since the last call."""
        self._count()
        use, self._use = self._use, Use()
        return use

    def _grant(self) -> None:
        while self._open and self._waiting and self._running < self._limit:
            granted = heapq.heappop(self._waiting)[2]
            if not granted.done():  # else its request was cancelled
                granted.set_result(None)
                self._change(1)

    def _change(self, by: int) -> None:
        self._count()
        self._running += by
        if self._running:
            self._empty.clear()
        else:
            self._empty.set()
        if by < 0:
            self._grant()

    def _count(self) -> None:
        now = time.monotonic()
        passed, self._since = now - self._since, now
        self._use.seconds += passed
        self._use.request_seconds += passed * self._running
        if self._running:
            self._use.busy_seconds += passed
