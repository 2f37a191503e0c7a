"""The broker's end of a socket to the client, or to another process of its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from ..wire import Frames, pack
from .loop import Loop

_CHUNK = 1 << 16
"""Bytes; memory for more is taken from the kernel, and given back, at each call."""
_LAST_WORDS_SECONDS = 5


class PeerGone(Exception):
    """Nobody is there to answer to."""


class Link:
    """Never blocks; what cannot be sent yet waits for the next `flush`."""

    def __init__(self, peer: socket.socket, loop: Loop) -> None:
        self._socket, self._loop = peer, loop
        self._received = Frames()
        self._to_send = bytearray()
        peer.setblocking(False)

    def receive(self) -> Iterator[dict[str, Any]]:
        """Messages that are complete. Raises PeerGone."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise PeerGone from error
        if not data:
            raise PeerGone
        self._received.feed(data)
        while (message := self._received.take()) is not None:
            yield message

    def send(self, message: dict[str, Any]) -> None:
        self._to_send += pack(message)

    @property
    def waiting(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._to_send)

    def flush(self) -> None:
        """Raises PeerGone."""
        try:
            while self._to_send:
                del self._to_send[: self._socket.send(self._to_send)]
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise PeerGone from error
        self._loop.want_write(self._socket.fileno(), bool(self._to_send))

    def close(self) -> None:
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()

    def say_last(self, message: dict[str, Any]) -> None:
        """What was not sent yet and then `message`, if the peer takes it within a few seconds."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(_LAST_WORDS_SECONDS)
            self._socket.sendall(self._to_send + pack(message))
