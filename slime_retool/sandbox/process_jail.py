"""Isolation level `none`: each call is a supervisor process (`jail/supervisor.py`) and, below it, the code's own
process.

The supervisor keeps time, reads output with a bound, ends every descendant and answers with one JSON document, so that
floods, floods of children and large replies cost the event loop here nothing. See `SandboxPolicy.isolation` for what
this level does not protect against.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime_retool.errors import ConfigError
from slime_retool.sandbox.jail.supervisor import STARTED
from slime_retool.sandbox.policy import Call, Result, SandboxPolicy, SandboxUnavailable, Status

_BOOT = str(Path(__file__).with_name("jail") / "boot.py")
# Beyond the code's own limit: the supervisor's time to kill descendants, drain pipes and answer.
_REPLY_GRACE = 15.0
_KILL_GRACE = 5.0


class ProcessJail:
    """Starts one supervisor per call. `open` before the first call, `close` after the last."""

    def __init__(self, policy: SandboxPolicy) -> None:
        self._policy = policy
        self._root: str | None = None
        self._count = 0
        self._slots = asyncio.Semaphore(policy.concurrency)
        self._calls: set[asyncio.Task[Result]] = set()

    async def open(self) -> None:
        try:
            self._root = tempfile.mkdtemp(prefix="slime-retool-sandbox-")
        except OSError as error:
            raise SandboxUnavailable(
                f"the sandbox needs a folder under {tempfile.gettempdir()}: {error}; set TMPDIR"
            ) from error

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._root is not None:
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)
            self._root = None

    async def execute(self, call: Call) -> Result:
        """Run one call to its end; cancelling kills it with all its descendants before CancelledError goes on."""
        if call.stdin is not None or call.files or call.fetch_files or call.memory_mb is not None:
            raise ConfigError("stdin, files and memory_mb of a call need sandbox isolation 'namespaces' or 'landlock'")
        task = asyncio.ensure_future(self._take_turn(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await task

    async def stats(self) -> dict[str, Any]:
        return {"calls": len(self._calls)}

    async def _take_turn(self, call: Call) -> Result:
        queued = time.monotonic()
        if len(self._calls) > self._policy.concurrency + self._policy.max_queue:
            return _unavailable(f"the queue is full ({self._policy.max_queue} calls wait); send fewer at once")
        async with self._slots:
            waited = time.monotonic() - queued
            result = await self._run(call.code, call.timeout, call.seed)
        return replace(result, queue_s=waited, limit=result.limit or ("output" if result.truncated else None))

    async def _run(self, code: str, timeout: float, seed: int | None) -> Result:
        assert self._root is not None, "enter the sandbox with `async with` before running code"
        self._count += 1
        scratch = os.path.join(self._root, str(self._count))
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                _BOOT,
                "supervisor",
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                cwd="/",
                env=_environment(scratch),
                start_new_session=True,
            )
        except OSError as error:
            return _unavailable(f"cannot start {sys.executable}: {error}")
        output = bytearray()
        stalled = False
        try:
            request = self._request(code, timeout, seed, scratch)
            started = await _within(self._start(process, request, output), self._policy.startup_timeout)
            stalled = not (started and await _within(self._read(process, output), timeout + _REPLY_GRACE))
        finally:
            await _finish(process, scratch)
        return _read_reply(bytes(output), stalled)

    def _request(self, code: str, timeout: float, seed: int | None, scratch: str) -> bytes:
        policy = self._policy
        request = {
            "code": code,
            "timeout": timeout,
            "seed": seed,
            "scratch": scratch,
            "packages": _package_folders(),
            "memory": policy.memory_mb << 20,
            "file_size": policy.max_file_mb << 20,
            "open_files": policy.max_open_files,
            "processes": policy.max_processes,
            "output": policy.max_output_bytes,
        }
        return json.dumps(request).encode() + b"\n"

    async def _start(self, process: Process, request: bytes, output: bytearray) -> None:
        """Send the request and read until the code's process runs."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it ended early; its last words are in stdout
        # Input stays open: its end tells the supervisor that we are gone.
        while STARTED not in output and (chunk := await process.stdout.read(4096)):
            output += chunk

    async def _read(self, process: Process, output: bytearray) -> None:
        assert process.stdout is not None
        # A reply is two outputs, a result and a traceback, in JSON's ASCII (at most 6 bytes for one).
        limit = 32 * self._policy.max_output_bytes + (1 << 20)
        while len(output) < limit and (chunk := await process.stdout.read(65_536)):
            output += chunk


async def _within(work: Coroutine[Any, Any, Any], seconds: float) -> bool:
    """Whether `work` ended in time. (`asyncio.wait_for` of Python 3.11 and older can swallow a cancellation.)"""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    if task.done():
        task.result()
    return task.done()


async def _finish(process: Process, scratch: str) -> None:
    """End the supervisor, whatever its state; a cancellation of the caller does not cut this short."""
    ending = asyncio.ensure_future(_end(process, scratch))
    cancelled = False
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    ending.result()


async def _end(process: Process, scratch: str) -> None:
    assert process.stdin is not None
    # The supervisor takes it as the order to kill its descendants and leave.
    process.stdin.close()
    if not await _within(process.wait(), _KILL_GRACE):
        process.kill()  # the code's process follows by its parent-death signal
        await process.wait()
    if process.returncode != 0:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)


def _environment(scratch: str) -> dict[str, str]:
    """All the variables the code sees; none is ours."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": scratch,
        "TMPDIR": scratch,
        "MPLBACKEND": "Agg",
        **threads,
    }


def _package_folders() -> list[str]:
    """Where packages are installed. Start-up skips `site` (and the .pth files it runs), so they are named."""
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def _unavailable(why: str) -> Result:
    return Result(Status.UNAVAILABLE, error=f"sandbox unavailable: {why}")


def _read_reply(output: bytes, stalled: bool) -> Result:
    """The supervisor's answer, or what its silence means."""
    head, started, reply = output.partition(STARTED)
    if not started:
        last_words = head[-500:].decode("utf-8", "replace").strip()
        return _unavailable(f"the supervisor did not start ({last_words or 'no message'})")
    try:
        answer: dict[str, Any] = json.loads(reply)
    except ValueError:
        # The code stopped its supervisor, or killed it.
        status = Status.TIMEOUT if stalled else Status.KILLED
        return Result(status, error="the program ended together with its supervisor")
    answer["status"] = Status(answer["status"])
    return Result(**answer)
