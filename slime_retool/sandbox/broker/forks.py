"""The broker's zygotes and the children that they fork: started, watched, replaced and ended here."""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
import shutil
import socket
import subprocess
import time
from typing import Any, Protocol

from ..boot import command
from ..child import zygote
from .loop import Loop
from .records import Child, Kind

_MAX_RESTARTS, _RESTART_WINDOW = 5, 60.0
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
    def on_child_event(self, child: Child) -> None: ...
    def on_child_end(self, child: Child, status: int, cpu: float, rss: int) -> None: ...


class Forks:
    def __init__(self, loop: Loop, config: dict[str, Any], owner: Owner, counts: collections.Counter[str]) -> None:
        self._loop, self._owner, self._counts = loop, owner, counts
        self._pool: int = config["pool"]
        self.work: str | None = config["zygote"]["work"]
        shared = config["zygote"] | {"limits": config["limits"]}
        self.kinds = {name: Kind(shared | {"preload": preload}) for name, preload in config["kinds"].items()}
        self.children: dict[int, Child] = {}
        self._tags = itertools.count(1)

    # Zygotes.

    def start(self, kind: Kind) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = theirs.fileno()
        kind.process = subprocess.Popen(command("child.zygote", fd), pass_fds=[fd], cwd="/", stdin=subprocess.DEVNULL)
        # Before our copy of its end is closed: if it has ended already, that is then read as its end.
        ours.send(json.dumps(kind.config).encode())
        theirs.close()
        ours.setblocking(False)
        kind.socket, kind.ready, kind.started, kind.starting = ours, False, now(), 0
        self._loop.watch(ours.fileno(), functools.partial(self._on_zygote, kind))

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
                    raise Fatal(answer["fatal"], answer["layer"])
                kind.ready, kind.address_space = True, answer["address_space"]
                self._owner.on_zygote_ready()
            elif message[:1] == b"F":
                self._on_forked(self.children.get(zygote.FORKED.unpack(message)[1]), fds[0])
            else:
                _, tag, status, user, system, rss = zygote.EXITED.unpack(message)
                child = self.children.get(tag)
                if child is not None:
                    self._end(child, status, user + system, rss)

    def _on_zygote_end(self, kind: Kind) -> None:
        """All that it forked ended with it. Start another one, unless it keeps ending."""
        assert kind.socket is not None and kind.process is not None
        self._loop.unwatch(kind.socket.fileno())
        kind.socket.close()
        kind.process.kill()
        status = kind.process.wait()
        if not kind.ready:
            raise Fatal(f"the zygote ended with status {status} while starting")
        kind.ready = False
        self._counts["zygote_restarts"] += 1
        kind.idle.clear()
        for child in [child for child in self.children.values() if child.kind is kind]:
            child.killed = "zygote"
            self._end(child, 0, 0.0, 0)
        kind.restarts.append(now())
        while now() - kind.restarts[0] > _RESTART_WINDOW:
            kind.restarts.popleft()
        if len(kind.restarts) > _MAX_RESTARTS:
            raise Fatal(f"the zygote ended {len(kind.restarts)} times within {_RESTART_WINDOW:g} s")
        self.start(kind)

    # Children.

    def fill(self) -> None:
        """Have as many children ready, or on their way, as are to wait for calls.

        Where the last one could not be set up, only as many as calls wait for.
        """
        for kind in self.kinds.values():
            wanted = min(self._pool, len(kind.queue)) if kind.setup_failures else self._pool
            while kind.ready and len(kind.idle) + kind.starting < wanted and self._spawn(kind):
                pass

    def _spawn(self, kind: Kind) -> bool:
        assert kind.socket is not None
        ours, theirs = socket.socketpair()
        child = Child(next(self._tags), kind, ours, os.memfd_create("out"), os.memfd_create("err"))
        try:
            socket.send_fds(kind.socket, [zygote.TAG.pack(child.tag)], [theirs.fileno(), child.out, child.err])
        except (BlockingIOError, ConnectionError):
            # It is busy, or it has ended: with requests unread that is a reset and not a broken pipe, and is
            # noticed when its socket is read.
            self._release(child)
            return False
        finally:
            theirs.close()
        ours.setblocking(False)
        self.children[child.tag] = child
        kind.starting += 1
        self._counts["forks"] += 1
        return True

    def _on_forked(self, child: Child | None, pidfd: int) -> None:
        if child is None:
            return os.close(pidfd)
        child.pidfd = pidfd
        with open(f"/proc/self/fdinfo/{pidfd}") as file:
            pid = next(int(line[4:]) for line in file if line.startswith("Pid:"))
        child.cpu_clock = (~pid << 3) | _CPUCLOCK_PROCESS
        if child.killed is not None:
            child.kill(child.killed)  # decided before it could be sent
        self._loop.watch(child.control.fileno(), functools.partial(self._owner.on_child_event, child))

    def on_child_ready(self, child: Child) -> None:
        child.ready = True
        child.kind.starting -= 1
        child.kind.setup_failures = 0
        child.kind.idle.append(child)

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
        if self.work is not None:
            shutil.rmtree(os.path.join(self.work, str(child.tag)), ignore_errors=True)

    def close(self) -> None:
        """End everything that was started, then remove the work folder."""
        for kind in self.kinds.values():
            if kind.socket is not None:
                kind.socket.close()
            if kind.process is not None:
                try:
                    kind.process.wait(_EXIT_SECONDS)  # it ends by itself when its socket closes
                except subprocess.TimeoutExpired:
                    kind.process.kill()
                    kind.process.wait()
        deadline = now() + 2.0
        while self.work is not None and os.path.exists(self.work) and now() < deadline:
            shutil.rmtree(os.path.dirname(self.work), ignore_errors=True)
            time.sleep(0.02)
