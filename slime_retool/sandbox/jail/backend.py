"""The levels `namespaces` and `landlock` behind `Sandbox`: keeps a broker running and turns answers into results."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from slime_retool.sandbox.jail.client import JailClient
from slime_retool.sandbox.policy import Call, Result, SandboxPolicy, SandboxUnavailable, Status


class Jail:
    """`open` before the first call, `close` after the last. A broker that ended is replaced at the next call."""

    def __init__(self, policy: SandboxPolicy, off: frozenset[str] = frozenset()) -> None:
        self._policy, self._off = policy, off
        self._client: JailClient | None = None
        self._starting = asyncio.Lock()
        self._open_sessions: set[str] = set()
        self._lost_sessions: set[str] = set()

    async def open(self) -> None:
        self._client = await self._start()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _start(self) -> JailClient:
        client = JailClient(self._policy, self._off)
        self.notes = await client.start()
        return client

    async def _running_client(self) -> JailClient:
        if self._client is not None and self._client.alive:
            return self._client
        async with self._starting:
            if self._client is None:
                raise SandboxUnavailable("the sandbox is closed: make calls inside `async with Sandbox(...)`")
            if not self._client.alive:
                self._lost_sessions |= self._open_sessions
                await self._client.close()
                self._client = await self._start()
            return self._client

    async def execute(self, call: Call) -> Result:
        message = {
            "op": "run",
            "code": call.code,
            "session": call.session,
            "timeout": call.timeout,
            "cpu": call.cpu,
            "seed": call.seed,
            "stdin": call.stdin,
            "files": {name: base64.b64encode(data).decode() for name, data in call.files.items()},
            "fetch": list(call.fetch_files),
            "memory_mb": call.memory_mb,
        }
        try:
            client = self._client if self._client is not None and self._client.alive else await self._running_client()
            if call.session is not None:
                if call.session in self._lost_sessions:
                    raise SandboxUnavailable(f"session {call.session!r} is lost: the sandbox's broker ended")
                self._open_sessions.add(call.session)
            return _result(await client.call(message))
        except SandboxUnavailable as error:
            return Result(Status.UNAVAILABLE, error=f"sandbox unavailable: {error}")

    def close_session(self, name: str) -> None:
        self._open_sessions.discard(name)
        self._lost_sessions.discard(name)
        if self._client is not None:
            self._client.close_session(name)

    async def stats(self) -> dict[str, Any]:
        """Numbers of running and waiting calls, sessions, processes, and how calls ended so far."""
        answer = await (await self._running_client()).call({"op": "stats"})
        return answer["stats"]


def _result(answer: dict[str, Any]) -> Result:
    del answer["id"]
    answer["status"] = Status(answer["status"])
    files = answer.get("files")
    if files:
        answer["files"] = {name: base64.b64decode(content) for name, content in files.items()}
    return Result(**answer)
