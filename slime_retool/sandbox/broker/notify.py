"""System calls of children that the kernel asks the broker about (seccomp_unotify(2)): those that use up what belongs
to the whole user, threads and pipes.

The count is the kernel's, taken when the call is made, and a refused call fails as at any other limit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import struct
from typing import Any

from ..child.syscalls import NR

_RECV, _SEND = 0xC0502100, 0xC0182101
_REQUEST = struct.Struct("<QIIiIQ6Q")
"""id, pid, flags; number, architecture, instruction pointer, arguments."""
_RESPONSE = struct.Struct("<QqiI")
_CONTINUE = 1

MAX_PIPES = 4
"""At once in a call or session. A pipe takes 16 pages, and Linux gives a user's pipes 16,384: 256 sessions fit."""


def answer(listener: int, limits: dict[str, Any]) -> None:
    """Answer one request that is pending at `listener`; a process that has ended meanwhile needs none."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    if not any(event & select.POLLIN for _, event in poll.poll(0)):
        return  # all that could ask have ended; receiving would wait
    request = bytearray(_REQUEST.size)
    with contextlib.suppress(OSError):
        fcntl.ioctl(listener, _RECV, request)
        identity, thread, _, number, *_ = _REQUEST.unpack(request)
        error = 0
        with contextlib.suppress(OSError):  # it has ended, or /proc hides it
            error = _verdict(thread, number, limits)
        response = _RESPONSE.pack(identity, 0, -error, 0 if error else _CONTINUE)
        fcntl.ioctl(listener, _SEND, response)


def _verdict(thread: int, number: int, limits: dict[str, Any]) -> int:
    """An error number, or 0 to let the call go on."""
    if number == NR["clone"]:
        # A folder has two links of its own and one for each folder in it.
        threads = os.stat(f"/proc/{thread}/task").st_nlink - 2
        return errno.EAGAIN if threads >= limits["max_threads"] else 0
    return errno.EMFILE if _pipes(thread) >= MAX_PIPES else 0


def _pipes(thread: int) -> int:
    found = set()
    for fd in os.listdir(f"/proc/{thread}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{thread}/fd/{fd}")
            if target.startswith("pipe:"):
                found.add(target)
    return len(found)
