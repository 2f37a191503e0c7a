"""What the model is shown of a tool's output: no template structure in it, and head and tail of what is too long."""

from __future__ import annotations

import re

import pytest
from tool_helpers import encode, tokenizer

from slime_retool.tool_use.observation import ObservationFilter, shorten

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


def test_a_budget_without_room_for_text_still_says_that_there_was_some():
    note = "... [50 characters omitted] ..."  # a character is a token
    assert FILTER.fit("c" * 50, len(note) + 2) == note.replace("50", "49") + "\nc"
    assert FILTER.fit("c" * 50, len(note) + 1) == FILTER.fit("c" * 50, len(note)) == note
    assert FILTER.fit("c" * 50, len(note) - 1) == FILTER.fit("c" * 50, 3) == "..."
    assert FILTER.fit("c" * 50, 2) == FILTER.fit("c" * 50, 0) == ""


@pytest.mark.parametrize("limit", range(40, 140))
def test_the_whole_budget_is_used(limit: int):
    shown = FILTER.fit("é" * 300 + "\n" + "c" * 200, limit)  # the head is denser than what is kept
    assert limit - 1 <= len(encode(shown)) <= limit  # a shorter text can need one digit more in the note


@pytest.mark.parametrize("line", ["123456789 is the sum", "-2.5e-07", "x = 3.25", "[1, 2, 3]"])
def test_a_last_line_that_has_room_is_whole(line: str):
    text = "é" * 300 + "\n" + line
    note = f"... [{len(text) - len(line)} characters omitted] ...\n"
    assert FILTER.fit(text, len(note) + len(line)) == note + line


NUMBERS = ["12", "+3", "-45", "6.75", ".875", "1,234,567", "8.5e-07", "9E+21", "355/113", "12:45:59", "70", "٣٤٥"]
PIECES = [piece for number in NUMBERS for piece in (number, ", x= ")] + ["246", " rows\n", "-1357.9", " is the end"]
TEXT = "".join(PIECES)


def between_numbers() -> list[int]:
    """Places in TEXT that split no number."""
    places, end = [0], 0
    for i, piece in enumerate(PIECES):
        places += [end + len(piece)] if i % 2 == 0 else range(end + 1, end + len(piece) + 1)
        end += len(piece)
    return places


def test_as_many_characters_as_are_kept_are_a_whole_text():
    assert shorten(TEXT, len(TEXT)) == TEXT


@pytest.mark.parametrize("keep", range(len(TEXT)))
def test_numbers_are_kept_whole_or_not_at_all(keep: int):
    """Two thirds are head, one tail; the last line is kept at the head's cost; a cut in a number keeps less."""
    tail = min(keep, max(keep // 3, len("-1357.9 is the end")))
    head = max(place for place in between_numbers() if place <= keep - tail)
    start = min(place for place in between_numbers() if place >= len(TEXT) - tail)
    note = f"... [{start - head} characters omitted] ..."
    assert shorten(TEXT, keep) == "\n".join(part for part in (TEXT[:head], note, TEXT[start:]) if part)


@pytest.mark.parametrize("limit", range(1, len(TEXT) + 40))
def test_whatever_the_budget_no_shown_number_is_part_of_another(limit: int):
    text = TEXT.replace("٣٤٥", "345")
    shown = re.sub(r"\[\d+ characters", "", FILTER.fit(text, limit))
    assert set(re.findall(r"[\d.,:/eE+-]*\d[\d.:/eE+-]*", shown)) <= set(
        re.findall(r"[\d.,:/eE+-]*\d[\d.:/eE+-]*", text)
    )


def test_in_a_number_too_long_for_the_budget_the_note_stands_between_its_digits():
    assert re.fullmatch(r"\.\.\. \[49\d\d characters omitted\] \.\.\.7{63,67}", FILTER.fit("7" * 5000, 100))
    both = FILTER.fit("8" * 2000 + "\n" + "end", 200)
    assert re.fullmatch(r"8{9,}\.\.\. \[\d+ characters omitted\] \.\.\.8{9,}\nend", both)


@pytest.mark.parametrize(("digits", "left"), [(65, ""), (66, "4")])
def test_numbers_of_65_digits_are_not_split(digits: int, left: str):
    number = "4" * digits
    note = r"\.\.\. \[\d+ characters omitted\] \.\.\."
    begun = shorten(number + " " + "v" * 200 + "\nend", digits + 31)  # a third is tail, and the last digit is cut off
    assert re.fullmatch(rf"{left}{note}\nv{{28}}\nend", begun)
    ended = shorten("head " * 50 + number + " v" * 20, digits + 39)  # one line, and the first digit is cut off
    assert re.fullmatch(rf"{note}{left or chr(10)}( v){{20}}", ended)


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
    assert special_tokens("<s").clean("a<s>") == "a< s>"
    assert "[" not in special_tokens("[INST]").clean("x") and special_tokens("[INST]").clean("[INST]") == "[INST]"


def test_a_tokenizer_without_added_tokens_cleans_tags_and_control_characters():
    class Bare:
        added_tokens_decoder: dict[int, object] = {}
        is_fast = False

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return list(text.encode())

    assert ObservationFilter(Bare()).clean("<tool_call>\x07") == "< tool_call>\\x07"


class Counting:
    """A byte is a token, and every text begins with one more; remembers the longest text that it was given."""

    added_tokens_decoder: dict[int, object] = {}
    is_fast = False
    longest = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.longest = max(self.longest, len(text))
        return [0, *text.encode()]


def test_a_token_for_the_beginning_of_a_text_is_part_of_the_budget():
    filter_ = ObservationFilter(Counting())
    assert filter_.fit("c" * 49, 50) == "c" * 49
    assert len(filter_.fit("c" * 50, 50)) == 49


def test_a_text_beyond_32_characters_a_token_is_never_tokenized_whole():
    counting = Counting()
    assert ObservationFilter(counting).fit("c" * 320, 10) == "..." and counting.longest == 320
    counting.longest = 0
    assert ObservationFilter(counting).fit("c" * 321, 10) == "..." and counting.longest < 320
