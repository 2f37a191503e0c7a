"""What the broker says to a child, and what it accepts as the answer."""

from __future__ import annotations

import base64
import json
import secrets
from typing import Any

from ..child import executor
from ..wire import LENGTH, pack
from .records import Child, Job

_CHILD_LIMITS = ("memory", "disk", "file_size", "open_files")
_SLACK = 1 << 20


class ProtocolViolation(Exception):
    """A child sent what the executor would not: the code it runs has taken over."""


def request(job: Job, child: Child) -> bytes:
    job.nonce = secrets.token_hex(16)
    message = {key: job.request[key] for key in ("code", "seed", "stdin", "files", "fetch")}
    memory = job.request["memory_mb"]
    limit = None if memory is None else child.kind.address_space + (memory << 20)
    return pack(message | {"nonce": job.nonce, "session": job.session is not None, "address_space": limit})


def answer(data: bytearray, job: Job, limits: dict[str, Any]) -> dict[str, Any] | None:
    """The child's answer to `job`, of which `data` has arrived; None while it is incomplete.

    Every field is of the right type and size. Raises ProtocolViolation on anything else.
    """
    if len(data) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack_from(data)
    most = 8 * limits["max_output_bytes"] + _SLACK + (2 * executor.MAX_FETCHED if job.request["fetch"] else 0)
    if size > most or len(data) > size + LENGTH.size:
        raise ProtocolViolation(f"an answer of {size} bytes")
    if len(data) < size + LENGTH.size:
        return None
    try:
        return _checked(json.loads(bytes(data[LENGTH.size :])), job.nonce)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolViolation(str(error)) from error


def _checked(message: dict[str, Any], nonce: str) -> dict[str, Any]:
    if not secrets.compare_digest(str(message["nonce"]), nonce):
        raise ValueError("an answer to another call")
    out, err = message["written"]
    for content in message["files"].values():
        base64.b64decode(content)  # as the client will, where it must not fail
    return {
        "error": _text(message["error"]),
        "limit": message["limit"] if message["limit"] in _CHILD_LIMITS else None,
        "result": _text(message["result"]),
        "wall": max(0.0, float(message["wall"])),
        "max_rss": _count(message["max_rss"]),
        "written": [_count(out), _count(err)],
        "files": message["files"],
    }


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(value)
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(value)
    return value
