"""Ctrl-C and SIGTERM in a run: the first lets the step end, the second ends at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MESSAGE = b"\ninterrupted: the run ends after this step, which is saved; once more ends it at once\n"


class Interrupts:
    """Use it as a context manager in the main thread; in another one it changes nothing.

    `asked` is set by the first signal, which raises KeyboardInterrupt like all later ones unless it comes inside of a
    `deferred` block, outside of the `ending` blocks in it.
    """

    def __init__(self, *, defers: bool) -> None:
        """`defers` False: every signal raises at once, there is nothing to be saved."""
        self.asked = False
        self._defers, self._deferring = defers, False
        self._before: dict[int, Any] = {}

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let what is inside go on after a first signal; whoever opened the block looks at `asked`."""
        self._deferring = self._defers
        try:
            yield
        finally:
            self._deferring = False

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Inside of a deferred block, what a first signal need not wait for: raises KeyboardInterrupt if one came."""
        self._deferring, before = False, self._deferring
        try:
            if self.asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._deferring = before

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        if not (first and self._deferring):
            raise KeyboardInterrupt
        os.write(2, MESSAGE)  # a logger may be in the middle of a line
