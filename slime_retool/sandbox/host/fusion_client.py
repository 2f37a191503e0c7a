"""`run` against a SandboxFusion deployment, or `slime-retool sandbox serve`, instead of a jail on this machine."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from slime_retool.errors import ConfigError
from slime_retool.sandbox.child import semantics
from slime_retool.sandbox.host.policy import Result, SandboxPolicy, Status

_REPLY_GRACE = 30.0
"""Seconds beyond a program's own limit for the server to queue it and to answer."""


class FusionSandbox:
    """Same `run` and the same `Result` as `Sandbox`; limits other than time and memory are the server's.

    async with FusionSandbox("http://sandbox:8080") as box:
        result = await box.run("print(6 * 7)", timeout=5)
    """

    def __init__(self, url: str, policy: SandboxPolicy | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the sandbox's URL must start with http:// or https://, got {url!r}")
        self.policy = policy or SandboxPolicy()
        self._url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self._slots = asyncio.Semaphore(self.policy.concurrency)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> FusionSandbox:
        # The policy's concurrency is the limit; aiohttp's own would count waiting as run time.
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def run(
        self,
        code: str,
        *,
        timeout: float | None = None,
        seed: int | None = None,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: tuple[str, ...] = (),
    ) -> Result:
        """As `Sandbox.run`: the protocol knows neither seed nor echo, so they travel with the code (see `_wrapped`)."""
        assert self._http is not None, "enter the sandbox with `async with` before running code"
        limit = self.policy.timeout if timeout is None else timeout
        nonce = secrets.token_hex(16)
        body = {
            "code": _wrapped(code, seed, nonce, self.policy, has_stdin=stdin is not None),
            "language": "python",
            "run_timeout": limit,
            "memory_limit_MB": self.policy.memory_mb,
            "stdin": stdin,
            "files": {name: base64.b64encode(data).decode() for name, data in (files or {}).items()},
            "fetch_files": list(fetch_files),
        }
        queued = time.monotonic()
        async with self._slots:
            waited = time.monotonic() - queued
            try:
                async with self._http.post(
                    self._url, json=body, timeout=aiohttp.ClientTimeout(total=limit + _REPLY_GRACE)
                ) as response:
                    if response.status != 200:
                        return _outage(
                            f"{self._url} answered {response.status}: {(await response.text())[:300]}", waited
                        )
                    return from_response(await response.json(), nonce, waited, limit)
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
                return _outage(f"{self._url}: {type(error).__name__}: {error}", waited)


_SEMANTICS = Path(semantics.__file__).read_text(encoding="utf-8")
_PROGRAM = """
import json, random, sys
semantics = {{"__name__": "__main__"}}
exec(compile({semantics!r}, "<semantics>", "exec"), semantics)
random.seed({seed!r})
namespace = semantics["main_module"]()
if {has_stdin}:
    semantics["allow_input"]()
outcome = semantics["run"]({code!r}, "<string>", namespace, {limit}, {memory_mb})
sys.__stdout__.flush()
sys.__stderr__.flush()
report = {nonce!r} + json.dumps(outcome, ensure_ascii=False) + "\\n"
written = sys.__stderr__.buffer.write(report.encode("utf-8", "backslashreplace"))
"""
_REPORT_SHARE = 16
"""The echoed value's characters, of which the report makes up to six bytes each, as a share of the output that is kept:
of stderr, servers cut out the middle, and the report has to be in its last half."""


def _wrapped(code: str, seed: int | None, nonce: str, policy: SandboxPolicy, *, has_stdin: bool) -> str:
    """A program that gives `code` the semantics it has in the jail and reports its end after `nonce` on stderr."""
    return _PROGRAM.format(
        semantics=_SEMANTICS,
        code=code,
        seed=seed,
        has_stdin=has_stdin,
        nonce=nonce,
        limit=max(1, policy.max_output_bytes // _REPORT_SHARE),
        memory_mb=policy.memory_mb,
    )


def _outage(why: str, waited: float) -> Result:
    return Result(Status.UNAVAILABLE, error=f"sandbox unavailable: {why}", queue_s=waited)


def from_response(body: Mapping[str, Any], nonce: str, waited: float, limit: float) -> Result:
    """A SandboxFusion response as a `Result`. `Failed` says that the program failed, `SandboxError` that the sandbox
    did."""
    run = body.get("run_result")
    if body["status"] == "SandboxError" or run is None or run["status"] == "Error":
        return _outage(body.get("message") or "the server could not run the program and gave no reason", waited)
    stderr, found, report = (run.get("stderr") or "").partition(nonce)
    files = {name: base64.b64decode(data) for name, data in (body.get("files") or {}).items()}
    result = Result(
        Status.OK,
        run.get("stdout") or "",
        stderr,
        wall_s=float(run.get("execution_time") or 0.0),
        queue_s=waited,
        files=files,
    )
    if run["status"] == "TimeLimitExceeded":
        error = f"TimeoutError: the code ran longer than {limit:g} s and was stopped"
        return replace(result, status=Status.TIMEOUT, error=error, limit="wall")
    if not found:
        code = run.get("return_code")
        if code == 0:
            return result  # it left by os._exit(0)
        return replace(result, status=Status.ERROR, error=f"the program ended with exit code {code}")
    (error, reached, value), end = json.JSONDecoder().raw_decode(report)
    stderr += report[end:].removeprefix("\n")  # what threads and exit functions wrote
    status = Status.OK if error is None else Status.MEMORY if reached == "memory" else Status.ERROR
    return replace(result, status=status, stderr=stderr, error=error, limit=reached, result=value)
