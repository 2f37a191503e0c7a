"""What a hook, an engine and a data source are; and user code by dotted path: `package.module.function`."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from slime_retool.errors import ConfigError
from slime_retool.types import Message, Sample, ToolSchema


class GenerateFn(Protocol):
    """`--custom-generate-function-path`: fill in `sample` (tokens, loss mask, log-probs, status) and return it.

    `args` is the run's `Config`; `sampling_params` are SGLang's (`temperature`, `max_new_tokens`, ...).
    """

    def __call__(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Awaitable[Sample]: ...


class RewardFn(Protocol):
    """`--custom-rm-path`: score a generated sample with a number, or a dict that holds `--reward-key`."""

    def __call__(self, args: Any, sample: Sample, **kwargs: Any) -> Awaitable[float | dict[str, Any]]: ...


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


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One assistant message."""

    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """In OpenAI's form: {"id", "type": "function", "function": {"name", "arguments" (JSON text)}}."""
    finish_reason: str = "stop"
    completion_tokens: int = 0


class ChatEngine(Protocol):
    """Messages in, one message out. Implemented by `rollout.chat_endpoint.ChatEndpoint`."""

    async def chat(
        self, messages: list[Message], sampling_params: dict[str, Any], tools: list[ToolSchema]
    ) -> ChatReply:
        """Raises EngineError after its retries."""
        ...


def load_module(path: str, flag: str = "path") -> ModuleType:
    """Import the module of what `path` names. Raises ConfigError, naming `flag`, when it does not exist."""
    name = path.rpartition(".")[0]
    if not name or name.startswith("."):
        raise ConfigError(f"{flag} must be a dotted path such as package.module.function, got {path!r}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{flag} {path!r}: cannot import {name!r} ({error}); is its folder on PYTHONPATH?") from error


def load_object(path: str, flag: str, kind: str = "name") -> Any:
    """Import the `kind` of thing that `path` names.

    Raises ConfigError, naming `flag`, when the module or the attribute does not exist.
    """
    module, attribute = load_module(path, flag), path.rpartition(".")[2]
    if attribute not in module.__dict__:
        raise ConfigError(f"{flag} {path!r}: module {module.__name__!r} has no {kind} {attribute!r}")
    return module.__dict__[attribute]


def load_function(path: str, flag: str = "path") -> Callable[..., Any]:
    """`load_object` of a function. Raises ConfigError for what cannot be called, too."""
    function = load_object(path, flag, "function")
    if not callable(function):
        raise ConfigError(f"{flag} {path!r} is a {type(function).__name__} and not a function")
    return function
