"""Token accounts agree whatever model, engine and tools do, in either format."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_helpers import TOOLS, ScriptedEngine, call_text, code_text, encode, tokenizer

from slime_retool.errors import EngineError, ToolUnavailable
from slime_retool.tool_use import LoopBudgets, Tool, ToolFormat, ToolRegistry, ToolResult, make_format, run_tool_loop
from slime_retool.types import Sample, SampleStatus

FORMATS = {name: make_format(name, tokenizer(), TOOLS) for name in ("qwen", "retool")}
PROMPT = [{"role": "user", "content": "What is 2 + 2?"}]
ENDS = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.ABORTED)

turn_texts = st.one_of(
    st.builds(call_text, st.text(max_size=10)),
    st.builds(code_text, st.text(max_size=10)),
    st.builds(lambda n: "".join(call_text(str(i)) for i in range(n)), st.integers(0, 4)),
    st.builds(lambda n: "".join(code_text(str(i)) for i in range(n)), st.integers(0, 4)),
    st.sampled_from([call_text("down"), code_text("down"), code_text('print("</code>")'), code_text("1")[:-7]]),
    st.sampled_from(
        ["<tool_call>{bad</tool_call>", "<tool_call>", "<code>1</code>", "<code>", "</code>", "answer", ""]
    ),
    st.lists(st.integers(0, 255), max_size=20),
    st.builds(
        lambda ids, code: [*encode(code), *ids], st.lists(st.integers(0, 255), max_size=3), st.just(code_text("1"))
    ),
)
reasons = st.sampled_from(["stop"] * 6 + ["length", "abort", "down"])
scripts = st.lists(st.tuples(turn_texts, reasons), min_size=1, max_size=6)
budgets = st.tuples(
    st.integers(1, 1500), st.integers(1, 1500), st.integers(1, 6), st.integers(0, 4), st.integers(1, 60)
)


async def tool(arguments: dict[str, Any]) -> ToolResult:
    if arguments["code"].strip() == "down":
        raise ToolUnavailable("down")
    return ToolResult("ran " + arguments["code"])


REGISTRY = ToolRegistry([Tool("code_interpreter", "", TOOLS[0]["function"]["parameters"], tool)], retries=0)


def new_sample() -> Sample:
    return Sample(prompt=PROMPT, label="4", index=3)


def run(tool_format: ToolFormat, script: Any, limits: LoopBudgets, sample: Sample, trim: bool) -> tuple[Any, bool]:
    """The engine, and whether an outage ended the sample."""
    engine = ScriptedEngine(script, trim_stop=trim)
    try:
        asyncio.run(run_tool_loop(engine, tool_format, REGISTRY, sample, {}, limits))
    except (EngineError, ToolUnavailable):
        return engine, True
    return engine, False


def masked(values: list[Any], mask: list[int], wanted: int) -> list[Any]:
    return [value for value, bit in zip(values, mask, strict=True) if bit == wanted]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(scripts, budgets, st.booleans())
def test_token_accounts_agree_whatever_happens(name: str, script: Any, limits: tuple[int, ...], trim: bool) -> None:
    tool_format = FORMATS[name]
    prompt = tool_format.prompt_ids(PROMPT)
    response, context, max_turns, max_calls, observation = limits
    limit = LoopBudgets(response, len(prompt) + context, max_turns, max_calls, observation)
    sample = new_sample()
    engine, outage = run(tool_format, script, limit, sample, trim)
    sample.check()
    assert sample.status is SampleStatus.PENDING if outage else sample.status in ENDS
    assert sample.tokens[: sample.prompt_length] == prompt
    written = [token for reply in engine.replies for token in reply.ids]
    assert masked(sample.tokens[sample.prompt_length :], sample.loss_mask, 1) == written
    assert sum(sample.loss_mask) == len(written)
    logs = [value for reply in engine.replies for value in reply.log_probs]
    assert masked(sample.rollout_log_probs, sample.loss_mask, 1) == logs
    assert not any(masked(sample.rollout_log_probs, sample.loss_mask, 0))
    assert sample.response_length <= response and len(sample.tokens) <= len(prompt) + context
    assert sample.num_turns == len(engine.replies) == len(sample.weight_versions) <= max_turns
    assert sample.num_tool_calls <= max_calls
    requests = [*engine.requests, sample.tokens]
    for earlier, reply, later in zip(requests[:-1], engine.replies, requests[1:], strict=True):
        assert later[: len(earlier) + len(reply.ids)] == earlier + reply.ids
    assert outage or sample.response == tool_format.text(sample.tokens[sample.prompt_length :])
    json.dumps(sample.response)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(scripts, scripts, budgets)
def test_an_earlier_try_leaves_no_trace(name: str, script: Any, earlier: Any, limits: tuple[int, ...]) -> None:
    tool_format = FORMATS[name]
    response, context, *others = limits
    limit = LoopBudgets(response, len(tool_format.prompt_ids(PROMPT)) + context, *others)
    used, fresh = new_sample(), new_sample()
    run(tool_format, earlier, limit, used, False)
    run(tool_format, script, limit, used, False)
    run(tool_format, script, limit, fresh, False)
    assert used == fresh


def test_a_script_reaches_the_cases_it_is_meant_to() -> None:
    limit = LoopBudgets(100_000)
    for name, call in (("qwen", call_text), ("retool", code_text)):
        for script, outage, status in (
            ([(call("1"), "stop"), ("4", "stop")], False, SampleStatus.COMPLETED),
            ([(call("1"), "stop"), ("4", "abort")], False, SampleStatus.ABORTED),
            ([(call("1"), "stop"), ("4", "length")], False, SampleStatus.TRUNCATED),
            ([(call("down"), "stop")], True, SampleStatus.PENDING),
            ([(call("1"), "stop"), ("4", "down")], True, SampleStatus.PENDING),
        ):
            sample = new_sample()
            assert run(FORMATS[name], script, limit, sample, False)[1] is outage and sample.status is status
            assert sample.tokens[sample.prompt_length :][: len(encode(script[0][0]))] == encode(script[0][0])
