"""The recipe's hooks as a run uses them: by dotted path, in a rollout context, with the real sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tool_helpers import ScriptedEngine, call_text, encode, tokenizer

from slime_retool.config import Config
from slime_retool.errors import ConfigError, ToolUnavailable
from slime_retool.protocols import load_function, load_module
from slime_retool.rollout.context import RolloutContext, use_context
from slime_retool.sandbox import Result, Status
from slime_retool.sandbox.host import client as sandbox_client
from slime_retool.types import Sample, SampleStatus

RECIPE = Path(__file__).parents[1] / "examples" / "retool"


@pytest.fixture(autouse=True)
def recipe_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))


def generate(
    turns: list[tuple[str, str]], count: int = 1, params: dict[str, Any] | None = None, **options: Any
) -> list[Sample]:
    hook = load_function("generate_with_retool.generate")
    config = Config(rollout_max_response_len=20_000, **options)

    async def main() -> list[Sample]:
        context = RolloutContext(config, tokenizer(), None)
        samples = [Sample(prompt=[{"role": "user", "content": "6 * 7?"}], label="42", index=i) for i in range(count)]
        try:
            async with use_context(context):
                for sample in samples:
                    context.engine = ScriptedEngine(turns)
                    await hook(config, sample, params or {})
        finally:
            await context.aclose()
        return samples

    return asyncio.run(main())


def reward(sample: Sample) -> dict[str, Any]:
    return asyncio.run(load_function("generate_with_retool.reward_func")(Config(), sample))


def test_code_is_run_and_its_output_shown() -> None:
    turns = [(call_text("x = 6\nprint('six', x)\nx * 7"), "stop"), ("It is \\boxed{42}.", "stop")]
    for sample in generate(turns, count=2):
        assert sample.status is SampleStatus.COMPLETED
        assert "<tool_response>\nsix 6\n42\n</tool_response>" in sample.response
        assert (sample.num_turns, sample.num_tool_calls, sample.num_tool_errors) == (2, 1, 0)
        assert reward(sample) == {"score": 1.0, "acc": True, "pred": "42"}


def test_every_sample_in_flight_may_wait_for_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = []

    class Box:
        def __init__(self, policy: Any) -> None:
            policies.append(policy)

        async def __aenter__(self) -> Box:
            return self

        async def __aexit__(self, *error: object) -> None:
            pass

    make_tools = load_function("tool_sandbox.make_tools")
    monkeypatch.setattr("slime_retool.recipes.retool.tool_sandbox.Sandbox", Box)
    config = Config(rollout_batch_size=512, over_sampling_batch_size=1024, n_samples_per_prompt=16)

    async def enter() -> None:
        async with make_tools(config):
            pass

    asyncio.run(enter())
    assert policies[0].max_queue >= 1024 * 16 * config.max_tool_calls


def test_the_prompt_shows_the_registered_tool() -> None:
    (sample,) = generate([("no tool", "stop")])
    prompt = tokenizer().decode(sample.tokens[: sample.prompt_length])
    assert '"name": "code_interpreter"' in prompt and prompt.endswith("<|im_start|>assistant\n")


def test_wrong_answers_are_shaped_by_rounds_of_tool_use_and_accuracy_is_not() -> None:
    call = (call_text("1"), "stop")
    for rounds, score in ((0, -1.0), (1, -0.9), (5, -0.6)):
        (sample,) = generate([call] * rounds + [("\\boxed{41}", "stop")])
        assert reward(sample) == {"score": pytest.approx(score), "acc": False, "pred": "41"}


def test_the_recipes_reward_follows_rm_type_shaping_and_format_flags() -> None:
    hook = load_function("generate_with_retool.reward_func")

    hook_args = load_module("generate_with_retool.reward_func").HookArgs

    def score(sample: Sample, *, rm_type: str = "dapo", **own: Any) -> dict[str, Any]:
        return asyncio.run(hook(Config(rm_type=rm_type, hook_args=(hook_args(**own),)), sample))

    spelled = Sample("", label="34", response="It is \\boxed{034}.", num_turns=1)
    assert not score(spelled)["acc"] and score(spelled, rm_type="math_verify")["acc"]
    wrong = Sample("", label="34", response="\\boxed{1}", num_turns=2, num_tool_calls=3)
    assert [score(wrong, shape_tool_use=counted)["score"] for counted in ("turns", "calls", "none")] == [
        pytest.approx(-0.9), pytest.approx(-0.7), -1.0,
    ]  # fmt: skip
    twice = Sample("", label="34", response="\\boxed{3} no, \\boxed{34}", num_turns=1)
    assert (score(twice)["score"], score(twice, format_penalty=0.5)["score"]) == (1.0, 0.5)


def test_errors_and_time_limits_are_observations() -> None:
    turns = [(call_text("print('a')\n1 / 0"), "stop"), (call_text("while True: pass"), "stop"), ("done", "stop")]
    (sample,) = generate(turns, tool_timeout=3)
    assert sample.num_tool_errors == 2
    assert "a\nTraceback (most recent call last):" in sample.response and "ZeroDivisionError" in sample.response
    assert "longer than 3 s" in sample.response


def test_an_outage_of_the_sandbox_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_client.sys, "executable", "/does/not/exist")
    with pytest.raises(ToolUnavailable, match="cannot start"):
        generate([(call_text("1"), "stop")], tool_retries=0)


def test_sampling_parameters_set_the_response_budget() -> None:
    (sample,) = generate([("x" * 1000, "stop")], params={"max_new_tokens": 30, "temperature": 0.0})
    assert (sample.status, sample.response_length) == (SampleStatus.TRUNCATED, 30)
    assert len(encode(sample.response)) == 30


def test_data_with_an_unregistered_tool_is_refused() -> None:
    sample = Sample(prompt="x", tools=[{"type": "function", "function": {"name": "browser"}}])

    async def main() -> None:
        async with use_context(RolloutContext(Config(), tokenizer(), ScriptedEngine([("", "stop")]))) as context:
            try:
                await load_function("generate_with_retool.generate")(Config(), sample, {})
            finally:
                await context.aclose()

    with pytest.raises(ConfigError, match="browser"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Result(Status.OK, stdout="1\n"), "1"),
        (Result(Status.OK, stdout="1\n", result="2"), "1\n2"),
        (Result(Status.OK, stdout="1\n", stderr="a warning"), "1"),
        (Result(Status.OK), "(no output: print what you want to see)"),
        (Result(Status.ERROR, stdout="1\n", stderr="said\n", error="E"), "1\nsaid\nE"),
    ],
)
def test_what_the_model_sees_of_a_result(result: Result, text: str) -> None:
    load_function("generate_with_retool.generate")  # puts the recipe's modules within reach
    import tool_sandbox

    assert tool_sandbox.format_result(result) == text
