"""Tool calls: found in model output, executed, and written back as token ids."""

from slime_retool.errors import ToolUnavailable
from slime_retool.tool_use.calls import ToolCall, ToolCallError, ToolResult, Turn
from slime_retool.tool_use.chat_loop import run_chat_loop
from slime_retool.tool_use.format import FORMATS, ToolFormat, make_format
from slime_retool.tool_use.loop import LoopBudgets, run_tool_loop
from slime_retool.tool_use.parser import parse_tool_calls
from slime_retool.tool_use.qwen import QwenFormat, check_template
from slime_retool.tool_use.registry import Tool, ToolFunction, ToolRegistry
from slime_retool.tool_use.retool import RetoolFormat

__all__ = [
    "FORMATS",
    "LoopBudgets",
    "QwenFormat",
    "RetoolFormat",
    "Tool",
    "ToolCall",
    "ToolCallError",
    "ToolFormat",
    "ToolFunction",
    "ToolRegistry",
    "ToolResult",
    "ToolUnavailable",
    "Turn",
    "check_template",
    "make_format",
    "parse_tool_calls",
    "run_chat_loop",
    "run_tool_loop",
]
