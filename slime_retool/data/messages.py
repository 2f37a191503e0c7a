"""Chat messages and tool schemas of a data row, checked and brought to one form."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from slime_retool.data.readers import parse_json
from slime_retool.errors import DataError
from slime_retool.types import ROLES, Message, ToolSchema


def parse_messages(value: Any, where: str) -> list[Message]:
    """A conversation: a list of {role, content, ...}, or JSON text of one.

    Keys without a value are dropped, a missing `content` becomes "", and `tool_calls` (a list or JSON text) get
    arguments that are objects, so that both spellings of arguments render to the same prompt.

    Raises DataError, naming `where`, for anything else, and for a tool message that answers no call.
    """
    messages = parse_json(value, where)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where} must be a list of messages with at least one entry, got {str(messages)[:80]!r}")
    parsed = [_parse_message(message, f"{where}, message {i}") for i, message in enumerate(messages)]
    _check_tool_messages(parsed, where)
    return parsed


def parse_tools(value: Any, where: str) -> list[ToolSchema] | None:
    """Tool schemas: a list of objects, or JSON text of one (also of each entry). None when there are none."""
    tools = parse_json(value, where) if value else None
    if not tools:
        return None
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools, list):
        raise DataError(f"{where} must be a list of tool schemas, got {str(tools)[:80]!r}")
    tools = [parse_json(tool, where) for tool in tools]
    for tool in tools:
        function = _function(tool, f"{where}: a tool schema")
        problem = _problem_of_parameters(json.dumps(function.get("parameters", {}), default=repr))
        if problem:
            name = function["name"]
            raise DataError(f"{where}: the parameters of {name} must be a JSON schema of an object; {problem}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


@lru_cache(maxsize=256)
def _problem_of_parameters(parameters: str) -> str:
    """What is wrong with a tool's `parameters` (JSON text); empty when a call's arguments can be checked by them."""
    from jsonschema import Draft202012Validator, SchemaError

    schema = json.loads(parameters)
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return f"got {parameters[:80]}"
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path[2:] or 'it'}: {error.message[:80]}"
    return ""


def _check_tool_messages(messages: list[Message], where: str) -> None:
    """Tool messages follow the assistant message that called, no more than it has calls (where it lists any)."""
    calls = left = None
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            if left is None:
                raise DataError(f"{where}, message {i}: a tool message must follow the assistant message that called")
            if calls and left == 0:
                raise DataError(f"{where}, message {i}: more tool messages than the {calls} call(s) before them")
            left -= 1
        else:
            calls = len(message.get("tool_calls", ()))
            left = calls if message["role"] == "assistant" else None


def _function(value: Any, what: str) -> dict[str, Any]:
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{what} must be an object with a function name, got {str(value)[:80]!r}")
    return function


def _parse_message(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        raise DataError(f"{where} must be an object whose role is one of {', '.join(ROLES)}; got {str(value)[:80]!r}")
    message = {key: item for key, item in value.items() if item is not None}
    message.setdefault("content", "")
    if not isinstance(message["content"], str):
        raise DataError(f"{where}: content must be text, got {type(message['content']).__name__}")
    calls = parse_json(message.pop("tool_calls", None) or [], f"{where}, tool_calls")
    if calls and message["role"] != "assistant":
        raise DataError(f"{where}: only an assistant message can hold tool_calls, this one's role is {message['role']}")
    if not isinstance(calls, list):
        raise DataError(f"{where}: tool_calls must be a list, got {str(calls)[:80]!r}")
    if calls:
        message["tool_calls"] = [_parse_call(call, f"{where}, tool_calls") for call in calls]
    return message


def _parse_call(value: Any, where: str) -> dict[str, Any]:
    call = parse_json(value, where)
    function = _function(call, f"{where}: a call")
    arguments = parse_json(function.get("arguments") or {}, f"{where}, arguments of {function['name']}")
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: arguments of {function['name']} must be an object, got {str(arguments)[:80]!r}")
    kept = {key: item for key, item in call.items() if key not in ("function", "name", "arguments")}
    return {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}}
