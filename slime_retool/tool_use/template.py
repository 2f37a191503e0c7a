r"""A tokenizer's chat template: whole prompts, and what it writes between one assistant turn and the next.

    <|im_start|>assistant\n                                                     end of the prompt
    <tool_call>...</tool_call><|im_end|>                                        turn, as the engine returned it
    \n<|im_start|>user\n<tool_response>...<|im_end|>\n<|im_start|>assistant\n     what stands between

The last is cut out of a dummy conversation that the template itself renders: the suffix after the assistant turn's end
token. So templates that change earlier turns (dropping their reasoning) work as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from slime_retool.errors import ConfigError
from slime_retool.tool_use.codec import TextCodec
from slime_retool.types import Message, ToolSchema

# Words that no template contains by itself.
TURN_MARK, TEXT_MARK = "qzturnqz", "qztextqz"
# What a template might trim, escape or treat as special; none of it is a mark.
_PROBES = ("", ' \n"a" \\n\t<b>&amp; {{ é ∑ }} \n')


class ChatTemplate:
    """Raises ConfigError when the tokenizer has no template, or none that ends turns with a special token."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; a tool recipe needs one: use an instruct tokenizer")
        self._tokenizer = tokenizer
        self._codec = TextCodec(tokenizer)
        self._prompt = lru_cache(maxsize=256)(lambda text: tuple(self._codec.encode(text)))
        self.end_token = self._find_end_token()
        self.end_token_id: int = tokenizer.convert_tokens_to_ids(self.end_token)
        self.special_ids = frozenset(tokenizer.all_special_ids)

    def render(self, messages: list[Message], tools: Sequence[ToolSchema] = (), *, generation: bool = True) -> str:
        """The conversation as text; with `generation`, up to where the next assistant turn begins."""
        return self._tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, add_generation_prompt=generation, tokenize=False
        )

    def suffix(self, messages: list[Message], tools: Sequence[ToolSchema] = ()) -> str:
        """What stands behind the end token of the assistant turn in `messages` that contains `TURN_MARK`."""
        text = self.render(messages, tools)
        return text[text.index(self.end_token, text.index(TURN_MARK)) + len(self.end_token) :]

    def encode(self, text: str) -> list[int]:
        return self._codec.encode(text)

    def prompt_ids(self, messages: list[Message] | str, tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Ids of a prompt; a string is taken as already rendered. Samples of one group share the work."""
        return list(self._prompt(messages if isinstance(messages, str) else self.render(messages, tools)))

    def encode_behind_end(self, text: str, *, with_end: bool) -> list[int]:
        """Ids of `text` as they are behind the end token (a special token bounds a text), with it or without."""
        ids = self.encode(self.end_token + text)
        assert ids[0] == self.end_token_id
        return ids if with_end else ids[1:]

    def decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids)

    def decode_without_end(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids).removesuffix(self.end_token)

    def _find_end_token(self) -> str:
        """The special token with which the template ends an assistant turn."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TURN_MARK}]
        try:
            text = self.render(messages, generation=False)
        except Exception as error:  # templates raise errors of their own
            raise ConfigError(f"the chat template cannot render a conversation: {error}") from error
        behind = text[text.rindex(TURN_MARK) + len(TURN_MARK) :]
        found = [(at, token) for token in self._tokenizer.all_special_tokens if (at := behind.find(token)) >= 0]
        if not found:
            raise ConfigError(
                "the chat template must end an assistant turn with a special token of the tokenizer (such as "
                f"<|im_end|>), got {behind!r}"
            )
        return min(found)[1]


class TextFrame:
    """A rendering of n texts, made without the template once it is known to put them in unchanged.

    Rendering by Jinja takes longer than all else in a turn. Where a template does change texts (trims or escapes them),
    every rendering is its own.
    """

    def __init__(self, render: Callable[[Sequence[str]], str]) -> None:
        self._render = render
        self._frames: dict[int, list[str] | None] = {}

    def fill(self, texts: Sequence[str]) -> str:
        if len(texts) not in self._frames:
            self._frames[len(texts)] = self._frame(len(texts))
        frame = self._frames[len(texts)]
        return self._render(texts) if frame is None else _fill(frame, texts)

    def _frame(self, count: int) -> list[str] | None:
        """The `count + 1` pieces around the texts; None when the template changes texts."""
        marks = [f"{TEXT_MARK}{number}." for number in range(count)]
        rest, frame = self._render(marks), []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                return None
            frame.append(before)
        frame.append(rest)
        unchanged = all(_fill(frame, [probe] * count) == self._render([probe] * count) for probe in _PROBES)
        return frame if unchanged else None


def _fill(frame: Sequence[str], texts: Sequence[str]) -> str:
    return "".join(piece + text for piece, text in zip(frame, texts, strict=False)) + frame[-1]
