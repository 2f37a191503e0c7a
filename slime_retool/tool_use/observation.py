"""Makes a tool's output safe and short enough to show to the model."""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import Any

from slime_retool.chat import TextCodec

# Tags that structure a conversation in the Qwen and ReTool formats, also where a tokenizer has no token for them.
_TAGS = "tool_call|tool_response|tools|think|code|interpreter|answer"
_TAG = re.compile(rf"<(?=/?(?:{_TAGS})\s*>|\|)", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# More characters than tokens of real text ever hold: longer outputs are cut before they are tokenized.
_MAX_CHARS_PER_TOKEN = 32
_NUMBER = re.compile(r"[-+]?\.?\d+(?:,\d{3}(?!\d)|[./:]\d+)*(?:e[-+]?\d+)?", re.IGNORECASE)
# Characters looked at on each side of a cut: longer numbers can be split.
_NUMBER_REACH = 64


class ObservationFilter:
    """Neutralises and shortens tool output for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._codec = TextCodec(tokenizer)
        specials = {
            str(token.content)
            for token in tokenizer.added_tokens_decoder.values()
            if len(str(token.content)) > 1 and (token.special or str(token.content).startswith("<"))
        }
        # Longest first, so that of two tokens with a common beginning the whole one is found.
        ordered = sorted(specials, key=lambda token: (-len(token), token))
        self._special = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def clean(self, text: str) -> str:
        """Text that cannot be taken for template structure.

        A space is put after the first character of every special token and template tag. Control characters and
        lone surrogates are written as escapes; line ends become newlines.
        """
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
        text = text.encode("utf-8", "backslashreplace").decode()
        text = _TAG.sub("< ", text)
        if self._special is not None:
            text = self._special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)
        return text

    def fit(self, text: str, max_tokens: int) -> str:
        """`text`, or as much of its head and tail as `max_tokens` tokens hold beside a note of what is missing.

        Of the tail at least the last line is kept (its end, if it is too long by itself): that is where a result or an
        exception's message stands. Where not even the note has room, "..." says that there was something.
        """
        text = text.rstrip()
        if text.isascii() and len(text) < max_tokens:  # at most one token for a character, and one for the beginning
            return text
        most = _MAX_CHARS_PER_TOKEN * max_tokens
        if len(text) <= most and self._count(text) <= max_tokens:
            return text
        sizes = range(min(len(text), most))
        fitting = bisect_left(sizes, True, key=lambda keep: self._count(shorten(text, keep)) > max_tokens)
        shown = shorten(text, fitting - 1) if fitting else "..."
        return shown if self._count(shown) <= max_tokens else ""

    def _count(self, text: str) -> int:
        return len(self._codec.encode(text))


def shorten(text: str, keep: int) -> str:
    """At most `keep` characters of text and a note of what is missing.

    Two thirds are from its head and one from its tail, or more to keep the last line. A number is kept whole or not
    at all, since a part of it reads as another number; in one too long for that the note stands between its digits.
    """
    if len(text) <= keep:
        return text
    last_line = len(text) - (text.rfind("\n") + 1)
    tail = min(keep, max(keep // 3, last_line))
    head, _ = _number_around(text, keep - tail)
    _, tail_start = _number_around(text, len(text) - tail)
    before, after = ("" if text[cut - 1 : cut + 1].isdecimal() else "\n" for cut in (head, tail_start))
    note = f"... [{tail_start - head} characters omitted] ..."
    return f"{text[:head]}{before}{note}{after}{text[tail_start:]}".strip("\n")


def _number_around(text: str, cut: int) -> tuple[int, int]:
    """(start, end) of the number that a cut before character `cut` splits; (cut, cut) where it splits none."""
    numbers = _NUMBER.finditer(text, max(0, cut - _NUMBER_REACH), cut + _NUMBER_REACH)
    return next((number.span() for number in numbers if number.start() < cut < number.end()), (cut, cut))
