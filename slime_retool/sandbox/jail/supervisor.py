"""Runs one snippet: a supervisor process, and below it the process that executes the code.

Started as `python -I -S boot.py supervisor` by `process_jail`; standard library only. It reads one JSON request line
from stdin, prints `STARTED` once the code's process exists, then the fields of `policy.Result` as JSON.

The end of stdin means that our owner is gone: everything is killed. Descendants that leave the code's session are found
all the same, for the supervisor is the subreaper to which orphans return.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import math
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from . import semantics

STARTED = b"started\n"
FILENAME = "<string>"  # as in `python -c`
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_OUT, _ERR, _REPORT = 0, 1, 2
_REPORT_FD = 3
_DRAIN_SECONDS = 1.0
_KILL_SECONDS = 10.0


class HeadTail:
    """Bytes of a stream of any length: the first half and the last half of `limit`."""

    def __init__(self, limit: int) -> None:
        self.half = max(1, limit // 2)
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > 2 * self.half:
            del self.tail[: -self.half]

    @property
    def omitted(self) -> int:
        return max(0, self.total - 2 * self.half)

    def text(self) -> str:
        tail = self.tail[-self.half :]
        if not self.omitted:
            return (self.head + tail).decode("utf-8", "replace")
        gap = f"\n... [{self.omitted} bytes of output omitted] ...\n"
        return self.head.decode("utf-8", "replace") + gap + tail.decode("utf-8", "replace")


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) refused")


# The supervisor.


def supervise() -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    owner = os.getppid()
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    request = json.loads(read_line(0))
    os.mkdir(request["scratch"], 0o700)
    os.chdir(request["scratch"])
    try:
        pipes = [os.pipe() for _ in range(3)]
        nonce = os.urandom(16).hex()
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            run_child(request, [write for _, write in pipes], nonce, supervisor)
        started = time.monotonic()
        for _, write in pipes:
            os.close(write)
        os.write(1, STARTED)
        limit = request["output"]
        out, err, report = HeadTail(limit), HeadTail(limit), HeadTail(1 << 24)
        streams = {read: stream for (read, _), stream in zip(pipes, (out, err, report), strict=True)}
        timed_out, abandoned, status, end = watch(pid, streams, wake_read, started + request["timeout"], owner)
    finally:
        os.chdir("/")
        remove_folder(request["scratch"])
    if abandoned:
        if os.getppid() != owner:
            # It had no chance to remove the folder of all its calls, which goes with the last of them.
            try:
                os.rmdir(os.path.dirname(request["scratch"]))
            except OSError:
                pass
        return
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = judge(request, timed_out, status, read_report(report, nonce))
    answer |= {
        "stdout": out.text(),
        "stderr": err.text(),
        "wall_s": end - started,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "max_rss": usage.ru_maxrss * 1024,
        "truncated": bool(out.omitted or err.omitted),
    }
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()


def read_line(fd: int) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        chunk = os.read(fd, 65_536)
        if not chunk:
            sys.exit("the owner left before sending a request")
        data += chunk
    return bytes(data)


def watch(
    pid: int, streams: dict[int, HeadTail], wake: int, deadline: float, owner: int
) -> tuple[bool, bool, int | None, float]:
    """Read output until the code's process ends, time is up or the owner leaves; then kill all descendants.

    Returns (timed out, abandoned, wait status of the code's process or None, time of its end).
    """
    timed_out = abandoned = ended = False
    unread = set(streams)
    poll = select.poll()
    for fd in (*streams, wake):
        poll.register(fd, select.POLLIN)
    poll.register(0, 0)  # only its hang-up matters
    while not (ended or timed_out or abandoned):
        wait = deadline - time.monotonic()
        timed_out = wait <= 0
        for fd, _ in poll.poll(max(0.0, wait) * 1000):
            if fd == 0:
                abandoned = True
            elif fd == wake:
                os.read(wake, 4096)
                # Not reaped yet: until `kill_descendants` has used it, the number must stay ours.
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
                abandoned = abandoned or os.getppid() != owner
            elif not read_some(streams[fd], fd):
                poll.unregister(fd)
                unread.discard(fd)
    end = time.monotonic()
    status = kill_descendants(pid)
    poll.unregister(wake)
    poll.unregister(0)
    drained = time.monotonic() + _DRAIN_SECONDS
    while unread and time.monotonic() < drained:
        for fd, _ in poll.poll(100):
            if not read_some(streams[fd], fd):
                poll.unregister(fd)
                unread.discard(fd)
    return timed_out and not ended, abandoned, status, end


def read_some(stream: HeadTail, fd: int) -> bool:
    data = os.read(fd, 65_536)
    stream.add(data)
    return bool(data)


def kill_descendants(pid: int) -> int | None:
    """SIGKILL and reap every descendant; returns the wait status of `pid`.

    The group goes first, at once. What left the group becomes our child when its parent dies, so killing all children
    until there are none reaches every generation.
    """
    status = None
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        if status is None:
            kill(os.killpg, pid)
        for child in children():
            kill(os.kill, child)
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if reaped[0] == pid:
                    status = reaped[1]
        except ChildProcessError:
            break
        time.sleep(0.002)
    return status


def kill(how: Callable[[int, int], None], number: int) -> None:
    try:
        how(number, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # gone, or (a group) not created yet


def children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
        return [int(number) for number in file.read().split()]


def read_report(stream: HeadTail, nonce: str) -> dict[str, Any] | None:
    """What the code's process said of its end; the nonce tells it from anything the code wrote there."""
    _, found, text = stream.text().rpartition(nonce)
    try:
        return json.loads(text) if found else None
    except ValueError:
        return None


def judge(
    request: dict[str, Any], timed_out: bool, status: int | None, report: dict[str, Any] | None
) -> dict[str, Any]:
    """`status`, `error` and `result` of the call."""
    too_slow = f"TimeoutError: the code ran longer than {request['timeout']:g} s and was stopped"
    if timed_out:
        return {"status": "timeout", "error": too_slow, "limit": "wall"}
    if report is not None:
        return report
    if status is None:
        return {"status": "killed", "error": "the program could not be ended"}
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return {"status": "timeout", "error": too_slow, "limit": "cpu"}
        names = {member.value: member.name for member in signal.Signals}
        return {"status": "killed", "error": f"the program was killed by signal {names.get(number, number)}"}
    code = os.WEXITSTATUS(status)
    return {"status": "error", "error": f"the program ended with exit code {code}"} if code else {"status": "ok"}


def remove_folder(path: str) -> None:
    try:
        os.rmdir(path)
        return
    except OSError:
        pass
    import shutil  # slow to import, and most calls write no file

    shutil.rmtree(path, ignore_errors=True)
    for folder, _, _ in os.walk(path):  # folders made unreadable
        try:
            os.chmod(folder, 0o700)
        except OSError:
            pass
    shutil.rmtree(path, ignore_errors=True)


# The code's process.


def run_child(request: dict[str, Any], fds: list[int], nonce: str, supervisor: int) -> NoReturn:
    # Bound here, so that code which patches modules cannot break the report.
    write, leave, encode = os.write, os._exit, json.JSONEncoder().encode
    try:
        try:
            set_up_child(request, fds, supervisor)
        except OSError as error:
            report = {"status": "unavailable", "error": f"sandbox unavailable: {error}"}
            write(fds[_REPORT], (nonce + encode(report)).encode())
            leave(0)
        report = execute(request["code"], request["output"], request["memory"])
        data = (nonce + encode(report)).encode()
        while data:
            data = data[write(_REPORT_FD, data) :]
        leave(0)
    finally:
        leave(1)


def set_up_child(request: dict[str, Any], fds: list[int], supervisor: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)  # it died before the line above could tell
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (fds[_OUT], 1), (fds[_ERR], 2)):
        os.dup2(source, target)
    report = fcntl.fcntl(fds[_REPORT], fcntl.F_DUPFD_CLOEXEC, 64)  # above all in use
    os.closerange(3, 64)
    os.dup2(report, _REPORT_FD, inheritable=False)
    os.close(report)

    megabyte = 1 << 20
    cpu = math.ceil(2 * request["timeout"]) + 1
    set_limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    set_limit(resource.RLIMIT_AS, request["memory"])
    set_limit(resource.RLIMIT_FSIZE, request["file_size"])
    set_limit(resource.RLIMIT_NOFILE, request["open_files"])
    set_limit(resource.RLIMIT_NPROC, request["processes"])
    set_limit(resource.RLIMIT_CORE, 0)
    # Deep recursion is common in puzzles. A stack may grow to this without a new program image.
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (lower(64 * megabyte, hard), hard))

    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        # By lines, so that what was printed survives a kill.
        stream = open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.__dict__[name] = sys.__dict__[f"__{name}__"] = stream
    sys.path[:] = [request["scratch"], *sys.path, *request["packages"]]
    if request["seed"] is not None:
        seed_generators(request["seed"], "numpy" in request["code"])


def lower(value: int, hard: int) -> int:
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def set_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit, never above what this process itself may use."""
    _, current = resource.getrlimit(kind)
    resource.setrlimit(kind, (lower(soft, current), lower(soft if hard is None else hard, current)))


def seed_generators(seed: int, numpy_too: bool) -> None:
    import random

    random.seed(seed)
    if numpy_too:
        try:
            import numpy
        except ImportError:
            return
        numpy.random.seed(seed % 2**32)


def execute(code: str, max_result: int, memory: int) -> dict[str, Any]:
    """Run `code` as the module `__main__`; what is returned are the `judge` fields."""
    outcome = semantics.run(code, FILENAME, semantics.main_module(), max_result, memory >> 20)
    # As an interpreter does at its end: wait for threads, run exit functions, flush.
    for finish in (threading._shutdown, atexit._run_exitfuncs, sys.__stdout__.flush, sys.__stderr__.flush):
        try:
            finish()
        except BaseException:
            pass
    status = "ok" if outcome.error is None else "memory" if outcome.limit == "memory" else "error"
    return {"status": status, "error": outcome.error, "limit": outcome.limit, "result": outcome.result}


def main() -> None:
    supervise()
