"""Warnings about many things that fail alike, few of which are worth a line."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter

logger = logging.getLogger(__name__)

QUIET_SECONDS = 10.0


class FailureLog:
    """At most one warning in `QUIET_SECONDS` for each boundary, and at the end one of how many more there were.

    For use by one event loop, as a context manager or until `close`.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._more: Counter[str] = Counter()

    def add(self, boundary: str, text: str, cause: BaseException | None = None) -> None:
        """Something failed at `boundary`; `text` says what, and the traceback of `cause` is shown with it."""
        now = time.monotonic()
        if now - self._last.get(boundary, -math.inf) < QUIET_SECONDS:
            self._more[boundary] += 1
            return
        self._last[boundary] = now
        more = self._more.pop(boundary, 0)
        logger.warning("%s%s", text, f" (and {more} more before)" if more else "", exc_info=cause)

    def close(self) -> None:
        """Tell of those that no warning has counted."""
        for boundary, more in self._more.items():
            logger.warning("and %d more failed at the %s", more, boundary)
        self._more.clear()

    def __enter__(self) -> FailureLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
