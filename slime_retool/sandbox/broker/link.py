"""The broker's end of the socket to the client."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from ..wire import Frames, pack
from .loop import Loop

_CHUNK = 1 << 20
_LAST_WORDS_SECONDS = 5


class ClientGone(Exception):
    """Nobody is there to answer to."""


class Link:
    """Never blocks; what cannot be sent yet waits for the next `flush`."""

    def __init__(self, client: socket.socket, loop: Loop) -> None:
        self._socket, self._loop = client, loop
        self._received = Frames()
        self._to_send = bytearray()
        client.setblocking(False)

    def receive(self) -> Iterator[dict[str, Any]]:
        """Messages that are complete. Raises ClientGone."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise ClientGone from error
        if not data:
            raise ClientGone
        self._received.feed(data)
        while (message := self._received.take()) is not None:
            yield message

    def send(self, message: dict[str, Any]) -> None:
        self._to_send += pack(message)

    def flush(self) -> None:
        """Raises ClientGone."""
        try:
            while self._to_send:
                del self._to_send[: self._socket.send(self._to_send)]
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise ClientGone from error
        self._loop.want_write(self._socket.fileno(), bool(self._to_send))

    def say_last(self, message: dict[str, Any]) -> None:
        """What was not sent yet and then `message`, if the client takes it within a few seconds."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(_LAST_WORDS_SECONDS)
            self._socket.sendall(self._to_send + pack(message))
