"""Runs code in the locked-down child, one request at a time. What it sends is untrusted to the broker.

Functions are bound at import, before any code runs: see `semantics`.
"""

from __future__ import annotations

import atexit
import base64
import gc
import io
import os
import random
import resource
import sys
import threading
import types
from typing import Any, NoReturn

from ..wire import LENGTH, pack, unpack
from . import semantics

CONTROL = 3
"""Descriptor of the socket to the broker (see `wire`)."""
READY = b"R"
_NO_SOCKET = 1
"""Exit code where the code closed it: there is nobody to answer."""
MAX_FETCHED = 16 << 20
ANSWER_ROOM = 32 << 20
"""Memory beyond the code's own, in which the answer is made and the next request taken although the code has used up
all that it may have."""
_REHEARSALS = 60
_BUFFER = 8192
_SHORT = 4096
"""Bytes within which most requests are."""

_read, _write, _lseek, _exit, _getpid = os.read, os.write, os.lseek, os._exit, os.getpid
_open, _len, _min, _memoryview, _bytearray, _isinstance = open, len, min, memoryview, bytearray, isinstance
_BaseException, _OSError, _ValueError, _MemoryError = BaseException, OSError, ValueError, MemoryError
_write_buffered, _flush = io.BufferedWriter.write, io.BufferedWriter.flush
_getrlimit, _setrlimit, _RLIMIT_AS = resource.getrlimit, resource.setrlimit, resource.RLIMIT_AS
_INFINITY = resource.RLIM_INFINITY
_usage, _SELF = resource.getrusage, resource.RUSAGE_SELF
_wait_for_threads = threading._shutdown  # type: ignore[attr-defined]
_run_exit_functions = atexit._run_exitfuncs


class _RingWriter(io.RawIOBase):
    """Writes the first half of `limit` bytes once and the rest in a ring after it: a file of bounded size.

    The broker shares the descriptor's offset, so it can find the ring's seam although we were killed.
    """

    def __init__(self, fd: int, limit: int) -> None:
        self._fd, self._limit, self._half = fd, limit, limit // 2
        self.total = 0
        self.cut = False
        """Something was overwritten or left out."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        view = _memoryview(data).cast("B")
        size, done = _len(view), 0
        self.total += size
        try:
            if self.total <= self._half:  # whoever else wrote, the seam is not reached
                done = _write(self._fd, view)
            while done < size:
                position = _lseek(self._fd, 0, 1)
                if position >= self._limit:
                    position, self.cut = _lseek(self._fd, self._half, 0), True
                    if size - done > self._limit:
                        done = size - self._half  # what would be overwritten at once
                done += _write(self._fd, view[done : done + self._limit - position])
            if self.cut and _lseek(self._fd, 0, 1) == self._limit:
                _lseek(self._fd, self._half, 0)  # a full ring, unlike a full file, has its seam in the middle
        except _OSError:
            pass  # the code closed or replaced its own output
        return size


class _Buffer(io.BufferedWriter):
    """Hands everything on at once, so that what was written survives a kill, until output is being cut: by lines then,
    which costs a flood of small pieces a quarter of the time."""

    def __init__(self, raw: _RingWriter) -> None:
        super().__init__(raw, _BUFFER)
        self._ring = raw
        self.text = io.TextIOWrapper(
            self, encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True
        )

    def write(self, data: Any) -> int:
        size = _write_buffered(self, data)
        try:
            if not self._ring.cut:
                _flush(self)
            elif self.text.write_through:
                self.text.reconfigure(write_through=False)
        except _ValueError:
            pass  # the code closed or detached its own output
        return size


def _receive_some(most: int) -> bytes:
    try:
        data = _read(CONTROL, most)
    except _OSError:
        _exit(_NO_SOCKET)
    if not data:
        _exit(0)
    return data


def _receive() -> dict[str, Any]:
    """The next request. After it nothing arrives before the answer, so that more may be asked for."""
    data = _bytearray()
    while _len(data) < LENGTH.size:
        data += _receive_some(_SHORT)
    end = LENGTH.size + LENGTH.unpack_from(data)[0]
    while _len(data) < end:
        data += _receive_some(_min(end - _len(data), 1 << 20))
    return unpack(data[LENGTH.size :])


def _send(data: bytes) -> None:
    view = _memoryview(data)
    try:
        while view:
            view = view[_write(CONTROL, view) :]
    except _OSError:
        _exit(_NO_SOCKET)


def _reseed(seed: int | None) -> None:
    """Forks share the zygote's random state: give each its own, or the one asked for."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(None if seed is None else seed & 0xFFFFFFFF)


def _hard_limit() -> int:
    """Bytes of address space that this process can have at most."""
    return _getrlimit(_RLIMIT_AS)[1]


def _set_stdin(text: str) -> None:
    """Standard input for the program and for what it reads from descriptor 0."""
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # halves of a surrogate pair
        data = text.encode("utf-8", "replace")
    with os.fdopen(os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600), "wb") as file:
        file.write(data)
        file.seek(0)
        os.dup2(file.fileno(), 0)
    semantics.allow_input()


def _write_files(files: dict[str, str]) -> None:
    for name, content in files.items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with _open(name, "wb") as file:
            file.write(base64.b64decode(content))


def _read_files(names: list[str]) -> list[bytes | None]:
    """None for what is not a readable file, and for what does not fit beside those before it."""
    found: list[bytes | None] = []
    room = MAX_FETCHED
    for name in names:
        data = None
        try:
            with _open(name, "rb") as file:
                data = file.read(room + 1)
        except (_OSError, _ValueError):  # also a name that no file can have
            pass
        if data is not None and _len(data) > room:
            data = None
        room -= _len(data or b"")
        found.append(data)
    return found


