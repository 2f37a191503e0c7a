"""What a hook, an engine and a data source are; and user code by dotted path: `package.module.function`."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, get_args, get_origin, get_type_hints

from slime_retool.errors import ConfigError
from slime_retool.types import Message, RolloutBatch, RoutedExperts, Sample, Span, ToolSchema


class GenerateFn(Protocol):
    """`--custom-generate-function-path`: fill in `sample` (tokens, loss mask, log-probs, status) and return it.

    `args` is the run's `Config`; `sampling_params` are SGLang's (`temperature`, `max_new_tokens`, ...).
    """

    def __call__(self, args: Any, sample: Sample, sampling_params: dict[str, Any], /) -> Awaitable[Sample]: ...


class RewardFn(Protocol):
    """`--custom-rm-path`: score a generated sample with a number, or a dict that holds `--reward-key`.

    A plain function runs in a thread (see `reward.runner`).
    """

    def __call__(
        self, args: Any, sample: Sample, /
    ) -> Awaitable[float | dict[str, Any]] | float | dict[str, Any]: ...


class FilterFn(Protocol):
    """`--dynamic-sampling-filter-path`: whether a group's scored samples are worth training on."""

    def __call__(self, args: Any, group: list[Sample], /) -> bool: ...


@dataclass(slots=True, frozen=True)
class Completion:
    """One engine reply: exactly the sampled ids, one log-prob each."""

    ids: list[int]
    log_probs: list[float]
    finish_reason: str
    """"stop" (end token or stop text), "length" (max_new_tokens reached) or "abort"."""
    weight_version: int
    """That of the last token."""
    prompt_tokens: int
    cached_tokens: int
    versions: list[int] | None = None
    """The weight version that wrote each id, where an update came between them."""
    routed_experts: RoutedExperts | None = None
    """The experts chosen for the tokens from `routed_from` on, as far as they were read: the last of `ids` rarely was.
    None where none came back."""
    routed_from: int = 0
    """A place in prompt and `ids` together."""
    spans: list[Span] = field(default_factory=list, compare=False)
    """A "request" for each one that it took, with its `tokens`, `prompt_tokens` and `cached_tokens`."""

    @property
    def token_versions(self) -> list[int]:
        """The weight version that wrote each id."""
        return [self.weight_version] * len(self.ids) if self.versions is None else self.versions


class GenerationEngine(Protocol):
    """Ids in, ids out. Implemented over HTTP by `rollout.engine_client.RouterClient`; tests script it."""

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None
    ) -> Completion:
        """Continue `input_ids`. `session` names the sample, so that its later turns can hit the same cache.

        An engine that returns experts also takes `routed_from`: those of the tokens before it are known already.
        Only an engine that has returned some is given it.

        Raises EngineError after its retries.
        """
        ...


class CachingEngine(Protocol):
    """A `GenerationEngine` that can keep what it has read of some requests from others, and return experts or not."""

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        *,
        session: str | None = None,
        cache_key: str | None = None,
        routed_from: int | None = 0,
    ) -> Completion:
        """Continue `input_ids`. Only requests of the same `cache_key` share cached prefixes.

        `routed_from`: the first token of which the chosen experts are wanted, where they are returned; None: of none.
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

    def sample_of_row(self, row: int, index: int, group_index: int) -> Sample:
        """A row that was drawn before (`Sample.row`), as a fresh sample."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RolloutFn(Protocol):
    """`--rollout-function-path`: make one training batch. `context` is a `rollout.context.RolloutContext`."""

    def __call__(self, context: Any, data: DataSource, rollout_id: int, /) -> Awaitable[RolloutBatch]: ...


class TrackerFn(Protocol):
    """`--custom-tracker-path`: make a `metrics.Tracker`, which is told every step's metrics."""

    def __call__(self, args: Any, /) -> Any: ...


