"""The sandbox as callers see it: a bounded number of calls at once, one `Result` each, at one isolation level."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from slime_retool.errors import ConfigError
from slime_retool.sandbox.jail.backend import Jail
from slime_retool.sandbox.policy import Call, Result, SandboxPolicy
from slime_retool.sandbox.process_jail import ProcessJail

logger = logging.getLogger(__name__)

_NO_ISOLATION = (
    "SANDBOX ISOLATION IS OFF (isolation='none'): code that a model writes runs as this user, can read "
    "what this "
    "user can read and can use the network. Use 'namespaces' or 'landlock' for anything but your own code."
)


class Sandbox:
    """Runs snippets of Python, each in a fresh process, or cells of sessions whose variables persist.

    `run` never raises for what the code does or for an outage (status `unavailable`). Leaving the `async with` block
    ends calls still running and removes every file they left.
    """

    def __init__(self, policy: SandboxPolicy | None = None, *, _without: frozenset[str] = frozenset()) -> None:
        """_without: layers to leave out (`jail.zygote.LAYERS`), for tests of what each one stops."""
        self.policy = policy or SandboxPolicy()
        self._jail: Jail | ProcessJail = (
            ProcessJail(self.policy) if self.policy.isolation == "none" else Jail(self.policy, _without)
        )

    async def __aenter__(self) -> Sandbox:
        """Raises SandboxUnavailable when the isolation level cannot be had on this machine."""
        if self.policy.isolation == "none":
            logger.warning(_NO_ISOLATION)
        await self._jail.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._jail.close()

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
    ) -> Result:
        """Run `code` as a script; a bare last expression is echoed in `Result.result`.

        `timeout`: seconds of wall time from start of execution (default: the policy's). `seed`: for the generators of
        `random` and, where it is loaded, numpy. `stdin`: what `input` and standard input give (default: closed).
        `files`: put into the working folder before; `fetch_files`: read from it afterwards. `memory_mb`: lower than the
        policy's. Cancelling the caller ends the call.
        """
        call = self._call(code, timeout, seed, stdin, files, fetch_files, memory_mb)
        return await self._jail.execute(call)

    def session(self, name: str) -> Session:
        """The session called `name`; it begins with its first cell."""
        if isinstance(self._jail, ProcessJail):
            raise ConfigError("sessions need sandbox isolation 'namespaces' or 'landlock', this sandbox has 'none'")
        return Session(self, self._jail, name)

    async def stats(self) -> dict[str, Any]:
        """Numbers of running and waiting calls, sessions and processes, and how calls ended so far."""
        return await self._jail.stats()

    def _call(
        self,
        code: str,
        timeout: float | None,
        seed: int | None = None,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: tuple[str, ...] = (),
        memory_mb: int | None = None,
        session: str | None = None,
    ) -> Call:
        wall = self.policy.timeout if timeout is None else timeout
        cpu = wall if self.policy.cpu_timeout is None else self.policy.cpu_timeout
        memory = None if memory_mb is None else min(memory_mb, self.policy.memory_mb)
        return Call(code, wall, cpu, seed, stdin, files or {}, fetch_files, memory, session)


class Session:
    """Cells that share variables, one at a time and in the order of the calls; between cells the process is stopped.

    A cell that is killed (time, memory, a crash) takes the variables with it: its error says so and the next cell
    starts afresh. A session that the sandbox itself lost (expired, evicted, an outage) is `unavailable` until closed.
    """

    def __init__(self, box: Sandbox, jail: Jail, name: str) -> None:
        self._box, self._jail, self.name = box, jail, name

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def run(
        self,
        cell: str,
        *,
        timeout: float | None = None,
        seed: int | None = None,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: tuple[str, ...] = (),
    ) -> Result:
        """As `Sandbox.run`, in this session; limits are those of the cell."""
        call = self._box._call(cell, timeout, seed, stdin, files, fetch_files, session=self.name)
        return await self._jail.execute(call)

    def close(self) -> None:
        """End its process; a later cell of the same name starts afresh."""
        self._jail.close_session(self.name)


def run_sync(
    code: str, policy: SandboxPolicy | None = None, *, timeout: float | None = None, seed: int | None = None
) -> Result:
    """Run one snippet from synchronous code; for many snippets use `Sandbox`."""

    async def once() -> Result:
        async with Sandbox(policy) as box:
            return await box.run(code, timeout=timeout, seed=seed)

    return asyncio.run(once())
