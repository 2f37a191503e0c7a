"""The broker: one small trusted process that owns time, output and status of every call.

Between it and the rollout's event loop is one stream socket (see `wire`); to each zygote a SEQPACKET socket (see
`zygote`); to each child a stream socket (see `executor`) whose content is never trusted: bounded, matched to the call
by a nonce, and only ever parsed as JSON. It never blocks on any of them.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import resource
import signal
import socket
import sys
import time
import traceback
from typing import Any

from ..child import executor
from ..wire import LENGTH
from . import cgroup, exchange, output, verdict
from .cgroup import Cgroup
from .deadlines import Deadlines
from .folders import Folders
from .forks import MAX_SETUP_FAILURES, Fatal, Forks
from .link import Link, PeerGone
from .loop import Loop
from .oom import OomKills
from .records import Child, Job, Kind, Session
from .started import StartedCalls

_PARENT_CHECK = 2.0
_TURNS = 4
"""Answers to be had in so many turns of the loop without waiting leave in one write: the caller wakes up less often."""
_MAX_LOST = 10_000
_CGROUP_SECONDS = 1.0
_LOST = {
    "zygote": "the sandbox's zygote ended",
    "cancelled": "a call in it was cancelled",
    "outside": "its process was ended from outside",
}

now = time.monotonic


class Broker:
    def __init__(self, client: socket.socket, config: dict[str, Any]) -> None:
        self.limits: dict[str, Any] = config["limits"]
        self.freeze = "freeze" not in config["zygote"]["off"]
        self.guarded = config["zygote"]["isolation"] == "none"
        """Children may have started processes: a call has ended when these have."""
        self.heavy = re.compile(rf"\b(?:{'|'.join(map(re.escape, config['heavy']))})\b")
        self.counts: collections.Counter[str] = collections.Counter()
        self.started = StartedCalls(config["started"])
        self.loop = Loop()
        self.loop.watch(client.fileno(), self._on_client)
        self.link = Link(client, self.loop)
        self.oom_kills = OomKills()
        self.cgroup: Cgroup | None = None
        self.no_cgroup = ""
        """Why there is none."""
        try:
            self.cgroup = Cgroup.make(config["name"], self.limits)
        except OSError as error:
            self.no_cgroup = str(error)
        self.folders = Folders(
            self.loop, config["folder"], self.limits, lambda child: child.kill("disk"), self.on_restart
        )
        self.forks = Forks(self.loop, config, self, self.folders, self.cgroup, self.counts)
        self.kinds = self.forks.kinds
        self.richest = self.kinds.get("packages", self.kinds["plain"])
        self.sessions: collections.OrderedDict[str, Session] = collections.OrderedDict()
        """Least recently used first."""
        self.lost: dict[str, str] = {}
        """Why the variables of a session are gone, by its name: later cells are refused, not run afresh."""
        self.deadlines = Deadlines(self.limits, self.folders)
        self.jobs: dict[int, Job] = {}
        self.session_queue: collections.deque[Job] = collections.deque()
        self.running = 0
        self.parent = os.getppid()

    def run(self) -> None:
        """Until the client is gone (PeerGone) or the sandbox cannot go on (Fatal)."""
        self.folders.ensure()
        self.forks.start_all()
        housekeeping = now()
        while True:
            for _ in range(_TURNS):
                if not (self.link.waiting and self.loop.poll(0.0)):
                    break
            self.link.flush()
            retry = self.forks.next
            self.loop.poll(min(self.deadlines.next, retry, housekeeping) - now())
            self.deadlines.run()
            if now() >= retry:
                self.forks.start_due()
                self._pump()
            if now() >= housekeeping:
                housekeeping = now() + self._keep_house()

    def _keep_house(self) -> float:
        """Seconds until the next round."""
        if os.getppid() != self.parent:
            raise PeerGone
        lifetime = self.limits["session_idle"]
        for session in list(self.sessions.values()):
            if session.current is None and session.last_used <= now() - lifetime:
                self._lose(session, f"it was idle for more than {lifetime:g} s")
        self.forks.end_late(self.limits["startup_timeout"])
        self.folders.ensure()
        self.oom_kills.turn()
        self.deadlines.prune()
        return min(_PARENT_CHECK, max(0.05, lifetime / 4))

    # Zygotes and children.

    def on_zygote_ready(self) -> None:
        if all(kind.ready for kind in self.kinds.values()):
            self.link.send({"ready": True, "cgroup": self.cgroup.folders if self.cgroup is not None else []})
        self._pump()

    def on_restart(self, why: str) -> None:
        self.link.send({"event": why})

    def on_no_children(self, kind: Kind, why: str) -> None:
        while kind.queue:
            self._refuse(kind.queue.popleft(), why)

    def on_child_event(self, child: Child) -> None:
        """Its control socket can be read or written."""
        if child.to_send:
            self._send_request(child)
        try:
            data = child.control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # It ends, or it closed its side and its time limit will see to it.
            self.loop.unwatch(child.control.fileno())
        elif not child.ready:
            if data != executor.READY:
                return self._break_off(child)
            self.forks.on_child_ready(child)
            self._pump()
        elif child.job is None:
            self._break_off(child)
        else:
            child.received += data
            self._read_answer(child, child.job)

    def _break_off(self, child: Child) -> None:
        self.counts["protocol_violations"] += 1
        child.kill("protocol")

    def _read_answer(self, child: Child, job: Job) -> None:
        try:
            answer = exchange.answer(child.received, job, self.limits)
        except exchange.ProtocolViolation:
            return self._break_off(child)
        if answer is None:
            return
        if child.session is not None and self.freeze:
            child.signal(signal.SIGSTOP)
        if child.session is not None:
            self.deadlines.look_last(child, job)
            if child.killed is not None:
                return
        result = verdict.completed(child, job, answer, self.limits)
        if child.session is None:
            child.kill("done")
            if self.guarded:
                child.result = result
                return
        self._finish(child, job, result)
        self._pump()

    def _read_last_words(self, child: Child) -> None:
        """The report of its end may overtake its answer."""
        with contextlib.suppress(OSError):
            while child.job is not None and child.killed is None:
                data = child.control.recv(1 << 16)
                if not data:
                    return
                child.received += data
                self._read_answer(child, child.job)

    def on_child_end(self, child: Child, status: int, cpu: float, rss: int) -> None:
        """Its wait status, CPU seconds and largest resident memory in bytes. It is released afterwards."""
        if child.job is not None and child.killed is None:
            self._read_last_words(child)
        session = child.session
        if child.killed == "leader" and status != signal.SIGKILL:
            child.killed = None  # its threads were ending, and the first one was done
        by_kill = status == signal.SIGKILL and child.killed is None and not self.guarded
        if by_kill and (child.job is not None or session is not None):
            child.killed = "oom" if self.oom_kills.take() else "outside"
        child.gone = True
        kind = child.kind
        if kind.setup_failures >= MAX_SETUP_FAILURES:
            why = output.take(child.err, self.limits["max_output_bytes"], None)[0] or "no message"
            self.on_no_children(kind, why)
        if child.job is not None:
            result = child.result or verdict.ended(child, child.job, status, cpu, rss, self.limits)
            self._finish(child, child.job, result)
        if session is not None and session.open and session.child is child:
            if child.killed in _LOST:
                self._lose(session, _LOST[child.killed])
            else:
                self._restart(session, verdict.between_cells(child, status, self.limits))
        if kind.ready:
            self._pump()

    # Calls.

    def _on_run(self, message: dict[str, Any]) -> None:
        name = message["session"]
        job = Job(message["id"], message, None, now() - message["waited"])
        self.jobs[job.id] = job
        if len(self.jobs) - self.running > self.limits["max_queue"]:
            return self._refuse(job, f"the queue is full ({self.limits['max_queue']} calls wait); send fewer at once")
        if name is None:
            kind = self.richest if self.heavy.search(message["code"]) else self.kinds["plain"]
            return kind.queue.append(job)
        if name in self.lost:
            return self._refuse(job, f"session {name!r} is lost: {self.lost[name]}")
        session = self.sessions.get(name)
        if session is None:
            most = self.limits["max_sessions"]
            if len(self.sessions) >= most:
                victim = next((each for each in self.sessions.values() if each.current is None), None)
                if victim is None:
                    return self._refuse(job, f"all {most} sessions are busy")
                self._lose(victim, f"it was the least recently used of {most} sessions")
            session = self.sessions[name] = Session(name)
        job.session = session
        if session.current is not None:
            session.waiting.append(job)
        else:
            self._next_cell(session, job)

    def _next_cell(self, session: Session, job: Job) -> None:
        session.current = job
        if session.ended is not None:
            result, session.ended = session.ended, None
            self._answer(job, result | {"queue_s": now() - job.arrived})
            return self._advance(session)
        (self.richest.queue if session.child is None else self.session_queue).append(job)

    def _restart(self, session: Session, result: dict[str, Any]) -> None:
        """Its code ended its process after a cell's answer, on purpose or not. Code can do so at will, so it is no
        outage, by which a bad sample could be dropped: the next cell has `result` and the one after it starts afresh.
        """
        session.child, session.ended = None, result
        if session.current is not None:
            self._unqueue(session.current)
            self._next_cell(session, session.current)

    def _lose(self, session: Session, why: str) -> None:
        self.lost[session.id] = why
        if len(self.lost) > _MAX_LOST:
            del self.lost[next(iter(self.lost))]
        self.counts["sessions_lost"] += 1
        self._end_session(session, f"session {session.id!r} is lost: {why}")

    def _on_close(self, name: str) -> None:
        self.lost.pop(name, None)
        if name in self.sessions:
            self._end_session(self.sessions[name], "the session was closed")

    def _end_session(self, session: Session, why: str) -> None:
        """End its process and refuse its calls that have not started."""
        del self.sessions[session.id]
        session.open = False
        if session.child is not None:
            session.child.kill("closed")
        jobs = [session.current, *session.waiting]
        session.waiting.clear()
        for job in (job for job in jobs if job is not None and job.child is None):
            self._unqueue(job)
            self._refuse(job, why)

    def _unqueue(self, job: Job) -> None:
        for queue in (self.session_queue, *(kind.queue for kind in self.kinds.values())):
            with contextlib.suppress(ValueError):
                queue.remove(job)

    def _on_cancel(self, identity: int) -> None:
        job = self.jobs.get(identity)
        if job is None:
            return
        if job.child is not None:
            return job.child.kill("cancelled")
        self._unqueue(job)
        if job.session is not None and job.session.current is not job:
            job.session.waiting.remove(job)
        self._refuse(job, "cancelled")

    def _advance(self, session: Session) -> None:
        session.current = None
        if session.open:
            session.last_used = now()
            self.sessions.move_to_end(session.id)
        if session.waiting:
            self._next_cell(session, session.waiting.popleft())

    def _pump(self) -> None:
        """Start what can start, oldest first; keep a few idle children ready."""
        while self.running < self.limits["concurrency"]:
            oldest = self.session_queue[0] if self.session_queue else None
            fresh: Kind | None = None
            for kind in self.kinds.values():
                if kind.queue and kind.idle and (oldest is None or kind.queue[0].arrived < oldest.arrived):
                    oldest, fresh = kind.queue[0], kind
            if oldest is None:
                break
            session = oldest.session
            if fresh is None:
                self.session_queue.popleft()
                assert session is not None and session.child is not None
                child = session.child
            else:
                fresh.queue.popleft()
                child = fresh.idle.popleft()
                if session is not None:
                    session.child, child.session = child, session
            self._assign(oldest, child)
        self.forks.fill()

    def _assign(self, job: Job, child: Child) -> None:
        self.running += 1
        self.started.add(job.id)
        job.child, child.job = child, job
        child.to_send = memoryview(exchange.request(job, child, self.limits))
        job.cpu_before = child.cpu_seconds()
        job.started = now()
        self._send_request(child)
        if job.session is not None:
            child.signal(signal.SIGCONT)  # after the request, which it then finds at once
        self.deadlines.arm(job, job.started)

    def _send_request(self, child: Child) -> None:
        try:
            while child.to_send:
                child.to_send = child.to_send[child.control.send(child.to_send) :]
        except BlockingIOError:
            pass
        except OSError:
            child.to_send = memoryview(b"")  # it is ending: its exit will be reported
        self.loop.want_write(child.control.fileno(), bool(child.to_send))

    def _finish(self, child: Child, job: Job, result: dict[str, Any]) -> None:
        """Answer the child's call."""
        self.folders.forget(child)
        child.job = job.child = None
        child.received.clear()
        child.to_send = memoryview(b"")
        self.running -= 1
        result["queue_s"] = job.started - job.arrived
        session = job.session
        if session is not None and session.open:
            if not child.gone:
                self._advance(session)
            elif child.killed not in _LOST:
                session.child = None
                self._advance(session)
                result |= verdict.restarted(result["status"], result["error"])
            else:
                session.current = None  # `on_child_end` gives the session up
        self._answer(job, result)

    def _answer(self, job: Job, result: dict[str, Any]) -> None:
        del self.jobs[job.id]
        self.counts[result["status"]] += 1
        result["id"] = job.id
        self.link.send(result)

    def _refuse(self, job: Job, why: str) -> None:
        waited = now() - job.arrived
        self._answer(job, {"status": "unavailable", "error": f"sandbox unavailable: {why}", "queue_s": waited})
        if job.session is not None and job.session.current is job:
            self._advance(job.session)

    # The client.

    def _on_client(self) -> None:
        for message in self.link.receive():
            self._on_message(message)
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
            self.link.send({"id": message["id"], "stats": self._stats()})

    def _stats(self) -> dict[str, Any]:
        return {
            "running": self.running,
            "queued": len(self.jobs) - self.running,
            "sessions": len(self.sessions),
            "children": len(self.forks.children),
            "idle": {name: len(kind.idle) for name, kind in self.kinds.items()},
            "counts": dict(self.counts),
            "asked": all(kind.listener is not None for kind in self.kinds.values()),
            "cgroup": self.cgroup.folders if self.cgroup is not None else self.no_cgroup,
        }


def main(fd: int) -> None:
    client = socket.socket(fileno=fd)
    (size,) = LENGTH.unpack(client.recv(LENGTH.size, socket.MSG_WAITALL))
    config = json.loads(client.recv(size, socket.MSG_WAITALL))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    broker = Broker(client, config)
    try:
        broker.run()
    except PeerGone:
        pass
    except Fatal as error:
        broker.link.say_last(error.reply)
    except Exception as error:
        # A fault of ours: whoever waits for an answer learns what it was.
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__} in {os.path.basename(where.filename)}, line {where.lineno}: {error}"
        traceback.print_exc(file=sys.stderr)
        broker.link.say_last(Fatal(f"a fault of the broker: {reason}").reply)
    finally:
        broker.forks.close()
        broker.folders.close()
        if broker.cgroup is not None:
            cgroup.remove(broker.cgroup.folders, _CGROUP_SECONDS)