def _depth() -> int:
    """Frames below the code's own first one, two of them of functions still to be called."""
    frame: types.FrameType | None = sys._getframe()
    count = 2
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


class Executor:
    """Made and rehearsed in the zygote, so that its objects, its specialised bytecode and its caches are shared by all
    children, where each would otherwise write its own copy of those pages; served in a child."""

    def __init__(self, output_limit: int) -> None:
        self._limit = output_limit
        self._hard = _hard_limit()
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
            request |= {"seed": None, "stdin": None, "address_space": None, "memory_mb": 1, "echo": True}
            self._respond(unpack(pack(request)[LENGTH.size :]), number)

    def _set_streams(self, fds: tuple[int, int]) -> None:
        self._fds = fds
        self._writers = [_RingWriter(fd, self._limit) for fd in fds]
        self._out, self._err = (_Buffer(writer).text for writer in self._writers)
        sys.stdout, sys.stderr = self._out, self._err
        sys.__stdout__, sys.__stderr__ = self._out, self._err  # type: ignore[misc]

    def serve(self) -> NoReturn:
        """Answer requests until the broker ends this process or is gone."""
        gc.enable()
        sys.setrecursionlimit(sys.getrecursionlimit() + _depth())  # the code has all of it
        own = _getpid()
        self._hard = _hard_limit()
        _write(CONTROL, READY)
        count = 0
        while True:
            request = _receive()
            count += 1
            try:
                answer = self._respond(request, count)
            except _BaseException as error:  # the code replaced or used up what the answer is made with
                answer = [self._answer_without(request, error)]
            if _getpid() != own:
                _exit(0)  # a fork of the code's own that has run to the end of it
            # And wait, also after a one-shot: the broker reads the process's clock before it ends it.
            for part in answer:
                _send(part)

    def _respond(self, request: dict[str, Any], count: int) -> list[bytes]:
        """The answer and then the files, as they are sent."""
        try:
            for stream, writer in ((self._out, self._writers[0]), (self._err, self._writers[1])):
                # Raises if an earlier cell closed or detached it.
                stream.reconfigure(line_buffering=True, write_through=True)
                writer.total, writer.cut = 0, False
            sys.stdout, sys.stderr = self._out, self._err
        except _BaseException:
            self._set_streams(self._fds)
        session = request["session"]
        if count <= 1 or request["seed"] is not None:
            _reseed(request["seed"])
        try:
            self._limit_memory(request["address_space"], session)
            if request["stdin"] is not None:
                _set_stdin(request["stdin"])
            if request["files"]:
                _write_files(request["files"])
        except _OSError as error:  # files that do not fit
            outcome = semantics.Outcome(error=semantics.brief(error), limit=semantics.limit_of(error))
        except _MemoryError as error:
            outcome = semantics.Outcome(error=semantics.brief(error), limit="memory")
        except _BaseException as error:  # a name that no file can have
            outcome = semantics.Outcome(error=semantics.brief(error))
        else:
            filename = f"<cell {count}>" if session else "<string>"
            limits = self._limit, request["memory_mb"]
            outcome = semantics.run(request["code"], filename, self._namespace, *limits, echo=request["echo"])
        # As an interpreter does at its end; a session goes on.
        at_end = () if session else (_wait_for_threads, _run_exit_functions)
        for finish in (*at_end, self._limit_memory_no_more, self._out.flush, self._err.flush):
            try:
                finish()
            except _BaseException:
                pass
        files: list[bytes | None] = []
        if request["fetch"]:
            try:
                files = _read_files(request["fetch"])
            except _MemoryError:
                outcome = semantics.Outcome("MemoryError while the files to fetch were read", "memory")
        answer = {
            "nonce": request["nonce"],
            "error": outcome.error,
            "limit": outcome.limit,
            "result": outcome.result,
            "exit_code": outcome.exit_code,
            "max_rss": _usage(_SELF).ru_maxrss * 1024,
            "written": [self._writers[0].total, self._writers[1].total],
            "files": [None if data is None else _len(data) for data in files] if files else files,
        }
        return [pack(answer), *[data for data in files if data]] if files else [pack(answer)]

    def _limit_memory(self, address_space: int | None, session: bool) -> None:
        """For the code to come; None: as much as the process may have. The next cell of a session may have more."""
        if address_space is not None:
            self._hard = self._hard if session else address_space + ANSWER_ROOM
            _setrlimit(_RLIMIT_AS, (address_space, self._hard))
        elif self._hard != _INFINITY:
            _setrlimit(_RLIMIT_AS, (self._hard - ANSWER_ROOM, self._hard))

    def _limit_memory_no_more(self) -> None:
        try:
            _setrlimit(_RLIMIT_AS, (self._hard, self._hard))
        except _ValueError:  # the code has lowered it, for good
            self._hard = _hard_limit()
            _setrlimit(_RLIMIT_AS, (self._hard, self._hard))

    def _answer_without(self, request: dict[str, Any], error: BaseException) -> bytes:
        """That the code ended, where a whole answer cannot be made."""
        self._namespace.clear()
        outcome = semantics.Outcome(
            f"{semantics.brief(error)}\n(while the result was put together)",
            "memory" if _isinstance(error, _MemoryError) else None,
        )
        rest = {"nonce": request["nonce"], "max_rss": 0, "written": [None, None], "files": []}
        return pack(outcome._asdict() | rest)
