"""The tools a model may call. A tool is a schema and an async function:

async def now(arguments: dict) -> str:
    return datetime.now(ZoneInfo(arguments["zone"])).isoformat()

zone = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
registry = ToolRegistry([Tool("now", "The time in a time zone.", zone, now)])
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from slime_retool.errors import ConfigError, ToolUnavailable
from slime_retool.tool_use.calls import ToolCall, ToolResult
from slime_retool.tool_use.schema import check_arguments
from slime_retool.types import ToolSchema

NO_OUTPUT = "(no output)"

ToolFunction = Callable[[dict[str, Any]], Awaitable[ToolResult | str]]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. `function` gets arguments that fit `parameters` and returns what the model is shown.

    It raises ToolUnavailable when its back end is down. What the call itself did wrong is for the model to see:
    `ToolResult(text, is_error=True)`.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments object."""
    function: ToolFunction
    conversation: Callable[[], AbstractAsyncContextManager[ToolFunction]] | None = None
    """For a tool that keeps state: entered for each conversation, gives the function that its calls go to."""

    def schema(self) -> ToolSchema:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolRegistry:
    """Tools by name, executed with retries during outages.

    `retries`: further tries after ToolUnavailable, the first after `retry_delay` seconds, then twice as long each.
    """

    def __init__(self, tools: Sequence[Tool] = (), *, retries: int = 3, retry_delay: float = 0.5) -> None:
        self._tools: dict[str, Tool] = {}
        self._retries = retries
        self._retry_delay = retry_delay
        for tool in tools:
            self.add(tool)

    def add(self, tool: Tool) -> None:
        """Raises ConfigError when the name is taken."""
        if tool.name in self._tools:
            raise ConfigError(f"there are two tools named {tool.name!r}; names must differ")
        self._tools[tool.name] = tool

    def schemas(self) -> list[ToolSchema]:
        return [tool.schema() for tool in self._tools.values()]

    def require(self, schemas: Sequence[ToolSchema]) -> None:
        """Raises ConfigError when a data row offers the model a tool that is not registered, or with other arguments.

        A row may say less of a tool than its own schema does; calls that this lets through are answered by `execute`.
        """
        missing = [name for schema in schemas if (name := schema["function"]["name"]) not in self._tools]
        if missing:
            known = ", ".join(self._tools) or "none"
            raise ConfigError(
                f"the data offers tools that no code is registered for: {', '.join(missing)} (registered: {known}); "
                "add them to the registry or change the tools column"
            )
        for schema in schemas:
            name = schema["function"]["name"]
            problem = _misfit(schema["function"].get("parameters") or {}, self._tools[name].parameters)
            if problem:
                raise ConfigError(
                    f"the data shows the tool {name!r} with other arguments than its code takes: {problem}; change the "
                    "tools column, or leave it out to show the registered tools"
                )

    @asynccontextmanager
    async def conversation(self) -> AsyncIterator[ToolRegistry]:
        """The registry that one conversation uses: tools that keep state have their own until it ends."""
        async with AsyncExitStack() as stack:
            own = [
                replace(tool, function=await stack.enter_async_context(tool.conversation()))
                if tool.conversation is not None
                else tool
                for tool in self._tools.values()
            ]
            yield ToolRegistry(own, retries=self._retries, retry_delay=self._retry_delay)

    async def execute(self, call: ToolCall) -> ToolResult:
        """Run one call. One that made the tool raise because its arguments do not fit the tool is answered by an error.

        Raises ToolUnavailable when the tool is down after all retries, or has a bug (it raised something else):
        neither is an observation that a model should learn from.
        """
        tool = self._tools[call.name]
        delay, begin = self._retry_delay, time.monotonic()
        for attempt in range(self._retries + 1):
            try:
                result = _to_result(await tool.function(call.arguments))
                return replace(result, seconds=time.monotonic() - begin)
            except ToolUnavailable:
                if attempt == self._retries:
                    raise
            except Exception as error:
                # Asked only now: the format checked them by what the row shows, and to check takes as long as a turn.
                problem = check_arguments(call.arguments, tool.parameters)
                if problem:
                    message = f"Error: wrong arguments for {call.name}: {problem}."
                    return ToolResult(message, is_error=True, seconds=time.monotonic() - begin)
                raise ToolUnavailable(f"tool {call.name!r} raised {type(error).__name__}: {error}") from error
            await asyncio.sleep(delay)
            delay *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def execute_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """`execute` all at once, results in order; when one raises, the others have ended before it goes on."""
        tasks = [asyncio.ensure_future(self.execute(call)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise


def _to_result(value: ToolResult | str | None) -> ToolResult:
    if value is None:
        value = ""
    if isinstance(value, str):
        value = ToolResult(value)
    if not isinstance(value, ToolResult) or not isinstance(value.text, str):
        raise TypeError(f"it must return text or a ToolResult, got {type(value).__name__}")
    return value if value.text.strip() else replace(value, text=NO_OUTPUT)


_OTHER_NAMES = {"patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
"""What may allow arguments that `properties` does not name."""


def _misfit(shown: dict[str, Any], own: dict[str, Any]) -> str | None:
    """How parameters that a row shows contradict the tool's own, by names and types; None where they do not."""
    arguments, known = shown.get("properties"), own.get("properties")
    if not arguments or not known:
        return None
    closed = own.get("additionalProperties", False) is False and not _OTHER_NAMES & own.keys()
    for name in own.get("required", ()):
        if name not in arguments:
            return f"{name!r} is required, and only {', '.join(map(repr, arguments))} shown"
    for name, argument in arguments.items():
        if name not in known and closed:
            return f"it has no {name!r}, only {', '.join(map(repr, known))}"
        types, own_types = _types(argument), _types(known.get(name))
        if types and own_types and not types & own_types:
            return f"{name!r} is {' or '.join(sorted(own_types))}, and {' or '.join(sorted(types))} is shown"
    return None


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names; none where it leaves them open."""
    named = schema.get("type", []) if isinstance(schema, dict) else []
    types = {named} if isinstance(named, str) else set(named)
    return types | {"integer"} if "number" in types else types
