"""Which calls have begun: a note in memory that broker and client share, and that outlives the broker."""

from __future__ import annotations

import mmap
import os

_SIZE = 1 << 20
"""Calls that can be told apart; no more than the queue's length wait at a time."""


class StartedCalls:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._marks = mmap.mmap(fd, _SIZE)

    @classmethod
    def create(cls) -> StartedCalls:
        fd = os.memfd_create("started", os.MFD_CLOEXEC)
        os.ftruncate(fd, _SIZE)
        return cls(fd)

    def add(self, call: int) -> None:
        self._marks[call % _SIZE] = 1

    def clear(self, call: int) -> None:
        self._marks[call % _SIZE] = 0

    def __contains__(self, call: int) -> bool:
        return self._marks[call % _SIZE] == 1

    def close(self) -> None:
        """Safe to call twice: the descriptor's number may be another file's by then."""
        if not self._marks.closed:
            self._marks.close()
            os.close(self.fd)
