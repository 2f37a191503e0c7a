"""An HTTP server that speaks SandboxFusion's `/run_code`, over a jail: `slime-retool sandbox serve`.

Request: `code, language, compile_timeout, run_timeout, memory_limit_MB, stdin, files, fetch_files` (files as base64 by
path). Response: `status, message, compile_result, run_result {status, execution_time, return_code, stdout, stderr},
executor_pod_name, files`. Python only. Where it is stricter than SandboxFusion: docs/sandbox.md.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from slime_retool.sandbox.host.policy import MAX_TIMEOUT, Result, SandboxPolicy, Status, check_limit
from slime_retool.sandbox.host.sandbox import Sandbox

T = TypeVar("T")

_SHUTDOWN_SECONDS = 0.1
"""After which requests that still run are cancelled, once the server is to end."""
_FIELDS = set("code language compile_timeout run_timeout memory_limit_MB stdin files fetch_files".split())
_MAX_HELD = 256 << 20
"""Bytes of bodies at once: each is in memory some four times over, as text, decoded and on its way to the call."""
_ESCAPED = 6
"""Bytes of JSON for one of text, at most."""
_FILES = "an object: files must map paths to base64"
_SHOWN = 80
"""Bytes of a wrong value that are shown."""
# Nothing below the first level is made into an object before its type is known: a body of 36 MB with 12 million lists
# takes 0.07 s this way, and several seconds as Python's own json reads it.
_BODY = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BadRequest(ValueError):
    """A request that cannot be served; the message names the field."""


class Refused(Exception):
    """A request that is not looked at: the HTTP status and why."""


@dataclass(frozen=True)
class Access:
    """Who may call. Browsers are refused whatever page they show: no page is this server's own."""

    host: str = "127.0.0.1"
    """Address that is listened on. On a loopback one, requests for another host's name are refused: the name was made
    to point here."""
    token: str | None = None
    """What `Authorization: Bearer` has to hold."""

    def check(self, request: web.Request) -> None:
        """Raises Refused."""
        if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") != "none":
            raise Refused(403, "requests of web pages are refused")
        if _is_loopback(self.host) and not _is_local(request.headers.get("Host", "localhost")):
            raise Refused(403, "the Host header must be localhost or an address: this server listens on a loopback one")
        if self.token is not None:
            given = request.headers.get("Authorization", "").encode("utf-8", "replace")
            if not secrets.compare_digest(given, f"Bearer {self.token}".encode()):
                raise Refused(401, "the header `Authorization: Bearer TOKEN` with this server's token is missing")


def _is_local(name: str) -> bool:
    name = re.sub(r":\d*$", "", name)
    return name.lower() == "localhost" or _is_address(name.strip("[]"))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


