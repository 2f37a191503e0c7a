"""Whether the code of a recorded conversation still prints what was recorded."""

from __future__ import annotations

import math
import re

from tool_sandbox import format_result

from slime_retool.errors import ToolUnavailable
from slime_retool.sandbox import Result, Sandbox, Status
from slime_retool.types import Message

_NUMBER = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_REL_TOLERANCE = 1e-6


async def disagreement(box: Sandbox, messages: list[Message]) -> str | None:
    """Why the conversation's code does not give the recorded outputs; None when it does.

    Every block is run by itself. Raises ToolUnavailable when the sandbox is down.
    """
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            continue
        call = messages[number - 1]["tool_calls"][0]
        result = await box.run(call["function"]["arguments"]["code"])
        if result.status is Status.UNAVAILABLE:
            raise ToolUnavailable(str(result.error))
        if result.status in (Status.TIMEOUT, Status.MEMORY, Status.KILLED):
            return f"a block ends with {result.status.value} when run again"
        if not agrees(message["content"], result):
            return "a block prints something else when run again"
    return None


def agrees(recorded: str, result: Result) -> bool:
    """Whether `result` shows the recorded text.

    A bare last expression may be echoed or not, floating-point numbers may differ in their last places, addresses and
    the layout of blanks do not count, and of a traceback only its last line does.
    """
    if result.status is Status.ERROR:
        return _same_text(_last_line(recorded), _last_line(format_result(result)))
    return _same_text(recorded, result.stdout) or _same_text(recorded, format_result(result))


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _same_text(left: str, right: str) -> bool:
    left, right = (_ADDRESS.sub("0x", " ".join(text.split())) for text in (left, right))
    if left == right:
        return True
    if _NUMBER.sub("#", left) != _NUMBER.sub("#", right):
        return False
    return all(map(_same_number, _NUMBER.findall(left), _NUMBER.findall(right)))


def _same_number(left: str, right: str) -> bool:
    """Integers exactly; numbers with a point or an exponent up to their last places."""
    if left == right:
        return True
    if not re.search(r"[.eE]", left + right):
        return False
    return math.isclose(float(left), float(right), rel_tol=_REL_TOLERANCE, abs_tol=1e-12)
