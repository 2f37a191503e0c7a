"""What the broker says to a child, and what it accepts as the answer."""

from __future__ import annotations

import base64
import os
import secrets
from typing import Any

from ..child import executor, semantics
from ..wire import LENGTH, pack, unpack
from .records import Child, Job

_CHILD_LIMITS = ("memory", "disk", "file_size", "open_files")
_NOTE = 200
"""Characters that the executor adds to a text that was cut."""
_CUT = "... [cut]"
_BYTES_OF_CHARACTER = 12
"""In JSON, at most: an escaped surrogate pair."""
_OTHER_FIELDS = 1000
_BYTES_OF_SIZE = 12


class ProtocolViolation(Exception):
    """A child sent what the executor would not: the code it runs has taken over."""


def request(job: Job, child: Child, limits: dict[str, Any]) -> bytes:
    job.nonce = os.urandom(16).hex()
    asked = job.request
    memory = asked["memory_mb"]
    message = {
        "code": asked["code"],
        "seed": asked["seed"],
        "stdin": asked["stdin"],
        "files": asked["files"],
        "fetch": asked["fetch"],
        "echo": asked["echo"],
        "memory_mb": limits["memory_mb"] if memory is None else memory,
        "address_space": None if memory is None else child.kind.address_space + (memory << 20),
        "nonce": job.nonce,
        "session": job.session is not None,
    }
    return pack(message)


def answer(data: bytearray, job: Job, limits: dict[str, Any]) -> dict[str, Any] | None:
    """The child's answer to `job`, of which `data` has arrived; None while it is incomplete.

    Every field is of the right type and size, and `files` holds only what was asked for, in base64. Raises
    ProtocolViolation on anything else.
    """
    if len(data) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack_from(data)
    end = LENGTH.size + size
    if size > _longest(job, limits):
        raise ProtocolViolation(f"an answer of {size} bytes")
    if len(data) < end:
        return None
    if job.answer is None:
        try:
            job.answer = _checked(unpack(data[LENGTH.size : end]), job, limits)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ProtocolViolation(str(error)) from error
    sizes: list[int | None] = job.answer["files"]
    if not sizes and len(data) == end:
        return job.answer | {"files": {}}
    missing = end + sum(size or 0 for size in sizes) - len(data)
    if missing < 0:
        raise ProtocolViolation(f"{-missing} bytes after the answer")
    if missing:
        return None
    files = {}
    for name, length in zip(job.request["fetch"], sizes, strict=False):
        if length is not None:
            files[name] = base64.b64encode(data[end : end + length]).decode()
            end += length
    return job.answer | {"files": files}


def _longest(job: Job, limits: dict[str, Any]) -> int:
    """Bytes that an answer has at most, without the files after it."""
    text = limits["max_output_bytes"] + semantics.MAX_ERROR + 2 * _NOTE
    return _BYTES_OF_CHARACTER * text + _BYTES_OF_SIZE * len(job.request["fetch"]) + _OTHER_FIELDS


def _checked(message: dict[str, Any], job: Job, limits: dict[str, Any]) -> dict[str, Any]:
    if not secrets.compare_digest(str(message["nonce"]), job.nonce):
        raise ValueError("an answer to another call")
    out, err = message["written"]
    exit_code = message["exit_code"]
    if exit_code is not None and _count(exit_code) > 0xFF:
        raise ValueError(exit_code)
    if message["error"] is None and (exit_code or message["limit"] is not None):
        raise ValueError("a failure without an error")
    return {
        "error": _text(message["error"], semantics.MAX_ERROR),
        "limit": message["limit"] if message["limit"] in _CHILD_LIMITS else None,
        "result": _text(message["result"], limits["max_output_bytes"]),
        "exit_code": exit_code,
        "max_rss": _count(message["max_rss"]),
        "written": [out if out is None else _count(out), err if err is None else _count(err)],
        "files": _sizes(message["files"], len(job.request["fetch"])),
    }


def _text(value: object, most: int) -> str | None:
    """As the caller gets it, where half of a surrogate pair is six characters (see `host.policy.Result`)."""
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > most + _NOTE:
        raise TypeError(type(value))
    text = value.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most + _NOTE else text[:most] + _CUT


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(value)
    return value


def _sizes(value: object, most: int) -> list[int | None]:
    """Of the files that were asked for, in their order; None where there is none."""
    if not isinstance(value, list) or len(value) > most:
        raise TypeError(type(value))
    if not value:
        return value
    sizes = [None if size is None else _count(size) for size in value]
    if sum(size or 0 for size in sizes) > executor.MAX_FETCHED:
        raise ValueError("more than may be fetched")
    return sizes
