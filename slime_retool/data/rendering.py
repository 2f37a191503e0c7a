"""Conversations to token ids by the model's own chat template, and which of them SFT supervises.

transformers is imported only where a tokenizer is loaded; everything else works on any object with
`apply_chat_template`, `decode`, `all_special_ids` and a call that returns `input_ids`.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_retool.errors import ConfigError, DataError
from slime_retool.types import Message, ToolSchema

# A word that no data row holds and that templates neither strip, split nor escape.
_MARK = "QzMarkedHereXv"


def load_tokenizer(path: str | Path, flag: str = "--hf-checkpoint") -> Any:
    """The transformers tokenizer in a local checkpoint folder, which `flag` named; nothing is downloaded.

    Raises ConfigError when the folder or its tokenizer is missing, or when it has no chat template.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"{flag} {str(path)!r} is not a folder; give a local Hugging Face checkpoint")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{flag} {str(path)!r} has no tokenizer that loads: {reason}") from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer in {str(path)!r} has no chat template; use an instruct model's, or add chat_template.jinja"
        )
    return tokenizer


def render_prompt(tokenizer: Any, prompt: list[Message] | str, tools: list[ToolSchema] | None = None) -> list[int]:
    """Token ids that the model continues: messages through the chat template, opened for an assistant turn.

    Text is taken as already rendered. Raises DataError when the template refuses the messages.
    """
    text = prompt if isinstance(prompt, str) else _render(tokenizer, prompt, tools, generate=True)
    return _encode(tokenizer, text)


def tokenize_conversation(
    tokenizer: Any, messages: list[Message], tools: list[ToolSchema] | None = None
) -> tuple[list[int], list[int]]:
    """(ids, loss_mask) of a whole conversation, one mask entry per token.

    `ids` are what the chat template makes of the whole conversation, so that text which it drops (earlier
    reasoning) or merges (parallel tool replies in one user turn) is trained on as it will be seen. The mask is 1 on
    every assistant turn: what follows the generation prompt, through the end-of-turn token; never on the line break
    behind it, nor on system, user or tool text.

    A turn is found by rendering the conversation once more with a mark in that turn: the mark's position belongs to
    it, the turn's header is the last one before, its end the first end-of-turn token after.

    Raises DataError for a template that shows no tools or tool calls although there are some, or whose turns
    cannot be told apart, and for an assistant message that holds the template's own control text.
    """
    whole = _render(tokenizer, messages, tools)
    for tool in tools or []:
        name = tool.get("function", tool)["name"]
        if name not in whole:
            raise DataError(f"the chat template does not show the tool {name!r}; use a tool-capable template")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("a conversation to learn from needs at least one assistant message, got none")
    marks = _turn_marks(tokenizer)
    ids = _encode(tokenizer, whole)
    mask = [0] * len(ids)
    known = (0, 0)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = _turn_span(tokenizer, whole, messages, tools, i, marks)
            if start < known[0]:
                raise DataError(f"the chat template puts message {i} before or inside an earlier one")
            first = _token_index(tokenizer, whole, ids, start, known)
            last = _token_index(tokenizer, whole, ids, end, known)
            mask[first:last] = [1] * (last - first)
            known = (end, last)
    return ids, mask


@dataclass(frozen=True)
class _TurnMarks:
    """What a template writes around an assistant turn."""

    header: str
    """Opens every assistant turn, e.g. "<|im_start|>assistant\\n"."""
    generation_prompt: str
    """Begins with `header`; longer where the template also opens the reasoning."""
    end: str
    """End-of-turn token."""


def _turn_marks(tokenizer: Any) -> _TurnMarks:
    """Read off the template by rendering a small probe conversation.

    Raises DataError when assistant turns have no header of their own or no special token ends them.
    """
    ask, reply = {"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}
    opened = _render(tokenizer, [ask])
    prompted = _render(tokenizer, [ask], generate=True)
    last_turn = _render(tokenizer, [ask, reply])
    inner_turn = _render(tokenizer, [ask, reply, ask])
    if not (prompted.startswith(opened) and inner_turn.startswith(opened) and last_turn.count(_MARK) == 1):
        raise DataError("the chat template rewrites a user turn once a reply follows; its turns cannot be told apart")
    generation_prompt = prompted[len(opened) :]
    header = _common_prefix(generation_prompt, inner_turn[len(opened) :])
    tail = _encode(tokenizer, last_turn.partition(_MARK)[2])
    if not header.strip() or not tail or tail[0] not in tokenizer.all_special_ids:
        raise DataError(
            f"assistant turns must begin with a header and end with a special token; this chat template writes "
            f"{header!r} before and {last_turn.partition(_MARK)[2]!r} after"
        )
    return _TurnMarks(header, generation_prompt, _decode(tokenizer, tail[:1]))


def _turn_span(
    tokenizer: Any,
    whole: str,
    messages: list[Message],
    tools: list[ToolSchema] | None,
    i: int,
    marks: _TurnMarks,
) -> tuple[int, int]:
    """Characters [start, end) of `whole` that assistant message `i` supervises."""
    written = json.dumps(messages[i], ensure_ascii=False)
    for control in (marks.header.strip(), marks.end):
        if control in written:
            raise DataError(f"message {i} holds {control!r}, which the chat template uses to separate turns; remove it")
    marked = copy.deepcopy(messages)
    if messages[i].get("tool_calls"):
        call = marked[i]["tool_calls"][0]
        call.get("function", call)["name"] += _MARK
    else:
        marked[i]["content"] = marked[i]["content"].rstrip() + _MARK
    rendered = _render(tokenizer, marked, tools)
    position = rendered.find(_MARK)
    if rendered.count(_MARK) != 1 or not whole.startswith(rendered[:position]):
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


def _token_index(tokenizer: Any, whole: str, ids: list[int], position: int, known: tuple[int, int]) -> int:
    """Index of the first token that begins at or after character `position` of `whole`.

    `known` is an earlier (character, token index) behind an end-of-turn token: only the text from there on is
    encoded, because special tokens never merge with what follows. A token that reaches across `position` (a
    header's line break merged with one that begins the reply) counts as before it.
    """
    for character, index in (known, (0, 0)):
        before = _encode(tokenizer, whole[character:position])
        shared = len(_common_prefix(before, ids[index : index + len(before)]))
        if shared == len(before):
            return index + shared
    left = len(_decode(tokenizer, before[shared:]))
    stop = shared
    while stop < len(ids) and len(_decode(tokenizer, ids[shared:stop])) < left:
        stop += 1
    return stop


def _render(tokenizer: Any, messages: list[Message], tools: list[ToolSchema] | None = None, generate=False) -> str:
    from jinja2.exceptions import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generate, tokenize=False)
    except (TemplateError, TypeError, KeyError) as error:
        raise DataError(f"the chat template refuses this conversation: {type(error).__name__}: {error}") from error


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _common_prefix(left: Any, right: Any) -> Any:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return left[:length]
