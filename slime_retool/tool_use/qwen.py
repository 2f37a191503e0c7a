r"""Qwen's format: calls as JSON in `<tool_call>` tags, observations as messages of role tool.

    turn          <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>
    observation   what the chat template writes between this turn and the next (see `suffix`)

The template shows the model the tools' schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_retool.chat import TURN_MARK, ChatTemplate
from slime_retool.errors import ConfigError
from slime_retool.tool_use.calls import ToolCall, Turn
from slime_retool.tool_use.observation import ObservationFilter
from slime_retool.tool_use.parser import parse_tool_calls
from slime_retool.tool_use.suffix import TEXT_MARK, SuffixFrame
from slime_retool.types import Message, ToolSchema

_ADVICE = "use --tool-format retool, or a tokenizer whose template writes tool calls as Qwen's do"
_ARGUMENTS = {"code": f'print("{TURN_MARK}")\n'}
"""Of the dummy call: text that JSON has to escape."""


class QwenFormat:
    """A `ToolFormat`. Raises ConfigError when the chat template cannot carry tool calls (see `check_template`)."""

    stop: tuple[str, ...] = ()
    marks: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

    def __init__(self, tokenizer: Any, tools: Sequence[ToolSchema]) -> None:
        check_template(tokenizer)
        self.tools = list(tools)
        self._template = ChatTemplate(tokenizer)
        self._filter = ObservationFilter(tokenizer)
        self._suffix = SuffixFrame(self._template, _dummy, tools)

    def prompt_ids(self, prompt: list[Message] | str) -> list[int]:
        return self._template.prompt_ids(prompt, self.tools)

    def text(self, ids: Sequence[int]) -> str:
        return self._template.decode_without_end(ids)

    def read_turn(self, ids: Sequence[int]) -> Turn:
        text = self._template.codec.decode(ids)
        closed = bool(ids) and ids[-1] == self._template.end_token_id
        missing = "" if closed else self._template.end_token
        return Turn(text, parse_tool_calls(text, self.tools), missing=missing)

    def fit_observation(self, text: str, max_tokens: int) -> str:
        return self._filter.fit(self._filter.clean(text), max_tokens)

    def observation_ids(self, observations: Sequence[str], turn: Turn) -> list[int]:
        return self._suffix.behind(turn, observations)


def check_template(tokenizer: Any) -> None:
    """Refuse a chat template with which a tool conversation cannot be written.

    Raises ConfigError when there is no template, or when it shows the model no tool schema, drops the calls of an
    assistant turn or writes them as `parse_tool_calls` does not read them, drops tool results or their order, or ends
    a turn without a special token.
    """
    template = ChatTemplate(tokenizer)
    schema: ToolSchema = {
        "type": "function",
        "function": {
            "name": "probe",
            "description": TEXT_MARK,
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
    try:
        shown = template.render([{"role": "user", "content": "x"}], [schema])
        messages = _dummy([TEXT_MARK + "1", TEXT_MARK + "2"])
        asked, conversation = template.render(messages[:1], generation=False), template.render(messages)
    except Exception as error:  # templates raise errors of their own
        raise ConfigError(f"the chat template cannot render a tool conversation: {error}; {_ADVICE}") from error
    rules = {
        "does not show the model the schema of its tools": TEXT_MARK in shown,
        "drops the tool calls of an assistant turn": TURN_MARK in conversation,
        "drops messages of role tool, or their order": (
            0 <= conversation.find(TEXT_MARK + "1") < conversation.find(TEXT_MARK + "2")
        ),
    }
    for problem, kept in rules.items():
        if not kept:
            raise ConfigError(f"the chat template {problem}; {_ADVICE}")
    behind_call = conversation[conversation.index(TURN_MARK) : conversation.index(TEXT_MARK)]
    if template.end_token not in behind_call:
        raise ConfigError(
            f"the chat template must end a turn with tool calls by {template.end_token!r}, as other turns; {_ADVICE}"
        )
    # Only what follows the question: a template may explain calls by an example in front of it.
    turn = conversation[: conversation.index(TEXT_MARK)].removeprefix(asked)
    if parse_tool_calls(turn, [schema]) != [ToolCall("probe", _ARGUMENTS)]:
        raise ConfigError(
            "the chat template writes tool calls in a form that --tool-format qwen does not read "
            f'(<tool_call>{{"name": ..., "arguments": ...}}</tool_call> is), namely {turn[:300]!r}; {_ADVICE}'
        )


def _dummy(observations: Sequence[str]) -> list[Message]:
    call = {"type": "function", "id": "call00001", "function": {"name": "probe", "arguments": _ARGUMENTS}}
    results = [{"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": text} for text in observations]
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        *results,
    ]
