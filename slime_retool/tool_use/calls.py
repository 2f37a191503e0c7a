"""What passes between parser, registry and conversation."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool shows the model."""

    text: str
    is_error: bool = False
    """The call itself went wrong (an exception, a time limit); counted, and shown all the same."""
