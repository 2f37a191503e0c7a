"""The tool loop with a scripted engine: what is sent, what is kept, and how a sample ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tool_helpers import TEMPLATE, TOOLS, ScriptedEngine, call_text, encode, tokenizer

from slime_retool.errors import ConfigError, EngineError, RolloutError, ToolUnavailable
from slime_retool.protocols import Completion
from slime_retool.rollout.sample_metrics import sample_metrics
from slime_retool.tool_use import (
    LoopBudgets,
    QwenFormat,
    Tool,
    ToolCall,
    ToolRegistry,
    ToolResult,
    run_tool_loop,
)
from slime_retool.tool_use.calls import MAX_CALLS
from slime_retool.types import Sample, SampleStatus

ANSWER = ("The answer is \\boxed{4}.", "stop")
CALL = (call_text("print(2 + 2)"), "stop")
BUDGETS = LoopBudgets(max_response_tokens=100_000)
QWEN = QwenFormat(tokenizer(), TOOLS)


async def echo(arguments: dict[str, Any]) -> ToolResult:
    return ToolResult("ran " + arguments["code"], is_error="raise" in arguments["code"])


def registry(function: Any = echo, **options: Any) -> ToolRegistry:
    schema = TOOLS[0]["function"]
    tool = Tool(schema["name"], schema["description"], schema["parameters"], function)
    return ToolRegistry([tool], **{"retry_delay": 0.0, **options})


def new_sample() -> Sample:
    return Sample(prompt=[{"role": "user", "content": "What is 2 + 2?"}], label="4", index=3)


def run(
    turns: list[tuple[Any, str]],
    budgets: LoopBudgets = BUDGETS,
    tools: ToolRegistry | None = None,
    sample: Sample | None = None,
) -> tuple[Sample, ScriptedEngine]:
    engine = ScriptedEngine(turns)
    sample = sample or new_sample()
    loop = run_tool_loop(engine, QWEN, tools or registry(), sample, {"temperature": 0.7}, budgets)
    return asyncio.run(loop), engine


def model_ids(sample: Sample) -> list[int]:
    response = sample.tokens[sample.prompt_length :]
    return [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask]


def test_a_conversation_with_one_call() -> None:
    sample, engine = run([CALL, ANSWER])
    assert sample.status is SampleStatus.COMPLETED
    assert (sample.num_turns, sample.num_tool_calls, sample.num_tool_errors) == (2, 1, 0)
    assert sample.weight_versions == [7, 7]
    assert sample.response == (
        CALL[0] + "<|im_end|>\n<|im_start|>user\n<tool_response>\nran print(2 + 2)\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n" + ANSWER[0]
    )
    assert engine.sessions == ["3", "3"] and engine.params[0]["temperature"] == 0.7


def test_ids_are_kept_as_sampled_even_when_they_are_not_canonical() -> None:
    pieces = encode("a") + encode("b")
    assert tokenizer().decode(pieces) == "ab" and encode("ab") != pieces
    turn = pieces + encode(call_text("1")) + encode("<|im_end|>")
    sample, engine = run([(turn, "stop"), (turn, "stop"), (pieces + encode("<|im_end|>"), "stop")])
    assert model_ids(sample) == turn + turn + pieces + encode("<|im_end|>")
    for earlier, reply, later in zip(engine.requests, engine.replies, engine.requests[1:], strict=False):
        assert later[: len(earlier) + len(reply.ids)] == earlier + reply.ids


@pytest.mark.parametrize("opened", [True, False])
def test_a_sample_knows_whether_its_prompt_opened_a_thought(opened: bool):
    sample = new_sample()
    sample.prompt = [{"role": "user", "content": "<think>"}]
    ask = "{{ '<|im_start|>assistant\n' }}{%- endif"
    own = tokenizer(TEMPLATE.replace(ask, ask.replace("assistant\n", "assistant\n<think>\n")) if opened else TEMPLATE)
    loop = run_tool_loop(ScriptedEngine([ANSWER]), QwenFormat(own, TOOLS), registry(), sample, {}, BUDGETS)
    assert asyncio.run(loop).begins_in_thought == opened
    assert sample.scored_text == ("<think>" if opened else "") + "The answer is \\boxed{4}."


@pytest.mark.parametrize("end", [("so far", "abort"), ("so f", "length"), ANSWER])
def test_a_sample_generated_again_starts_from_the_prompt(end: tuple[str, str]) -> None:
    first, _ = run([CALL, ANSWER])
    broken = ("<tool_call>{bad</tool_call>", "stop")
    used, _ = run([CALL, broken, (call_text("raise"), "stop"), end])
    assert used.num_malformed_calls == used.num_tool_errors == 1
    again, _ = run([CALL, ANSWER], sample=used)
    assert again == first and len(again.spans) == 1


def test_each_call_is_a_span_of_its_turn() -> None:
    broken = ("<tool_call>{bad</tool_call>", "stop")
    sample, _ = run([CALL, broken, (call_text("raise"), "stop"), ANSWER])
    spans = [(span["name"], span["status"], span["turn"]) for span in sample.spans]
    assert spans == [("tool", "ok", 1), ("tool", "malformed", 2), ("tool", "error", 3)]
    assert all(span["seconds"] >= 0 and span["start"] > 1e9 for span in sample.spans)


def test_a_turn_of_very_many_malformed_calls_is_answered_up_to_a_limit() -> None:
    sample, engine = run([("<tool_call>{bad\n</tool_call>" * 1000, "stop"), ANSWER])
    assert (sample.status, sample.num_malformed_calls) == (SampleStatus.COMPLETED, MAX_CALLS + 1)
    assert sample.response.count("<tool_response>") == MAX_CALLS + 1
    assert "a turn can hold 64 tool calls" in sample.response


def test_the_share_of_samples_with_malformed_calls_is_reported() -> None:
    broken = ("<tool_call>{bad" + call_text("1"), "stop")
    samples = [run([broken, broken, ANSWER])[0], run([CALL, ANSWER])[0], run([ANSWER])[0], run([ANSWER])[0]]
    for sample in samples:
        sample.reward = 1.0
    assert [sample.num_malformed_calls for sample in samples] == [2, 0, 0, 0]
    assert sample_metrics(samples, None)["malformed_call_rate"] == 0.25


def test_the_seconds_of_calls_are_reported_where_one_ran() -> None:
    broken = ("<tool_call>{bad</tool_call>", "stop")
    samples = [run([CALL, broken, CALL, ANSWER])[0], run([broken, ANSWER])[0]]
    for sample in samples:
        sample.reward = 1.0
    calls = [span for span in samples[0].spans if span["status"] == "ok"]
    calls[0]["seconds"], calls[1]["seconds"] = 1.0, 10.0
    metrics = sample_metrics(samples, None)
    assert (metrics["tool_seconds_mean"], metrics["tool_seconds_max"]) == (5.5, 10.0)
    samples[1].spans.append(calls[0] | {"status": "not run"})  # beyond the sample's budget
    assert "tool_seconds_max" not in sample_metrics(samples[1:], None)


def test_calls_of_one_turn_run_at_once_and_are_answered_in_order() -> None:
    running = 0
    most = 0

    async def slow(arguments: dict[str, Any]) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02 if arguments["code"] == "1" else 0.0)
        running -= 1
        return "result " + arguments["code"]

    turn = call_text("1") + call_text("2") + "<tool_call>{bad</tool_call>" + call_text("3")
    sample, _ = run([(turn, "stop"), ANSWER], tools=registry(slow))
    assert most == 3 and sample.num_tool_calls == 3
    observation = sample.response[len(turn) :]
    order = [observation.index(text) for text in ("result 1", "result 2", "not valid JSON", "result 3")]
    assert order == sorted(order) and observation.count("<tool_response>") == 4


def test_a_malformed_call_gets_another_turn_and_is_not_counted_as_executed() -> None:
    sample, _ = run([('<tool_call>{"name": "nothing", "arguments": {}}</tool_call>', "stop"), ANSWER])
    assert sample.status is SampleStatus.COMPLETED
    assert "there is no tool 'nothing'" in sample.response
    assert (sample.num_turns, sample.num_tool_calls, sample.num_malformed_calls) == (2, 0, 1)


def test_calls_that_report_an_error_are_counted() -> None:
    sample, _ = run([(call_text("raise"), "stop"), CALL, ANSWER])
    assert (sample.num_tool_calls, sample.num_tool_errors) == (2, 1)


def test_the_limit_is_on_executed_calls_and_leaves_a_turn_to_answer() -> None:
    budgets = LoopBudgets(max_response_tokens=100_000, max_tool_calls=2)
    broken = ("<tool_call>{bad</tool_call>", "stop")
    answered, _ = run([CALL, broken, broken, broken, CALL, ANSWER], budgets)
    assert answered.status is SampleStatus.COMPLETED and answered.num_tool_calls == 2
    endless, engine = run([CALL], budgets)
    assert endless.status is SampleStatus.TRUNCATED and endless.num_tool_calls == 2 and len(engine.requests) == 3


def test_calls_beyond_the_limit_within_a_turn_are_answered_without_running() -> None:
    budgets = LoopBudgets(max_response_tokens=100_000, max_tool_calls=1)
    sample, _ = run([(call_text("1") + call_text("2"), "stop"), ANSWER], budgets)
    assert sample.num_tool_calls == 1 and "ran 1" in sample.response and "ran 2" not in sample.response
    assert "all 1 tool calls are used up" in sample.response


def test_the_last_turn_runs_no_tool() -> None:
    ran = []

    async def note(arguments: dict[str, Any]) -> str:
        ran.append(arguments)
        return "x"

    sample, _ = run([CALL], LoopBudgets(max_response_tokens=100_000, max_turns=3), registry(note))
    assert sample.status is SampleStatus.TRUNCATED and sample.num_turns == 3 and len(ran) == 2


def test_a_turn_cut_inside_a_call_ends_the_sample() -> None:
    sample, _ = run([CALL], LoopBudgets(max_response_tokens=20))
    assert sample.status is SampleStatus.TRUNCATED
    assert (sample.response_length, sample.num_tool_calls) == (20, 0)


def test_an_observation_without_room_for_an_answer_is_not_appended() -> None:
    async def long(arguments: dict[str, Any]) -> str:
        return "x" * 50_000

    turn = len(encode(CALL[0])) + 1
    shown = QWEN.fit_observation("x" * 50_000, 400)
    filled = turn + len(QWEN.observation_ids([shown], QWEN.read_turn(encode("<|im_end|>"))))
    for limit, status, length in (
        (filled, SampleStatus.TRUNCATED, turn),
        (filled + 1, SampleStatus.COMPLETED, filled + 1),  # room for the end token alone
    ):
        budgets = LoopBudgets(max_response_tokens=limit, max_observation_tokens=400)
        sample, _ = run([CALL, ("", "stop")], budgets, registry(long))
        assert (sample.status, sample.response_length) == (status, length)


def test_prompt_and_response_share_the_context() -> None:
    prompt = len(QWEN.prompt_ids(new_sample().prompt))
    sample, engine = run([CALL], LoopBudgets(max_response_tokens=100_000, max_context_tokens=prompt + 900))
    assert sample.status is SampleStatus.TRUNCATED and len(sample.tokens) <= prompt + 900
    rooms = [prompt + 900 - len(request) for request in engine.requests]
    assert [params["max_new_tokens"] for params in engine.params] == rooms
    with pytest.raises(RolloutError, match="leaves no room"):
        run([CALL], LoopBudgets(max_response_tokens=100_000, max_context_tokens=prompt))


def test_an_aborted_turn_keeps_what_it_has() -> None:
    sample, _ = run([CALL, ("so far", "abort")])
    assert sample.status is SampleStatus.ABORTED and sample.response.endswith("so far")
    sample.check()


def test_missing_log_probs_are_an_engine_error() -> None:
    class Silent(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Completion:
            reply = await super().generate(*args, **kwargs)
            return Completion(reply.ids, [], reply.finish_reason, 7, 0, 0)

    sample = new_sample()
    with pytest.raises(EngineError, match="log-prob"):
        asyncio.run(run_tool_loop(Silent([ANSWER]), QWEN, registry(), sample, {}, BUDGETS))
    sample.check()


def test_an_outage_is_retried_and_never_shown_to_the_model() -> None:
    tries = 0

    async def flaky(arguments: dict[str, Any]) -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ToolUnavailable("connection reset")
        return "back"

    sample, _ = run([CALL, ANSWER], tools=registry(flaky, retries=2))
    assert tries == 3 and "back" in sample.response and "connection reset" not in sample.response
    tries = -10
    with pytest.raises(ToolUnavailable, match="connection reset"):
        run([CALL, ANSWER], tools=registry(flaky, retries=2))


def test_an_outage_of_one_call_ends_the_calls_beside_it() -> None:
    ended = []

    async def mixed(arguments: dict[str, Any]) -> str:
        if arguments["code"] == "down":
            raise ToolUnavailable("down")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(arguments["code"])
        return "late"

    with pytest.raises(ToolUnavailable):
        run([(call_text("slow") + call_text("down"), "stop")], tools=registry(mixed, retries=0))
    assert ended == ["slow"]


@pytest.mark.parametrize("value", [3, {"text": "x"}])
def test_a_bug_in_a_tool_is_an_outage_and_not_an_observation(value: object) -> None:
    async def broken(arguments: dict[str, Any]) -> Any:
        return value

    with pytest.raises(ToolUnavailable, match="'code_interpreter' raised TypeError"):
        run([CALL], tools=registry(broken))


@pytest.mark.parametrize("value", [None, "", " \n", ToolResult("")])
def test_a_tool_that_says_nothing_is_quoted_as_such(value: Any) -> None:
    async def silent(arguments: dict[str, Any]) -> Any:
        return value

    result = asyncio.run(registry(silent).execute(ToolCall("code_interpreter", {"code": ""})))
    assert result.text == "(no output)"


def test_a_registry_refuses_double_names_and_unregistered_schemas() -> None:
    tools = registry()
    assert tools.schemas() == TOOLS
    with pytest.raises(ConfigError, match="two tools named"):
        tools.add(Tool("code_interpreter", "", {}, echo))
    with pytest.raises(ConfigError, match="browser"):
        tools.require([*TOOLS, {"type": "function", "function": {"name": "browser"}}])


def shown(properties: dict[str, Any], **further: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": properties, **further}
    return [{"type": "function", "function": {"name": "code_interpreter", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("properties", "problem"),
    [
        ({"source": {"type": "string"}}, "'code' is required, and only 'source' shown"),
        ({"code": {"type": "string"}, "zone": {"type": "string"}}, "it has no 'zone', only 'code'"),
        ({"code": {"type": "array"}}, "'code' is string, and array is shown"),
    ],
)
def test_a_registry_refuses_a_row_that_shows_other_arguments(properties: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"'code_interpreter' with other arguments than its code takes: {problem}"):
        registry().require(shown(properties))


def test_a_registry_takes_a_row_that_says_less_of_a_tool() -> None:
    registry().require(shown({"code": {}}))
    registry().require(shown({"code": {"type": ["string", "null"]}}))
    registry().require(shown({"code": {"type": "string"}}, required=["code"]))
    registry().require([{"type": "function", "function": {"name": "code_interpreter"}}])
    for others in (
        {"additionalProperties": True}, {"additionalProperties": {}}, {"patternProperties": {"^y": {}}},
        {"anyOf": [{"properties": {"y": {"type": "string"}}}]},
    ):  # fmt: skip
        numbers = {"type": "object", "properties": {"x": {"type": "number"}}, **others}
        open_tool = ToolRegistry([Tool("code_interpreter", "", numbers, echo)])
        open_tool.require(shown({"x": {"type": "integer"}, "y": {"type": "string"}}))


def test_arguments_that_a_row_lets_through_and_the_tool_does_not_take_are_an_observation() -> None:
    format_of_row = QwenFormat(tokenizer(), shown({"code": {"type": "string"}}))
    engine = ScriptedEngine([('<tool_call>{"name": "code_interpreter", "arguments": {}}</tool_call>', "stop"), ANSWER])
    sample = asyncio.run(run_tool_loop(engine, format_of_row, registry(), new_sample(), {}, BUDGETS))
    assert (sample.status, sample.num_tool_calls, sample.num_tool_errors) == (SampleStatus.COMPLETED, 1, 1)
    assert "wrong arguments for code_interpreter: missing required argument 'code'" in sample.response


def test_budgets_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_turns must be at least 1, got 0"):
        LoopBudgets(max_response_tokens=1, max_turns=0)
