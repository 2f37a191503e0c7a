"""Processes that a benchmark starts: none of them outlives it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

PATIENCE = 30.0
"""Seconds that a run is given to end what it started: once after its step is done, and once more at once."""


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`subprocess.Popen` of a command that has ended when the block is left, however it is left.

    Meanwhile SIGTERM raises KeyboardInterrupt, as Ctrl-C does. Call it in the main thread.
    """

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        process = subprocess.Popen(command, **options)
        try:
            yield process
        finally:
            _end(process)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, which lets a run end its own processes; twice, as the first one lets its step end; then SIGKILL."""
    for how in (process.terminate, process.terminate, process.kill):
        if process.poll() is not None:
            return
        how()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            continue
