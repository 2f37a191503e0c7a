"""Finds the tool calls in one turn of Qwen's format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The end of a call is where its JSON value ends, so code may contain any tag. Nothing that the model wrote is
evaluated, and nothing here raises: what cannot be executed becomes a `ToolCallError`, which tells the model why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slime_retool.tool_use.calls import MAX_CALLS, TOO_MANY, ToolCall, ToolCallError
from slime_retool.tool_use.schema import check_arguments
from slime_retool.types import ToolSchema

OPEN, CLOSE, END_OF_THINKING = "<tool_call>", "</tool_call>", "</think>"
# Messages spell no tag out: in an observation it would be neutralised, like any other.
_FORM = 'Between the opening and the closing tool_call tag write only {"name": "tool name", "arguments": {...}}.'
# Not strict: raw newlines and tabs inside strings are what models write in code.
_DECODER = json.JSONDecoder(strict=False)


def parse_tool_calls(text: str, tools: Sequence[ToolSchema]) -> list[ToolCall | ToolCallError]:
    """All calls of `text`, in order, checked against `tools`; empty when the turn is an answer.

    Calls mentioned in reasoning that ends with `</think>` do not count. Of more than `MAX_CALLS` the rest is one
    `ToolCallError`.
    """
    calls: list[ToolCall | ToolCallError] = []
    position, thought = 0, text.find(END_OF_THINKING)
    while True:
        start = text.find(OPEN, position)
        if 0 <= thought < position:  # it stood inside a call; otherwise no new search, for each may read all the text
            thought = text.find(END_OF_THINKING, position)
        if 0 <= thought and (start < 0 or thought < start):
            calls.clear()
            position = thought + len(END_OF_THINKING)
            continue
        if start < 0:
            return calls
        if len(calls) == MAX_CALLS:
            last = text.rfind(END_OF_THINKING, start)
            if last < 0:
                return [*calls, TOO_MANY]
            calls.clear()
            position = last + len(END_OF_THINKING)
            continue
        value, position = _read_call(text, start + len(OPEN))
        calls.append(value if isinstance(value, ToolCallError) else to_call(value, tools))


def _read_call(text: str, position: int) -> tuple[Any, int]:
    """The JSON value at `position` and where to look on; or a ToolCallError and where to look on."""
    begin = _skip_space(text, position)
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except RecursionError:
        return ToolCallError("Error: the JSON of the tool call is nested too deeply."), _resume(text, begin)
    except json.JSONDecodeError as error:
        at = error.pos
        seen = text[max(begin, at - 20) : at + 20]
        message = (
            f"Error: the tool call is not valid JSON ({error.msg} near {seen!r}). "
            'Escape double quotes (\\") and backslashes (\\\\) inside strings. ' + _FORM
        )
        return ToolCallError(message), _resume(text, at)
    except ValueError as error:  # an integer with more digits than Python converts
        return ToolCallError(f"Error: the tool call cannot be read ({error})."), _resume(text, begin)
    end = _skip_space(text, end)
    if not text.startswith(CLOSE, end):
        found = text[end : end + 20]
        message = f"Error: the closing tool_call tag must follow the JSON of a call, found {found!r}. {_FORM}"
        return ToolCallError(message), _resume(text, end)
    return value, end + len(CLOSE)


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _resume(text: str, position: int) -> int:
    """Where to go on after a broken call: behind its closing tag, or at the next opening one if that is nearer."""
    opening = text.find(OPEN, position)
    closing = text.find(CLOSE, position, opening if opening >= 0 else len(text))
    if closing >= 0:
        return closing + len(CLOSE)
    return opening if opening >= 0 else position


def to_call(value: Any, tools: Sequence[ToolSchema]) -> ToolCall | ToolCallError:
    """The call of one of `tools` that a JSON value stands for."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or "arguments" not in value:
        return ToolCallError(
            'Error: a tool call must be one JSON object with a string "name" and an object "arguments". ' + _FORM
        )
    name, arguments = value["name"], value["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return ToolCallError(f'Error: "arguments" of {name} must be a JSON object, got text that is not JSON.')
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return ToolCallError(f'Error: "arguments" of {name} must be a JSON object of named arguments, got {kind}.')
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if name not in schemas:
        return ToolCallError(f"Error: there is no tool {name!r}. Available: {', '.join(schemas) or 'none'}.")
    problem = check_arguments(arguments, schemas[name])
    if problem:
        return ToolCallError(f"Error: wrong arguments for {name}: {problem}.")
    return ToolCall(name, arguments)
