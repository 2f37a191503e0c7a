"""Stop texts found by the client: the same tokens as where the engine looks for them, with any byte-level tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_hooks import CharTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_retool.chat import TextCodec
from slime_retool.protocols import Completion
from slime_retool.rollout import stop_tokens
from slime_retool.rollout.stop_tokens import FIRST_REQUESTS, MOST_CONTINUED, StopTokens
from slime_retool.types import timed

CLOSE = "</code>"
TEXTS = ("</code>", "b", ">\n", "é>", "</s", "\n\n")


def byte_level(corpus: str, size: int) -> PreTrainedTokenizerFast:
    """A BPE over bytes that has merged what is frequent in `corpus`, over the borders of words too."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([corpus] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", clean_up_tokenization_spaces=False)


TOKENIZER = byte_level("x</code>\n</s>> a</co\n\nde>é>bé</code>>>\n" * 5 + "if a >b:\n\n  </" * 3, 330)
END = TOKENIZER.eos_token_id


class Engine:
    """Writes given ids; stops at ids, at texts, and at the limit, as SGLang does: texts are sought in each step."""

    def __init__(self, ids: list[int], aborts: tuple[int, ...] = ()) -> None:
        self.ids, self.aborts, self.asked = ids, list(aborts), []

    async def generate(
        self, input_ids: list[int], params: dict[str, Any], *, session: str | None = None, **options: Any
    ) -> Completion:
        self.asked.append((list(input_ids), params, session, options))
        begin, ids, reason = len(input_ids) - 1, [], "length"
        for token in self.ids[begin : begin + params["max_new_tokens"]]:
            if self.aborts and begin + len(ids) == self.aborts[0]:
                self.aborts.pop(0)
                reason = "abort"
                break
            ids.append(token)
            text = TOKENIZER.decode(ids)
            if token == END or token in (params.get("stop_token_ids") or ()):
                reason = "stop"
                break
            if any(stop in text for stop in params.get("stop") or ()):
                reason = "stop"
                break
        spans: list[Any] = []
        with timed("request", spans):
            pass
        log_probs = [-(begin + place + 1) / 8 for place in range(len(ids))]
        return Completion(ids, log_probs, reason, len(self.asked), len(input_ids), 0, spans=spans)


def params(limit: int = 64, stop: Any = (CLOSE,), **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": limit, "stop": stop, "temperature": 1.0, **more}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([*"x<>/b é\n", "</code>", "</co", "de>", "</", ">\n"]), max_size=30),
    st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=5),
    st.sets(st.sampled_from(TEXTS), min_size=1),
    st.integers(1, 40),
)
async def test_the_same_tokens_as_where_the_engine_looks_for_the_texts(words, noise, stop, limit):
    ids = [*TOKENIZER.encode("".join(words)), *noise, END]
    given_ids = [TOKENIZER.encode("b")[0]] if noise else []
    asked = params(limit, sorted(stop), stop_token_ids=given_ids)
    expected = await Engine(ids).generate([0], asked)
    engine = Engine(ids)
    found = await StopTokens(engine, TOKENIZER).generate([0], asked)
    assert (found.ids, found.log_probs, found.finish_reason) == (
        expected.ids, expected.log_probs, expected.finish_reason
    )  # fmt: skip
    assert (found.prompt_tokens, len(found.spans)) == (1, len(engine.asked))
    starts = [len(begin) - 1 for begin, *_ in engine.asked]  # each request has a version of its own
    assert found.token_versions == [sum(start <= place for start in starts) for place in range(len(found.ids))]


async def test_a_token_that_ends_no_text_is_gone_on_from_with_what_is_left_of_the_limit():
    ids = TOKENIZER.encode("if a>b:\n x</code>")
    engine = Engine(ids)
    found = await StopTokens(engine, TOKENIZER).generate([0], params(50), session="7", cache_key="3")
    assert found.ids == ids and found.finish_reason == "stop"
    assert len(engine.asked) > 1
    for begin, asked, session, options in engine.asked:
        assert begin == [0, *ids[: len(begin) - 1]]
        assert asked["max_new_tokens"] == 50 - (len(begin) - 1)
        assert (session, options) == ("7", {"cache_key": "3"}) and "stop" not in asked


def by_character(text: str) -> list[int]:
    return [TOKENIZER.encode(character)[0] for character in text]


@pytest.mark.parametrize(("end", "reason"), [("x</code>", "stop"), ("x", "length")])
async def test_an_answer_that_repeats_such_a_token_is_left_to_the_engine(end, reason):
    ids = by_character("a>b" * 40 + end)
    engine = Engine(ids)
    found = await StopTokens(engine, TOKENIZER).generate([0], params(len(ids)), session="7", cache_key="3")
    assert (found.ids, found.finish_reason) == (ids, reason)
    assert len(engine.asked) == MOST_CONTINUED + 1
    begin, asked, session, options = engine.asked[-1]
    assert asked == params(len(ids) - (len(begin) - 1)) and (session, options) == ("7", {"cache_key": "3"})


