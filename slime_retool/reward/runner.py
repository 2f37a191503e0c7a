"""Runs a reward function on one sample so that a stuck or crashing one costs that sample alone."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from slime_retool.errors import ConfigError, RewardError, RolloutError
from slime_retool.protocols import RewardFn, is_async

THREADS = max(2, min(8, os.cpu_count() or 2))
"""Plain (not async) reward functions that run at once. More would share the interpreter and each run longer."""


class RewardRunner:
    """`await runner(args, sample)` calls the function with the same arguments and gives what it returns.

    A plain function runs in a thread of its own, a few at once, so that it never blocks the event loop. `timeout` is
    the seconds that one call may run: a thread's counts from its start, not while it waits for its turn. A call that
    overruns is given up (an async one is cancelled, a thread is left behind); None sets no limit.

    Raises RewardError, which costs one sample, for an overrun and for whatever the function raises, except ConfigError
    and the errors of other boundaries, which pass.
    """

    def __init__(self, function: RewardFn, name: str, *, timeout: float | None) -> None:
        self._function: Callable[..., Any] = function
        self._name, self._timeout = name, timeout
        self._is_async = is_async(function)
        self._turns = asyncio.Semaphore(THREADS)

    async def __call__(self, args: Any, sample: Any) -> Any:
        try:
            if self._is_async:
                return await self._within_limit(self._function(args, sample))
            async with self._turns:
                reward = await self._within_limit(_in_thread(self._function, args, sample))
            return await self._within_limit(reward) if inspect.isawaitable(reward) else reward
        except (ConfigError, RolloutError):
            raise
        except Exception as error:
            raise RewardError(f"{self._name} raised {type(error).__name__}: {error}") from error

    async def _within_limit(self, call: Awaitable[Any]) -> Any:
        """What it returns or raises; unlike `asyncio.wait_for`, an overrun is not taken for a TimeoutError of its own,
        and one that ignores its cancellation is not waited for."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task}, timeout=self._timeout)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        if not task.done():
            task.cancel()
            raise RewardError(f"{self._name} ran longer than --reward-timeout {self._timeout:g} s")
        return task.result()


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    done: Future[tuple[Any, Exception | None]] = Future()
    done.set_running_or_notify_cancel()  # from here on it cannot be cancelled: the thread sets it in any case
    context = contextvars.copy_context()

    def work() -> None:
        try:
            done.set_result((context.run(function, *arguments), None))
        except Exception as error:
            done.set_result((None, error))

    threading.Thread(target=work, name="reward", daemon=True).start()
    result, error = await asyncio.wrap_future(done)
    if error is not None:
        raise error
    return result
