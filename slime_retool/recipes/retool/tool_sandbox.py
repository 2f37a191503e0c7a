"""The recipe's one tool: `code_interpreter`, which runs Python in the sandbox.

To give the model a second tool, add it to what `tools` returns (see `slime_retool.tool_use.registry`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from slime_retool.config import Config
from slime_retool.errors import ToolUnavailable
from slime_retool.sandbox import Result, Sandbox, SandboxPolicy, Session, Status
from slime_retool.sandbox.host.fusion_client import FusionSandbox
from slime_retool.sandbox.host.policy import read_token
from slime_retool.tool_use import Tool, ToolFunction, ToolRegistry, ToolResult

WHAT = "Run Python code and see what it prints. numpy and sympy are installed."
DESCRIPTION = f"{WHAT} Every call starts afresh."
DESCRIPTION_OF_SESSIONS = f"{WHAT} Variables are kept from call to call."
PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The Python code to run."}},
    "required": ["code"],
}
SCHEMA = {
    "type": "function",
    "function": {"name": "code_interpreter", "description": DESCRIPTION, "parameters": PARAMETERS},
}
"""What the model is shown, in SFT (`sft_data_processing.py`) as in RL (but for `--tool-state session`)."""
NOTHING_PRINTED = "(no output: print what you want to see)"


def tools(args: Config, box: Sandbox | FusionSandbox) -> list[Tool]:
    """All that the model may call, by `--tool-state`; a sandbox of another host keeps none."""
    if args.tool_state == "session" and isinstance(box, Sandbox):
        return [session_interpreter(box)]
    return [code_interpreter(box)]


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
        # The samples in flight are the bound: none is to be lost because of thousands of others, or because its next
        # turn takes long.
        max_queue=1 << 30,
        max_sessions=1 << 30,
        session_idle=float(1 << 30),
    )
    if args.sandbox_url is not None:
        token = None if args.sandbox_token_file is None else read_token(Path(args.sandbox_token_file))
        async with FusionSandbox(args.sandbox_url, policy, token) as remote:
            yield ToolRegistry(tools(args, remote), retries=args.tool_retries)
        return
    async with Sandbox(policy) as box:
        yield ToolRegistry(tools(args, box), retries=args.tool_retries)


def code_interpreter(box: Sandbox | FusionSandbox) -> Tool:
    """The tool over a given sandbox; every call is a process of its own."""
    return Tool("code_interpreter", DESCRIPTION, PARAMETERS, _runner(box))


def session_interpreter(box: Sandbox) -> Tool:
    """The tool with variables that last as long as their conversation, whose calls run one after the other."""
    numbers = count()

    @asynccontextmanager
    async def conversation() -> AsyncIterator[ToolFunction]:
        async with box.session(f"conversation {next(numbers)}") as session:
            yield _runner(session)

    return Tool("code_interpreter", DESCRIPTION_OF_SESSIONS, PARAMETERS, _runner(box), conversation)


def _runner(place: Sandbox | FusionSandbox | Session) -> ToolFunction:
    async def run(arguments: dict[str, Any]) -> ToolResult:
        result = await place.run(arguments["code"])
        if result.status is Status.UNAVAILABLE:
            raise ToolUnavailable(str(result.error))
        return ToolResult(format_result(result), is_error=result.status is not Status.OK, waited=result.queue_s)

    return run


def format_result(result: Result) -> str:
    """What the model sees: output, the echoed value and, only when the code failed, stderr and the error."""
    parts = [result.stdout, result.result]
    if result.status is not Status.OK:
        parts += [result.stderr, result.error]
    return "\n".join(part.rstrip() for part in parts if part and part.strip()) or NOTHING_PRINTED
