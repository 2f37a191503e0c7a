"""The ReTool paper's format, with a scripted engine: code and interpreter tags inside one assistant message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_helpers import TEMPLATE, TOOLS, ScriptedEngine, call_text, code_text, encode, tokenizer

from slime_retool.errors import ConfigError
from slime_retool.reward import compute_score
from slime_retool.tool_use import (
    LoopBudgets,
    RetoolFormat,
    Tool,
    ToolCallError,
    ToolRegistry,
    make_format,
    run_tool_loop,
)
from slime_retool.tool_use.calls import MAX_CALLS
from slime_retool.tool_use.code_blocks import parse_code_blocks
from slime_retool.types import Sample, SampleStatus

RETOOL = RetoolFormat(tokenizer(), TOOLS)
BUDGETS = LoopBudgets(max_response_tokens=10_000)
ANSWER = "So it is <answer>\\boxed{4}</answer>"


async def interpreter(arguments: dict[str, Any]) -> str:
    return "ran " + arguments["code"]


REGISTRY = ToolRegistry([Tool("code_interpreter", "", TOOLS[0]["function"]["parameters"], interpreter)])


def run(
    *turns: str | list[int], budgets: LoopBudgets = BUDGETS, params: dict[str, Any] | None = None, trim: bool = False
) -> tuple[Sample, ScriptedEngine]:
    engine = ScriptedEngine([(turn, "stop") for turn in turns], trim_stop=trim)
    sample = Sample(prompt=[{"role": "user", "content": "2 + 2?"}], label="4")
    return asyncio.run(run_tool_loop(engine, RETOOL, REGISTRY, sample, params or {}, budgets)), engine


def parts(sample: Sample) -> list[tuple[int, str]]:
    """Stretches of the response by loss mask, as text."""
    found: list[tuple[int, list[int]]] = []
    for token, mask in zip(sample.tokens[sample.prompt_length :], sample.loss_mask, strict=True):
        if not found or found[-1][0] != mask:
            found.append((mask, []))
        found[-1][1].append(token)
    return [(mask, tokenizer().decode(ids)) for mask, ids in found]


def shown(text: str) -> str:
    return f"\n<interpreter>\n{text}\n</interpreter>\n"


def test_two_rounds_stay_inside_one_assistant_message() -> None:
    sample, engine = run("Let me see. " + code_text("1"), code_text("2"), ANSWER)
    assert parts(sample) == [
        (1, "Let me see. " + code_text("1")),
        (0, shown("ran 1")),
        (1, code_text("2")),
        (0, shown("ran 2")),
        (1, ANSWER + "<|im_end|>"),
    ]
    assert sample.status is SampleStatus.COMPLETED
    assert (sample.num_turns, sample.num_tool_calls, sample.num_malformed_calls) == (3, 2, 0)
    assert [params["stop"] for params in engine.params] == [["</code>"]] * 3
    assert all(params["no_stop_trim"] for params in engine.params)


def test_the_runs_own_stop_texts_stay() -> None:
    for given_stop, sent in (("END", ["END", "</code>"]), (["a", "b"], ["a", "b", "</code>"]), (None, ["</code>"])):
        _, engine = run(ANSWER, params={"stop": given_stop} if given_stop else {})
        assert engine.params[0]["stop"] == sent


def test_ids_are_kept_as_sampled() -> None:
    pieces = encode("a") + encode("b")
    assert encode(tokenizer().decode(pieces)) != pieces
    turn = pieces + encode(code_text("1"))
    sample, engine = run(turn, turn, ANSWER)
    assert engine.requests[2] == engine.requests[0] + (turn + encode(shown("ran 1"))) * 2
    assert sample.tokens == engine.requests[2] + encode(ANSWER + "<|im_end|>")


def test_a_stop_text_that_the_engine_trims_is_put_back_unlearned() -> None:
    sample, _ = run(code_text("1"), ANSWER, trim=True)
    whole, _ = run(code_text("1"), ANSWER)
    assert parts(sample)[:2] == [(1, code_text("1").removesuffix("</code>")), (0, "</code>" + shown("ran 1"))]
    assert sample.response == whole.response and sample.tokens == whole.tokens


@pytest.mark.parametrize(
    "code", ['print("</code>")', "x = '''\n  a </code>'''\nprint('</code>')", "1  # <code> </code>"]
)
@pytest.mark.parametrize("trim", [False, True])
def test_code_may_contain_the_stop_text(code: str, trim: bool) -> None:
    sample, engine = run(code_text(code), ANSWER, trim=trim)
    response = tokenizer().decode(sample.tokens[sample.prompt_length :])
    observation = RETOOL.fit_observation("ran " + code, 512)
    assert response == code_text(code) + shown(observation) + ANSWER + "<|im_end|>"
    assert sample.num_tool_calls == 1 and sample.num_malformed_calls == 0
    assert len(engine.requests) == 2 + code.count("</code>")
    if not trim:
        assert [mask for mask, _ in parts(sample)] == [1, 0, 1]


def test_a_token_may_reach_beyond_the_stop_text() -> None:
    # One token that holds the end of the tag and more, as ">\n" or '>")' do in real vocabularies.
    ids = encode(code_text('print("</code'))[: -len(encode("\n```\n</code>"))]
    turn = RETOOL.read_turn([*ids, *encode(">")])
    assert turn.unfinished and turn.missing == ""
    sample, _ = run([*encode(code_text("1") + "\n")], ANSWER)
    assert parts(sample)[1] == (0, shown("ran 1").removeprefix("\n"))


def test_the_budget_of_turns_bounds_a_block_that_never_ends() -> None:
    endless = encode('<code>\n```python\nprint("</code>')
    sample, engine = run(endless, budgets=LoopBudgets(10_000, max_turns=5))
    assert sample.status is SampleStatus.TRUNCATED and len(engine.requests) == 5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<code>print(1)</code>", "not in a fenced block"),
        ("<code>\n```python\nprint(1)\n</code>", "no closing fence"),
        ("</code>", "was not opened"),
        ("I use <code> now.", "no code block follows"),
        ("<code>\n```python\nprint(1)", "not closed"),
    ],
)
def test_a_malformed_block_is_explained_and_counted(text: str, problem: str) -> None:
    sample, _ = run(text, ANSWER)
    assert sample.status is SampleStatus.COMPLETED
    assert (sample.num_malformed_calls, sample.num_tool_calls) == (1, 0)
    assert problem in parts(sample)[1][1]


def test_a_turn_of_very_many_malformed_blocks_is_answered_up_to_a_limit() -> None:
    sample, _ = run(encode("<code> " * 5000 + "<|im_end|>"), ANSWER, budgets=LoopBudgets(100_000))
    assert (sample.status, sample.num_malformed_calls) == (SampleStatus.COMPLETED, MAX_CALLS + 1)
    observation = parts(sample)[1][1]
    assert observation.count("<interpreter>") == MAX_CALLS + 1 and "a turn can hold 64 tool calls" in observation


def test_behind_a_message_that_the_model_ended_the_observation_is_a_new_message() -> None:
    turn = encode(code_text("1") + "<|im_end|>")
    sample, _ = run(turn, ANSWER)
    message = "\n<|im_start|>user\n<interpreter>\nran 1\n</interpreter><|im_end|>\n<|im_start|>assistant\n"
    assert parts(sample)[1] == (0, message)
    other_end, _ = run(encode(code_text("1") + "<|endoftext|>"), ANSWER)
    assert parts(other_end)[1] == (0, "<|im_end|>" + message)


def test_what_only_code_or_interpreter_say_is_no_answer() -> None:
    sample, _ = run(code_text(r"print(r'\boxed{4}')"), "I do not know.")
    assert compute_score(sample.response, "4")["pred"] == ""
    assert compute_score(run(code_text("1"), ANSWER)[0].response, "4")["acc"]


def test_the_system_message_explains_the_format_and_no_schema_is_shown() -> None:
    question = [{"role": "user", "content": "2 + 2?"}]
    alone = tokenizer().decode(RETOOL.prompt_ids(question))
    assert alone.startswith("<|im_start|>system\n") and alone.endswith("2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert code_text("print(6 * 7)") in alone and shown("42") in alone
    assert "Run Python." in alone and "parameters" not in alone
    behind = tokenizer().decode(RETOOL.prompt_ids([{"role": "system", "content": "Be brief."}, *question]))
    assert behind == alone.replace("<|im_start|>system\n", "<|im_start|>system\nBe brief.\n\n")
    assert RETOOL.prompt_ids("as it is") == encode("as it is")


def test_what_the_format_cannot_express_is_refused() -> None:
    for tools in ([], TOOLS * 2, [{"type": "function", "function": {"name": "now", "parameters": {}}}]):
        with pytest.raises(ConfigError, match="one tool with one required argument"):
            make_format("retool", tokenizer(), tools)
    with pytest.raises(ConfigError, match="drops the system message.*; use --tool-format qwen, or a tokenizer"):
        silent = TEMPLATE.replace("+ system + '<|im_end|>", "+ '<|im_end|>")
        assert silent != TEMPLATE
        make_format("retool", tokenizer(silent), TOOLS)
    with pytest.raises(ConfigError, match="qwen, retool, got 'xml'"):
        make_format("xml", tokenizer(), TOOLS)
    assert make_format("qwen", tokenizer(), TOOLS).read_turn(encode(call_text("1"))).calls


# Lines without a backtick or a "<" can neither end a fence nor open a block.
plain = st.text(st.characters(exclude_characters="`<\r", exclude_categories=["Cs"]), max_size=30)
tagged = st.sampled_from(['print("</code>")', "x = '<code>'", "`" * 3 + " x", "s = '''```'''"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(plain, plain | tagged), max_size=4), plain)
def test_blocks_come_back_in_order(pairs: list[tuple[str, str]], tail: str) -> None:
    text = "".join(before + code_text(code) for before, code in pairs) + tail
    assert parse_code_blocks(text) == ([code + "\n" for _, code in pairs], False)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<code>", "</code>", "```python\n", "```", "\n", "x", " "])), st.booleans())
def test_any_mixture_of_fragments_is_read_without_raising(fragments: list[str], ended: bool) -> None:
    ids = encode("".join(fragments) + "<|im_end|>" * ended)
    turn = RETOOL.read_turn(ids)
    assert turn.over is ended and not (turn.over and turn.unfinished)
    assert isinstance(RETOOL.observation_ids(["x"] * len(turn.calls), turn), list)
    assert all(isinstance(call, ToolCallError) or "code" in call.arguments for call in turn.calls)
