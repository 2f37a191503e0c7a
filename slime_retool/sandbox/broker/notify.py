"""System calls of children that the kernel asks the broker about (seccomp_unotify(2)): those that use up what belongs
to the whole user, threads and pipes.

The count is the kernel's, taken when the call is made, and a refused call fails as at any other limit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import struct
from collections.abc import Callable
from typing import Any

from ..child.syscalls import NR

_RECV, _SEND = 0xC0502100, 0xC0182101
_REQUEST = struct.Struct("<QIIiIQ6Q")
"""id, pid, flags; number, architecture, instruction pointer, arguments."""
_RESPONSE = struct.Struct("<QqiI")
_CONTINUE = 1
_PROCESS = re.compile(rb"^Tgid:\s*(\d+)$", re.MULTILINE)
_STATUS_SIZE = 4096

MAX_PIPES = 4
"""At once in a call or session. A pipe takes 16 pages, and Linux gives a user's pipes 16,384: 256 sessions fit."""
MAX_QUESTIONS = 2000
"""Of a call that take more of the broker's time than of its own: pipes, and threads that are refused. They take it one
second, in which others wait."""


def answer(listener: int, limits: dict[str, Any], on_costly: Callable[[int], bool]) -> None:
    """Answer one request that is pending at `listener`; a process that has ended meanwhile needs none.

    on_costly: told the process of one that takes more of our time than of its own, which are a pipe and a refusal; says
    whether it may go on to ask.
    """
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
            error = _verdict(thread, number, limits, on_costly)
        response = _RESPONSE.pack(identity, 0, -error, 0 if error else _CONTINUE)
        fcntl.ioctl(listener, _SEND, response)


def _verdict(thread: int, number: int, limits: dict[str, Any], on_costly: Callable[[int], bool]) -> int:
    """An error number, or 0 to let the call go on."""
    if number == NR["clone"]:
        # A folder has two links of its own and one for each folder in it.
        threads = os.stat(f"/proc/{thread}/task").st_nlink - 2
        if threads < limits["max_threads"]:
            return 0
        on_costly(_process(thread))
        return errno.EAGAIN
    # One that is being ended is not looked at again.
    may_ask = on_costly(_process(thread))
    return 0 if may_ask and _pipes(thread) < MAX_PIPES else errno.EMFILE


def _process(thread: int) -> int:
    with open(f"/proc/{thread}/status", "rb", buffering=0) as file:
        found = _PROCESS.search(file.read(_STATUS_SIZE))
    return int(found[1]) if found else thread


def _pipes(thread: int) -> int:
    found = set()
    for fd in os.listdir(f"/proc/{thread}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{thread}/fd/{fd}")
            if target.startswith("pipe:"):
                found.add(target)
    return len(found)
