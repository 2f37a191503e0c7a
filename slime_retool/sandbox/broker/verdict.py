"""What a call's end means: by a child's answer, or by how its process ended."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from . import output
from .records import Child, Job

Limits = dict[str, Any]


def completed(child: Child, job: Job, answer: dict[str, Any], cpu: float, limits: Limits) -> dict[str, Any]:
    """The child answered: the code ran to its end or raised. `cpu`: seconds of its process so far."""
    result = _collect(child, answer["written"], limits)
    error, limit = answer["error"], answer["limit"]
    result["limit"] = limit or result["limit"]
    return result | {
        "status": "ok" if error is None else "memory" if limit == "memory" else "error",
        "error": error,
        "result": answer["result"],
        "wall_s": min(answer["wall"], time.monotonic() - job.started),
        "cpu_s": max(0.0, cpu - job.cpu_before),
        "max_rss": answer["max_rss"],
        "files": answer["files"],
    }


def ended(child: Child, job: Job, status: int, cpu: float, rss: int, limits: Limits) -> dict[str, Any]:
    """The process ended without an answer, with this wait status."""
    result = _collect(child, [None, None], limits)
    verdict, error = _reason(child, job, status, limits)
    if child.killed is None and os.WIFEXITED(status):
        result["exit_code"] = os.WEXITSTATUS(status)
    limit = {"timeout": "wall", "cpu": "cpu", "disk": "disk"}.get(child.killed or "")
    result["limit"] = limit or ("memory" if verdict == "memory" else result["limit"])
    return result | {
        "status": verdict,
        "error": error,
        "result": None,
        "wall_s": time.monotonic() - job.started,
        "cpu_s": max(0.0, cpu - job.cpu_before),
        "max_rss": rss,
    }


def _collect(child: Child, written: list[int | None], limits: Limits) -> dict[str, Any]:
    out, out_cut = output.take(child.out, limits["output"], written[0])
    err, err_cut = output.take(child.err, limits["output"], written[1])
    cut = out_cut or err_cut
    return {"stdout": out, "stderr": err, "truncated": cut, "limit": "output" if cut else None}


def _reason(child: Child, job: Job, status: int, limits: Limits) -> tuple[str, str | None]:
    """(status, error)"""
    if child.killed == "timeout":
        return "timeout", f"TimeoutError: the code ran longer than {job.request['timeout']:g} s and was stopped"
    if child.killed == "cpu":
        seconds = job.request["cpu"]
        return "timeout", f"TimeoutError: the code used more than {seconds:g} s of CPU time and was stopped"
    if child.killed == "disk":
        return "killed", f"the code wrote more than {limits['scratch_mb']} MB or {limits['inodes']} files"
    if child.killed == "protocol":
        return "killed", "the code interfered with the process that runs it and was stopped"
    outages = {
        "zygote": "the zygote ended during the call",
        "cancelled": "cancelled",
        "closed": "the session was closed during the call",
    }
    if child.killed in outages:
        return "unavailable", f"sandbox unavailable: {outages[child.killed]}"
    return _reason_of_status(status)


def _reason_of_status(status: int) -> tuple[str, str | None]:
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
