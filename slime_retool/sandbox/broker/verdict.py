"""What a call's end means: by a child's answer, or by how its process ended."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from . import output
from .notify import MAX_QUESTIONS
from .records import Child, Job

Limits = dict[str, Any]
_OF_THE_CHILD = ("error", "result", "exit_code", "max_rss", "files")


def completed(child: Child, job: Job, answer: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The child answered: the code ran to its end or raised."""
    cpu = child.cpu_seconds()  # at once: it may be ending
    error, limit = answer["error"], answer["limit"]
    result = _collect(child, job, answer["written"], cpu, limits)
    result["limit"] = limit or result["limit"]
    result["status"] = "ok" if error is None else "memory" if limit == "memory" else "error"
    for key in _OF_THE_CHILD:
        result[key] = answer[key]
    return result


def ended(child: Child, job: Job, status: int, cpu: float, rss: int, limits: Limits) -> dict[str, Any]:
    """The process ended without an answer, with this wait status.

    SIGKILL that we did not send: the code cannot send it to itself (see `seccomp`), so it is an outage unless
    `child.killed` says "oom".
    """
    result = _collect(child, job, [None, None], cpu, limits)
    verdict, error, limit = _reason(child.killed, job.request, status, limits)
    if child.killed is None:
        result["exit_code"] = os.waitstatus_to_exitcode(status)
    return result | {"status": verdict, "error": error, "max_rss": rss, "limit": limit or result["limit"]}


def restarted(status: str, error: str | None) -> dict[str, Any]:
    """Status and error of a cell whose session goes on without its process."""
    note = "The session was restarted: variables of earlier cells are gone."
    error = f"{error or 'the process ended with exit code 0'}\n{note}"
    return {"status": "error" if status == "ok" else status, "error": error}


def between_cells(child: Child, status: int, limits: Limits) -> dict[str, Any]:
    """For the cell that was to run next in the process of a session, which ended with this wait status."""
    verdict, error, limit = _reason(child.killed, {}, status, limits)
    error = f"{error or 'the process ended with exit code 0'}, after an earlier cell: this one was not run"
    return restarted(verdict, error) | {"limit": limit}


def _collect(child: Child, job: Job, written: list[int | None], cpu: float, limits: Limits) -> dict[str, Any]:
    """Output, and times until now. `cpu`: seconds of its process so far."""
    wall = time.monotonic() - job.started
    out, out_cut = output.take(child.out, limits["max_output_bytes"], written[0])
    err, err_cut = output.take(child.err, limits["max_output_bytes"], written[1])
    cut = out_cut or err_cut
    return {
        "stdout": out,
        "stderr": err,
        "truncated": cut,
        "limit": "output" if cut else None,
        "wall_s": wall,
        "cpu_s": max(0.0, cpu - job.cpu_before),
    }


def _reason(
    killed: str | None, request: dict[str, Any], status: int, limits: Limits
) -> tuple[str, str | None, str | None]:
    """(status, error, limit). `request`: of the call that ran; empty between two, when no time limit is passed."""
    wall, cpu = request.get("timeout", 0.0), request.get("cpu", 0.0)
    disk = f"{limits['max_disk_mb']} MB or {limits['max_inodes']} files"
    outage = "sandbox unavailable: "
    reasons = {
        "timeout": ("timeout", f"TimeoutError: the code ran longer than {wall:g} s and was stopped", "wall"),
        "cpu": ("timeout", f"TimeoutError: the code used more than {cpu:g} s of CPU time and was stopped", "cpu"),
        "disk": ("killed", f"the code wrote more than {disk}", "disk"),
        "memory": ("memory", "the code used more memory for page tables than its limit leaves", "memory"),
        "threads": ("killed", f"the code started more than {limits['max_threads']} threads", "threads"),
        "questions": (
            "killed",
            f"the code asked for pipes, or for threads beyond its limit, more than {MAX_QUESTIONS:,} times",
            "threads",
        ),
        "protocol": ("killed", "the code interfered with the process that runs it and was stopped", None),
        "leader": ("killed", "the code ended the first thread of its process and went on in another", None),
        "oom": ("memory", "the kernel ended the process (SIGKILL): memory ran out", "memory"),
        "outside": ("unavailable", f"{outage}the process was ended from outside (SIGKILL)", None),
        "zygote": ("unavailable", f"{outage}the zygote ended during the call", None),
        "cancelled": ("unavailable", f"{outage}cancelled", None),
        "closed": ("unavailable", f"{outage}the session was closed during the call", None),
    }
    return reasons[killed] if killed in reasons else _reason_of_status(status)


def _reason_of_status(status: int) -> tuple[str, str | None, str | None]:
    if not os.WIFSIGNALED(status):
        code = os.waitstatus_to_exitcode(status)
        return ("error", f"the program ended with exit code {code}", None) if code else ("ok", None, None)
    number = os.WTERMSIG(status)
    if number == signal.SIGKILL:
        return "memory", "the kernel ended the process (SIGKILL), most likely because memory ran out", "memory"
    if number == signal.SIGSYS:
        return "killed", "the process was ended for a system call of another architecture (SIGSYS)", None
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = ": a crash in native code, often by very deep recursion" if number == signal.SIGSEGV else ""
    return "killed", f"the process was ended by {name}{hint}", None
