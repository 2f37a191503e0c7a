"""A conversation as SFT trains on it, in either of the formats of `--tool-format`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slime_retool.chat import ChatTemplate
from slime_retool.config import Config
from slime_retool.data.loss_mask import (
    refuse_empty_turns,
    render_conversation,
    require_assistant,
    tokenize_conversation,
)
from slime_retool.data.rows import RowCheck
from slime_retool.errors import DataError
from slime_retool.tool_use.calls import ToolCall
from slime_retool.tool_use.retool import RetoolFormat
from slime_retool.types import Message, Sample, ToolSchema

NO_CONVERSATION = (
    "SFT needs conversations, this row's prompt is plain text; point --input-key at the column of messages"
)
_OUTPUTS = "give each call a tool message with its output"
_NO_LIMIT = 1 << 20
"""Tokens of a recorded observation: data is not cut."""


class ConversationTokenizer:
    """(ids, loss_mask) of conversations with `tool_calls` and `tool` turns.

    `qwen`: the chat template writes calls and tool turns (`data.loss_mask.tokenize_conversation`). `retool`: code
    blocks and interpreter blocks inside one assistant message, built piece by piece like a rollout, so that the ids are
    those which RL will see; the model's pieces are supervised, interpreter blocks are not. That one needs no template
    with tools.
    """

    def __init__(self, tool_format: str, tokenizer: Any) -> None:
        self._tool_format, self._tokenizer = tool_format, tokenizer
        self._template = ChatTemplate(tokenizer)
        self._formats: dict[str, RetoolFormat] = {}

    def __call__(self, messages: list[Message], tools: list[ToolSchema] | None = None) -> tuple[list[int], list[int]]:
        """One mask entry per token. Raises DataError for a conversation that the format cannot hold."""
        form = self._format(tools)
        if form is None:
            return tokenize_conversation(self._template, messages, tools)
        return self._in_retool(form, messages)

    def check(self, messages: list[Message], tools: list[ToolSchema] | None = None) -> None:
        """Raise DataError for a conversation that cannot be trained on, as far as that shows without its tokens."""
        refuse_empty_turns(messages)
        form = self._format(tools)
        if form is None:
            render_conversation(self._template, messages, tools)
        else:
            self._in_pieces(form, messages)

    def _format(self, tools: list[ToolSchema] | None) -> RetoolFormat | None:
        """None where the chat template writes the conversation."""
        if self._tool_format != "retool" or not tools:
            return None
        key = json.dumps(tools)
        if key not in self._formats:
            self._formats[key] = RetoolFormat(self._tokenizer, tools)
        return self._formats[key]

    def _in_pieces(
        self, form: RetoolFormat, messages: list[Message]
    ) -> tuple[list[Message], list[tuple[str, str | None]]]:
        """The prompt, and the `_pieces` of the one assistant message behind it."""
        require_assistant(messages)
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
        if first == 0 or any(message["role"] in ("user", "system") for message in messages[first:]):
            raise DataError(
                "--tool-format retool puts a whole solution into one assistant message: a conversation must be a "
                "prompt followed by assistant and tool messages only"
            )
        pieces = _pieces(messages, first, form)
        if any(self._template.end_token in text for text, _ in pieces):
            raise DataError(f"an assistant message holds {self._template.end_token!r}, which ends a turn; remove it")
        return messages[:first], pieces

    def _in_retool(self, form: RetoolFormat, messages: list[Message]) -> tuple[list[int], list[int]]:
        prompt, pieces = self._in_pieces(form, messages)
        ids = form.prompt_ids(prompt)
        mask = [0] * len(ids)
        for text, observation in pieces:
            spoken = self._template.codec.encode(text)
            if observation is None:
                spoken.append(self._template.end_token_id)
                shown: list[int] = []
            else:
                turn = form.read_turn(spoken)
                if len(turn.calls) != 1 or not isinstance(turn.calls[0], ToolCall) or turn.missing:
                    raise DataError(f"a code block cannot be written in the retool format: {text[-200:]!r}")
                shown = form.observation_ids([form.fit_observation(observation, _NO_LIMIT)], turn)
            ids += spoken + shown
            mask += [1] * len(spoken) + [0] * len(shown)
        return ids, mask


def conversation_check(tool_format: str, tokenizer: Any) -> RowCheck:
    """What `sft_rollout` needs of a data row: see `ConversationTokenizer.check`."""
    tokenize = ConversationTokenizer(tool_format, tokenizer)

    def check(args: Config, sample: Sample) -> None:
        if isinstance(sample.prompt, str):
            raise DataError(NO_CONVERSATION)
        tokenize.check(sample.prompt, sample.tools)

    return check


def _code(form: RetoolFormat, function: dict[str, Any]) -> str:
    name, arguments = function["name"], function["arguments"]
    if name != form.tool or list(arguments) != [form.argument] or not isinstance(arguments[form.argument], str):
        raise DataError(
            f"--tool-format retool can write calls of {form.tool!r} with text as {form.argument!r} and nothing else, "
            f"got a call of {name!r} with {json.dumps(arguments)[:80]}"
        )
    return arguments[form.argument]


def _pieces(messages: Sequence[Message], first: int, form: RetoolFormat) -> list[tuple[str, str | None]]:
    """(what the model writes, the output behind it) from message `first` on, of the last piece without an output.

    Several calls of one message become blocks one after the other, each with its own output.
    """
    pieces: list[tuple[str, str | None]] = []
    outputs = [message["content"] for message in messages if message["role"] == "tool"]
    for i, message in enumerate(messages[first:], start=first):
        calls = message.get("tool_calls") or []
        for number, call in enumerate(calls):
            code = _code(form, call["function"])
            prose = message["content"].strip() if number == 0 else ""
            if len(pieces) >= len(outputs):
                raise DataError(f"message {i} has a call without an output; {_OUTPUTS}")
            block = f"<code>\n```python\n{code.rstrip()}\n```\n</code>"
            pieces.append((f"{prose}\n{block}" if prose else block, outputs[len(pieces)]))
        if message["role"] == "assistant" and not calls:
            if message is not messages[-1]:
                raise DataError("an assistant message without a call must be the last one")
            pieces.append((message["content"].strip(), None))
    if len(pieces) != len(outputs) + 1:
        raise DataError(
            f"message {len(messages) - 1} ends the conversation with {len(outputs)} outputs, which need as many calls "
            f"and a last assistant message; {_OUTPUTS}"
        )
    return pieces
