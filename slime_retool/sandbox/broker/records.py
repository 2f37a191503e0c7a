"""What the broker keeps of calls, sessions, processes and zygotes."""

from __future__ import annotations

import collections
import contextlib
import select
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Job:
    """One call, from its arrival to its answer."""

    id: int
    request: dict[str, Any]
    session: Session | None
    arrived: float
    started: float = 0.0
    nonce: str = ""
    cpu_before: float = 0.0
    cpu_seen: float = -1.0
    """CPU seconds that it had used when it was looked at last."""
    questions: int = 0
    """Of the kernel's to the broker, about what it did: those that cost the broker more than it."""
    answer: dict[str, Any] | None = None
    """What the child has answered, while the files after it arrive."""
    child: Child | None = None
    """While it runs."""


@dataclass(eq=False, slots=True)
class Session:
    id: str
    open: bool = True
    child: Child | None = None
    current: Job | None = None
    waiting: collections.deque[Job] = field(default_factory=collections.deque)
    last_used: float = 0.0
    ended: dict[str, Any] | None = None
    """The answer to the next cell, where its process ended after the last one."""


@dataclass(eq=False, slots=True)
class Child:
    tag: int
    kind: Kind
    folder: str
    """Name of its working folder, where it has one; nobody can guess it."""
    control: socket.socket
    out: int
    err: int
    pid: int = -1
    pidfd: int = -1
    cpu_clock: int = 0
    cpu_looked_at: float = 0.0
    """CPU seconds that it had used, with all its calls, when it was looked at last."""
    leaderless: bool = False
    """It showed no memory when it was looked at last: its first thread has left, or it is ending."""
    ready: bool = False
    gone: bool = False
    killed: str | None = None
    job: Job | None = None
    session: Session | None = None
    result: dict[str, Any] | None = None
    """A call that has run, and whose other processes are being ended."""
    received: bytearray = field(default_factory=bytearray)
    to_send: memoryview = field(default_factory=lambda: memoryview(b""))

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self, why: str) -> None:
        self.killed = self.killed or why
        if self.pidfd >= 0:
            self.signal(signal.SIGKILL)

    def runs(self) -> bool:
        """Whether it has threads left, be it without the first one."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def cpu_seconds(self) -> float:
        """CPU time of all its threads, by the kernel's count."""
        try:
            return time.clock_gettime(self.cpu_clock)
        except OSError:
            return 0.0


@dataclass(eq=False, slots=True)
class Kind:
    """A zygote, what it preloads, and its idle children."""

    config: dict[str, Any]
    socket: socket.socket | None = None
    process: subprocess.Popen[bytes] | None = None
    ready: bool = False
    ever_ready: bool = False
    started: float = 0.0
    start_at: float = float("inf")
    """When to start another one; on the clock of `time.monotonic`."""
    late: bool = False
    """Ended for taking too long to start."""
    failed_starts: int = 0
    """In a row."""
    down_since: float = 0.0
    """When the last one that was ready ended."""
    deaths: collections.deque[float] = field(default_factory=collections.deque)
    address_space: int = 0
    page_tables: int = 0
    """Bytes of it and of its page tables, with which a child begins."""
    listener: int | None = None
    """Where the kernel asks about its children's threads and pipes."""
    setup_failures: int = 0
    """Children in a row that could not be made."""
    fork_at: float = 0.0
    """Not to ask for a child before."""
    starting: int = 0
    idle: collections.deque[Child] = field(default_factory=collections.deque)
    queue: collections.deque[Job] = field(default_factory=collections.deque)
