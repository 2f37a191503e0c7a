r"""A tokenizer's chat template: whole prompts, and what it writes between one assistant turn and the next.

    <|im_start|>assistant\n                                                     end of the prompt
    <tool_call>...</tool_call><|im_end|>                                        turn, as the engine returned it
    \n<|im_start|>user\n<tool_response>...<|im_end|>\n<|im_start|>assistant\n     what stands between

The last is cut out of a dummy conversation that the template itself renders: the suffix after the assistant turn's end
token. So templates that change earlier turns (dropping their reasoning) work as well.
"""

from __future__ import annotations

import json
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
    """Raises ConfigError when the tokenizer has no template, or none that ends turns with a special token.

    `tools`: what prompts show the model.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[ToolSchema] = ()) -> None:
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template; a tool recipe needs one: use an instruct tokenizer")
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self.codec = TextCodec(tokenizer)
        self._text_prompt = lru_cache(maxsize=256)(lambda text: tuple(self.codec.encode(text)))
        self._json_prompt = lru_cache(maxsize=256)(lambda text: tuple(self._encode_prompt(json.loads(text))))
        self.end_token = self._find_end_token()
        self.end_token_id: int = tokenizer.convert_tokens_to_ids(self.end_token)
        self.special_ids = frozenset(tokenizer.all_special_ids)

    def render(self, messages: list[Message], tools: Sequence[ToolSchema] = (), *, generation: bool = True) -> str:
        """The conversation as text; with `generation`, up to where the next assistant turn begins."""
        return self._tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, add_generation_prompt=generation, tokenize=False
        )

    def suffix(self, messages: list[Message]) -> str:
        """What stands behind the end token of the assistant turn in `messages` that contains `TURN_MARK`."""
        text = self.render(messages, self._tools)
        return text[text.index(self.end_token, text.index(TURN_MARK)) + len(self.end_token) :]

    def prompt_ids(self, messages: list[Message] | str) -> list[int]:
        """Ids of a prompt; a string is taken as already rendered. Samples of one group share the work."""
        if isinstance(messages, str):
            return list(self._text_prompt(messages))
        try:
            key = json.dumps(messages)
        except (TypeError, ValueError):  # a template may be given more than JSON can hold
            return self._encode_prompt(messages)
        return list(self._json_prompt(key))

    def decode_without_end(self, ids: Sequence[int]) -> str:
        return self.codec.decode(ids).removesuffix(self.end_token)

    def _encode_prompt(self, messages: list[Message]) -> list[int]:
        return self.codec.encode(self.render(messages, self._tools))

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


class SuffixFrame:
    """Ids of the end token and what follows it until the next assistant turn, around n texts.

    Rendering by Jinja takes longer than all else in a turn, so the template is only asked until it is known to put
    texts in unchanged; where it does change them (trims or escapes them), every rendering is its own. The end token
    stands in front because text has to be encoded as it is behind one.
    """

    def __init__(self, template: ChatTemplate, render: Callable[[Sequence[str]], str]) -> None:
        """`render`: the suffix behind the end token (see `ChatTemplate.suffix`) with these texts in it."""
        self._codec = template.codec
        self._render = lambda texts: template.end_token + render(texts)
        self._encoders: dict[int, Callable[[Sequence[str]], list[int]]] = {}

    def ids(self, texts: Sequence[str]) -> list[int]:
        if len(texts) not in self._encoders:
            self._encoders[len(texts)] = self._encoder(len(texts))
        return self._encoders[len(texts)](texts)

    def _encoder(self, count: int) -> Callable[[Sequence[str]], list[int]]:
        codec, frame = self._codec, self._frame(count)
        if frame is None:
            return lambda texts: codec.encode(self._render(texts))
        pieces = [codec.split_at_added(piece) for piece in frame]
        if None in pieces:
            return lambda texts: codec.encode(_fill(frame, texts))

        def encode(texts: Sequence[str]) -> list[int]:
            """Only what stands around a text, between two added tokens, is encoded with it."""
            _, ids, before = pieces[0]
            filled = list(ids)
            for text, (after, ids, following) in zip(texts, pieces[1:], strict=True):
                filled += codec.encode(before + text + after)
                filled += ids
                before = following
            filled += codec.encode(before)
            return filled

        return encode

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
