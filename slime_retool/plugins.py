"""User code by dotted path: `package.module.function`. The signatures a hook must have are the protocols here."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from slime_retool.errors import ConfigError
from slime_retool.types import Sample


class GenerateFn(Protocol):
    """`--custom-generate-function-path`: fill in `sample` (tokens, loss mask, log-probs, status) and return it.

    `args` is the run's `Config`; `sampling_params` are SGLang's (`temperature`, `max_new_tokens`, ...).
    """

    def __call__(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Awaitable[Sample]: ...


class RewardFn(Protocol):
    """`--custom-rm-path`: score a generated sample with a number, or a dict that holds `--reward-key`."""

    def __call__(self, args: Any, sample: Sample, **kwargs: Any) -> Awaitable[float | dict[str, Any]]: ...


def load_function(path: str, flag: str = "path") -> Callable[..., Any]:
    """Import the function named by `path`.

    Raises ConfigError, naming `flag`, when the module or the attribute does not exist or is not callable.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name or module_name.startswith("."):
        raise ConfigError(f"{flag} must be a dotted path such as package.module.function, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{flag} {path!r}: cannot import {module_name!r} ({error}); is its folder on PYTHONPATH?"
        ) from error
    function = module.__dict__.get(attribute)
    if not callable(function):
        raise ConfigError(f"{flag} {path!r}: module {module_name!r} has no function {attribute!r}")
    return function
