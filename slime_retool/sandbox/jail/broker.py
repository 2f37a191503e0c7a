"""The broker: one small trusted process that owns time, output and status of every call.

Between it and the rollout's event loop is one stream socket with length-prefixed JSON; to each zygote a
SEQPACKET
socket (see `zygote`); to each child a stream socket (see `executor`) whose content is never trusted: bounded,
matched to the call by a nonce, and only ever parsed as JSON. It never blocks on any of them.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import json
import os
import re
import resource
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from . import executor, output, zygote
from .records import Child, Job, Kind, Session

_LENGTH = struct.Struct("<I")
_CLIENT_CHUNK = 1 << 20
_PARENT_CHECK = 2.0
_DISK_CHECK = 0.05
_MIN_CPU_CHECK = 0.01
_MAX_RESTARTS, _RESTART_WINDOW = 5, 60.0
_MAX_SETUP_FAILURES = 3
_MAX_TOMBSTONES = 10_000
_REPLY_SLACK = 1 << 20
_EXIT_SECONDS = 2.0
_CPUCLOCK_PROCESS = 2

_CHILD_LIMITS = ("memory", "disk", "file_size", "open_files")
_LOST = {"zygote": "the sandbox's zygote ended", "cancelled": "a call in it was cancelled"}

now = time.monotonic


class Fatal(Exception):
    """The sandbox cannot go on; the fields reach the client."""

    def __init__(self, reason: str, layer: str | None = None, errno: int | None = None) -> None:
        super().__init__(reason)
        self.reply = {"fatal": reason, "layer": layer, "errno": errno}


class Broker:
    def __init__(self, client: socket.socket, config: dict[str, Any]) -> None:
        self.client = client
        self.limits: dict[str, Any] = config["limits"]
        self.freeze = "freeze" not in config["zygote"]["off"]
        self.work: str | None = config["zygote"]["work"]
        heavy = "|".join(map(re.escape, config["heavy"]))
        self.heavy = re.compile(rf"\b(?:{heavy})\b") if heavy else None
        self.kinds = {
            name: Kind(name, config["zygote"] | {"preload": preload, "limits": self.limits}, config["pool"])
            for name, preload in config["kinds"].items()
        }
        self.children: dict[int, Child] = {}
        self.jobs: dict[int, Job] = {}
        self.sessions: collections.OrderedDict[str, Session] = collections.OrderedDict()
        self.lost: collections.OrderedDict[str, str] = collections.OrderedDict()
        self.session_queue: collections.deque[Job] = collections.deque()
        self.running = 0
        self.timers: list[tuple[float, int, Job]] = []
        self.sequence = itertools.count(1)
        self.epoll = select.epoll()
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.received = bytearray()
        self.to_send = bytearray()
        self._client_writing = False
        self._writing: set[int] = set()
        self.announced = False
        self.counts: collections.Counter[str] = collections.Counter()
        self.parent = os.getppid()

    # The loop.

    def run(self) -> None:
        self.client.setblocking(False)
        self._watch(self.client.fileno(), self._on_client)
        for kind in self.kinds.values():
            self._start_zygote(kind)
        housekeeping = now()
        while True:
            self._flush()
            wait = min(self.timers[0][0] if self.timers else housekeeping, housekeeping) - now()
            for fd, event in self.epoll.poll(max(0.0, wait)):
                handler = self.handlers.get(fd)
                if handler is not None:
                    handler(event)
            self._run_timers()
            if now() >= housekeeping:
                housekeeping = now() + self._keep_house()

    def _watch(self, fd: int, handler: Callable[[int], None]) -> None:
        self.handlers[fd] = handler
        self.epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        self._writing.discard(fd)
        if self.handlers.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def _keep_house(self) -> float:
        """Seconds until the next round."""
        if os.getppid() != self.parent:
            raise ConnectionError("the client is gone")
        lifetime = self.limits["session_idle"]
        for session in list(self.sessions.values()):
            if session.current is None and now() - session.last_used >= lifetime:
                self._lose(session, f"it was idle for more than {lifetime:g} s")
        for kind in self.kinds.values():
            if not kind.ready and now() - kind.started > self.limits["startup_timeout"]:
                raise Fatal(f"the zygote did not start within {self.limits['startup_timeout']:g} s")
        if len(self.timers) > 1024:
            self.timers = [timer for timer in self.timers if not timer[2].answered]
            heapq.heapify(self.timers)
        return min(_PARENT_CHECK, max(0.05, lifetime / 4))

    # Zygotes.

    def _start_zygote(self, kind: Kind) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        boot = os.path.join(os.path.dirname(os.path.abspath(__file__)), "boot.py")
        kind.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", boot, "zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd="/",
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        ours.send(json.dumps(kind.config).encode())
        ours.setblocking(False)
        kind.socket, kind.ready, kind.started, kind.starting = ours, False, now(), 0
        self._watch(ours.fileno(), lambda _: self._on_zygote(kind))

    def _on_zygote(self, kind: Kind) -> None:
        assert kind.socket is not None
        while kind.socket is not None:
            try:
                message, fds, _, _ = socket.recv_fds(kind.socket, 1 << 16, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                message, fds = b"", []
            if not message:
                return self._on_zygote_end(kind)
            if not kind.ready:
                self._on_zygote_answer(kind, json.loads(message))
            elif message[:1] == b"F":
                self._on_forked(self.children.get(zygote.FORKED.unpack(message)[1]), kind, fds[0])
            else:
                _, tag, status, user, system, rss = zygote.EXITED.unpack(message)
                child = self.children.get(tag)
                if child is not None:
                    self._on_exit(child, status, user + system, rss)

    def _on_zygote_answer(self, kind: Kind, answer: dict[str, Any]) -> None:
        if "fatal" in answer:
            raise Fatal(answer["fatal"], answer["layer"], answer["errno"])
        kind.ready, kind.notes, kind.address_space = True, answer["ready"], answer["address_space"]
        if not self.announced and all(other.ready for other in self.kinds.values()):
            self.announced = True
            self._reply({"ready": {name: other.notes for name, other in self.kinds.items()}})
        self._pump()

    def _on_zygote_end(self, kind: Kind) -> None:
        """All that it forked ended with it. Start another one, unless it keeps ending."""
        assert kind.socket is not None and kind.process is not None
        self._unwatch(kind.socket.fileno())
        kind.socket.close()
        kind.socket = None
        kind.process.kill()
        status = kind.process.wait()
        if not kind.ready:
            raise Fatal(f"the zygote ended with status {status} while starting")
        self.counts["zygote_restarts"] += 1
        kind.idle.clear()
        for child in [child for child in self.children.values() if child.kind is kind]:
            child.killed = "zygote"
            self._on_exit(child, 0, 0.0, 0)
        kind.restarts.append(now())
        while now() - kind.restarts[0] > _RESTART_WINDOW:
            kind.restarts.popleft()
        if len(kind.restarts) > _MAX_RESTARTS:
            raise Fatal(f"the zygote ended {len(kind.restarts)} times within {_RESTART_WINDOW:g} s")
        self._start_zygote(kind)

    # Children.

    def _spawn(self, kind: Kind) -> bool:
        assert kind.socket is not None
        ours, theirs = socket.socketpair()
        child = Child(next(self.sequence), kind, ours, output.create("out"), output.create("err"))
        try:
            socket.send_fds(kind.socket, [zygote.TAG.pack(child.tag)], [theirs.fileno(), child.out, child.err])
        except (BlockingIOError, BrokenPipeError):
            self._release(child)
            return False
        finally:
            theirs.close()
        ours.setblocking(False)
        self.children[child.tag] = child
        kind.starting += 1
        self.counts["forks"] += 1
        return True

    def _on_forked(self, child: Child | None, kind: Kind, pidfd: int) -> None:
        if child is None or child.gone:
            os.close(pidfd)
            return
        child.pidfd = pidfd
        with open(f"/proc/self/fdinfo/{pidfd}") as file:
            pid = next(int(line[4:]) for line in file if line.startswith("Pid:"))
        child.cpu_clock = (~pid << 3) | _CPUCLOCK_PROCESS
        self._watch(child.control.fileno(), lambda event: self._on_child(child, event))

    def _on_child(self, child: Child, event: int) -> None:
        if event & select.EPOLLOUT:
            self._send_request(child)
        if not event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            data = child.control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # It ends, or it closed its side and its time limit will see to it.
            return self._unwatch(child.control.fileno())
        if not child.ready:
            self._on_ready(child, data)
        elif child.job is None:
            self._break_off(child)
        else:
            child.received += data
            self._read_answer(child)

    def _read_last_words(self, child: Child) -> None:
        """The report of its end may overtake its answer."""
        with contextlib.suppress(OSError):
            while child.job is not None and child.killed is None:
                data = child.control.recv(1 << 16)
                if not data:
                    return
                child.received += data
                self._read_answer(child)

    def _on_ready(self, child: Child, data: bytes) -> None:
        if data != executor.READY:
            return self._break_off(child)
        child.ready = True
        child.kind.starting -= 1
        child.kind.setup_failures = 0
        child.kind.idle.append(child)
        self._pump()

    def _break_off(self, child: Child) -> None:
        self.counts["protocol_violations"] += 1
        child.kill("protocol")

    def _read_answer(self, child: Child) -> None:
        job, data = child.job, child.received
        assert job is not None
        if len(data) < _LENGTH.size:
            return
        (size,) = _LENGTH.unpack_from(data)
        most = 8 * self.limits["output"] + _REPLY_SLACK + (2 * executor.MAX_FETCHED if job.request["fetch"] else 0)
        if size > most or len(data) > size + _LENGTH.size:
            return self._break_off(child)
        if len(data) < size + _LENGTH.size:
            return
        try:
            answer = _checked(json.loads(bytes(data[_LENGTH.size :])), job.nonce)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return self._break_off(child)
        data.clear()
        cpu = child.cpu_seconds()
        if child.session is None:
            self._finish(child, self._completed(child, answer, cpu))
            child.kill("done")
        else:
            if self.freeze:
                child.signal(signal.SIGSTOP)
                child.stopped = True
            self._finish(child, self._completed(child, answer, cpu))
        self._pump()

    def _on_exit(self, child: Child, status: int, cpu: float, rss: int) -> None:
        if child.job is not None and child.killed is None:
            self._read_last_words(child)
        child.gone = True
        del self.children[child.tag]
        kind = child.kind
        if not child.ready and child.killed != "zygote":
            kind.starting -= 1
            self._on_setup_failure(child)
        elif child in kind.idle:
            kind.idle.remove(child)
        if child.job is not None:
            self._finish(child, self._ended(child, status, cpu, rss))
        session = child.session
        if session is not None and session.child is child and self.sessions.get(session.id) is session:
            self._lose(session, _LOST.get(child.killed or "", "its process ended between two cells"))
        self._release(child)
        if kind.socket is not None:
            self._pump()

    def _on_setup_failure(self, child: Child) -> None:
        kind = child.kind
        kind.setup_failures += 1
        if kind.setup_failures < _MAX_SETUP_FAILURES:
            return
        kind.setup_failures = 0
        why = output.take(child.err, self.limits["output"], None)[0] or "no message"
        while kind.queue:
            self._refuse(kind.queue.popleft(), why)

    def _release(self, child: Child) -> None:
        self._unwatch(child.control.fileno())
        child.control.close()
        for fd in (child.out, child.err, child.pidfd):
            if fd >= 0:
                os.close(fd)
        if self.work is not None:
            shutil.rmtree(os.path.join(self.work, str(child.tag)), ignore_errors=True)

    # Calls.

    def _on_run(self, message: dict[str, Any]) -> None:
        name = message["session"]
        job = Job(message["id"], message, None, now())
        self.jobs[job.id] = job
        if len(self.jobs) - self.running > self.limits["queue"]:
            return self._refuse(job, f"the queue is full ({self.limits['queue']} calls wait); send fewer at once")
        if name is None:
            self._kind_for(message["code"]).queue.append(job)
            return
        if name in self.lost:
            return self._refuse(job, f"session {name!r} is lost: {self.lost[name]}")
        session = self.sessions.get(name)
        if session is None:
            if len(self.sessions) >= self.limits["sessions"] and not self._evict():
                return self._refuse(job, f"all {self.limits['sessions']} sessions are busy")
            session = self.sessions[name] = Session(name)
        job.session = session
        if session.current is not None:
            session.waiting.append(job)
        else:
            self._next_cell(session, job)

    def _next_cell(self, session: Session, job: Job) -> None:
        session.current = job
        if session.child is None:
            self._richest().queue.append(job)
        else:
            self.session_queue.append(job)

    def _richest(self) -> Kind:
        return self.kinds["packages"] if "packages" in self.kinds else self.kinds["plain"]

    def _kind_for(self, code: str) -> Kind:
        return self._richest() if self.heavy is not None and self.heavy.search(code) else self.kinds["plain"]

    def _evict(self) -> bool:
        for session in self.sessions.values():
            if session.current is None:
                self._lose(session, f"it was the least recently used of {self.limits['sessions']} sessions")
                return True
        return False

    def _lose(self, session: Session, why: str) -> None:
        """Forget a session whose variables are gone; later cells of the same name are refused, not run
        afresh."""
        self.lost[session.id] = why
        while len(self.lost) > _MAX_TOMBSTONES:
            self.lost.popitem(last=False)
        self.counts["sessions_lost"] += 1
        self._end_session(session, f"session {session.id!r} is lost: {why}")

    def _on_close(self, name: str) -> None:
        self.lost.pop(name, None)
        session = self.sessions.get(name)
        if session is not None:
            self._end_session(session, "the session was closed")

    def _end_session(self, session: Session, why: str) -> None:
        del self.sessions[session.id]
        if session.child is not None:
            session.child.kill("closed")
        current = session.current
        if current is not None and current.child is None:
            self._unqueue(current)
            self._refuse(current, why)
        for job in session.waiting:
            self._refuse(job, why)
        session.waiting.clear()

    def _unqueue(self, job: Job) -> None:
        for queue in (self.session_queue, *(kind.queue for kind in self.kinds.values())):
            with contextlib.suppress(ValueError):
                queue.remove(job)

    def _on_cancel(self, identity: int) -> None:
        job = self.jobs.get(identity)
        if job is None:
            return
        job.cancelled = True
        if job.child is not None:
            job.child.kill("cancelled")
            return
        self._unqueue(job)
        session = job.session
        if session is not None and session.current is job:
            self._advance(session)
        elif session is not None:
            session.waiting.remove(job)
        self._refuse(job, "cancelled")

    def _advance(self, session: Session) -> None:
        session.current = None
        session.last_used = now()
        if session.waiting:
            self._next_cell(session, session.waiting.popleft())
        if session.id in self.sessions:
            self.sessions.move_to_end(session.id)

    def _pump(self) -> None:
        """Start what can start, oldest first; keep a few idle children ready."""
        while self.running < self.limits["concurrency"]:
            queues = [kind.queue for kind in self.kinds.values() if kind.queue and kind.idle]
            if self.session_queue:
                queues.append(self.session_queue)
            if not queues:
                break
            queue = min(queues, key=lambda waiting: waiting[0].arrived)
            job = queue.popleft()
            if queue is self.session_queue:
                assert job.session is not None and job.session.child is not None
                self._assign(job, job.session.child)
                continue
            kind = next(kind for kind in self.kinds.values() if kind.queue is queue)
            child = kind.idle.popleft()
            if job.session is not None:
                job.session.child, child.session = child, job.session
            self._assign(job, child)
        for kind in self.kinds.values():
            while kind.ready and kind.socket is not None and len(kind.idle) + kind.starting < kind.pool:
                if not self._spawn(kind):
                    break

    def _assign(self, job: Job, child: Child) -> None:
        self.running += 1
        job.child, child.job = child, job
        job.nonce = secrets.token_hex(16)
        job.cpu_before = child.cpu_seconds()
        request = {key: job.request[key] for key in ("code", "seed", "stdin", "files", "fetch")}
        memory = job.request["memory_mb"]
        limit = None if memory is None else child.kind.address_space + (memory << 20)
        request |= {"nonce": job.nonce, "session": job.session is not None, "address_space": limit}
        data = json.dumps(request).encode()
        child.to_send = memoryview(_LENGTH.pack(len(data)) + data)
        if child.stopped:
            child.stopped = False
            child.signal(signal.SIGCONT)
        job.started = now()
        self._send_request(child)
        self._arm(job, job.started)

    def _send_request(self, child: Child) -> None:
        try:
            while child.to_send:
                child.to_send = child.to_send[child.control.send(child.to_send) :]
        except BlockingIOError:
            pass
        except OSError:
            child.to_send = memoryview(b"")  # it is ending: its exit will be reported
        if child.control.fileno() in self.handlers:
            events = select.EPOLLIN | (select.EPOLLOUT if child.to_send else 0)
            if child.to_send or child.control.fileno() in self._writing:
                self.epoll.modify(child.control.fileno(), events)
                (self._writing.add if child.to_send else self._writing.discard)(child.control.fileno())

    def _finish(self, child: Child, result: dict[str, Any]) -> None:
        """Answer the child's call."""
        job = child.job
        assert job is not None
        child.job = job.child = None
        child.received.clear()
        child.to_send = memoryview(b"")
        self.running -= 1
        result["queue_s"] = job.started - job.arrived
        session = job.session
        if session is not None and self.sessions.get(session.id) is session:
            if not child.gone:
                self._advance(session)
            elif child.killed not in _LOST:
                session.child = None
                self._advance(session)
                note = "The session was restarted: variables of earlier cells are gone."
                result["error"] = f"{result['error'] or 'the process ended with exit code 0'}\n{note}"
                result["status"] = "error" if result["status"] == "ok" else result["status"]
            else:
                session.current = None  # `_on_exit` gives the session up
        self._answer(job, result)

    def _answer(self, job: Job, result: dict[str, Any]) -> None:
        job.answered = True
        del self.jobs[job.id]
        self.counts[result["status"]] += 1
        if not job.cancelled:
            self._reply(result | {"id": job.id})

    def _refuse(self, job: Job, why: str) -> None:
        self._answer(
            job,
            {"status": "unavailable", "error": f"sandbox unavailable: {why}", "queue_s": now() - job.arrived},
        )

    # Verdicts.

    def _collect(self, child: Child, written: list[int | None]) -> dict[str, Any]:
        out, out_cut = output.take(child.out, self.limits["output"], written[0])
        err, err_cut = output.take(child.err, self.limits["output"], written[1])
        cut = out_cut or err_cut
        return {"stdout": out, "stderr": err, "truncated": cut, "limit": "output" if cut else None}

    def _completed(self, child: Child, answer: dict[str, Any], cpu: float) -> dict[str, Any]:
        """The child answered: the code ran to its end or raised."""
        assert child.job is not None
        result = self._collect(child, answer["written"])
        error, limit = answer["error"], answer["limit"]
        status = "ok" if error is None else "memory" if limit == "memory" else "error"
        result["limit"] = limit or result["limit"]
        wall = min(answer["wall"], now() - child.job.started)
        result |= {"status": status, "error": error, "result": answer["result"], "wall_s": wall}
        result |= {
            "cpu_s": max(0.0, cpu - child.job.cpu_before),
            "max_rss": answer["max_rss"],
            "files": answer["files"],
        }
        return result

    def _ended(self, child: Child, status: int, cpu: float, rss: int) -> dict[str, Any]:
        """The process ended without an answer."""
        job = child.job
        assert job is not None
        result = self._collect(child, [None, None])
        verdict, error = self._verdict(child, job, status)
        if child.killed is None and os.WIFEXITED(status):
            result["exit_code"] = os.WEXITSTATUS(status)
        limit = {"timeout": "wall", "cpu": "cpu", "disk": "disk"}.get(child.killed or "")
        result["limit"] = limit or ("memory" if verdict == "memory" else result["limit"])
        result |= {"status": verdict, "error": error, "result": None, "wall_s": now() - job.started}
        result |= {"cpu_s": max(0.0, cpu - job.cpu_before), "max_rss": rss}
        return result

    def _verdict(self, child: Child, job: Job, status: int) -> tuple[str, str | None]:
        reasons = {
            "timeout": (
                "timeout",
                f"TimeoutError: the code ran longer than {job.request['timeout']:g} s and was stopped",
            ),
            "cpu": (
                "timeout",
                f"TimeoutError: the code used more than {job.request['cpu']:g} s of CPU time and was stopped",
            ),
            "disk": (
                "killed",
                f"the code wrote more than {self.limits['scratch_mb']} MB or {self.limits['inodes']} files",
            ),
            "protocol": ("killed", "the code interfered with the process that runs it and was stopped"),
            "zygote": ("unavailable", "sandbox unavailable: the zygote ended during the call"),
            "cancelled": ("unavailable", "sandbox unavailable: cancelled"),
            "closed": ("unavailable", "sandbox unavailable: the session was closed during the call"),
        }
        if child.killed in reasons:
            return reasons[child.killed]
        if not os.WIFSIGNALED(status):
            code = os.waitstatus_to_exitcode(status)
            return ("error", f"the program ended with exit code {code}") if code else ("ok", None)
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        if number == signal.SIGKILL:
            return "memory", "the kernel ended the process (SIGKILL), most likely because memory ran out"
        if number == signal.SIGSYS:
            return "killed", "the process was ended for a system call of another architecture (SIGSYS)"
        hint = ": a crash in native code, often by very deep recursion" if number == signal.SIGSEGV else ""
        return "killed", f"the process was ended by {name}{hint}"

    # Time, CPU and disk limits.

    def _arm(self, job: Job, at: float) -> None:
        """Look at the job again when it could first have passed a limit."""
        child = job.child
        assert child is not None
        left = job.request["cpu"] - (child.cpu_seconds() - job.cpu_before)
        due = min(
            job.started + job.request["timeout"],
            at + max(_MIN_CPU_CHECK, left / (os.cpu_count() or 1)),
            at + _DISK_CHECK if self.work is not None else float("inf"),
        )
        heapq.heappush(self.timers, (due, next(self.sequence), job))

    def _run_timers(self) -> None:
        current = now()
        while self.timers and self.timers[0][0] <= current:
            job = heapq.heappop(self.timers)[2]
            child = job.child
            if job.answered or child is None or child.killed:
                continue
            if current >= job.started + job.request["timeout"]:
                child.kill("timeout")
            elif child.cpu_seconds() - job.cpu_before >= job.request["cpu"]:
                child.kill("cpu")
            elif self.work is not None and self._disk_exceeded(child):
                child.kill("disk")
            else:
                self._arm(job, current)

    def _disk_exceeded(self, child: Child) -> bool:
        """Only without a file system per call, which has its own bounds."""
        assert self.work is not None
        room, inodes = self.limits["scratch_mb"] << 20, self.limits["inodes"]
        folders = [os.path.join(self.work, str(child.tag))]
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        inodes -= 1
                        room -= entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        if room < 0 or inodes < 0:
                            return True
            except OSError:
                continue  # removed meanwhile
        return False

    # The client.

    def _on_client(self, event: int) -> None:
        if event & select.EPOLLOUT:
            self._flush()
        if not event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            return
        try:
            data = self.client.recv(_CLIENT_CHUNK)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("the client is gone")
        self.received += data
        offset = 0
        while len(self.received) - offset >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self.received, offset)
            end = offset + _LENGTH.size + size
            if len(self.received) < end:
                break
            self._on_message(json.loads(bytes(self.received[offset + _LENGTH.size : end])))
            offset = end
        del self.received[:offset]
        self._pump()

    def _on_message(self, message: dict[str, Any]) -> None:
        operation = message["op"]
        if operation == "run":
            self._on_run(message)
        elif operation == "cancel":
            self._on_cancel(message["id"])
        elif operation == "close":
            self._on_close(message["session"])
        else:
            assert operation == "stats", operation
            self._reply({"id": message["id"], "stats": self._stats()})

    def _stats(self) -> dict[str, Any]:
        return {
            "running": self.running,
            "queued": len(self.jobs) - self.running,
            "sessions": len(self.sessions),
            "children": len(self.children),
            "idle": {name: len(kind.idle) for name, kind in self.kinds.items()},
            "counts": dict(self.counts),
        }

    def _reply(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self.to_send += _LENGTH.pack(len(data)) + data

    def _flush(self) -> None:
        if not self.to_send and not self._client_writing:
            return
        with contextlib.suppress(BlockingIOError):
            while self.to_send:
                del self.to_send[: self.client.send(self.to_send)]
        if bool(self.to_send) != self._client_writing:
            self._client_writing = bool(self.to_send)
            self.epoll.modify(self.client.fileno(), select.EPOLLIN | (select.EPOLLOUT if self.to_send else 0))

    def close(self) -> None:
        """End everything that was started, then remove the work folder."""
        for kind in self.kinds.values():
            if kind.socket is not None:
                kind.socket.close()
            if kind.process is not None:
                try:
                    kind.process.wait(_EXIT_SECONDS)  # it ends by itself when its socket closes
                except subprocess.TimeoutExpired:
                    kind.process.kill()
                    kind.process.wait()
        deadline = now() + 2.0
        while self.work is not None and os.path.exists(self.work) and now() < deadline:
            shutil.rmtree(os.path.dirname(self.work), ignore_errors=True)
            time.sleep(0.02)


def _checked(answer: dict[str, Any], nonce: str) -> dict[str, Any]:
    """A child's answer with every field of the right type and size. Raises on anything else."""
    if not secrets.compare_digest(str(answer["nonce"]), nonce):
        raise ValueError("an answer to another call")

    def text(value: object) -> str | None:
        if value is not None and not isinstance(value, str):
            raise TypeError(value)
        return value

    def count(value: object) -> int:
        if not isinstance(value, int) or not 0 <= value < 1 << 62:
            raise ValueError(value)
        return value

    out, err = answer["written"]
    return {
        "error": text(answer["error"]),
        "limit": answer["limit"] if answer["limit"] in _CHILD_LIMITS else None,
        "result": text(answer["result"]),
        "wall": max(0.0, float(answer["wall"])),
        "max_rss": count(answer["max_rss"]),
        "written": [count(out), count(err)],
        "files": {str(name): str(text(content)) for name, content in answer["files"].items()},
    }


def main(fd: int) -> None:
    client = socket.socket(fileno=fd)
    (size,) = _LENGTH.unpack(client.recv(_LENGTH.size, socket.MSG_WAITALL))
    config = json.loads(client.recv(size, socket.MSG_WAITALL))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    broker = Broker(client, config)
    try:
        broker.run()
    except Fatal as error:
        data = json.dumps(error.reply).encode()
        with contextlib.suppress(OSError):
            client.setblocking(True)
            client.settimeout(5)
            client.sendall(bytes(broker.to_send) + _LENGTH.pack(len(data)) + data)
    except ConnectionError:
        pass
    finally:
        broker.close()
