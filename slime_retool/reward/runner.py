"""Runs a reward function on one sample so that a stuck or crashing one costs that sample alone."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import numbers
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

    Values of NumPy and torch become Python's. Raises RewardError, which costs one sample, for an overrun, for a value
    that is no reward (see `as_reward`), and for whatever the function raises, except ConfigError and the errors of
    other boundaries, which pass.
    """

    def __init__(self, function: RewardFn, name: str, *, timeout: float | None) -> None:
        self._function: Callable[..., Any] = function
        self._name, self._timeout = name, timeout
        self._is_async = is_async(function)
        self._turns = asyncio.Semaphore(THREADS)

    async def __call__(self, args: Any, sample: Any) -> Any:
        try:
            if self._is_async:
                reward = await self._within_limit(self._function(args, sample))
            else:
                async with self._turns:
                    reward = await self._within_limit(_in_thread(self._function, args, sample))
                if inspect.isawaitable(reward):
                    reward = await self._within_limit(reward)
            return as_reward(reward, args.reward_key, self._name)
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


def as_reward(value: Any, key: str | None, name: str) -> float | dict[str, Any]:
    """What the reward function `name` returned, in Python's own types: a finite number, or a dict in which entry `key`
    (default "score") is one and "acc", where it is there, says yes or no. Raises RewardError for anything else."""
    if not isinstance(value, dict):
        return _finite(_plain(value), f"{name} returned")
    reward = {str(entry): _plain(each) for entry, each in value.items()}
    entry = key or "score"
    if entry not in reward:
        raise RewardError(f"{name} returned no entry {entry!r}, only {sorted(reward)}; set --reward-key")
    if "acc" in reward:
        said = reward["acc"]
        if said not in (0, 1):  # of a share, or NaN, bool() would be True
            raise RewardError(f"{name} returned as 'acc' {said!r:.100}; it is True or False: is the answer right")
        reward["acc"] = bool(said)
    return reward | {entry: _finite(reward[entry], f"{name} returned as {entry!r}")}


def _plain(value: Any) -> Any:
    """A scalar of NumPy or torch as Python's; all else as it is."""
    if not (hasattr(value, "item") and hasattr(value, "dtype")):
        return value
    try:
        return value.item()
    except (ValueError, RuntimeError):  # it holds several
        return value


def _finite(value: Any, returned: str) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(f"{returned} {value!r:.100}; a reward is a finite number")
    return float(value)


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
