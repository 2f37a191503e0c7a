"""What a rollout runs with: configuration, tokenizer, engine client, and resources that hooks share.

A hook such as `generate(args, sample, sampling_params)` reaches it through `current_context()`; it is set
for the asyncio tasks of one rollout manager (a context variable, so two managers in one process never mix).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from slime_retool.config import Config
from slime_retool.tool_use.chat_loop import ChatEngine
from slime_retool.types import RolloutBatch, Sample

R = TypeVar("R")


@dataclass(slots=True, frozen=True)
class Completion:
    """One engine reply: exactly the sampled ids, one log-prob each."""

    ids: list[int]
    log_probs: list[float]
    finish_reason: str
    """"stop" (end token or stop text), "length" (max_new_tokens reached) or "abort"."""
    weight_version: int
    prompt_tokens: int
    cached_tokens: int


class GenerationEngine(Protocol):
    """Ids in, ids out. Implemented over HTTP by `rollout.engine_client.RouterClient`; tests script it."""

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None
    ) -> Completion:
        """Continue `input_ids`. `session` names the sample, so that its later turns can hit the same cache.

        Raises EngineError after its retries.
        """
        ...


class DataSource(Protocol):
    """Rows in a resumable order, as groups of samples to generate."""

    def next_groups(self, count: int) -> list[list[Sample]]:
        """The next `count` prompts, each copied n_samples_per_prompt times (fresh PENDING samples)."""
        ...

    def return_groups(self, groups: list[list[Sample]]) -> None:
        """Groups that were drawn and not used: `next_groups` draws their prompts again before any other."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class RolloutContext:
    """Lives as long as its rollout manager; `aclose` ends every resource it made."""

    config: Config
    tokenizer: Any
    """A transformers tokenizer (typed Any: this module imports without transformers)."""
    engine: GenerationEngine | None
    """None in training-only runs (SFT)."""
    chat: ChatEngine | None = None
    """Takes the engine's place when a model behind a chat API is evaluated."""
    _resources: dict[str, Any] = field(default_factory=dict)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def resource(self, key: str, make: Callable[[Config], AbstractAsyncContextManager[R]]) -> R:
        """The shared resource `key` (a sandbox pool, say), made and entered at its first use."""
        if key not in self._resources:
            manager = make(self.config)
            # Stored before the first await, so that concurrent callers wait for one and the same entry.
            self._resources[key] = _Entered(self._stack.enter_async_context(manager))
        return await self._resources[key].value()

    async def aclose(self) -> None:
        self._resources.clear()
        await self._stack.aclose()


class _Entered:
    """A resource that is entered once, however many tasks wait for it."""

    def __init__(self, entering: Awaitable[Any]) -> None:

        self._task = asyncio.ensure_future(entering)

    async def value(self) -> Any:

        return await asyncio.shield(self._task)


class RolloutFn(Protocol):
    """`--rollout-function-path`: make one training batch."""

    def __call__(self, context: RolloutContext, data: DataSource, rollout_id: int) -> Awaitable[RolloutBatch]: ...


_current: ContextVar[RolloutContext] = ContextVar("rollout_context")


def current_context() -> RolloutContext:
    """The context of the rollout this task belongs to; LookupError outside of one."""
    return _current.get()


@asynccontextmanager
async def use_context(context: RolloutContext) -> AsyncIterator[RolloutContext]:
    """Make `context` the current one for this task and the tasks it starts."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
