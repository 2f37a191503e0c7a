"""What a rollout runs with: configuration, tokenizer, engine client, and resources that hooks share.

A hook such as `generate(args, sample, sampling_params)` reaches it through `current_context()`; it is set
for the asyncio tasks of one rollout manager (a context variable, so two managers in one process never mix).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from slime_retool.chat import ChatTemplate
from slime_retool.config import Config
from slime_retool.protocols import ChatEngine, GenerationEngine
from slime_retool.rollout.attempts import Attempts
from slime_retool.rollout.sft_tokens import ConversationTokenizer

R = TypeVar("R")


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
    attempts: Attempts = field(default_factory=Attempts)
    """At the samples of all rollouts and evaluations."""
    _resources: dict[str, asyncio.Future[Any]] = field(default_factory=dict)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @cached_property
    def template(self) -> ChatTemplate:
        """The tokenizer's. Raises ConfigError when it has none."""
        return ChatTemplate(self.tokenizer)

    @cached_property
    def conversations(self) -> ConversationTokenizer:
        """SFT's, in the run's tool format. Raises ConfigError when the tokenizer has no template."""
        return ConversationTokenizer(self.config.tool_format, self.tokenizer)

    async def resource(self, key: str, make: Callable[[Config], AbstractAsyncContextManager[R]]) -> R:
        """The shared resource `key` (a sandbox pool, say), made and entered at its first use."""
        if key not in self._resources:
            manager = make(self.config)
            # Stored before the first await, so that concurrent callers wait for one and the same entry.
            self._resources[key] = asyncio.ensure_future(self._stack.enter_async_context(manager))
        return await asyncio.shield(self._resources[key])

    def with_engine(self, engine: GenerationEngine) -> RolloutContext:
        """The same with another engine; resources are shared."""
        return replace(self, engine=engine)

    async def aclose(self) -> None:
        self._resources.clear()
        await self._stack.aclose()


_current: ContextVar[RolloutContext] = ContextVar("rollout_context")


def current_context() -> RolloutContext:
    """The context of the rollout this task belongs to; LookupError outside of one."""
    return _current.get()


def current_attempts() -> Attempts:
    """Those of the current context; outside of one, some that nobody reads."""
    context = _current.get(None)
    return Attempts() if context is None else context.attempts


@asynccontextmanager
async def use_context(context: RolloutContext) -> AsyncIterator[RolloutContext]:
    """Make `context` the current one for this task and the tasks it starts."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