HOOKS: dict[str, type] = {
    "--rollout-function-path": RolloutFn,
    "--custom-generate-function-path": GenerateFn,
    "--custom-rm-path": RewardFn,
    "--dynamic-sampling-filter-path": FilterFn,
    "--custom-tracker-path": TrackerFn,
}
"""Flag -> what the function is that it names."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One assistant message."""

    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """In OpenAI's form: {"id", "type": "function", "function": {"name", "arguments" (JSON text)}}."""
    finish_reason: str = "stop"
    """"length" also where the context was full before the reply began: that is the model's failure, no outage."""
    completion_tokens: int = 0
    reasoning: dict[str, Any] = field(default_factory=dict)
    """The fields of the message that hold the model's thoughts; the next turn gives them back."""


class ChatEngine(Protocol):
    """Messages in, one message out. Implemented by `rollout.chat_endpoint.ChatEndpoint`."""

    async def chat(
        self, messages: list[Message], sampling_params: dict[str, Any], tools: list[ToolSchema]
    ) -> ChatReply:
        """Raises EngineError after its retries."""
        ...


def load_module(path: str, flag: str = "path") -> ModuleType:
    """Import the module of what `path` names.

    Raises ConfigError, naming `flag`, when it does not exist, and where when its own code raises.
    """
    name = path.rpartition(".")[0]
    if not name or name.startswith("."):
        raise ConfigError(f"{flag} must be a dotted path such as package.module.function, got {path!r}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{flag} {path!r}: cannot import {name!r} ({error}); is its folder on PYTHONPATH?") from error
    except Exception as error:  # of the module's own code
        last = traceback.extract_tb(error.__traceback__)[-1]
        file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (last.filename, last.lineno)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{flag} {path!r}: importing {name!r} fails in {file}, line {line} ({what})") from error


def load_object(path: str, flag: str, kind: str = "name") -> Any:
    """Import the `kind` of thing that `path` names.

    Raises ConfigError, naming `flag`, when the module or the attribute does not exist.
    """
    module, attribute = load_module(path, flag), path.rpartition(".")[2]
    if attribute not in module.__dict__:
        raise ConfigError(f"{flag} {path!r}: module {module.__name__!r} has no {kind} {attribute!r}")
    return module.__dict__[attribute]


def load_function(path: str, flag: str = "path") -> Callable[..., Any]:
    """`load_object` of a function. Raises ConfigError for what cannot be called, or not as `HOOKS` says for `flag`."""
    function = load_object(path, flag, "function")
    if not callable(function):
        raise ConfigError(f"{flag} {path!r} is a {type(function).__name__} and not a function")
    if flag in HOOKS:
        _check_signature(function, HOOKS[flag], f"{flag} {path!r}")
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Whether it is a coroutine function, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _check_signature(function: Callable[..., Any], hook: type, where: str) -> None:
    """Raise ConfigError for a function that a call as `hook` would fail on, as far as that shows without a call."""
    try:
        found = inspect.signature(function, follow_wrapped=False)  # a decorator may give or take arguments
    except (TypeError, ValueError):  # of a builtin nothing is known
        return
    names = [name for name in inspect.signature(hook.__call__).parameters if name != "self"]
    result = get_type_hints(hook.__call__)["return"]
    awaited = get_args(result)[0] if get_origin(result) is Awaitable else None
    problem = ""
    try:
        found.bind(*names)
    except TypeError as error:
        problem = f"cannot be called with these {len(names)} arguments ({error})"
    if awaited is not None and not is_async(function) and not is_async(inspect.unwrap(function)):
        generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        if generator or inspect.isclass(function) or found.return_annotation in (awaited, awaited.__name__):
            problem = problem or "returns what cannot be awaited"
    if result is bool and is_async(function):
        problem = problem or "is async, so that its answer would always count as true"
    if problem:
        right = f"{'def' if result is bool else 'async def'} {hook.__name__}({', '.join(names)})"
        raise ConfigError(f"{where}, with the signature {found}, {problem}; it must be like: {right}")
