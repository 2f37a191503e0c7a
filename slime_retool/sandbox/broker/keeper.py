"""The keeper of the calls' working folders, where they are no file systems with bounds of their own: a process beside
the broker that measures them while their calls run and removes them afterwards, so that the broker does neither.

It takes a fifth of one core at most, however many files there are. When the broker is gone, it removes all folders.
Messages in (see `wire`): {"limits", "folder"} first, then by a folder's name {"watch", "pid", "clock"}, {"forget"} and
{"remove"}; out: {"exceeded"} and {"removed"}.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from dataclasses import dataclass
from typing import Any

from ..wire import Frames, pack
from .trees import REMOVE_SECONDS, TRASH, WORK, Remover, deleted_bytes, exceeds, remove_tree

_LOOK_EVERY = 0.01
_REST = 4
"""Times as long as a round of looking took."""
_CPU_STEP = 0.002
"""Seconds of CPU time with which a process cannot write much: it is not looked at again before, unless it rests."""
_ENTRIES_AT_ONCE = 64


@dataclass
class _Watched:
    pid: int
    clock: int
    cpu: float = -1.0
    """Of the process when it was looked at last."""
    seen: float = -1.0
    """Of the process a moment ago."""
    last: bool = False
    """Its call has ended: to be looked at once more, since a short one was never seen."""


class Keeper:
    def __init__(self, broker: socket.socket) -> None:
        self._broker, self._received = broker, Frames()
        self._watched: dict[str, _Watched] = {}
        config = self._first_message()
        self._folder: str = config["folder"]
        self._room, self._inodes = config["limits"]["max_disk_mb"] << 20, config["limits"]["max_inodes"]
        self._work, trash = (
            os.open(os.path.join(self._folder, name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for name in (WORK, TRASH)
        )
        self._device = os.fstat(self._work).st_dev
        self._remover = Remover(trash)
        for name in os.listdir(trash):  # of a keeper that ended
            self._remover.add(name)

    def _first_message(self) -> dict[str, Any]:
        while (message := self._received.take()) is None:
            if not self._receive():
                raise EOFError
        return message

    def _receive(self) -> bool:
        """False when the broker is gone, which with messages unread is a reset and no end."""
        try:
            data = self._broker.recv(1 << 16)
        except ConnectionError:
            return False
        self._received.feed(data)
        return bool(data)

    def run(self) -> None:
        """Until the broker is gone; then nothing of the folder is left."""
        poll = select.poll()
        poll.register(self._broker, select.POLLIN)
        look_at = 0.0
        self._take_messages()
        while True:
            wait = None if not self._watched else 1e3 * max(0.0, look_at - time.monotonic())
            if poll.poll(0 if self._remover else wait):
                if not self._receive():
                    break
                self._take_messages()
            started = time.monotonic()
            if self._watched and started >= look_at:
                self._look()
                ended = time.monotonic()
                look_at = ended + max(_LOOK_EVERY, _REST * (ended - started))
            self._remover.step(_ENTRIES_AT_ONCE)
        remove_tree(self._folder, REMOVE_SECONDS)

    def _take_messages(self) -> None:
        while (message := self._received.take()) is not None:
            self._on_message(message)

    def _on_message(self, message: dict[str, Any]) -> None:
        if "watch" in message:
            self._watched.setdefault(message["watch"], _Watched(message["pid"], message["clock"])).last = False
        elif "forget" in message:
            if message["forget"] in self._watched:
                self._watched[message["forget"]].last = True
        else:
            name = message["remove"]
            self._watched.pop(name, None)
            with contextlib.suppress(OSError):  # it was never made
                self._remover.add(name, self._work)
            self._say({"removed": name})

    def _look(self) -> None:
        for name, watched in list(self._watched.items()):
            try:
                cpu = time.clock_gettime(watched.clock)
            except OSError:
                if watched.last:
                    del self._watched[name]
                continue  # it has ended
            works = cpu != watched.seen and not watched.last
            watched.seen = cpu
            if watched.last:
                del self._watched[name]
            if cpu == watched.cpu or (works and cpu - watched.cpu < _CPU_STEP):
                continue
            watched.cpu = cpu
            if exceeds(self._work, name, self._room - deleted_bytes(watched.pid, self._device), self._inodes):
                self._watched.pop(name, None)
                self._say({"exceeded": name})

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):
            self._broker.sendall(pack(message))


def main(fd: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(EOFError):
        Keeper(socket.socket(fileno=fd)).run()
