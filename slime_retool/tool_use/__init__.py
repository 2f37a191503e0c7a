"""Tool calls: found in model output, executed, and written back as token ids."""

from slime_retool.tool_use.calls import ToolCall, ToolCallError, ToolResult
from slime_retool.tool_use.conversation import ConversationRenderer, check_template
from slime_retool.tool_use.loop import LoopBudgets, run_tool_loop
from slime_retool.tool_use.parser import parse_tool_calls
from slime_retool.tool_use.registry import Tool, ToolRegistry

__all__ = [
    "ConversationRenderer",
    "LoopBudgets",
    "Tool",
    "ToolCall",
    "ToolCallError",
    "ToolRegistry",
    "ToolResult",
    "check_template",
    "parse_tool_calls",
    "run_tool_loop",
]
