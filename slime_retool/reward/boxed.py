r"""Finds the answer that a response states: its last complete \boxed{...}, at any depth of braces, in linear time."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\boxed[ \t\n]*\{|\\[\\{}]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} that is closed, the outermost of nested ones; None when there is none."""
    answer: tuple[int, int] | None = None
    opened: list[int] = []  # where the content of a box begins; -1 for any other brace
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token.startswith("\\boxed"):
            opened.append(match.end())
        elif token == "{":
            opened.append(-1)
        elif token == "}" and opened:
            begin = opened.pop()
            if begin >= 0:
                answer = (begin, match.start())
    return text[answer[0] : answer[1]] if answer else None


def without_tool_text(response: str) -> str:
    """The response without its tool calls and observations: what the model itself says.

    An answer that only the tool printed, or that only stands in code, is not the model's answer.
    """
    for tag in ("tool_call", "tool_response", "code", "interpreter"):
        response = _without(response, f"<{tag}>", f"</{tag}>")
    return response


def _without(text: str, opening: str, closing: str) -> str:
    parts = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start)
        if end < 0:
            break
        parts.append(text[position:start])
        position = end + len(closing)
    parts.append(text[position:])
    return "".join(parts)