class _Server:
    def __init__(self, policy: SandboxPolicy, max_timeout: float, access: Access) -> None:
        check_limit("max_timeout", max_timeout, whole=False)
        self._policy, self._max_timeout, self._access = policy, max_timeout, access
        self._box = Sandbox(policy)
        self._longest = _ESCAPED * policy.max_code_bytes + 2 * (policy.max_disk_mb << 20)
        self._most_held = max(_MAX_HELD, self._longest)
        self._held = 0
        """Bytes of bodies that are read, and of those whose calls wait or run."""

    def application(self) -> web.Application:
        # Otherwise a refused body is decompressed too, of which a few MB make gigabytes.
        app = web.Application(handler_args={"auto_decompress": False})
        app.router.add_post("/run_code", self._run_code, expect_handler=_expect)
        app.router.add_get("/v1/ping", _ping, expect_handler=_expect)
        app.router.register_resource(rest := _Anything("/"))
        rest.add_route("*", _not_found, expect_handler=_expect)
        app.cleanup_ctx.append(self._sandbox)
        return app

    async def _sandbox(self, _: web.Application) -> AsyncIterator[None]:
        async with self._box:
            yield

    async def _run_code(self, request: web.Request) -> web.Response:
        try:
            self._access.check(request)
            _check_kind(request)
            async with self._body(request) as body:
                result = await self._box.run(**self._arguments(body), echo=False)
        except Refused as refusal:
            status, why = refusal.args
            return web.json_response({"detail": why}, status=status)
        except (BadRequest, web.RequestPayloadError) as error:
            return web.json_response({"detail": str(error)}, status=422)
        return web.json_response(to_response(result))

    @contextlib.asynccontextmanager
    async def _body(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body, whose bytes count as held until its call has ended. Raises Refused."""
        body, size = bytearray(), 0
        try:
            async for chunk in request.content.iter_any():
                size += len(chunk)
                self._held += len(chunk)
                if size > self._longest:
                    raise Refused(413, f"the body may be at most {self._longest} bytes")
                if self._held > self._most_held:
                    held = f"the bodies of the calls that wait or run pass {self._most_held >> 20} MB"
                    raise Refused(503, f"{held}; send fewer large ones at once")
                body += chunk
            yield bytes(body)
        finally:
            self._held -= size

    def _arguments(self, data: bytes) -> dict[str, Any]:
        """Keyword arguments of `Sandbox.run`. Raises BadRequest."""
        body = _object(data)
        unknown = sorted(set(body) - _FIELDS)
        if unknown:
            raise BadRequest(f"unknown fields {', '.join(unknown)[:_SHOWN]}; known are {', '.join(sorted(_FIELDS))}")
        code = _field(body, "code", str, "text")
        if code is None:
            raise BadRequest("the body must be an object with a string `code`")
        language = _field(body, "language", str, "'python'")
        if language not in (None, "python"):
            raise BadRequest(f"language must be 'python', got {language[:_SHOWN]!r}")
        timeout = _field(body, "run_timeout", float, "a number of seconds")
        timeout = self._policy.timeout if timeout is None else timeout
        if not 0 < timeout <= self._max_timeout:
            raise BadRequest(
                f"run_timeout must be a number of seconds above 0 and at most this server's {self._max_timeout:g} "
                f"(its --max-timeout), got {timeout:g}"
            )
        memory, most = _field(body, "memory_limit_MB", int, "an integer"), self._policy.memory_mb
        if memory is not None and memory > most:
            asked = _shown(bytes(body["memory_limit_MB"]))
            raise BadRequest(f"memory_limit_MB may be at most this server's {most} (its --memory-mb), got {asked}")
        fetched = _field(body, "fetch_files", list[str], "a list of paths") or []
        if len(fetched) > self._policy.max_inodes:
            raise BadRequest(f"fetch_files may be at most {self._policy.max_inodes}, got {len(fetched)}")
        return {
            "code": code,
            "timeout": timeout,
            # A program without input finds its end, as with SandboxFusion, and not a refusal.
            "stdin": _field(body, "stdin", str, "text") or "",
            "files": _decoded(_field(body, "files", dict[str, str | None], _FILES)),
            "fetch_files": tuple(fetched),
            "memory_mb": memory if memory is not None and memory > 0 else None,
        }


async def _ping(_: web.Request) -> web.Response:
    return web.json_response("pong")


async def _not_found(_: web.Request) -> web.Response:
    return web.json_response({"detail": "there are POST /run_code and GET /v1/ping"}, status=404)


class _Anything(web.PlainResource):
    """Every path, and what is none, as in `OPTIONS *`, which no pattern matches."""

    def _match(self, path: str) -> dict[str, str] | None:
        return {}


async def _expect(request: web.Request) -> web.Response | None:
    """aiohttp's own fails on what is no text."""
    if request.headers["Expect"].lower() != "100-continue":
        return web.json_response({"detail": "Expect may only be 100-continue"}, status=417)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
    return None


def _check_kind(request: web.Request) -> None:
    """A page can send a form to any address; JSON, only where the server agrees. Raises Refused."""
    if request.content_type != "application/json":
        raise Refused(415, f"Content-Type must be application/json, got {request.content_type[:_SHOWN]}")
    if "Content-Encoding" in request.headers:
        raise Refused(415, "the body must not be compressed")
    charset = request.charset or "utf-8"
    if charset.lower() not in ("utf-8", "utf8", "us-ascii", "ascii"):
        raise Refused(422, f"the body must be in UTF-8, got {charset[:_SHOWN]}")


def _object(data: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _BODY.decode(data)
    except RecursionError:
        raise BadRequest("the body must be JSON of little depth") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body must be in UTF-8: {error}") from None
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body must be an object with a string `code`: {error}") from None
    except msgspec.DecodeError as error:
        place = re.search(r"\(byte (\d+)\)", str(error))
        start = max(0, int(place[1]) - _SHOWN // 2) if place else 0
        raise BadRequest(f"the body must be JSON: {error}, in {data[start : start + _SHOWN]!r}") from None


def _field(body: dict[str, msgspec.Raw], name: str, kind: type[T], what: str) -> T | None:
    """None where it is missing or null. Raises BadRequest."""
    raw = body.get(name, msgspec.Raw(b"null"))
    try:
        return msgspec.json.decode(raw, type=kind | None)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise BadRequest(f"{name} must be {what}, got {_shown(bytes(raw))}: {error}") from None


def _shown(raw: bytes) -> str:
    try:
        return repr(msgspec.json.decode(raw[:_SHOWN]))
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return raw[:_SHOWN].decode("utf-8", "replace")


def _decoded(files: dict[str, str | None] | None) -> dict[str, bytes]:
    try:
        return {
            name: base64.b64decode(data, validate=True) for name, data in (files or {}).items() if data is not None
        }
    except ValueError as error:
        raise BadRequest(f"files must be {_FILES}: {error}") from None


def make_app(
    policy: SandboxPolicy | None = None, max_timeout: float = MAX_TIMEOUT, access: Access | None = None
) -> web.Application:
    """The application; its sandbox starts and ends with it. max_timeout: seconds that a request may ask for.

    Run it with `handler_cancellation`, so that a call ends when its client leaves.
    """
    return _Server(policy or SandboxPolicy(), max_timeout, access or Access()).application()


def serve(host: str, port: int, policy: SandboxPolicy, max_timeout: float, token: str | None) -> None:
    """Serve until interrupted. Raises SandboxUnavailable where the policy's isolation level cannot be had."""
    web.run_app(
        make_app(policy, max_timeout, Access(host, token)),
        host=host,
        port=port,
        print=None,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        handler_cancellation=True,
    )


_RUN_STATUS = {Status.TIMEOUT: "TimeLimitExceeded", Status.UNAVAILABLE: "Error"}
_KILLED = -9


def to_response(result: Result) -> dict[str, Any]:
    """The SandboxFusion response. `Failed` means that the program failed, `SandboxError` that the sandbox did."""
    code = _return_code(result)
    status = "SandboxError" if result.status is Status.UNAVAILABLE else "Success" if code == 0 else "Failed"
    # Of an exit the program has said all that there is to say.
    error = f"{result.error}\n" if result.error and (result.exit_code is None or result.exit_code < 0) else ""
    stderr = result.stderr + ("\n" if result.stderr and error and not result.stderr.endswith("\n") else "") + error
    run_result = {
        "status": _RUN_STATUS.get(result.status, "Finished"),
        "execution_time": result.wall_s,
        "return_code": code,
        "stdout": result.stdout,
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


def _return_code(result: Result) -> int | None:
    """That of `python FILE`, as its parent sees it; None for one that had to be stopped for its time."""
    if result.status is Status.TIMEOUT:
        return None
    if result.exit_code is not None:
        return result.exit_code
    return {Status.OK: 0, Status.KILLED: _KILLED}.get(result.status, 1)
