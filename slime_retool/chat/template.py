"""A tokenizer's chat template: prompts as ids, and what it writes around an assistant turn.

transformers is imported only where a tokenizer is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from megatron_bridge.checkpoint import what_it_is
from megatron_bridge.hf_config import check_tokenizer
from slime_retool.chat.codec import TextCodec
from slime_retool.errors import ConfigError, DataError
from slime_retool.types import ROLES, Message, ToolSchema

TURN_MARK = "qzturnqz"
"""A word that no data row and no template holds, and that templates neither strip, split nor escape."""
_ASK: Message = {"role": "user", "content": "x"}
_REPLY: Message = {"role": "assistant", "content": TURN_MARK}
_OTHER_TEMPLATE = "give the checkpoint a chat_template.jinja that does, by tokens of its tokenizer, and begin with SFT"


def load_tokenizer(path: str | Path, flag: str = "--hf-checkpoint") -> Any:
    """The transformers tokenizer in a local checkpoint folder, which `flag` named; nothing is downloaded.

    Raises ConfigError when the folder or its tokenizer is missing, or when it has no chat template.
    """
    if not Path(path).is_dir():
        hint = what_it_is(path)
        raise ConfigError(f"{flag} {str(path)!r} is not a folder; give a local Hugging Face checkpoint{hint}")
    try:
        check_tokenizer(path)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{flag} {str(path)!r} has no tokenizer that loads: {reason}") from error
    # Without its files transformers makes an empty one.
    if set(tokenizer.encode("x 1", add_special_tokens=False)) <= {tokenizer.unk_token_id}:
        raise ConfigError(f"{flag} {str(path)!r} has no tokenizer that loads: it is empty; add tokenizer.json")
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer in {str(path)!r} has no chat template; use an instruct model's, or add chat_template.jinja"
        )
    return tokenizer


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """What a template writes around an assistant turn."""

    header: str
    """Opens every assistant turn, e.g. "<|im_start|>assistant\\n"."""
    generation_prompt: str
    """Begins with `header`; longer where the template also opens the reasoning."""
    end: str
    """End-of-turn token."""


class ChatTemplate:
    """Conversations as text and ids. Raises ConfigError when the tokenizer has no template."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; use an instruct model's tokenizer")
        self.tokenizer = tokenizer
        self.codec = TextCodec(tokenizer)
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self._prompt = lru_cache(maxsize=256)(lambda key: tuple(self._encode_prompt(*json.loads(key))))

    def render(
        self, messages: list[Message], tools: Sequence[ToolSchema] | None = None, *, generation: bool = True
    ) -> str:
        """The conversation as text; with `generation`, up to where the next assistant turn begins.

        Raises DataError when the template refuses the messages.
        """
        from jinja2.exceptions import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=list(tools) if tools else None, add_generation_prompt=generation, tokenize=False
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise DataError(f"the chat template refuses this conversation: {type(error).__name__}: {error}") from error

    def prompt_ids(self, prompt: list[Message] | str, tools: Sequence[ToolSchema] | None = None) -> list[int]:
        """Ids that the model continues; text is taken as already rendered. Samples of one group share the work.

        Raises DataError when the template refuses the messages.
        """
        try:
            key = json.dumps([prompt, list(tools) if tools else None])
        except (TypeError, ValueError):  # a template may be given more than JSON can hold
            return self._encode_prompt(prompt, tools)
        return list(self._prompt(key))

    def decode_without_end(self, ids: Sequence[int]) -> str:
        return self.codec.decode(ids).removesuffix(self.end_token)

    @cached_property
    def end_token(self) -> str:
        """The special token with which the template ends an assistant turn. Raises ConfigError when there is none."""
        _, found, behind = self.render([_ASK, _REPLY], generation=False).rpartition(TURN_MARK)
        token = self._first_special(behind) if found else ""
        if not token:
            raise ConfigError(
                "the chat template must end an assistant turn with a special token of the tokenizer (such as "
                f"<|im_end|>), got {behind!r}; {_OTHER_TEMPLATE}"
            )
        return token

    @cached_property
    def end_token_id(self) -> int:
        return self.tokenizer.convert_tokens_to_ids(self.end_token)

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """The tokenizer's special and added tokens that the template writes around turns, as text."""
        try:
            written = self.render([_ASK, _REPLY, _ASK], generation=False)
        except DataError:
            return ()
        return tuple(token for token in self._special_texts() if token in written)

    def refuse_control_texts(self, messages: Sequence[Message], roles: Container[str] = ROLES) -> None:
        """Raise DataError for messages of these roles with `control_texts` in them, which would end or begin a turn."""
        for i, message in enumerate(messages):
            if message["role"] not in roles:
                continue
            said = [message["content"], json.dumps(message.get("tool_calls", ""), ensure_ascii=False)]
            for control in self.control_texts:
                if any(control in text for text in said):
                    raise DataError(
                        f"message {i} holds {control!r}, which the chat template uses to separate turns; remove it"
                    )

    @cached_property
    def stop_ids(self) -> list[int]:
        """What an engine must stop at: `end_token_id`, which need not be the checkpoint's eos (base models, say); none
        where the template writes no such token."""
        try:
            return [self.end_token_id]
        except (ConfigError, DataError):
            return []

    @cached_property
    def turn_marks(self) -> TurnMarks:
        """Read off the template by rendering a small probe conversation.

        Raises DataError when assistant turns have no header of their own or no special token ends them.
        """
        opened = self.render([_ASK], generation=False)
        prompted = self.render([_ASK])
        last_turn = self.render([_ASK, _REPLY], generation=False)
        inner_turn = self.render([_ASK, _REPLY, _ASK], generation=False)
        if not (prompted.startswith(opened) and inner_turn.startswith(opened) and last_turn.count(TURN_MARK) == 1):
            raise DataError(
                "the chat template rewrites a user turn once a reply follows; its turns cannot be told apart"
            )
        generation_prompt = prompted[len(opened) :]
        header = os.path.commonprefix([generation_prompt, inner_turn[len(opened) :]])
        behind = last_turn.partition(TURN_MARK)[2]
        end = self._first_special(behind)
        if not header.strip() or not end or not behind.startswith(end):
            raise DataError(
                f"assistant turns must begin with a header and end with a special token; this chat template writes "
                f"{header!r} before and {behind!r} after; {_OTHER_TEMPLATE}"
            )
        return TurnMarks(header, generation_prompt, end)

    def _encode_prompt(self, prompt: list[Message] | str, tools: Sequence[ToolSchema] | None) -> list[int]:
        return self.codec.encode(prompt if isinstance(prompt, str) else self.render(prompt, tools))

    def _special_texts(self) -> list[str]:
        """Special and added tokens: base models often do not list the chat's as special, but have them as added."""
        added = (str(token.content) for token in self.tokenizer.added_tokens_decoder.values())
        return list(dict.fromkeys([*map(str, self.tokenizer.all_special_tokens), *added]))

    def _first_special(self, text: str) -> str:
        """The special token that stands first in `text`, the longest of several; empty when there is none."""
        tokens = [token for token in self._special_texts() if token in text]
        return min(tokens, key=lambda token: (text.find(token), -len(token)), default="")
