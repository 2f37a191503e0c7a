"""What passes between parser, registry and conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be executed: it names a known tool and its arguments fit the tool's schema."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCallError:
    """An attempt to call that cannot be executed. `message` is for the model: what to change."""

    message: str


MAX_CALLS = 64
"""Calls of one turn that are read, malformed ones included: reading and answering them holds up all other samples."""
TOO_MANY = ToolCallError(f"Error: a turn can hold {MAX_CALLS} tool calls; what followed them was not read.")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool shows the model."""

    text: str
    is_error: bool = False
    """The call itself went wrong (an exception, a time limit); counted, and shown all the same."""
    seconds: float = field(default=0.0, compare=False)
    """How long the registry took to get it, retries included."""
    waited: float = field(default=0.0, compare=False)
    """Seconds of these for which the call waited for its turn, where the tool knows."""


@dataclass(slots=True)
class Turn:
    """What the model wrote since the prompt or the last observation, read by a `ToolFormat`."""

    text: str
    """All of it, with the end token if it is there."""
    calls: list[ToolCall | ToolCallError]
    unfinished: bool = False
    """The engine stopped in the middle of a call; generation has to go on before there is something to answer."""
    over: bool = True
    """The model ended it with an end token, or the format knows no other way."""
    missing: str = ""
    """Text that ends the turn but is not among its ids, because the engine stopped for another reason or trimmed it.

    It is appended as the observation's, with loss mask 0."""
