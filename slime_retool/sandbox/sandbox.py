"""The sandbox as callers see it: a bounded number of calls at once, one `Result` each."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import TracebackType

from slime_retool.sandbox.policy import Result, SandboxPolicy
from slime_retool.sandbox.process_jail import ProcessJail

# One entry per isolation level; `policy.ISOLATION_LEVELS` lists the same names.
_JAILS = {"process": ProcessJail}


class Sandbox:
    """Runs snippets of Python, each in a fresh interpreter.

    `run` never raises for what the code does or for an outage (status `unavailable`). Leaving the `async with`
    block ends calls still running and removes every file they left.
    """

    def __init__(self, policy: SandboxPolicy | None = None) -> None:
        self.policy = policy or SandboxPolicy()
        self._jail = _JAILS[self.policy.isolation](self.policy)
        self._slots = asyncio.Semaphore(self.policy.concurrency)
        self._calls: set[asyncio.Task[Result]] = set()

    async def __aenter__(self) -> Sandbox:
        """Raises SandboxUnavailable when the sandbox cannot be set up on this machine."""
        self._jail.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._jail.close()

    async def run(self, code: str, *, timeout: float | None = None, seed: int | None = None) -> Result:
        """Run `code` as a script. Input is closed; a bare last expression is echoed in `Result.result`.

        `timeout`: seconds of wall time from start of execution (default: the policy's). `seed`: for the generators
        of `random` and, where the code uses it, numpy. Cancelling the caller ends the call and all its processes.
        """
        call = asyncio.ensure_future(self._run(code, self.policy.timeout if timeout is None else timeout, seed))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await call

    async def _run(self, code: str, timeout: float, seed: int | None) -> Result:
        queued = time.monotonic()
        async with self._slots:
            waited = time.monotonic() - queued
            result = await self._jail.execute(code, timeout, seed)
        return replace(result, queue_s=waited)


def run_sync(
    code: str, policy: SandboxPolicy | None = None, *, timeout: float | None = None, seed: int | None = None
) -> Result:
    """Run one snippet from synchronous code; for many snippets use `Sandbox`."""

    async def once() -> Result:
        async with Sandbox(policy) as box:
            return await box.run(code, timeout=timeout, seed=seed)

    return asyncio.run(once())
