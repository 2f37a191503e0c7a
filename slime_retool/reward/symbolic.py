"""Symbolic equality by the math-verify library, in worker processes with a deadline.

The library's own time limit is an alarm signal, which works in a main thread only and cannot stop native code. Here
a worker that overruns is killed and replaced, so that any thread may ask and nothing a model writes can hang it.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import select
import subprocess
import sys
import time
from pathlib import Path

from slime_retool.errors import RewardError

_WORKER = str(Path(__file__).with_name("symbolic_worker.py"))


class MathVerifier:
    """Up to `workers` processes, started when needed. Thread-safe.

    Waiting for a free worker is not counted against `timeout`, the seconds that one comparison may take.
    """

    def __init__(self, workers: int = 2, timeout: float = 5.0, startup_timeout: float = 120.0) -> None:
        self._timeout = timeout
        self._startup_timeout = startup_timeout
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        self._workers = workers
        for _ in range(workers):
            self._idle.put(None)

    def equal(self, ground_truth: str, answer: str) -> bool:
        """Whether the two answers (LaTeX, without the box) are equal; not equal when it takes too long to tell.

        Raises as `compare` does.
        """
        return self.compare(ground_truth, answer) is True

    def compare(self, ground_truth: str, answer: str) -> bool | None:
        """As `equal`, and None when the comparison took too long or crashed its worker.

        Raises RewardError when a worker cannot be started (math-verify not installed, say).
        """
        worker = self._idle.get()
        try:
            if worker is None or worker.poll() is not None:
                worker = self._start()
            reply = self._ask(worker, ground_truth, answer)
            if reply is None:
                _end(worker)
                worker = None
            return reply
        except BaseException:
            if worker is not None:
                _end(worker)
                worker = None
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers; waits for comparisons still running."""
        for _ in range(self._workers):
            worker = self._idle.get()
            if worker is not None:
                _end(worker)
        for _ in range(self._workers):
            self._idle.put(None)

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            worker = subprocess.Popen(
                [sys.executable, _WORKER, str(self._timeout)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            raise RewardError(f"cannot start the math-verify worker: {error}") from error
        try:
            line = _read_line(worker, self._startup_timeout)
        except BaseException:
            _end(worker)
            raise
        if line != b"ready\n":
            _end(worker)
            raise RewardError(
                "the math-verify worker did not start; check that `pip install math-verify` was done in "
                f"{sys.executable} (it said {line.decode(errors='replace')!r})"
            )
        return worker

    def _ask(self, worker: subprocess.Popen[bytes], ground_truth: str, answer: str) -> bool | None:
        assert worker.stdin is not None
        try:
            worker.stdin.write(json.dumps([ground_truth, answer]).encode() + b"\n")
            worker.stdin.flush()
        except BrokenPipeError:
            return None
        line = _read_line(worker, self._timeout)
        return json.loads(line) if line.endswith(b"\n") else None


def _read_line(worker: subprocess.Popen[bytes], timeout: float) -> bytes:
    """One line, or what came of it until the deadline or the end of the stream."""
    assert worker.stdout is not None
    fd = worker.stdout.fileno()
    deadline = time.monotonic() + timeout
    line = bytearray()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not line.endswith(b"\n"):
        wait = deadline - time.monotonic()
        if wait <= 0 or not poll.poll(wait * 1000):
            break
        chunk = os.read(fd, 4096)
        if not chunk:
            break
        line += chunk
    return bytes(line)


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.close()
    except BrokenPipeError:
        pass
    worker.stdout.close()
    worker.wait()


@functools.cache
def shared_verifier() -> MathVerifier:
    """The process's pool of workers. They leave when the process ends, however it ends: their input closes."""
    return MathVerifier()
