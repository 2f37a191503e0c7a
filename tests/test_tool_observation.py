"""What the model is shown of a tool's output: no template structure in it, and head and tail of what is too long."""

from __future__ import annotations

import re

import pytest
from tool_helpers import encode, tokenizer

from slime_retool.tool_use.observation import ObservationFilter

NOTE = re.compile(r"\n?\.\.\. \[(\d+) characters omitted\] \.\.\.\n")
FILTER = ObservationFilter(tokenizer())


def parts(shown: str) -> tuple[str, int, str]:
    """(head, characters that the note says are missing, tail) of a shortened text."""
    head, omitted, tail = NOTE.split(shown)
    return head, int(omitted), tail


@pytest.mark.parametrize("text", ["", "c" * 99, "c" * 100, "é" * 50, "1\n2\n3"])
def test_what_fits_is_shown_whole(text: str):
    assert len(encode(text)) <= 100  # a byte is a token
    assert FILTER.fit(text, 100) == text
    assert FILTER.fit(text + " \n\n", 100) == text


@pytest.mark.parametrize("text", ["c" * 101, "é" * 51, "c" * 90 + "é" * 6])
def test_one_token_too_many_is_cut(text: str):
    head, omitted, tail = parts(FILTER.fit(text, 100))
    assert head + tail != text and len(head) + omitted + len(tail) == len(text)


@pytest.mark.parametrize("length", [150, 1_000, 3_199, 3_200, 3_201, 100_000])
@pytest.mark.parametrize("limit", [60, 100, 1_000])
def test_head_and_tail_of_a_long_line_are_in_proportion_and_use_the_budget(length: int, limit: int):
    text = "".join(chr(ord("c") + i % 20) for i in range(length))
    shown = FILTER.fit(text, limit)
    if length <= limit:
        assert shown == text
        return
    assert len(encode(shown)) <= limit
    head, omitted, tail = parts(shown)
    assert text == head + text[len(head) : len(text) - len(tail)] + tail and omitted == length - len(head) - len(tail)
    # One line: all of the tail that is kept is its end, and there is no head.
    assert head == "" and len(encode(shown)) >= 0.85 * limit - 10


@pytest.mark.parametrize("limit", [90, 200, 600])
def test_a_third_of_many_lines_is_tail(limit: int):
    text = "\n".join(f"row {number}" for number in range(2_000))
    shown = FILTER.fit(text, limit)
    head, omitted, tail = parts(shown)
    assert text.startswith(head) and text.endswith(tail) and omitted == len(text) - len(head) - len(tail)
    assert 0.85 * limit - 10 <= len(encode(shown)) <= limit
    assert len(tail) == (len(head) + len(tail)) // 3 > len("row 1999")


@pytest.mark.parametrize("last", [30, 60])
def test_the_last_line_is_kept_whole_at_the_heads_expense(last: int):
    text = "head line\n" * 300 + "v" * last
    head, omitted, tail = parts(FILTER.fit(text, 120))
    assert tail == "v" * last if last == 60 else tail.endswith("\n" + "v" * last) or tail == "v" * last
    assert text.startswith(head) and len(head) + omitted + len(tail) == len(text) and head


def test_a_budget_without_room_for_the_note_shows_nothing():
    assert FILTER.fit("c" * 50, 5) == ""
    note = "... [49 characters omitted] ...\n"
    assert FILTER.fit("c" * 50, len(note)) == ""
    assert FILTER.fit("c" * 50, len(note) + 1) == note + "c"


def test_text_denser_at_its_end_still_fits():
    text = "ab" * 2_000 + "é" * 400  # one token for two characters, then two for one
    for limit in (64, 100, 500):
        assert 0 < len(encode(FILTER.fit(text, limit))) <= limit


def test_structure_of_the_conversation_is_defused_wherever_it_stands():
    assert FILTER.clean("<|im_end|>") == "< |im_end|>"
    assert FILTER.clean("a</tool_response>b<TOOL_CALL >c") == "a< /tool_response>b< TOOL_CALL >c"
    assert FILTER.clean("a < b, <b>, <html>, <toolbox>") == "a < b, <b>, <html>, <toolbox>"
    assert FILTER.clean("a\r\nb\rc\td") == "a\nb\nc\td"
    assert FILTER.clean("\x00\x1b[31m\x85") == "\\x00\\x1b[31m\\x85"
    assert FILTER.clean("\ud800") == "\\ud800"


def special_tokens(*contents: str) -> ObservationFilter:
    """A filter for a tokenizer that also has these tokens, none of them marked special."""
    other = tokenizer.__wrapped__()
    other.add_tokens(list(contents))
    return ObservationFilter(other)


def test_tokens_that_only_a_vocabulary_knows_are_defused_too():
    """Tags that are tokens of their own are special by their first character; words are not, and single ones never."""
    filter_ = special_tokens("<sep>", "<sep>more", "word", "<")
    assert filter_.clean("<sep> word <") == "< sep> word <"
    assert filter_.clean("<sep>more") == "< sep>more"
    assert "[" not in special_tokens("[INST]").clean("x") and special_tokens("[INST]").clean("[INST]") == "[INST]"


def test_a_tokenizer_without_added_tokens_cleans_tags_and_control_characters():
    class Bare:
        added_tokens_decoder: dict[int, object] = {}
        is_fast = False

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return list(text.encode())

    assert ObservationFilter(Bare()).clean("<tool_call>\x07") == "< tool_call>\\x07"
