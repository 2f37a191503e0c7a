"""An HTTP server that speaks SandboxFusion's `/run_code`, over a jail: `slime-retool sandbox serve`.

Request: `code, language, compile_timeout, run_timeout, memory_limit_MB, stdin, files, fetch_files` (files as base64 by
path). Response: `status, message, compile_result, run_result {status, execution_time, return_code, stdout, stderr},
executor_pod_name, files`. Python only. There is no authentication: bind it to a loopback or private address.
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from slime_retool.sandbox.host.policy import Result, SandboxPolicy, Status
from slime_retool.sandbox.host.sandbox import Sandbox

_MAX_REQUEST = 64 << 20
_FIELDS = set("code language compile_timeout run_timeout memory_limit_MB stdin files fetch_files".split())
_BOX = web.AppKey("box", Sandbox)


class BadRequest(ValueError):
    """A request that cannot be served; the message names the field."""


def make_app(policy: SandboxPolicy | None = None) -> web.Application:
    """The application; its sandbox starts and ends with it."""
    app = web.Application(client_max_size=_MAX_REQUEST)
    app.router.add_post("/run_code", _run_code)
    app.router.add_get("/v1/ping", _ping)

    async def sandbox(app: web.Application) -> AsyncIterator[None]:
        async with Sandbox(policy) as box:
            app[_BOX] = box
            yield

    app.cleanup_ctx.append(sandbox)
    return app


def serve(host: str = "127.0.0.1", port: int = 8080, policy: SandboxPolicy | None = None) -> None:
    """Serve until interrupted. Raises SandboxUnavailable where the policy's isolation level cannot be had."""
    web.run_app(make_app(policy), host=host, port=port, print=None)


async def _ping(_: web.Request) -> web.Response:
    return web.json_response("pong")


async def _run_code(request: web.Request) -> web.Response:
    box = request.app[_BOX]
    try:
        arguments = _arguments(await request.json(), box.policy)
    except ValueError as error:
        detail = str(error) if isinstance(error, BadRequest) else "the body must be JSON"
        return web.json_response({"detail": detail}, status=422)
    return web.json_response(to_response(await box.run(**arguments)))


def _arguments(body: Any, policy: SandboxPolicy) -> dict[str, Any]:
    """Keyword arguments of `Sandbox.run`."""
    if not isinstance(body, Mapping) or not isinstance(body.get("code"), str):
        raise BadRequest("the body must be an object with a string `code`")
    unknown = sorted(set(body) - _FIELDS)
    if unknown:
        raise BadRequest(f"unknown fields {', '.join(unknown)}; known are {', '.join(sorted(_FIELDS))}")
    language = body.get("language", "python")
    if language != "python":
        raise BadRequest(f"language must be 'python', got {language!r}")
    timeout = body.get("run_timeout") or policy.timeout
    if not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise BadRequest(f"run_timeout must be a number of seconds above 0, got {timeout!r}")
    memory = body.get("memory_limit_MB")
    if not isinstance(memory, (int, type(None))):
        raise BadRequest(f"memory_limit_MB must be an integer, got {memory!r}")
    if memory is not None and memory > policy.memory_mb:
        raise BadRequest(f"memory_limit_MB may be at most this server's {policy.memory_mb}, got {memory}")
    try:
        files = {
            str(name): base64.b64decode(content, validate=True)
            for name, content in (body.get("files") or {}).items()
            if content is not None
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise BadRequest(f"files must map paths to base64: {error}") from None
    stdin, fetched = body.get("stdin"), body.get("fetch_files") or []
    if stdin is not None and not isinstance(stdin, str):
        raise BadRequest(f"stdin must be text, got {stdin!r}")
    if not isinstance(fetched, list) or not all(isinstance(name, str) for name in fetched):
        raise BadRequest(f"fetch_files must be a list of paths, got {fetched!r}")
    return {
        "code": body["code"],
        "timeout": float(timeout),
        "stdin": stdin,
        "files": files,
        "fetch_files": tuple(fetched),
        "memory_mb": memory if memory is not None and memory > 0 else None,
    }


_RUN_STATUS = {Status.TIMEOUT: "TimeLimitExceeded", Status.UNAVAILABLE: "Error"}


def to_response(result: Result) -> dict[str, Any]:
    """The SandboxFusion response. `Failed` means that the program failed, `SandboxError` that the sandbox did."""
    status = {Status.OK: "Success", Status.UNAVAILABLE: "SandboxError"}.get(result.status, "Failed")
    stdout = result.stdout + (f"{result.result}\n" if result.result is not None else "")
    error = f"{result.error}\n" if result.error else ""
    stderr = result.stderr + ("\n" if result.stderr and error and not result.stderr.endswith("\n") else "") + error
    run_result = {
        "status": _RUN_STATUS.get(result.status, "Finished"),
        "execution_time": result.wall_s,
        "return_code": None if result.status is Status.TIMEOUT else result.exit_code or int(status != "Success"),
        "stdout": stdout,
        "stderr": stderr,
    }
    return {
        "status": status,
        "message": result.error or "" if status == "SandboxError" else "",
        "compile_result": None,
        "run_result": None if status == "SandboxError" else run_result,
        "executor_pod_name": f"{socket.gethostname()}:{os.getpid()}",
        "files": {name: base64.b64encode(data).decode() for name, data in result.files.items()},
    }
