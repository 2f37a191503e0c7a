"""The broker's zygotes and the children that they fork: started, watched, replaced and ended here."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import secrets
import socket
import subprocess
import time
from typing import Any, Protocol

from ..boot import command
from ..child import zygote
from . import notify
from .cgroup import Cgroup
from .folders import Folders
from .loop import Loop
from .records import Child, Kind

_MAX_DEATHS, _DEATH_WINDOW = 5, 60.0
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 5.0
MAX_SETUP_FAILURES = 3
_EXIT_SECONDS = 2.0
_CPUCLOCK_PROCESS = 2

now = time.monotonic


class Fatal(Exception):
    """The sandbox cannot go on; the fields reach the client."""

    def __init__(self, reason: str, layer: str | None = None) -> None:
        super().__init__(reason)
        self.reply = {"fatal": reason, "layer": layer}


class Owner(Protocol):
    """Who is told of what happens to zygotes and children."""

    def on_zygote_ready(self) -> None: ...
    def on_restart(self, why: str) -> None: ...
    def on_no_children(self, kind: Kind, why: str) -> None: ...
    def on_child_event(self, child: Child) -> None: ...
    def on_child_end(self, child: Child, status: int, cpu: float, rss: int) -> None: ...


class Forks:
    def __init__(
        self,
        loop: Loop,
        config: dict[str, Any],
        owner: Owner,
        folders: Folders,
        cgroup: Cgroup | None,
        counts: collections.Counter[str],
    ) -> None:
        self._loop, self._owner, self._folders, self._counts = loop, owner, folders, counts
        self._cgroup = cgroup
        self._pool: int = config["pool"]
        self._limits: dict[str, Any] = config["limits"]
        shared = config["zygote"] | {"limits": config["limits"]}
        self.kinds = {name: Kind(shared | {"preload": preload}) for name, preload in config["kinds"].items()}
        self.children: dict[int, Child] = {}
        self._tags = itertools.count(1)

    # Zygotes.

    @property
    def next(self) -> float:
        """When there is a zygote to start or a fork to ask for again, on the clock of `time.monotonic`."""
        soonest = float("inf")
        for kind in self.kinds.values():
            if kind.start_at < soonest:
                soonest = kind.start_at
            if kind.queue and now() < kind.fork_at < soonest:
                soonest = kind.fork_at
        return soonest

    def start_due(self) -> None:
        for kind in self.kinds.values():
            if kind.start_at <= now():
                kind.start_at = float("inf")
                try:
                    self._start(kind)
                except OSError as error:
                    self._on_failed_start(kind, f"the zygote could not be started: {error}")

    def start_all(self) -> None:
        for kind in self.kinds.values():
            kind.start_at = 0.0
        self.start_due()

    def _start(self, kind: Kind) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            start = command("child.zygote", fd)
            try:
                kind.process = subprocess.Popen(start, pass_fds=[fd], cwd="/", stdin=subprocess.DEVNULL)
            except OSError:
                ours.close()
                raise
            if self._cgroup is not None:
                with contextlib.suppress(OSError):  # removed by somebody: each call has its own limits
                    self._cgroup.add(kind.process.pid)
            # Before our copy of its end is closed: if it has ended already, that is then read as its end.
            ours.send(json.dumps(kind.config).encode())
        ours.setblocking(False)
        kind.socket, kind.ready, kind.started, kind.starting = ours, False, now(), 0
        self._loop.watch(ours.fileno(), functools.partial(self._on_zygote, kind))

    def end_late(self, seconds: float) -> None:
        """End the zygotes that take longer to start; that is then noticed as any other end."""
        for kind in self.kinds.values():
            if kind.socket is not None and not kind.ready and now() - kind.started > seconds:
                assert kind.process is not None
                kind.late = True
                kind.process.kill()

    def _on_zygote(self, kind: Kind) -> None:
        assert kind.socket is not None
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(kind.socket, 1 << 16, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                message, fds = b"", []
            if not message:
                return self._on_zygote_end(kind)
            if not kind.ready:
                answer = json.loads(message)
                if "fatal" in answer:
                    if not kind.ever_ready:
                        raise Fatal(answer["fatal"], answer["layer"])
                    continue  # it ends
                self._on_zygote_ready(kind, answer, fds)
            elif message[:1] == b"F":
                self._on_forked(self.children[zygote.FORKED.unpack(message)[1]], fds)
            elif message[:1] == b"E":
                _, tag, number = zygote.FAILED.unpack(message)
                self._on_not_forked(self.children[tag], os.strerror(number))
            else:
                _, tag, status, user, system, rss = zygote.EXITED.unpack(message)
                child = self.children.get(tag)
                if child is not None:
                    self._end(child, status, user + system, rss)

    def _on_zygote_ready(self, kind: Kind, answer: dict[str, int], fds: list[int]) -> None:
        kind.ready = kind.ever_ready = True
        kind.failed_starts = kind.setup_failures = 0
        kind.address_space, kind.page_tables = answer["address_space"], answer["page_tables"]
        for listener in fds:
            kind.listener = listener
            self._loop.watch(listener, functools.partial(notify.answer, listener, self._limits, self._on_costly))
        self._owner.on_zygote_ready()

    def _on_zygote_end(self, kind: Kind) -> None:
        """All that it forked ended with it. Start another one."""
        assert kind.socket is not None and kind.process is not None
        self._loop.unwatch(kind.socket.fileno())
        kind.socket.close()
        kind.socket = None
        kind.process.kill()
        status = kind.process.wait()
        if kind.listener is not None:
            self._loop.unwatch(kind.listener)
            os.close(kind.listener)
            kind.listener = None
        if not kind.ready:
            why = "took too long" if kind.late else f"ended with status {status}"
            kind.late = False
            return self._on_failed_start(kind, f"the zygote {why} while starting")
        kind.ready, kind.down_since = False, now()
        self._counts["zygote_restarts"] += 1
        kind.idle.clear()
        for child in [child for child in self.children.values() if child.kind is kind]:
            child.killed = "zygote"
            self._end(child, 0, 0.0, 0)
        kind.deaths.append(now())
        while now() - kind.deaths[0] > _DEATH_WINDOW:
            kind.deaths.popleft()
        kind.start_at = now() + (_MAX_RETRY_SECONDS if len(kind.deaths) > _MAX_DEATHS else 0.0)
        self._owner.on_restart(f"the zygote ended with status {status}; another one is started")

    def _on_failed_start(self, kind: Kind, why: str) -> None:
        if not kind.ever_ready:
            raise Fatal(why)
        kind.failed_starts += 1
        kind.start_at = now() + min(_MAX_RETRY_SECONDS, _RETRY_SECONDS * 2**kind.failed_starts)
        self._owner.on_restart(f"{why}; it is tried again")
        if now() - kind.down_since > self._limits["startup_timeout"]:
            self._owner.on_no_children(kind, why)  # tried again all the same

    # Children.

    def fill(self) -> None:
        """Have as many children ready, or on their way, as are to wait for calls.

        Where the last one could not be set up, only as many as calls wait for.
        """
        for kind in self.kinds.values():
            wanted = min(self._pool, len(kind.queue)) if kind.setup_failures else self._pool
            while len(kind.idle) + kind.starting < wanted and self._can_fork(kind) and self._spawn(kind):
                pass

    def _can_fork(self, kind: Kind) -> bool:
        return kind.ready and kind.fork_at <= now()

    def _spawn(self, kind: Kind) -> bool:
        assert kind.socket is not None
        with contextlib.ExitStack() as stack:
            try:
                ours, theirs = socket.socketpair()
                stack.callback(theirs.close)
                stack.callback(ours.close)
                out, err = (self._memory_file(name, stack) for name in ("out", "err"))
            except OSError as error:
                self._on_no_child(kind, error.strerror or "")
                return False
            child = Child(next(self._tags), kind, secrets.token_hex(16), ours, out, err)
            request = zygote.FORK.pack(child.tag, child.folder.encode())
            try:
                socket.send_fds(kind.socket, [request], [theirs.fileno(), out, err])
            except (BlockingIOError, ConnectionError):
                # It is busy, or it has ended: with requests unread that is a reset and not a broken pipe, and is
                # noticed when its socket is read.
                return False
            stack.pop_all()
        theirs.close()
        ours.setblocking(False)
        self.children[child.tag] = child
        kind.starting += 1
        self._counts["forks"] += 1
        return True

    def _memory_file(self, name: str, stack: contextlib.ExitStack) -> int:
        fd = os.memfd_create(name)
        stack.callback(os.close, fd)
        return fd

    def _on_not_forked(self, child: Child, why: str) -> None:
        del self.children[child.tag]
        child.kind.starting -= 1
        self._release(child)
        self._on_no_child(child.kind, why)

    def _on_no_child(self, kind: Kind, why: str) -> None:
        """The system lends no process or no descriptors: what runs goes on, and may free some."""
        kind.setup_failures += 1
        kind.fork_at = now() + _RETRY_SECONDS
        if kind.setup_failures >= MAX_SETUP_FAILURES:
            self._owner.on_no_children(kind, f"no process could be started: {why}")

    def _on_forked(self, child: Child, fds: list[int]) -> None:
        try:
            child.pidfd = fds[0]
            with open(f"/proc/self/fdinfo/{child.pidfd}") as file:
                child.pid = next(int(line[4:]) for line in file if line.startswith("Pid:"))
        except (IndexError, OSError):  # we are out of descriptors
            child.control.shutdown(socket.SHUT_RDWR)  # it ends when it reads that
            return child.kill("setup")
        child.cpu_clock = (~child.pid << 3) | _CPUCLOCK_PROCESS
        if child.killed is not None:
            child.kill(child.killed)  # decided before it could be sent
        self._loop.watch(child.control.fileno(), functools.partial(self._owner.on_child_event, child))

    def on_child_ready(self, child: Child) -> None:
        child.ready = True
        child.kind.starting -= 1
        child.kind.setup_failures = 0
        child.kind.idle.append(child)

    def _on_costly(self, pid: int) -> bool:
        child = next((child for child in self.children.values() if child.pid == pid), None)
        if child is None or child.job is None:
            return True
        child.job.questions += 1
        if child.job.questions > notify.MAX_QUESTIONS:
            child.kill("questions")
        return child.killed is None

    def _end(self, child: Child, status: int, cpu: float, rss: int) -> None:
        del self.children[child.tag]
        if not child.ready and child.killed != "zygote":
            child.kind.starting -= 1
            child.kind.setup_failures += 1
        elif child in child.kind.idle:
            child.kind.idle.remove(child)
        self._owner.on_child_end(child, status, cpu, rss)
        self._release(child)

    def _release(self, child: Child) -> None:
        self._loop.unwatch(child.control.fileno())
        child.control.close()
        for fd in (child.out, child.err, child.pidfd):
            if fd >= 0:
                os.close(fd)
        self._folders.remove(child)

    def close(self) -> None:
        """End everything that was started."""
        for kind in self.kinds.values():
            if kind.socket is not None:
                kind.socket.close()
            if kind.process is not None:
                try:
                    kind.process.wait(_EXIT_SECONDS)  # it ends by itself when its socket closes
                except subprocess.TimeoutExpired:
                    kind.process.kill()
                    kind.process.wait()
