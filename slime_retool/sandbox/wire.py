"""Messages on a stream socket: a 4-byte little-endian length, then JSON."""

from __future__ import annotations

import json
import struct
from typing import Any

LENGTH = struct.Struct("<I")
# Bound at import, before any code runs: see `child.semantics`.
_encode, _len = json.JSONEncoder().encode, len


def pack(message: dict[str, Any]) -> bytes:
    data = _encode(message).encode()
    return LENGTH.pack(_len(data)) + data


class Frames:
    """Cuts what arrives into messages, one `take` at a time."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._start = 0

    def feed(self, data: bytes) -> None:
        del self._data[: self._start]
        self._start = 0
        self._data += data

    def take(self) -> dict[str, Any] | None:
        """The next message; None until one is complete."""
        body = self._start + LENGTH.size
        if len(self._data) < body:
            return None
        end = body + LENGTH.unpack_from(self._data, self._start)[0]
        if len(self._data) < end:
            return None
        self._start = end
        return json.loads(self._data[body:end])
