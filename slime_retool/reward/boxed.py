r"""Finds the answer that a response states: its last complete \boxed{...}, at any depth of braces, in linear time."""

from __future__ import annotations

import re

TAGS = ("tool_call", "tool_response", "code", "interpreter")
"""What encloses tool calls and observations."""
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


def published_box(text: str) -> str | None:
    r"""Content of the last \\boxed{ in `text`, up to its closing brace; None when there is none or it is not closed.

    As in the published rule: a later box that is left open hides an earlier one, of nested boxes the inner one counts.
    """
    box, opening = text.rfind("\\boxed{"), len("\\boxed")
    end = closing(text, box + opening, "{", "}") if box >= 0 else -1
    return text[box + opening + 1 : end] if end >= 0 else None


def closing(text: str, start: int, opens: str, closes: str) -> int:
    """Where the bracket at `start` is closed, by one of these kinds; -1 when it is not."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in opens) - (text[position] in closes)
        if depth == 0:
            return position
    return -1


_MAX_PARTS = 64


def split_outside(text: str, separator: str) -> list[str]:
    """The parts of `text` between separators outside all brackets; empty when there is no separator, or too many."""
    parts, depth, begin, position = [], 0, 0, 0
    while position < len(text):
        if depth == 0 and text.startswith(separator, position):
            parts.append(text[begin:position])
            position = begin = position + len(separator)
            continue
        depth += (text[position] in "([{") - (text[position] in ")]}")
        position += 1
    if not parts or len(parts) >= _MAX_PARTS:
        return []
    return [*parts, text[begin:]]


_STATED = re.compile(r"(?:\bAnswer\**[ \t]*(?:is[ \t]*)?:\**|\banswer is)[ \t]*([^\n]+)", re.IGNORECASE)


def last_answer(text: str) -> str | None:
    r"""The answer that a response states: its last complete box, else what follows its last "Answer:" or "answer is".

    None when it states none.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    stated = _STATED.findall(text[-_STATED_WINDOW:])
    return stated[-1].strip().rstrip(".").strip("*") if stated else None


_STATED_WINDOW = 2000


def without_tool_text(response: str) -> str:
    """The response with its tool calls and observations blanked out, at the same length: what the model itself says.

    An answer that only the tool printed, or that only stands in code, is not the model's answer.
    """
    cut = _begin_of_cut_call(response)
    for tag in TAGS:
        response = _blanked(response, f"<{tag}>", f"</{tag}>")
    return response[:cut] + "\n" * (len(response) - cut)


_CALL = re.compile(r"<tool_call>\s*\{|<code>\s*```")
_TURN = re.compile(rf"</?(?:{'|'.join(TAGS)})>|<\|")


def _begin_of_cut_call(response: str) -> int:
    """Where the call begins in whose midst the response was cut; its length where there is none.

    A call that was not closed but answered has the observation, or another turn, behind it.
    """
    begin = max((match.end() for match in _CALL.finditer(response)), default=-1)
    return len(response) if begin < 0 or _TURN.search(response, begin) else begin


def without_open_thought(text: str) -> str:
    """The text up to a `<think>` that is never closed: what was only thought when the response was cut is no answer."""
    start = text.rfind("<think>")
    return text if start < 0 or "</think>" in text[start:] else text[:start]


def _blanked(text: str, opening: str, closing: str) -> str:
    parts = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        end = text.find(closing, start)
        if end < 0:
            break
        end += len(closing)
        parts += [text[position:start], "\n" * (end - start)]
        position = end
    parts.append(text[position:])
    return "".join(parts)
