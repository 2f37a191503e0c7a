"""Runs code in the locked-down child, one request at a time. What it sends is untrusted to the broker.

Functions are bound at import, before any code runs: see `semantics`.
"""

from __future__ import annotations

import atexit
import base64
import gc
import io
import json
import os
import random
import resource
import sys
import threading
import time
from typing import Any, NoReturn

from ..wire import LENGTH, pack
from . import semantics

CONTROL = 3
"""Descriptor of the socket to the broker (see `wire`)."""
READY = b"R"
MAX_FETCHED = 16 << 20
_REHEARSALS = 60

_read, _write, _lseek, _exit, _getpid = os.read, os.write, os.lseek, os._exit, os.getpid
_len, _min, _memoryview, _bytearray = len, min, memoryview, bytearray
_BaseException, _OSError = BaseException, OSError
_decode = json.JSONDecoder().decode
_TextIOWrapper, _BufferedWriter = io.TextIOWrapper, io.BufferedWriter
_setrlimit, _RLIMIT_AS = resource.setrlimit, resource.RLIMIT_AS
_clock, _usage, _SELF = time.perf_counter, resource.getrusage, resource.RUSAGE_SELF
_wait_for_threads = threading._shutdown  # type: ignore[attr-defined]
_run_exit_functions = atexit._run_exitfuncs


class _RingWriter(io.RawIOBase):
    """Writes the first half of `limit` bytes once and the rest in a ring after it: a file of bounded size.

    The broker shares the descriptor's offset, so it can find the ring's seam although we were killed.
    """

    def __init__(self, fd: int, limit: int) -> None:
        self._fd, self._limit, self._half = fd, limit, limit // 2
        self.total = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        view = _memoryview(data).cast("B")
        size, done = _len(view), 0
        self.total += size
        try:
            while done < size:
                position = _lseek(self._fd, 0, 1)
                if position >= self._limit:
                    position = _lseek(self._fd, self._half, 0)
                    if size - done > self._limit:
                        done = size - self._half  # what would be overwritten at once
                done += _write(self._fd, view[done : done + self._limit - position])
        except _OSError:
            pass  # the code closed or replaced its own output
        return size


def _receive_exactly(count: int) -> bytearray:
    data = _bytearray()
    while _len(data) < count:
        chunk = _read(CONTROL, _min(count - _len(data), 1 << 20))
        if not chunk:
            _exit(0)
        data += chunk
    return data


def _receive() -> dict[str, Any]:
    (count,) = LENGTH.unpack(_receive_exactly(LENGTH.size))
    return _decode(_receive_exactly(count).decode())


def _send(message: dict[str, Any]) -> None:
    view = _memoryview(pack(message))
    while view:
        view = view[_write(CONTROL, view) :]


def _reseed(seed: int | None) -> None:
    """Forks share the zygote's random state: give each its own, or the one asked for."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(None if seed is None else seed & 0xFFFFFFFF)


def _set_stdin(text: str) -> None:
    """Standard input for the program and for what it reads from descriptor 0."""
    with os.fdopen(os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600), "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
        file.seek(0)
        os.dup2(file.fileno(), 0)
    semantics.allow_input()


def _write_files(files: dict[str, str]) -> None:
    for name, content in files.items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))


def _read_files(names: list[str]) -> dict[str, str]:
    found, room = {}, MAX_FETCHED
    for name in names:
        try:
            with open(name, "rb") as file:
                data = file.read(room + 1)
        except _OSError:
            continue
        if _len(data) <= room:
            room -= _len(data)
            found[name] = base64.b64encode(data).decode()
    return found


class Executor:
    """Made and rehearsed in the zygote, so that its objects, its specialised bytecode and its caches are shared by all
    children, where each would otherwise write its own copy of those pages; served in a child."""

    def __init__(self, output_limit: int, memory_mb: int) -> None:
        self._limit, self._memory_mb = output_limit, memory_mb
        null = os.open(os.devnull, os.O_RDWR)
        self._rehearse(null)
        os.close(null)
        self._namespace = semantics.main_module()
        self._set_streams((1, 2))
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
        sys.__stdin__ = sys.stdin  # type: ignore[misc]  # final to mypy
        atexit._clear()  # nothing of the zygote's runs in a child

    def _rehearse(self, null: int) -> None:
        # The interpreter's own streams are kept alive: closing them would close the zygote's descriptors.
        self._kept = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
        self._namespace = semantics.main_module()
        self._set_streams((null, null))
        for number in range(_REHEARSALS):
            code = ("print(1 + 1)\n[n for n in range(3)]", "def f(x):\n    return x\nf(1 // 0)")[number % 4 == 3]
            request: dict[str, Any] = {"code": code, "files": {}, "fetch": [], "nonce": "", "session": True}
            request |= dict.fromkeys(("seed", "stdin", "address_space"))
            pack(self._respond(_decode(pack(request)[LENGTH.size :].decode()), number))

    def _set_streams(self, fds: tuple[int, int]) -> None:
        self._fds = fds
        self._writers = [_RingWriter(fd, self._limit) for fd in fds]
        # By lines, so that what was printed survives a kill.
        self._out, self._err = (
            _TextIOWrapper(_BufferedWriter(w, 8192), encoding="utf-8", errors="backslashreplace", line_buffering=True)
            for w in self._writers
        )
        sys.stdout, sys.stderr = self._out, self._err
        sys.__stdout__, sys.__stderr__ = self._out, self._err  # type: ignore[misc]

    def serve(self) -> NoReturn:
        """Answer requests until the broker ends this process or is gone."""
        gc.enable()
        own = _getpid()
        _write(CONTROL, READY)
        count = 0
        while True:
            request = _receive()
            count += 1
            answer = self._respond(request, count)
            if _getpid() != own:
                _exit(0)  # a fork of the code's own that has run to the end of it
            # And wait, also after a one-shot: the broker reads the process's clock before it ends it.
            _send(answer)

    def _respond(self, request: dict[str, Any], count: int) -> dict[str, Any]:
        try:
            for stream, writer in ((self._out, self._writers[0]), (self._err, self._writers[1])):
                stream.reconfigure(line_buffering=True)  # raises if an earlier cell closed or detached it
                writer.total = 0
            sys.stdout, sys.stderr = self._out, self._err
        except _BaseException:
            self._set_streams(self._fds)
        session = request["session"]
        if count <= 1 or request["seed"] is not None:
            _reseed(request["seed"])
        started = _clock()
        try:
            if request["address_space"] is not None:
                _setrlimit(_RLIMIT_AS, (request["address_space"],) * 2)
            if request["stdin"] is not None:
                _set_stdin(request["stdin"])
            if request["files"]:
                _write_files(request["files"])
            filename = f"<cell {count}>" if session else "<string>"
            outcome = semantics.run(request["code"], filename, self._namespace, self._limit, self._memory_mb)
        except _BaseException as error:  # files that do not fit
            outcome = semantics.Outcome(error=f"{error}", limit="disk")
        # As an interpreter does at its end; a session goes on.
        at_end = () if session else (_wait_for_threads, _run_exit_functions)
        for finish in (*at_end, self._out.flush, self._err.flush):
            try:
                finish()
            except _BaseException:
                pass
        return outcome._asdict() | {
            "nonce": request["nonce"],
            "wall": _clock() - started,
            "max_rss": _usage(_SELF).ru_maxrss * 1024,
            "written": [writer.total for writer in self._writers],
            "files": _read_files(request["fetch"]) if request["fetch"] else {},
        }
