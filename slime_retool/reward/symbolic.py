"""Symbolic equality by the math-verify library, in worker processes with a deadline.

The library's own time limit is an alarm signal, which works in a main thread only and cannot stop native code. Here
a worker that overruns is killed and replaced, so that any thread may ask and nothing a model writes can hang it.
"""

from __future__ import annotations

import functools
import queue
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

from slime_retool.errors import RewardError

_WORKER = str(Path(__file__).with_name("symbolic_worker.py"))


class MathVerifier:
    """Up to `workers` processes, started when needed. Thread-safe.

    Waiting for a free worker is not counted against `timeout`, the seconds that one comparison may take.
    """

    def __init__(self, workers: int = 2, timeout: float = 5.0, startup_timeout: float = 120.0) -> None:
        self._timeout, self._startup_timeout = timeout, startup_timeout
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._workers = workers
        for _ in range(workers):
            self._idle.put(None)

    def compare(self, ground_truth: str, answer: str) -> bool | None:
        """Whether the two answers (LaTeX, without the box) are equal; None when that takes too long or ends its worker.

        Raises RewardError when a worker cannot be started (math-verify not installed, say).
        """
        worker, reply = self._idle.get(), None
        try:
            if worker is None or worker.process.poll() is not None:
                worker = _Worker(self._timeout, self._startup_timeout)
            reply = worker.ask(ground_truth, answer, self._timeout)
            return reply
        finally:
            if reply is None and worker is not None:
                worker.end()
                worker = None
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers; waits for comparisons still running."""
        for worker in [self._idle.get() for _ in range(self._workers)]:
            if worker is not None:
                worker.end()
            self._idle.put(None)


class _Worker:
    def __init__(self, timeout: float, startup_timeout: float) -> None:
        self._pipe, theirs = Pipe()
        command = [sys.executable, _WORKER, str(timeout), str(theirs.fileno())]
        null = subprocess.DEVNULL
        with theirs:
            try:
                # In a session of its own: a terminal's Ctrl-C reaches the run alone, which may go on for a while.
                self.process = subprocess.Popen(
                    command, stdin=null, stdout=null, stderr=null, pass_fds=[theirs.fileno()], start_new_session=True
                )
            except OSError as error:
                raise RewardError(f"cannot start the math-verify worker: {error}") from error
        if not self._reply(startup_timeout):
            self.end()
            raise RewardError(
                "the math-verify worker did not start; check that `pip install math-verify` was done in "
                f"{sys.executable}"
            )

    def ask(self, ground_truth: str, answer: str, timeout: float) -> bool | None:
        try:
            self._pipe.send((ground_truth, answer))
        except OSError:
            return None
        return self._reply(timeout)

    def _reply(self, timeout: float) -> bool | None:
        """None for no answer until the deadline, or the end of the worker."""
        try:
            # Bytes: what evaluates a model's text is not trusted with pickles.
            return self._pipe.recv_bytes() == b"1" if self._pipe.poll(timeout) else None
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._pipe.close()


@functools.cache
def shared_verifier() -> MathVerifier:
    """The process's pool of workers. They leave when the process ends, however it ends: their pipe closes."""
    return MathVerifier()
