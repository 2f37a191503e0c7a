r"""What a chat template writes between one assistant turn and the next, as ids.

    <|im_start|>assistant\n                                                     end of the prompt
    <tool_call>...</tool_call><|im_end|>                                        turn, as the engine returned it
    \n<|im_start|>user\n<tool_response>...<|im_end|>\n<|im_start|>assistant\n     what stands between

It is cut out of a dummy conversation that the template itself renders: the suffix after the assistant turn's end token.
So templates that change earlier turns (dropping their reasoning) work as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slime_retool.chat import TURN_MARK, ChatTemplate
from slime_retool.tool_use.calls import Turn
from slime_retool.types import Message, ToolSchema

TEXT_MARK = "qztextqz"
"""Like `TURN_MARK`, in the place of an observation."""
# What a template might trim, escape or treat as special; none of it is a mark.
_PROBES = ("", ' \n"a" \\n\t<b>&amp; {{ é ∑ }} \n')


class SuffixFrame:
    """Ids of the end token and what follows it until the next assistant turn, around n texts.

    Rendering by Jinja takes longer than all else in a turn, so the template is only asked until it is known to put
    texts in unchanged; where it does change them (trims or escapes them), every rendering is its own. The end token
    stands in front because text has to be encoded as it is behind one.
    """

    def __init__(
        self,
        template: ChatTemplate,
        conversation: Callable[[Sequence[str]], list[Message]],
        tools: Sequence[ToolSchema] | None = None,
    ) -> None:
        """`conversation`: holds an assistant turn with `TURN_MARK` and, behind it, these texts.

        Raises ConfigError when the template ends turns without a special token.
        """
        self._template, self._conversation, self._tools = template, conversation, tools
        self._codec, self._end_token = template.codec, template.end_token
        self._encoders: dict[int, Callable[[Sequence[str]], list[int]]] = {}

    def behind(self, turn: Turn, texts: Sequence[str]) -> list[int]:
        """What follows this turn; the end token is left out where the model has written it."""
        if len(texts) not in self._encoders:
            self._encoders[len(texts)] = self._encoder(len(texts))
        ids = self._encoders[len(texts)](texts)
        return ids if turn.missing else ids[1:]

    def _encoder(self, count: int) -> Callable[[Sequence[str]], list[int]]:
        codec, frame = self._codec, self._frame(count)
        if frame is None:
            return lambda texts: codec.encode(self._render(texts))
        pieces = [split for piece in frame if (split := codec.split_at_added(piece)) is not None]
        if len(pieces) < len(frame):
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

    def _render(self, texts: Sequence[str]) -> str:
        """From the end token of the assistant turn on."""
        text = self._template.render(self._conversation(texts), self._tools)
        return text[text.index(self._end_token, text.index(TURN_MARK)) :]

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
