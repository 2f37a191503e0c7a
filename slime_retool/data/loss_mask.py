"""Conversations as token ids by the model's own chat template, and which of them SFT supervises."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence

from slime_retool.chat.codec import TextCodec
from slime_retool.chat.template import TURN_MARK, ChatTemplate
from slime_retool.errors import DataError
from slime_retool.types import Message, ToolSchema


def tokenize_conversation(
    template: ChatTemplate, messages: list[Message], tools: list[ToolSchema] | None = None
) -> tuple[list[int], list[int]]:
    """(ids, loss_mask) of a whole conversation, one mask entry per token.

    `ids` are what the chat template makes of the whole conversation, so that text which it drops (earlier
    reasoning) or merges (parallel tool replies in one user turn) is trained on as it will be seen. The mask is 1 on
    every assistant turn: what follows the generation prompt, through the end-of-turn token; never on the line break
    behind it, nor on system, user or tool text.

    A turn is found by rendering the conversation once more with a mark in that turn: the mark's position belongs to
    it, the turn's header is the last one before, its end the first end-of-turn token after.

    Raises DataError as `render_conversation`, and for a template that shows no tool calls although there are some, or
    whose turns cannot be told apart.
    """
    whole = render_conversation(template, messages, tools)
    ids, marks = template.codec.encode_with_marks(whole)
    mask = [0] * len(ids)
    known = (0, 0)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = _turn_span(template, whole, messages, tools, i)
            if start < known[0]:
                raise DataError(f"the chat template puts message {i} before or inside an earlier one")
            first = _token_index(template.codec, whole, ids, start, [*marks, known])
            last = _token_index(template.codec, whole, ids, end, [*marks, known])
            mask[first:last] = [1] * (last - first)
            known = (end, last)
    return ids, mask


def require_assistant(messages: Sequence[Message]) -> None:
    """Raise DataError for a conversation without a message to learn."""
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("a conversation to learn from needs at least one assistant message, got none")


def refuse_empty_turns(messages: Sequence[Message]) -> None:
    """Raise DataError for a conversation with an assistant message that says nothing and calls nothing."""
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise DataError(f"message {i} is an assistant's and empty: the model would learn to say nothing")


def render_conversation(
    template: ChatTemplate, messages: list[Message], tools: Sequence[ToolSchema] | None = None
) -> str:
    """A whole conversation as the chat template writes it.

    Raises DataError for one that nothing can be learned from or that the template refuses, for an assistant message
    with the template's own control text, and for a template that shows no tools although there are some.
    """
    require_assistant(messages)
    template.refuse_control_texts(messages, ("assistant",))
    whole = template.render(messages, tools, generation=False)
    for tool in tools or []:
        name = tool.get("function", tool)["name"]
        if name not in whole:
            raise DataError(
                f"the chat template does not show the tool {name!r}; use --tool-format retool, or another template"
            )
    return whole


def _turn_span(
    template: ChatTemplate,
    whole: str,
    messages: list[Message],
    tools: list[ToolSchema] | None,
    i: int,
) -> tuple[int, int]:
    """Characters [start, end) of `whole` that assistant message `i` supervises."""
    marks = template.turn_marks
    marked = copy.deepcopy(messages)
    if messages[i].get("tool_calls"):
        call = marked[i]["tool_calls"][0]
        call.get("function", call)["name"] += TURN_MARK
    else:
        marked[i]["content"] = marked[i]["content"].rstrip() + TURN_MARK
    rendered = template.render(marked, tools, generation=False)
    position = rendered.find(TURN_MARK)
    if rendered.count(TURN_MARK) != 1 or not whole.startswith(rendered[:position]):
        what = "tool calls" if messages[i].get("tool_calls") else "content"
        raise DataError(
            f"the chat template does not write the {what} of message {i} once and in place; use a tool-capable template"
        )
    start = whole.rfind(marks.header, 0, position)
    end = whole.find(marks.end, position)
    if start < 0 or end < 0:
        raise DataError(f"the chat template gives message {i} no {marks.header!r} or no {marks.end!r}")
    prompted = whole.startswith(marks.generation_prompt, start)
    start += len(marks.generation_prompt if prompted else marks.header)
    return start, end + len(marks.end)


def _token_index(codec: TextCodec, whole: str, ids: list[int], position: int, known: list[tuple[int, int]]) -> int:
    """Index of the first token that begins at or after character `position` of `whole`.

    `known` are (character, token index) behind special tokens: only the text from the last one before `position` on is
    encoded, because special tokens never merge with what follows. A token that reaches across `position` (a
    header's line break merged with one that begins the reply) counts as before it.
    """
    for character, index in (max(place for place in known if place[0] <= position), (0, 0)):
        before = codec.encode(whole[character:position])
        shared = len(os.path.commonprefix([before, ids[index : index + len(before)]]))
        if shared == len(before):
            return index + shared
    left = len(codec.decode(before[shared:]))
    stop = shared
    while stop < len(ids) and len(codec.decode(ids[shared:stop])) < left:
        stop += 1
    return stop
