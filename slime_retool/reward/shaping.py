"""Reward shaping: tool use while answers are still wrong, and answers near the length limit.

Tool use: the published ReTool recipes add, to wrong answers only, (n - 2) / 2 * 0.1 and cap the sum at -0.6. They
differ in n: verl's counts the messages of the conversation, slime's the tool calls, so that there a failure without any
call scores -1.1. Here n is always 2 for question and answer, and 2 more for every unit of tool use; `--shape-tool-use`
says what a unit is. A failure scores -1.0 without tools, -0.9 with one unit, and -0.6 from four units on.
"""

from __future__ import annotations

from slime_retool.types import Sample

COUNTED = ("turns", "calls", "none")


def conversation_messages(sample: Sample, counted: str = "turns") -> int:
    """Messages of the conversation as the formula counts them.

    `turns`: a round of tool use is a further assistant turn and an executed call; neither many calls in one turn nor
    malformed calls earn more. `calls`: every executed call counts. `none`: no tool use does.
    """
    assert counted in COUNTED, counted
    units = {
        "turns": min(max(0, sample.num_turns - 1), sample.num_tool_calls),
        "calls": sample.num_tool_calls,
        "none": 0,
    }
    return 2 + 2 * units[counted]


def shape_tool_use(score: float, num_messages: int) -> float:
    """min(-0.6, score + (num_messages - 2) / 2 * 0.1) for a wrong answer (score below 0), else the score itself."""
    if score >= 0:
        return score
    return min(-0.6, score + (num_messages - 2) / 2 * 0.1)


def overlong_penalty(length: int, max_length: int, buffer: float) -> float:
    """DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, eq. 13), between -1 and 0.

    `length` tokens of the response, of at most `max_length`; the punishment grows linearly over the last `buffer` of
    them and is -1 at and beyond the limit.
    """
    return -min(max(length - (max_length - buffer), 0) / buffer, 1.0)
