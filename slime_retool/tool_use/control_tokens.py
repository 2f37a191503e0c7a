"""The tokens that structure a conversation: what the chat template and the tool format write as one token each."""

from __future__ import annotations

import re
from typing import Any

from slime_retool.chat import ChatTemplate
from slime_retool.errors import DataError
from slime_retool.tool_use.format import FORMATS
from slime_retool.types import Message

_CONVERSATION: list[Message] = [
    {"role": role, "content": "x"} for role in ("system", "user", "assistant", "user", "assistant")
]


def control_tokens(tokenizer: Any, *tool_formats: str) -> dict[str, int]:
    """Text -> id of the added tokens that the chat template writes around turns, and of the formats' tags that are one
    token."""
    template = ChatTemplate(tokenizer)
    try:
        written = template.render(_CONVERSATION)
    except DataError:  # without a system message, then
        written = template.render(_CONVERSATION[1:])
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    found = {added[number]: number for number in template.codec.encode(written) if number in added}
    for mark in (mark for name in tool_formats for mark in FORMATS[name].marks):
        ids = template.codec.encode(mark)
        if len(ids) == 1:
            found[mark] = ids[0]
    return found


def made_of(tokenizer: Any, token: str) -> list[int]:
    """Ids of the tokens that a token's text would be without it: of its words and of the signs around them."""
    own, codec = tokenizer.convert_tokens_to_ids(token), ChatTemplate(tokenizer).codec
    pieces = [codec.encode(piece) for piece in re.findall(r"\w+|\W+", token)]
    if [own] in pieces:  # a single word
        pieces = [codec.encode(character) for character in token]
    return [number for piece in pieces for number in piece]


def untrained_control_tokens(checkpoint: str, tokenizer: Any, *tool_formats: str) -> list[str]:
    """Those that the checkpoint's weights never saw; none where its folder has no weights that can be read."""
    from megatron_bridge.token_rows import untrained_tokens  # brings torch

    tokens = control_tokens(tokenizer, *tool_formats)
    try:
        first_unused = max(tokenizer.get_vocab().values()) + 1
        return untrained_tokens(checkpoint, tokens, tokenizer.added_tokens_decoder, first_unused)
    except (ValueError, OSError):
        return []
