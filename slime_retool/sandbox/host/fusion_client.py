"""`run` against a SandboxFusion deployment, or `slime-retool sandbox serve`, instead of a jail on this machine."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from slime_retool.errors import ConfigError
from slime_retool.sandbox.child import semantics
from slime_retool.sandbox.host.policy import Result, SandboxPolicy, Status, check_limit
from slime_retool.sandbox.host.sandbox import check_arguments, refusal

_REPLY_GRACE = 30.0
"""Seconds beyond a program's own limit for the server to queue it and to answer."""
_MAX_REPLY = 64 << 20
_CHUNK = 1 << 20


class FusionSandbox:
    """Same `run` and the same `Result` as `Sandbox`; limits other than time, memory and code are the server's.

    token: sent as `Authorization: Bearer`, for a server that asks for one.

    async with FusionSandbox("http://sandbox:8080") as box:
        result = await box.run("print(6 * 7)", timeout=5)
    """

    def __init__(self, url: str, policy: SandboxPolicy | None = None, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the sandbox's URL must start with http:// or https://, got {url!r}")
        self.policy = policy or SandboxPolicy()
        self._url = url.rstrip("/").removesuffix("/run_code") + "/run_code"
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._slots = asyncio.Semaphore(self.policy.concurrency)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> FusionSandbox:
        # The policy's concurrency is the limit; aiohttp's own would count waiting as run time.
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=self._headers)
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
        check_limit("timeout", limit, whole=False)
        check_arguments(code, seed, stdin, files or {}, fetch_files, self.policy)
        nonce = secrets.token_hex(16)
        program = _wrapped(code, seed, nonce, self.policy, has_stdin=stdin is not None)
        too_large = refusal(program, stdin, files or {}, self.policy)
        if too_large is not None:
            return too_large
        body = {
            "code": program,
            "language": "python",
            "run_timeout": limit,
            "memory_limit_MB": self.policy.memory_mb,
            "stdin": None if stdin is None else stdin.encode("utf-8", "replace").decode(),
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
                    data = await _read(response)
                    if response.status != 200:
                        text = (data or b"")[:300].decode("utf-8", "replace")
                        return _outage(f"{self._url} answered {response.status}: {text}", waited)
                    if data is None:
                        error = f"the program's output and files are more than {_MAX_REPLY >> 20} MB"
                        return Result(Status.ERROR, error=error, queue_s=waited, limit="output", truncated=True)
                    return from_response(json.loads(data), nonce, waited, limit, fetch_files)
            except _FAULTS as error:
                return _outage(f"{self._url}: {type(error).__name__}: {error}", waited)


_FAULTS = (
    aiohttp.ClientError,
    asyncio.TimeoutError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Of the network, or of a server that does not speak the protocol."""


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    """The body; None if it is longer than one is read."""
    data = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        data += chunk
        if len(data) > _MAX_REPLY:
            return None
    return bytes(data)


_SEMANTICS = Path(semantics.__file__).read_text(encoding="utf-8")
_PROGRAM = """
import json, random, sys
semantics = {{"__name__": "__main__"}}
exec(compile({semantics!r}, "<semantics>", "exec"), semantics)
random.seed({seed!r})
namespace = semantics["main_module"]()
if {has_stdin}:
    semantics["allow_input"]()
outcome = semantics["run"]({code!r}, "<string>", namespace, {limit}, {memory_mb})._asdict()
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


def from_response(
    body: Mapping[str, Any], nonce: str, waited: float, limit: float, fetched: tuple[str, ...] = ()
) -> Result:
    """A SandboxFusion response as a `Result`. `Failed` says that the program failed, `SandboxError` that the sandbox
    did.

    What the program can shape makes an error of its own at worst. Raises one of `_FAULTS` on what only the server can.
    """
    run = body.get("run_result")
    if body["status"] == "SandboxError" or run is None or run["status"] == "Error":
        return _outage(body.get("message") or "the server could not run the program and gave no reason", waited)
    stderr, found, rest = _text(run, "stderr").partition(nonce)
    contents = body.get("files") or {}
    seconds = float(run.get("execution_time") or 0.0)
    result = Result(
        Status.OK,
        _text(run, "stdout"),
        stderr,
        wall_s=seconds if math.isfinite(seconds) else 0.0,
        queue_s=waited,
        files={name: base64.b64decode(contents[name], validate=True) for name in fetched if name in contents},
    )
    if run["status"] == "TimeLimitExceeded":
        error = f"TimeoutError: the code ran longer than {limit:g} s and was stopped"
        return replace(result, status=Status.TIMEOUT, error=error, limit="wall")
    code = run.get("return_code")
    if not isinstance(code, (int, type(None))):
        raise TypeError(f"return_code {code!r}")
    if not found:
        return _without_report(result, code)
    try:
        report, end = json.JSONDecoder().raw_decode(rest)
        outcome = _checked(report)
    except (ValueError, TypeError, RecursionError):  # the code wrote it, or made it be cut
        error = "the code interfered with the report of its end"
        return replace(result, status=Status.ERROR, stderr=stderr, error=error)
    status = Status.OK if outcome.error is None else Status.MEMORY if outcome.limit == "memory" else Status.ERROR
    stderr += rest[end:].removeprefix("\n")  # what threads and exit functions wrote
    return replace(result, status=status, stderr=stderr, **outcome._asdict())


def _without_report(result: Result, code: int | None) -> Result:
    """The process ended without the end of the code."""
    if code == 0:
        return replace(result, exit_code=0)  # it left by os._exit(0)
    if code is None or code > 0:
        return replace(result, status=Status.ERROR, error=f"the program ended with exit code {code}", exit_code=code)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return replace(result, status=Status.KILLED, error=f"the process was ended by {name}", exit_code=code)


def _text(run: Mapping[str, Any], name: str) -> str:
    value = run.get(name)
    if not isinstance(value, (str, type(None))):
        raise TypeError(f"{name} is no text")
    return value or ""


def _checked(report: Any) -> semantics.Outcome:
    """Raises TypeError on what `semantics.run` does not return."""
    outcome = semantics.Outcome(**report)
    texts = (outcome.error, outcome.limit, outcome.result)
    if not all(isinstance(text, (str, type(None))) for text in texts):
        raise TypeError("a text is none")
    if outcome.exit_code is not None and type(outcome.exit_code) is not int:
        raise TypeError("an exit code is no number")
    return outcome
