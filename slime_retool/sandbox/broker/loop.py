"""The broker's event loop: descriptors, and what to do when they can be read or written."""

from __future__ import annotations

import select
from collections.abc import Callable

Handler = Callable[[], object]


class Loop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._writing: set[int] = set()

    def watch(self, fd: int, handler: Handler) -> None:
        """Call `handler` whenever `fd` can be read, until `unwatch`."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        self._writing.discard(fd)
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def want_write(self, fd: int, wanted: bool) -> None:
        """Whether to call the handler of `fd`, if it has one, also when it can be written."""
        if fd not in self._handlers or wanted == (fd in self._writing):
            return
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))
        (self._writing.add if wanted else self._writing.discard)(fd)

    def poll(self, seconds: float) -> bool:
        """Wait so long, at most, and handle what there is: whether there was something."""
        ready = self._epoll.poll(max(0.0, seconds))
        for fd, _ in ready:
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
        return bool(ready)