@pytest.mark.parametrize(("written", "stop"), [("x " * MOST_CONTINUED + "xyx", "xyx"), ("x" * 9, "x" * 7)])
async def test_a_text_that_had_begun_before_the_engine_could_take_over_is_found(written, stop):
    ids = by_character(written)
    found = await StopTokens(Engine(ids), TOKENIZER).generate([0], params(stop=[stop]))
    assert (TOKENIZER.decode(found.ids), found.finish_reason) == (written[: written.index(stop) + len(stop)], "stop")


async def test_an_interruption_ends_it_and_a_limit_met_by_such_a_token_is_one():
    ids = TOKENIZER.encode("a>b x</code>")
    place = next(place for place, token in enumerate(ids) if TOKENIZER.decode([token]).startswith(">"))
    cut = await StopTokens(Engine(ids, aborts=(place + 2,)), TOKENIZER).generate([0], params())
    assert (cut.ids, cut.finish_reason) == (ids[: place + 2], "abort")
    nothing = await StopTokens(Engine(ids, aborts=(0,)), TOKENIZER).generate([0], params())
    assert (nothing.ids, nothing.finish_reason) == ([], "abort")
    short = await StopTokens(Engine(ids), TOKENIZER).generate([0], params(place + 1))
    assert (short.ids, short.finish_reason) == (ids[: place + 1], "length")


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_new_tokens": 4}])
async def test_where_tokens_would_not_stop_it_the_engine_looks_for_the_text(more):
    engine = Engine(TOKENIZER.encode("x</code>"))
    asked = params(**more)
    await StopTokens(engine, TOKENIZER).generate([0], asked)
    assert [call[1] for call in engine.asked] == [asked]


async def test_without_stop_texts_or_a_byte_level_tokenizer_nothing_changes():
    cases = ((TOKENIZER, params(stop=[])), (CharTokenizer(), params()), (TOKENIZER, {"max_new_tokens": 3}))
    for tokenizer, asked in cases:
        engine = Engine(TOKENIZER.encode("x</code>"))
        await StopTokens(engine, tokenizer).generate([0], asked)
        assert [call[1] for call in engine.asked] == [asked]


@pytest.mark.parametrize(("written", "pays"), [("a>x</code>", True), ("a>a>x</code>", False)])
async def test_texts_that_cost_more_than_one_request_each_are_left_to_the_engine(written, pays):
    ids = TOKENIZER.encode(written)
    stops = StopTokens(engine := Engine(ids), TOKENIZER)
    for _ in range(FIRST_REQUESTS):
        assert (await stops.generate([0], params())).ids == ids
    assert all("stop" not in asked for _, asked, *_ in engine.asked)
    assert len(engine.asked) == FIRST_REQUESTS * (2 if pays else 3)
    before = len(engine.asked)
    assert (await stops.generate([0], params())).ids == ids
    assert [asked == params() for _, asked, *_ in engine.asked[before:]] == ([False, False] if pays else [True])
    await stops.generate([0], params(stop="</s"))  # other texts, another count
    assert "stop" not in engine.asked[-1][1]


@pytest.mark.parametrize("most", [0, 1])
async def test_texts_that_too_many_tokens_can_end_are_left_to_the_engine(most, monkeypatch):
    found = TextCodec(TOKENIZER).tokens_that_end([CLOSE])
    monkeypatch.setattr(stop_tokens, "MOST_TOKENS", len(found) - most)
    engine = Engine(TOKENIZER.encode("x</code>"))
    await StopTokens(engine, TOKENIZER).generate([0], params())
    assert [asked == params() for _, asked, *_ in engine.asked] == [bool(most)]


@pytest.mark.parametrize("versions", [(3, 3), (3, 4)])
async def test_the_versions_of_parts_are_told_apart_where_they_differ(versions):
    parts = [TOKENIZER.encode("a>")[-1:], TOKENIZER.encode("x</code>")]

    class Parts(Engine):
        async def generate(self, *args: Any, **options: Any) -> Completion:
            number = len(self.asked)
            self.asked.append(args)
            return Completion(parts[number], [-1.0] * len(parts[number]), "stop", versions[number], 1, 0)

    found = await StopTokens(Parts([]), TOKENIZER).generate([0], params())
    expected = [versions[0]] * len(parts[0]) + [versions[1]] * len(parts[1])
    assert found.token_versions == expected and found.weight_version == versions[1]
    assert (found.versions is None) == (versions[0] == versions[1])


def test_tokens_that_end_a_text_hold_it_or_begin_with_its_last_bytes():
    found = TextCodec(TOKENIZER).tokens_that_end([CLOSE])
    texts = {number: TOKENIZER.decode([number]) for number in range(len(TOKENIZER))}
    expected = {n for n, text in texts.items() if CLOSE in text or any(text.startswith(CLOSE[k:]) for k in range(1, 7))}
    assert found == expected and 3 < len(found) < 60
    assert TextCodec(CharTokenizer()).tokens_that_end([CLOSE]) is None
