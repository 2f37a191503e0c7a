"""The broker's end of the keeper of working folders: what it is asked for, and a new one when it ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from ..boot import command
from .link import Link, PeerGone
from .loop import Loop
from .records import Child
from .trees import REMOVE_SECONDS, WORK

_MIN_LIFETIME = 1.0
"""Seconds: one that ends sooner is not replaced at once."""


class Folders:
    """Working folders of children, by name, below `folder`; without one they are the children's own file systems.

    on_exceeded: told of a running child whose folder holds more than it may. on_restart: told why a keeper ended.
    """

    def __init__(
        self,
        loop: Loop,
        folder: str | None,
        limits: dict[str, Any],
        on_exceeded: Callable[[Child], None],
        on_restart: Callable[[str], None],
    ) -> None:
        self._loop, self._folder, self._limits = loop, folder, limits
        self._on_exceeded, self._on_restart = on_exceeded, on_restart
        self._watched: dict[str, Child] = {}
        self._seen: dict[str, Child] = {}
        """Those that were watched and are not removed: a last look may find too much."""
        self._removing: set[str] = set()
        """Asked for and not yet begun."""
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0

    def ensure(self) -> None:
        """Have a keeper, unless one was started a moment ago."""
        if self._folder is None or self._link is not None or time.monotonic() < self._start_at:
            return
        self._start_at = time.monotonic() + _MIN_LIFETIME
        try:
            self._start()
        except OSError as error:
            self._on_restart(f"the keeper of working folders could not be started: {error}")

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            start = command("broker.keeper", theirs.fileno())
            self._process = subprocess.Popen(start, pass_fds=[theirs.fileno()], cwd="/", stdin=subprocess.DEVNULL)
        self._link = Link(ours, self._loop)
        self._loop.watch(ours.fileno(), self._on_message)
        self._link.send({"folder": self._folder, "limits": self._limits})
        for child in self._watched.values():
            self._ask_to_watch(child)
        for name in self._removing:
            self._link.send({"remove": name})
        self._flush()

    def watch(self, child: Child) -> None:
        """Its call has run for a while."""
        if self._folder is not None and child.folder not in self._watched:
            self._watched[child.folder] = self._seen[child.folder] = child
            self._ask_to_watch(child)

    def forget(self, child: Child) -> None:
        """Its call has ended: one more look."""
        if self._watched.pop(child.folder, None) is not None:
            self._send({"forget": child.folder})

    def remove(self, child: Child) -> None:
        """The child has ended."""
        if self._folder is None:
            return
        for known in (self._watched, self._seen):
            known.pop(child.folder, None)
        # An empty folder is gone by one system call; what there is to do in another is not ours to do.
        try:
            os.rmdir(os.path.join(self._folder, WORK, child.folder))
        except FileNotFoundError:
            pass
        except OSError:
            self._removing.add(child.folder)
            self._send({"remove": child.folder})

    def close(self) -> None:
        """All folders are removed, in a few seconds at most."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            try:
                self._process.wait(REMOVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _ask_to_watch(self, child: Child) -> None:
        self._send({"watch": child.folder, "pid": child.pid, "clock": child.cpu_clock})

    def _send(self, message: dict[str, Any]) -> None:
        if self._link is not None:
            self._link.send(message)
            self._flush()

    def _flush(self) -> None:
        assert self._link is not None
        with contextlib.suppress(PeerGone):  # noticed when it is read
            self._link.flush()

    def _on_message(self) -> None:
        assert self._link is not None and self._process is not None
        try:
            for message in self._link.receive():
                if "exceeded" in message:
                    child = self._seen.get(message["exceeded"])
                    if child is not None:
                        self._watched.pop(child.folder, None)
                        self._on_exceeded(child)
                else:
                    self._removing.discard(message["removed"])
            self._flush()
        except PeerGone:
            self._link.close()
            self._link = None
            self._process.kill()
            self._on_restart(f"the keeper of working folders ended with status {self._process.wait()}")
            self.ensure()
