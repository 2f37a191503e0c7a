"""How tool calls and observations are written: the protocol that the loop speaks, and the formats to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from slime_retool.errors import ConfigError
from slime_retool.tool_use.calls import Turn
from slime_retool.tool_use.qwen import QwenFormat
from slime_retool.tool_use.retool import RetoolFormat
from slime_retool.types import Message, ToolSchema


class ToolFormat(Protocol):
    """Prompts and observations as ids, turns as calls, for one tokenizer and one set of tools."""

    stop: tuple[str, ...]
    """Texts at which the engine has to end a turn, besides the end token. They stay part of the turn."""
    marks: tuple[str, ...]
    """Tags that structure turns and observations; a tokenizer may have a token for each."""

    def __init__(self, tokenizer: Any, tools: Sequence[ToolSchema]) -> None: ...

    def prompt_ids(self, prompt: list[Message] | str) -> list[int]:
        """Ids of the prompt, ready for generation, tools explained; a string is taken as already rendered."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids, for reading and scoring only: without the end token."""
        ...

    def read_turn(self, ids: Sequence[int]) -> Turn:
        """The calls of a turn that the engine ended (finish reason "stop"); never raises for what the model wrote."""
        ...

    def fit_observation(self, text: str, max_tokens: int) -> str:
        """Tool output that cannot be taken for structure, cut to a token budget (see `ObservationFilter`)."""
        ...

    def observation_ids(self, observations: Sequence[str], turn: Turn) -> list[int]:
        """What to append behind a turn before generation goes on; `observations` have passed `fit_observation`.

        Without observations (an unfinished turn): only what the turn is `missing`.
        """
        ...


FORMATS: dict[str, type[ToolFormat]] = {"qwen": QwenFormat, "retool": RetoolFormat}


def make_format(name: str, tokenizer: Any, tools: Sequence[ToolSchema]) -> ToolFormat:
    """The format of `--tool-format`. Raises ConfigError when the tokenizer's template or the tools do not suit it."""
    if name not in FORMATS:
        raise ConfigError(f"tool_format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name](tokenizer, tools)
