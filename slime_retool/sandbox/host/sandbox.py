"""The sandbox as callers see it: a bounded number of calls at once, one `Result` each, at one isolation level."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from slime_retool.errors import ConfigError
from slime_retool.sandbox.host.client import JailClient, NotStarted
from slime_retool.sandbox.host.policy import Result, SandboxPolicy, SandboxUnavailable, Status, check_limit

logger = logging.getLogger(__name__)

_SEED_BITS = 64
_MAX_BROKERS = 20
"""That a waiting call goes through: it may itself be what ends them."""

_NO_ISOLATION = (
    "SANDBOX ISOLATION IS OFF (isolation='none'): code that a model writes runs as this user, can read what this user "
    "can read and can use the network. Use 'namespaces' or 'landlock' for anything but your own code."
)


class Sandbox:
    """Runs snippets of Python, each in a fresh process, or cells of sessions whose variables persist.

    `run` never raises for what the code does or for an outage (status `unavailable`). Leaving the `async with` block
    ends calls still running and removes every file they left. A broker that ended is replaced, and calls that had not
    begun are run by the next one.
    """

    def __init__(self, policy: SandboxPolicy | None = None, *, _without: frozenset[str] = frozenset()) -> None:
        """_without: layers to leave out (`child.zygote.LAYERS`), for tests of what each one stops."""
        self.policy = policy or SandboxPolicy()
        self._without = _without
        self._client: JailClient | None = None
        self._starting = asyncio.Lock()
        self._lost_sessions: set[str] = set()

    async def __aenter__(self) -> Sandbox:
        """Raises SandboxUnavailable when the isolation level cannot be had on this machine."""
        if self.policy.isolation == "none":
            logger.warning(_NO_ISOLATION)
        self._client = await JailClient(self.policy, self._without).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._starting:  # a broker that is being started is ended as well
            client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def run(
        self,
        code: str,
        *,
        timeout: float | None = None,
        seed: int | None = None,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: tuple[str, ...] = (),
        memory_mb: int | None = None,
        echo: bool = True,
        _session: str | None = None,
    ) -> Result:
        """Run `code` as a script; a bare last expression is echoed in `Result.result`.

        `timeout`: seconds of wall time from start of execution (default: the policy's). `seed`: for the generators of
        `random` and, where it is loaded, numpy. `stdin`: what `input` and standard input give (default: closed).
        `files`: put into the working folder before; `fetch_files`: read from it afterwards. `memory_mb`: lower than the
        policy's. `echo`: without, as `python FILE` does it: nothing is echoed, and the text of a `sys.exit` goes to
        stderr. Cancelling the caller ends the call. Raises ConfigError on arguments that no call can have.
        """
        wall = self.policy.timeout if timeout is None else timeout
        check_limit("timeout", wall, whole=False)
        if memory_mb is not None:
            check_limit("memory_mb", memory_mb, whole=True)
        check_arguments(code, seed, stdin, files or {}, fetch_files, self.policy)
        too_large = refusal(code, stdin, files or {}, self.policy)
        if too_large is not None:
            return too_large
        message = {
            "op": "run",
            "code": code,
            "session": _session,
            "timeout": wall,
            "cpu": wall if self.policy.cpu_timeout is None else self.policy.cpu_timeout,
            "seed": seed,
            "stdin": stdin,
            "files": {name: base64.b64encode(data).decode() for name, data in (files or {}).items()},
            "fetch": list(fetch_files),
            "memory_mb": None if memory_mb is None else min(memory_mb, self.policy.memory_mb),
            "echo": echo,
        }
        try:
            return _result(await self._call(message))
        except SandboxUnavailable as error:
            return Result(Status.UNAVAILABLE, error=f"sandbox unavailable: {error}")

    async def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer of a broker: of the next one when a broker ended before the call began."""
        arrived = time.monotonic()
        for _ in range(_MAX_BROKERS):
            client = self._client
            if client is None or not client.alive:
                client = await self._running_client()
            if message.get("session") in self._lost_sessions:
                raise SandboxUnavailable(f"session {message['session']!r} is lost: the sandbox's broker ended")
            try:
                message["waited"] = time.monotonic() - arrived
                return await client.call(message)
            except NotStarted as error:
                reason = str(error)
        raise SandboxUnavailable(f"{_MAX_BROKERS} brokers ended before the call began: {reason}")

    def session(self, name: str) -> Session:
        """The session called `name`; it begins with its first cell."""
        if not isinstance(name, str):
            raise ConfigError(f"the name of a sandbox session must be text, got {name!r}")
        return Session(self, name)

    async def stats(self) -> dict[str, Any]:
        """Numbers of running and waiting calls, sessions and processes, and how calls ended so far."""
        return (await self._call({"op": "stats"}))["stats"]

    async def _running_client(self) -> JailClient:
        async with self._starting:
            if self._client is None:
                raise SandboxUnavailable("the sandbox is closed: make calls inside `async with Sandbox(...)`")
            if not self._client.alive:
                await self._client.close()  # after this it is known why it ended, and what was lost with it
                logger.warning("%s; another one is started", self._client.failure)
                self._lost_sessions |= self._client.sessions
                self._client = await self._started_client()
            return self._client

    async def _started_client(self) -> JailClient:
        for _ in range(_MAX_BROKERS - 1):
            client = JailClient(self.policy, self._without)
            try:
                return await client.start()
            except SandboxUnavailable as error:
                if not client.killed:
                    raise
                logger.warning("%s before it was ready; another one is started", error)
        return await JailClient(self.policy, self._without).start()

    def _close_session(self, name: str) -> None:
        self._lost_sessions.discard(name)
        if self._client is not None:
            self._client.close_session(name)


class Session:
    """Cells that share variables, one at a time and in the order of the calls; between cells the process is stopped.

    A cell that is killed (time, memory, a crash) takes the variables with it: its error says so and the next cell
    starts afresh. A session that the sandbox itself lost (expired, evicted, an outage) is `unavailable` until closed.
    """

    def __init__(self, box: Sandbox, name: str) -> None:
        self._box, self.name = box, name
        self.run = partial(box.run, _session=name)
        """As `Sandbox.run`, in this session; limits are those of the cell."""

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End its process; a later cell of the same name starts afresh."""
        self._box._close_session(self.name)


def check_arguments(
    code: str,
    seed: int | None,
    stdin: str | None,
    files: Mapping[str, bytes],
    fetch_files: tuple[str, ...],
    policy: SandboxPolicy,
) -> None:
    """Raises ConfigError on what the caller, and not the code, did wrong."""
    if not isinstance(code, str) or not isinstance(stdin, (str, type(None))):
        raise ConfigError(f"sandbox code and stdin must be text, got {type(code).__name__} and {type(stdin).__name__}")
    if seed is not None and (not isinstance(seed, int) or seed.bit_length() > _SEED_BITS):
        raise ConfigError(f"a sandbox seed must be a whole number of at most {_SEED_BITS} bits, got {type(seed)}")
    if not all(isinstance(name, str) and isinstance(data, (bytes, bytearray)) for name, data in files.items()):
        raise ConfigError("sandbox files must map paths to bytes")
    if isinstance(fetch_files, str) or not all(isinstance(name, str) for name in fetch_files):
        raise ConfigError(f"sandbox fetch_files must be a list of paths, got {fetch_files!r}")
    if len(fetch_files) > policy.max_inodes:
        most = policy.max_inodes
        raise ConfigError(f"sandbox fetch_files may be at most max_inodes ({most}), got {len(fetch_files)}")


def refusal(code: str, stdin: str | None, files: Mapping[str, bytes], policy: SandboxPolicy) -> Result | None:
    """The answer to a call that is too large to be looked at: every call pays for what is parsed here."""
    size, most = _bytes(code), policy.max_code_bytes
    if size > most:
        return Result(Status.ERROR, error=f"the code has {size} bytes; at most {most} are run")
    if not (stdin or files):
        return None
    size, most = _bytes(stdin or "") + sum(map(len, files.values())), policy.max_disk_mb << 20
    if size > most or len(files) > policy.max_inodes:
        what = f"standard input and {len(files)} files have {size} bytes"
        error = f"{what}; at most {most} and {policy.max_inodes} files fit into the folder"
        return Result(Status.ERROR, error=error, limit="disk")
    return None


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _result(answer: dict[str, Any]) -> Result:
    del answer["id"]
    answer["status"] = Status(answer["status"])
    answer["files"] = {name: base64.b64decode(content) for name, content in answer.get("files", {}).items()}
    return Result(**answer)
