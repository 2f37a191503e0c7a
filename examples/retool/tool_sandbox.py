"""The recipe's one tool: `code_interpreter`, which runs Python in the sandbox.

To give the model a second tool, add it to the registry that `make_tools` yields (see `slime_retool.tool_use.registry`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from slime_retool.config import Config
from slime_retool.errors import ToolUnavailable
from slime_retool.sandbox import Result, Sandbox, SandboxPolicy, Status
from slime_retool.sandbox.host.fusion_client import FusionSandbox
from slime_retool.tool_use import Tool, ToolRegistry, ToolResult

DESCRIPTION = "Run Python code and see what it prints. numpy and sympy are installed. Every call starts afresh."
PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The Python code to run."}},
    "required": ["code"],
}
SCHEMA = {
    "type": "function",
    "function": {"name": "code_interpreter", "description": DESCRIPTION, "parameters": PARAMETERS},
}
"""What the model is shown, in SFT (`sft_data_processing.py`) as in RL."""
NOTHING_PRINTED = "(no output: print what you want to see)"


@asynccontextmanager
async def make_tools(args: Config) -> AsyncIterator[ToolRegistry]:
    """The registry of the recipe, over one sandbox that all samples of a rollout share.

    Use it as `await current_context().resource("tools", make_tools)`.
    """
    policy = SandboxPolicy(
        isolation=args.sandbox_isolation,
        timeout=args.tool_timeout,
        memory_mb=args.tool_memory_mb,
        concurrency=args.tool_concurrency,
        # The samples in flight are the bound: none is to be lost because thousands of others wait before it.
        max_queue=1 << 30,
    )
    async with Sandbox(policy) if args.sandbox_url is None else FusionSandbox(args.sandbox_url, policy) as box:
        yield ToolRegistry([code_interpreter(box)], retries=args.tool_retries)


def code_interpreter(box: Sandbox | FusionSandbox) -> Tool:
    """The tool over a given sandbox."""

    async def run(arguments: dict[str, Any]) -> ToolResult:
        result = await box.run(arguments["code"])
        if result.status is Status.UNAVAILABLE:
            raise ToolUnavailable(str(result.error))
        return ToolResult(format_result(result), is_error=result.status is not Status.OK)

    return Tool("code_interpreter", DESCRIPTION, PARAMETERS, run)


def format_result(result: Result) -> str:
    """What the model sees: output, the echoed value and, only when the code failed, stderr and the error."""
    parts = [result.stdout, result.result]
    if result.status is not Status.OK:
        parts += [result.stderr, result.error]
    return "\n".join(part.rstrip() for part in parts if part and part.strip()) or NOTHING_PRINTED
