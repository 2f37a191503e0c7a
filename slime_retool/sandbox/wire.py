"""Messages on a stream socket: a 4-byte little-endian length, then JSON."""

from __future__ import annotations

import json
import json.encoder
import struct
from typing import Any, NoReturn

LENGTH = struct.Struct("<I")


def _refuse(value: object) -> NoReturn:
    raise TypeError(f"{type(value).__name__} is not of JSON")


# Bound at import, before any code runs: see `child.semantics`. The parts in C, since `json`'s own methods look up `len`
# and `isinstance` when they are called.
_len, _StopIteration, _ValueError = len, StopIteration, ValueError
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_chunks = json.encoder.c_make_encoder(  # type: ignore[attr-defined]
    None, _refuse, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, True
)


def pack(message: dict[str, Any]) -> bytes:
    data = "".join(_chunks(message, 0)).encode()
    return LENGTH.pack(_len(data)) + data


def unpack(body: bytes | bytearray) -> Any:
    """What `pack` made, without its length. Raises ValueError, or RecursionError, on what it did not make."""
    text = body.decode()
    try:
        message, end = _scan(text, 0)
    except _StopIteration:
        end = -1
    if end != _len(text):
        raise _ValueError("no message, or more than one")
    return message


class Frames:
    """Cuts what arrives into messages, one `take` at a time."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._start = 0

    def feed(self, data: bytes | memoryview) -> None:
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
        return unpack(self._data[body:end])  # of a process that no code has touched
