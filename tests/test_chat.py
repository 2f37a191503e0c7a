"""What the text codec asks of a tokenizer, and which chat templates have turns that can be told apart."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from tool_helpers import encode, tokenizer
from transformers import PreTrainedTokenizerFast

from slime_retool.chat import ChatTemplate, TextCodec
from slime_retool.errors import DataError

START, END = tokenizer().convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])


class RustSpy:
    """The Rust tokenizer inside a fast one, with a list of what it was asked."""

    def __init__(self, rust: Any) -> None:
        self._rust = rust
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rust, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> RustSpy:
        return self

    def encode(self, text: str, **options: Any) -> Any:
        self.asked.append(text)
        return self._rust.encode(text, **options)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.asked.append(list(ids))
        return self._rust.decode(ids, **options)


class RustOnly:
    """A fast tokenizer that can only be asked through the Rust one inside: the wrapper has no method at all."""

    is_fast = True

    def __init__(self) -> None:
        self.added_tokens_decoder = tokenizer().added_tokens_decoder
        self.backend_tokenizer = RustSpy(copy.deepcopy(tokenizer().backend_tokenizer))


class Slow:
    """A Python tokenizer of one character per token."""

    is_fast = False
    added_tokens_decoder: dict[int, Any] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert type(ids) is list and not skip_special_tokens and not clean_up_tokenization_spaces
        return "".join(map(chr, ids))


def spied() -> tuple[TextCodec, list[Any]]:
    """A codec, and what it asks from now on."""
    fast = RustOnly()
    codec = TextCodec(fast)
    fast.backend_tokenizer.asked.clear()
    return codec, fast.backend_tokenizer.asked


def test_short_text_between_special_tokens_is_encoded_once() -> None:
    codec, asked = spied()
    text = "<|im_start|>user ab<|im_end|>" * 3
    assert codec.encode(text) == codec.encode(text) == encode(text)
    assert [text for text in asked if text] == ["user ab"]


def test_long_text_is_encoded_each_time_and_without_the_special_tokens_around_it() -> None:
    codec, asked = spied()
    assert codec.encode(f"<|im_start|>{'ab' * 50}<|im_end|>") == [START, *encode("ab" * 50), END]
    codec.encode("ab" * 50)
    assert [text for text in asked if text] == ["ab" * 50] * 2


def test_ids_of_a_byte_level_tokenizer_are_decoded_without_asking_it() -> None:
    codec, asked = spied()
    text = bytes(range(256)).decode("latin-1") + "日🙂<|im_end|>ab"  # UTF-8 of every kind of lead byte
    assert codec.decode(encode(text)) == text and asked == []
    assert [codec.decode([number]) for number in range(256)] == [
        tokenizer().backend_tokenizer.decode([number]) for number in range(256)
    ]


def test_an_id_that_the_tokenizer_does_not_have_decodes_to_nothing() -> None:
    codec, asked = spied()
    assert codec.decode([START, 10**6, END]) == "<|im_start|><|im_end|>" and asked == []


def test_an_added_word_with_letters_that_stand_for_no_byte_decodes_to_itself() -> None:
    other = copy.deepcopy(tokenizer())
    other.add_tokens(["kończ"])
    assert TextCodec(other).decode([START, len(other) - 1, END]) == "<|im_start|>kończ<|im_end|>"


def test_a_python_tokenizer_is_told_to_add_skip_and_tidy_nothing() -> None:
    codec = TextCodec(Slow())
    assert codec.encode("a  b .") == [97, 32, 32, 98, 32, 46]
    assert codec.decode((97, 32, 32, 98, 32, 46)) == "a  b ."


def test_a_tokenizer_without_added_tokens_merges_over_the_whole_text() -> None:
    merging = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    assert TextCodec(PreTrainedTokenizerFast(tokenizer_object=merging)).encode("abba") == [2, 1, 0]


@pytest.mark.parametrize(
    "left_on", [{"truncation": True, "max_length": 2}, {"padding": "max_length", "max_length": 99}]
)
def test_neither_truncation_nor_padding_that_was_left_on_changes_the_ids(left_on: dict[str, Any]) -> None:
    shared = copy.deepcopy(tokenizer())
    codec = TextCodec(shared)
    shared("x", **left_on)
    assert codec.encode("y" * 50) == encode("y" * 50)


def test_a_hook_that_pads_and_truncates_in_another_thread_disturbs_no_encoding_and_is_not_disturbed() -> None:
    shared = copy.deepcopy(tokenizer())
    codec, text, stop = TextCodec(shared), "<|im_start|>" + "abc " * 2000, threading.Event()

    def hook() -> None:
        while not stop.is_set():
            shared(["x", "y" * 2000], padding=True, truncation=True, max_length=9)
            shared(["x"])

    with ThreadPoolExecutor(1) as pool:
        padding = pool.submit(hook)
        try:
            for _ in range(300):
                assert codec.encode(text) == [START, *encode("abc " * 2000)]
        finally:
            stop.set()
        padding.result()


def test_tokens_added_later_are_known_to_the_next_codec() -> None:
    shared = copy.deepcopy(tokenizer())
    TextCodec(shared)
    shared.add_tokens(["<new>"])
    assert TextCodec(shared).encode("<new>") == [len(shared) - 1]


def test_a_text_is_split_into_what_stands_before_within_and_behind_its_added_tokens() -> None:
    codec = TextCodec(tokenizer())
    assert codec.split_at_added("ab<|im_end|>\n<|im_start|>user") == ("ab", [END, *encode("\n"), START], "user")
    assert codec.split_at_added("<|im_end|>") == ("", [END], "")
    assert codec.split_at_added("ab") is None and TextCodec(Slow()).split_at_added("<|im_end|>") is None


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        # a last user turn is marked: another text stands there once a reply follows
        "{% for m in messages %}" + TURN + "{% if loop.last and m.role == 'user' %}!{% endif %}<|im_end|>\n{% endfor %}"
        + PROMPT,
        # the conversation ends with a mark, except where a reply is asked for
        "{% for m in messages %}" + TURN + "<|im_end|>\n{% endfor %}"
        "{% if messages | length == 1 and not add_generation_prompt %}<|im_end|>{% endif %}" + PROMPT,
        # every text is written twice, and not at all
        "{% for m in messages %}" + TURN + "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n<|im_end|>\n{% endfor %}" + PROMPT,
    ],
    ids=["last user turn", "end of text", "twice", "never"],
)  # fmt: skip
def test_turns_that_a_template_writes_otherwise_in_context_cannot_be_told_apart(template: str) -> None:
    with pytest.raises(DataError, match="its turns cannot be told apart"):
        _ = ChatTemplate(tokenizer(template)).turn_marks
