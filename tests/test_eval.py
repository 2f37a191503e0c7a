"""Evaluation: metrics of a set, transcripts that resume, and the tool loop against a chat endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from rollout_hooks import scripted_context
from test_config import argv, run_args  # noqa: F401

from slime_retool.commands.eval import _as_evaluation, table
from slime_retool.commands.eval import main as eval_main
from slime_retool.config import Config, flag, parse_config, resolve, validate
from slime_retool.config.validate import check_batches, validate_evaluation
from slime_retool.engine.server import kv_tokens
from slime_retool.errors import ConfigError, EngineError, MissingLabel, ToolUnavailable
from slime_retool.rollout.chat_endpoint import ChatEndpoint, _is_near
from slime_retool.rollout.context import use_context
from slime_retool.rollout.engine_client import RouterClient
from slime_retool.rollout.eval_metrics import set_metrics
from slime_retool.rollout.evaluate import evaluate
from slime_retool.rollout.failure_log import FailureLog
from slime_retool.rollout.statistics import majority_at_k, pass_at_k
from slime_retool.tool_use import LoopBudgets, Tool, ToolRegistry, run_chat_loop
from slime_retool.types import Sample, SampleStatus


@dataclass(frozen=True)
class HookArgs:
    """A hook's flags."""

    bonus: float = flag(1.0, help="Added to the score.")


PARAMS = {"temperature": 0.5, "top_p": 1.0, "max_new_tokens": 100}


def scored(group: int, index: int, pred: str, right: bool, **fields: Any) -> Sample:
    sample = Sample(prompt="q", index=index, group_index=group, status=SampleStatus.COMPLETED, num_turns=2, **fields)
    sample.tokens, sample.response_length = [1, 2, 3], 2
    sample.loss_mask, sample.rollout_log_probs = [1, 1], [-0.1, -0.2]
    sample.reward = {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}
    return sample


def of(n: int, **fields: Any) -> Config:
    return Config(n_samples_per_eval_prompt=n, **fields)


def test_figures_of_a_set_are_those_of_its_verdicts():
    samples = [
        *(scored(0, i, p, p == "7", num_tool_calls=2, num_tool_errors=1) for i, p in enumerate(["7", "7", "8", "9"])),
        *(scored(1, 4 + i, "3", False) for i in range(4)),
    ]
    metrics = set_metrics("aime", samples, of(4))
    assert metrics["val-core/aime/acc/mean@4"] == metrics["eval/aime/accuracy"] == 0.25
    assert metrics["val-aux/aime/acc/mean@4/low"] < 0.25 < metrics["val-aux/aime/acc/mean@4/high"]
    for k in (1, 2, 4):
        assert metrics[f"val-aux/aime/acc/pass@{k}"] == pytest.approx(pass_at_k(4, 2, k) / 2)
        votes = majority_at_k(["7", "7", "8", "9"], [True, True, False, False], k)
        assert metrics[f"val-aux/aime/acc/maj@{k}"] == pytest.approx(votes / 2)
    assert metrics["val-aux/aime/code/pass_rate"] == 0.5
    assert metrics["val-aux/aime/num_turns/max"] == 4 and metrics["val-aux/aime/num_turns/min"] == 2
    assert metrics["eval/aime/response_length"] == 2


def test_a_key_of_the_data_is_not_taken_for_the_tokens_that_a_chat_api_counts():
    for given in (9000, "17", None):
        sample = scored(0, 0, "1", True)
        sample.metadata["completion_tokens"] = given
        assert set_metrics("s", [sample], of(1))["eval/s/response_length"] == 2
    sample.tokens, sample.response_length, sample.metadata["completion_tokens"] = [], 0, 30
    assert set_metrics("s", [sample], of(1))["eval/s/response_length"] == 30


def test_a_shaped_reward_does_not_make_an_answer_right():
    sample = scored(0, 0, "1", False)
    sample.reward["score"] = 0.1
    assert set_metrics("s", [sample], of(1))["eval/s/accuracy"] == 0


def test_problems_count_alike_whatever_outages_took_from_them():
    lost = scored(0, 1, "", False)
    lost.status = SampleStatus.FAILED
    samples = [scored(0, 0, "1", True), lost, scored(1, 2, "1", False), scored(1, 3, "1", False)]
    metrics = set_metrics("s", samples, of(2))
    assert metrics["eval/s/accuracy"] == 0.5 and metrics["eval/s/failed"] == 0.25
    assert metrics["val-aux/s/acc/pass@2"] == 0 and metrics["val-aux/s/acc/problems@2"] == 1


def test_the_table_does_not_call_a_figure_of_fewer_samples_by_the_whole_number():
    samples = [scored(0, i, "1", i == 0) for i in range(4)]
    config = Config(n_samples_per_eval_prompt=4, eval_prompt_data=["s", "s.jsonl"])
    whole = table(config, set_metrics("s", samples, config))
    samples[3].status = SampleStatus.FAILED
    cut = table(config, set_metrics("s", samples, config))
    assert "pass@4" in whole and "100.0 %" in whole and "k=" not in whole
    assert "66.7 % (k=2)" in cut


def test_the_turns_of_the_table_are_the_assistants_as_in_training():
    samples = [scored(0, i, "1", True) for i in range(2)]
    samples[0].num_turns, samples[1].num_turns = 1, 2
    config = Config(n_samples_per_eval_prompt=2, eval_prompt_data=["s", "s.jsonl"])
    names, values = table(config, metrics := set_metrics("s", samples, config)).splitlines()
    begin = names.index("turns")
    assert values[begin:].split()[0] == "1.5" and metrics["eval/s/mean_turns"] == 1.5


def test_one_problem_with_fewer_answers_does_not_take_pass_at_k_from_the_others():
    samples = [scored(group, 4 * group + i, str(i), i == 0) for group in range(3) for i in range(4)]
    for sample in samples[9:]:
        sample.status = SampleStatus.FAILED
    metrics = set_metrics("s", samples, of(4))
    assert metrics["val-aux/s/acc/pass@4"] == 1 and metrics["val-aux/s/acc/problems@4"] == 2
    assert metrics["val-aux/s/acc/pass@1"] == pytest.approx((0.25 + 0.25 + 1) / 3)
    assert "val-aux/s/acc/problems@1" not in metrics


def test_equal_answers_are_one_vote_however_they_are_written():
    answers = [("1/2", True), ("0.5", True), ("\\frac{1}{2}", True), ("3", False), ("3", False)]
    samples = [scored(0, i, answer, right) for i, (answer, right) in enumerate(answers)]
    by_meaning = set_metrics("s", samples, of(5, rm_type="math_verify"))
    by_characters = set_metrics("s", samples, of(5))
    assert by_meaning["val-aux/s/acc/maj@5"] == 1 and by_characters["val-aux/s/acc/maj@5"] == 0


def test_a_reward_alone_is_reported_as_a_reward_and_not_as_accuracy():
    samples = [scored(i, i, "", False) for i in range(40)]
    for i, sample in enumerate(samples):
        sample.reward = 0.3 if i else 1.0
    metrics = set_metrics("s", samples, of(1, accuracy_threshold=None))
    assert not [name for name in metrics if "acc" in name]
    assert metrics["val-core/s/reward/mean@1"] == metrics["eval/s/reward"] == pytest.approx(0.3175)
    assert metrics["val-aux/s/reward/mean@1/low"] < 0.3175 < metrics["val-aux/s/reward/mean@1/high"]
    shown = table(of(1, eval_prompt_data=["s", "s.jsonl"]), metrics)
    assert "reward" in shown.splitlines()[0] and "0.318" in shown and "%" not in shown.splitlines()[1].split("to")[0]
    declared = set_metrics("s", samples, of(1, accuracy_threshold=1.0))
    assert declared["eval/s/accuracy"] == 0.025


def make_config(tmp_path: Any, **fields: Any) -> Config:
    values = {"no_progress": True, "n_samples_per_eval_prompt": 2, "rollout_max_response_len": 16}
    return Config(output_dir=str(tmp_path), **{**values, "custom_rm_path": "rollout_hooks.length_reward", **fields})


async def test_a_stopped_evaluation_generates_only_what_is_missing(tmp_path):
    sets = {"one": [Sample(prompt=p) for p in ("ab", "cd", "ef")]}
    broken = scripted_context(make_config(tmp_path), lambda text, call: EngineError("gone") if call > 3 else text)
    async with use_context(broken):
        await evaluate(broken, sets, resume=True)
    path = tmp_path / "eval" / "one_-00001.jsonl"
    with path.open("a") as file:
        file.write('{"index": 5, "cut off')
    context = scripted_context(make_config(tmp_path), lambda text, _: text)
    async with use_context(context):
        metrics = await evaluate(context, sets, resume=True)
    assert context.engine.calls == 3 and metrics["eval/one/samples"] == 6 and metrics["eval/one/failed"] == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(6))
    async with use_context(context):
        assert await evaluate(context, sets, resume=True) == metrics
    assert context.engine.calls == 3


async def test_samples_of_another_setting_are_not_mixed_in(tmp_path):
    sets = {"one": [Sample(prompt="ab")]}
    context = scripted_context(make_config(tmp_path), lambda text, _: text)
    async with use_context(context):
        await evaluate(context, sets, resume=True)
    others = [
        ({"eval_temperature": 0.3}, sets, "sampling"),
        ({"rm_type": "math_verify"}, sets, "scoring"),
        ({"hook_args": (HookArgs(bonus=2.0),)}, sets, "hooks"),
        ({"rollout_max_context_len": 8}, sets, "context_len"),
        ({"rollout_external_urls": ["http://10.0.0.2:30000"]}, sets, "servers"),
        ({"eval_endpoint_url": "http://10.0.0.2:30000/v1"}, sets, "servers"),
        ({"sglang_server_flags": {"--quantization": ["fp8"]}}, sets, "server_flags"),
        ({"seed": 7}, sets, "seed"),
        ({"tool_state": "session"}, sets, "tools"),
        ({"tool_timeout": 1.0}, sets, "tools"),
        ({"tool_memory_mb": 32}, sets, "tools"),
        ({}, {"one": [Sample(prompt="cd")]}, "data"),
        ({}, {"one": [Sample(prompt="ab", tools=[{"type": "function", "function": {"name": "f"}}])]}, "data"),
        ({}, {"one": [Sample(prompt="ab", label="5")]}, "labels_and_metadata"),
        ({}, {"one": [Sample(prompt="ab", metadata={"expected": "5"})]}, "labels_and_metadata"),
    ]
    for fields, other_sets, changed in others:
        other = scripted_context(make_config(tmp_path, **fields), lambda text, _: text)
        with pytest.raises(ConfigError, match=f"samples of another evaluation .{changed} was .* new --output-dir"):
            async with use_context(other):
                await evaluate(other, other_sets, resume=True)


async def test_samples_of_weights_that_another_checkpoint_replaced_are_not_kept(tmp_path):
    sets, folder = {"one": [Sample(prompt="ab")]}, tmp_path / "hf"
    folder.mkdir()
    weights = folder / "model.safetensors"

    async def calls(size: int, written: float) -> int:
        weights.write_bytes(bytes(size))
        os.utime(weights, (written, written))
        context = scripted_context(make_config(tmp_path, hf_checkpoint=str(folder)), lambda text, _: text)
        async with use_context(context):
            await evaluate(context, sets, resume=True)
        return context.engine.calls

    assert await calls(8, 1e9) == 2 and await calls(8, 1e9) == 0
    for size, written in ((9, 1e9), (8, 1e9 + 0.5)):
        with pytest.raises(ConfigError, match=f"weights was 8 bytes, .*, now it is {size} bytes, the last of"):
            await calls(size, written)


async def test_a_prompt_without_room_for_an_answer_counts_as_an_empty_one(tmp_path, caplog):
    sets = {"one": [Sample(prompt=p) for p in ("ab", "abcdefgh")]}
    config = make_config(tmp_path, rollout_max_context_len=8, accuracy_threshold=1.0)
    context = scripted_context(config, lambda text, _: text)
    async with use_context(context):
        metrics = await evaluate(context, sets, resume=True)
        assert await evaluate(context, sets, resume=True) == metrics and context.engine.calls == 2
    assert (metrics["eval/one/accuracy"], metrics["eval/one/failed"], metrics["eval/one/truncated"]) == (0.5, 0, 0.5)
    assert metrics["eval/one/response_length"] == 1.0  # 2 and 0
    assert "'one': 2 of 4 samples got no response and count as such; the first: a prompt of 8 tokens" in caplog.text


async def test_kept_samples_are_said_to_be_and_rescore_scores_them_again_without_generating(tmp_path, caplog):
    caplog.set_level("INFO")
    sets = {"one": [Sample(prompt=p) for p in ("ab", "cd")]}
    path = tmp_path / "eval" / "one_-00001.jsonl"

    async def run(**changes: Any) -> tuple[float, int]:
        context = scripted_context(make_config(tmp_path, **changes), lambda text, _: text)
        async with use_context(context):
            metrics = await evaluate(context, sets, resume=True)
        return metrics["eval/one/reward"], context.engine.calls

    assert await run() == (2.0, 4) and "already" not in caplog.text
    assert await run() == (2.0, 0)
    assert "'one': 4 of 4 samples are there already and keep their scores; --rescore scores" in caplog.text
    changed = {"custom_rm_path": "rollout_hooks.index_reward"}
    assert await run(**changed, rescore=True) == (0.0, 0)
    assert "4 of 4 samples are there already and are scored again" in caplog.text
    assert await run(**changed) == (0.0, 0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["reward"] for row in rows] == [{"score": 0.0}] * 4
    assert [[span["name"] for span in row["spans"]] for row in rows] == [["generate", "reward"]] * 4
    # What the samples themselves depend on may not change.
    with pytest.raises(ConfigError, match="another evaluation .sampling was .*; give a new --output-dir"):
        await run(**changed, rescore=True, eval_temperature=0.3)
    # A mistake in the reward's configuration leaves everything as it was.
    files = [path.read_bytes(), path.with_suffix(".setting.json").read_bytes()]
    with pytest.raises(MissingLabel):
        await run(rescore=True, custom_rm_path=None)
    assert [path.read_bytes(), path.with_suffix(".setting.json").read_bytes()] == files


async def test_rescore_scores_by_the_labels_and_metadata_that_the_data_has_now(tmp_path):
    path = tmp_path / "eval" / "one_-00001.jsonl"
    hooks = {
        "custom_generate_function_path": "rollout_hooks.noting_generate",
        "custom_rm_path": "rollout_hooks.expected_reward",
        "rollout_max_response_len": 2,
    }

    async def run(row: Sample, **changes: Any) -> tuple[float, int]:
        context = scripted_context(make_config(tmp_path, **hooks, **changes), lambda text, _: text)
        async with use_context(context):
            metrics = await evaluate(context, {"one": [row]}, resume=True)
        return metrics["eval/one/reward"], context.engine.calls

    def metadata() -> list[dict[str, Any]]:
        return [json.loads(line)["metadata"] for line in path.read_text().splitlines()]

    of_hook = {"completion_tokens": 17, "mine": {"1": ["noted"]}}
    wrong = {"expected": "xy", "nan": float("nan"), "completion_tokens": 5, "left": "out"}
    assert await run(Sample(prompt="ab", metadata=wrong)) == (0.0, 2)
    assert await run(Sample(prompt="ab", metadata=wrong)) == (0.0, 0)
    right = Sample(prompt="ab", metadata={"expected": "ab", "nan": None, "completion_tokens": 6})
    with pytest.raises(ConfigError, match="labels_and_metadata was .*; give --rescore where only"):
        await run(right)
    assert await run(right, rescore=True) == (1.0, 0)
    assert await run(right) == (1.0, 0)
    assert metadata() == [{"expected": "ab", "nan": None, **of_hook}] * 2
    right.metadata["level"] = 1
    assert await run(right, rescore=True) == (1.0, 0)
    right.metadata["level"] = 2
    assert await run(right, rescore=True) == (1.0, 0)
    assert metadata() == [{"expected": "ab", "nan": None, "level": 2, **of_hook}] * 2
    right.label = "c"
    assert await run(right, rescore=True) == (0.0, 0)
    right.label = "b"
    assert await run(right, rescore=True) == (1.0, 0)
    assert [json.loads(line)["label"] for line in path.read_text().splitlines()] == ["b"] * 2
    with pytest.raises(ConfigError, match="data was .*; give a new --output-dir"):
        await run(Sample(prompt="ef", metadata=right.metadata), rescore=True)


async def test_an_outage_of_the_reward_costs_rescore_one_sample_which_is_scored_at_the_next_call(tmp_path, caplog):
    sets = {"one": [Sample(prompt=p) for p in ("ab", "abcdefgh")]}
    path = tmp_path / "eval" / "one_-00001.jsonl"

    def rows() -> list[dict[str, Any]]:
        return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["index"])

    async def run(answer: str, **changes: Any) -> tuple[float, float, int]:
        config = make_config(tmp_path, rollout_max_context_len=8, **changes)
        context = scripted_context(config, lambda text, _: answer)
        async with use_context(context):
            metrics = await evaluate(context, sets, resume=True)
        return metrics["eval/one/reward"], metrics["eval/one/failed"], context.engine.calls

    assert await run("cd") == (1.0, 0.0, 2)  # 2 and, without room for a response, 0
    before = rows()
    down = {"custom_rm_path": "rollout_hooks.outage_for_odd"}
    fresh = scripted_context(make_config(tmp_path / "fresh", rollout_max_context_len=8, **down), lambda *_: "cd")
    async with use_context(fresh):
        metrics = await evaluate(fresh, sets, resume=True)
    assert await run("other", **down, rescore=True) == (metrics["eval/one/reward"], metrics["eval/one/failed"], 0)
    assert "failed at the reward: the judge is down" in caplog.text
    lost = [row for row in rows() if row["status"] == "failed"]
    assert [(row["index"], row["reward"]) for row in lost] == [(1, None), (3, None)]
    assert [row["error"] for row in lost] == ["reward: the judge is down"] * 2
    assert [row["response"] for row in rows()] == ["cd", "cd", "", ""]
    assert await run("other", **down) == (1.0, 0.5, 0)
    # With a reward that works all is as it was, statuses and errors included.
    assert await run("other", rescore=True) == (1.0, 0.0, 0)
    assert [row | {"spans": []} for row in rows()] == [row | {"spans": []} for row in before]
    assert [row["status"] for row in before] == ["completed", "completed", "truncated", "truncated"]


async def test_sets_whose_names_differ_in_a_sign_have_files_of_their_own(tmp_path):
    context = scripted_context(make_config(tmp_path), lambda text, _: text)
    async with use_context(context):
        await evaluate(context, {"a/b": [Sample(prompt="ab")], "a_b": [Sample(prompt="cd")]})
    files = [path.read_text().splitlines() for path in (tmp_path / "eval").glob("*.jsonl")]
    assert [{json.loads(line)["eval_set"] for line in lines} for lines in sorted(files)] == [{"a/b"}, {"a_b"}]


async def test_text_that_utf_8_cannot_hold_is_kept(tmp_path):
    sets = {"one": [Sample(prompt="ab", metadata={"said": "a\ud83d"})]}
    context = scripted_context(make_config(tmp_path), lambda text, _: text)
    async with use_context(context):
        metrics = await evaluate(context, sets, resume=True)
        assert await evaluate(context, sets, resume=True) == metrics
    rows = [json.loads(line) for line in (tmp_path / "eval" / "one_-00001.jsonl").read_text().splitlines()]
    assert [row["metadata"]["said"] for row in rows] == ["a\ud83d"] * 2


# A chat endpoint


def call(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def reply(content: str = "", calls: list[dict[str, Any]] | None = None, finish: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": {"completion_tokens": 7}}


@asynccontextmanager
async def endpoint(*answers: Any, retries: int = 1) -> AsyncIterator[tuple[ChatEndpoint, list[dict[str, Any]]]]:
    """A server that gives these replies in turn; an int is an HTTP status. The last one is repeated."""
    seen: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        answer = answers[min(len(seen), len(answers) - 1)]
        seen.append({**body, "key": request.headers.get("Authorization")})
        if isinstance(answer, web.Response):
            return answer
        return web.json_response({}, status=answer) if isinstance(answer, int) else web.json_response(answer)

    async with served(handle, retries=retries) as client:
        yield client, seen


@asynccontextmanager
async def served(handle: Any, *, concurrency: int = 4, retries: int = 1) -> AsyncIterator[ChatEndpoint]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = ChatEndpoint(
        f"http://127.0.0.1:{port}/v1", "m", api_key="k", concurrency=concurrency, timeout=60, retries=retries
    )  # fmt: skip
    try:
        yield client
    finally:
        await client.aclose()
        await runner.cleanup()


def doubler() -> ToolRegistry:
    async def run(arguments: dict[str, Any]) -> str:
        return str(2 * arguments["n"])

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    return ToolRegistry([Tool("double", "Doubles.", schema, run)])


async def test_calls_of_a_chat_model_are_run_and_answered_in_order():
    registry = doubler()
    turns = [
        reply("let me see", [call("double", '{"n": 4}'), call("triple", "{}", 1), call("double", '{"n": "x"}', 2)]),
        reply("it is 8"),
    ]
    async with endpoint(*turns) as (client, seen):
        sample = await run_chat_loop(
            client, registry, Sample(prompt=[{"role": "user", "content": "2*4?"}]), PARAMS,
            LoopBudgets(max_response_tokens=100), registry.schemas(),
        )  # fmt: skip
    observations = [message for message in seen[1]["messages"] if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in observations] == ["c0", "c1", "c2"]
    assert observations[0]["content"] == "8"
    assert "no tool 'triple'" in observations[1]["content"] and "must be integer" in observations[2]["content"]
    assert sample.status is SampleStatus.COMPLETED and sample.response.endswith("it is 8")
    assert (sample.num_turns, sample.num_tool_calls, sample.num_malformed_calls) == (2, 1, 2)
    assert sample.metadata["completion_tokens"] == 14 and seen[0]["key"] == "Bearer k"
    assert seen[1]["max_tokens"] == 93


async def test_a_long_output_is_cut_and_its_last_line_stays():
    async def run(arguments: dict[str, Any]) -> str:
        return "first\n" + "x" * 400 + "\n" + "y" * 60 + "TOTAL 42\n"

    registry = ToolRegistry([Tool("show", "Shows.", {"type": "object"}, run)])
    budgets = LoopBudgets(max_response_tokens=100, max_observation_tokens=25)
    async with endpoint(reply(calls=[call("show", "{}")]), reply("42")) as (client, seen):
        await run_chat_loop(client, registry, Sample(prompt="go"), PARAMS, budgets, registry.schemas())
    shown = seen[1]["messages"][-1]["content"]
    head, note, tail = re.split(r"\n(.*omitted.*)\n", shown)
    assert tail == "y" * 60 + "TOTAL 42" and len(head) + len(tail) == 100 and head.startswith("first\n")
    assert note == f"... [{len('first') + 1 + 400 + 1 + 68 - 100} characters omitted] ..."


@pytest.mark.parametrize("budget", [{"max_turns": 2}, {"max_tool_calls": 1}, {"max_response_tokens": 14}])
async def test_a_budget_ends_an_endless_caller(budget):
    registry = doubler()
    budgets = LoopBudgets(**{"max_response_tokens": 1000, **budget})
    async with endpoint(reply(calls=[call("double", '{"n": 1}')])) as (client, seen):
        sample = await run_chat_loop(client, registry, Sample(prompt="go"), PARAMS, budgets, registry.schemas())
    assert sample.status is SampleStatus.TRUNCATED and len(seen) == 2


async def test_an_overloaded_endpoint_is_tried_again_and_a_refusal_is_not(monkeypatch):
    monkeypatch.setattr("slime_retool.rollout.chat_endpoint.BACKOFF_SECONDS", 0.01)
    async with endpoint(429, reply("yes")) as (client, seen):
        assert (await client.chat([], PARAMS, [])).content == "yes" and len(seen) == 2
    async with endpoint(400, retries=3) as (client, seen):
        with pytest.raises(EngineError, match="refused the request: HTTP 400"):
            await client.chat([], PARAMS, [])
        assert len(seen) == 1
    async with endpoint(503) as (client, seen):
        with pytest.raises(EngineError, match="failed 2 times"):
            await client.chat([], PARAMS, [])


def refusal(text: str, status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": text}}, status=status)


@asynccontextmanager
async def strict_endpoint(
    refuses: Callable[[dict[str, Any]], str | None], *answers: dict[str, Any]
) -> AsyncIterator[tuple[ChatEndpoint, list[dict[str, Any]]]]:
    """A server that refuses with what `refuses` says of a request; the last answer is given for ever."""
    seen: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(body := await request.json())
        text, answer = refuses(body), answers[min(len(seen), len(answers)) - 1]
        return web.json_response(answer) if text is None else refusal(text)

    async with served(handle) as client:
        yield client, seen


NEWER = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."


async def test_a_model_that_refuses_max_tokens_is_asked_with_max_completion_tokens_from_then_on():
    async with strict_endpoint(lambda body: NEWER if "max_tokens" in body else None, reply("yes")) as (client, seen):
        for _ in range(2):
            assert (await client.chat([], PARAMS, [])).content == "yes"
    asked = [{name: body[name] for name in body if name.startswith("max")} for body in seen]
    assert asked == [{"max_tokens": 100}, {"max_completion_tokens": 100}, {"max_completion_tokens": 100}]


async def test_every_sampling_parameter_that_was_set_is_sent_and_no_other():
    async with endpoint(reply("yes")) as (client, seen):
        await client.chat([], {**PARAMS, "top_k": -1}, [])
        await client.chat([], {**PARAMS, "top_k": 20, "stop": ["x"], "stop_token_ids": [7]}, [])
    assert not {"top_k", "stop", "stop_token_ids"} & seen[0].keys()
    assert (seen[1]["top_k"], seen[1]["stop"], seen[1]["stop_token_ids"]) == (20, ["x"], [7])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_the_models_thoughts_are_given_back_with_its_calls(name: str):
    thought = reply("", [call("double", '{"n": 4}')])
    thought["choices"][0]["message"][name] = "four times two"
    registry = doubler()
    async with endpoint(thought, reply("8")) as (client, seen):
        budgets = LoopBudgets(max_response_tokens=100)
        await run_chat_loop(client, registry, Sample(prompt="go"), PARAMS, budgets, registry.schemas())
    assert seen[1]["messages"][1][name] == "four times two"
    assert not {"reasoning_content", "reasoning"} & seen[0]["messages"][0].keys()


FULL = [
    "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens.",
    "The input (9001 tokens) is longer than the model's context length (8192 tokens).",
    "prompt is too long: 9001 tokens > 8192 maximum",
    "the request exceeds the available context size, try increasing it",
    "Your input exceeds the context window of this model.",
    "'max_tokens' or 'max_completion_tokens' is too large: 90. This model's maximum context length is 8192 tokens",
]


@pytest.mark.parametrize("text", FULL)
async def test_a_full_context_cuts_the_answer_and_is_no_outage(text: str):
    registry, budgets = doubler(), LoopBudgets(max_response_tokens=100)

    def refuses(body: dict[str, Any]) -> str | None:
        return text if len(body["messages"]) > 1 else None

    async with strict_endpoint(refuses, reply("first", [call("double", '{"n": 4}')])) as (client, _):
        sample = await run_chat_loop(client, registry, Sample(prompt="go"), PARAMS, budgets, registry.schemas())
    assert sample.status is SampleStatus.TRUNCATED and sample.response.startswith("first") and sample.error is None


@pytest.mark.parametrize("text", ["'tools': array too long", "no such model", "top_k: unknown argument"])
async def test_another_refusal_is_no_full_context_and_keeps_its_reason(text: str):
    async with strict_endpoint(lambda body: text, reply()) as (client, seen):
        with pytest.raises(EngineError, match=f"HTTP 400: .*{text}"):
            await client.chat([], PARAMS, [])
        assert len(seen) == 1


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
async def test_an_outage_is_no_full_context(status: int, monkeypatch):
    monkeypatch.setattr("slime_retool.rollout.chat_endpoint.BACKOFF_SECONDS", 0.01)

    async def handle(_: web.Request) -> web.Response:
        return refusal("no such key, no such model, no capacity", status)

    async with served(handle) as client:
        budgets = LoopBudgets(max_response_tokens=100)
        with pytest.raises(EngineError, match=f"HTTP {status}: .*no capacity"):
            await run_chat_loop(client, ToolRegistry(), Sample(prompt="go"), PARAMS, budgets, [])


async def test_a_budget_beyond_the_context_is_no_failure_while_there_is_room():
    async with strict_endpoint(lambda body: FULL[-1] if "max_tokens" in body else None, reply("yes")) as (client, seen):
        assert (await client.chat([], PARAMS, [])).content == "yes" and len(seen) == 2


async def test_samples_that_failed_are_told_of_in_one_line(tmp_path, caplog):
    context = scripted_context(make_config(tmp_path), lambda text, n: text if n > 7 else EngineError("HTTP 403: no"))
    async with use_context(context):
        await evaluate(context, {"one": [Sample(prompt=p) for p in ("ab", "cd", "ef", "gh", "ij")]})
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("evaluate")]
    assert line == (
        "evaluation set 'one': 7 of 10 samples failed and are no part of its metrics; 7 of them with: "
        "engine: HTTP 403: no"
    )


async def test_samples_that_fail_alike_are_one_warning_for_each_boundary_with_their_number(tmp_path, caplog):
    def answer(text: str, number: int) -> Any:
        return text if number > 58 else EngineError("gone") if number % 2 else ToolUnavailable("sandbox is down")

    context = scripted_context(make_config(tmp_path), answer)
    async with use_context(context):
        await evaluate(context, {"one": [Sample(prompt=chr(97 + n % 26) * (1 + n // 26)) for n in range(40)]})
    warned = [record.getMessage() for record in caplog.records if record.name.endswith("failure_log")]
    assert [re.sub(r"sample \d+", "sample N", text) for text in warned] == [
        "sample N failed at the engine: gone",
        "sample N failed at the tool: sandbox is down",
        "and 28 more failed at the engine",
        "and 28 more failed at the tool",
    ]


def test_a_failure_that_goes_on_is_warned_of_again_with_the_number_since(monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr("slime_retool.rollout.failure_log.time", SimpleNamespace(monotonic=lambda: clock[0]))
    with FailureLog() as failures:
        for second in range(25):
            clock[0] = 100.0 + second
            failures.add("engine", f"sample {second} failed")
    assert caplog.messages == [
        "sample 0 failed", "sample 10 failed (and 9 more before)", "sample 20 failed (and 9 more before)",
        "and 4 more failed at the engine",
    ]  # fmt: skip


@asynccontextmanager
async def counting_proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """The proxy that the environment names, which answers itself; the addresses that it was asked for."""
    asked: list[str] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        asked.append(request.raw_path if request.method == "CONNECT" else str(request.url))
        return web.json_response(reply("by proxy"), status=502 if request.method == "CONNECT" else 200)

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{runner.addresses[0][1]}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    try:
        yield asked
    finally:
        await runner.cleanup()


def chat_client(url: str) -> ChatEndpoint:
    return ChatEndpoint(url, "m", api_key="k", concurrency=1, timeout=60, retries=0)


async def test_an_external_chat_api_is_reached_through_the_environments_proxy(monkeypatch):
    async with counting_proxy(monkeypatch) as asked:
        async with chat_client("http://api.example.com/v1") as client:
            assert (await client.chat([], PARAMS, [])).content == "by proxy"
        async with chat_client("https://api.example.com/v1") as client:
            with pytest.raises(EngineError, match="502"):
                await client.chat([], PARAMS, [])
        assert asked == ["http://api.example.com/v1/chat/completions", "api.example.com:443"]
        monkeypatch.setenv("no_proxy", "example.invalid")
        async with chat_client("http://api.example.invalid/v1") as client:
            with pytest.raises(EngineError, match="Cannot connect"):
                await client.chat([], PARAMS, [])
        assert len(asked) == 2


async def test_servers_on_this_host_or_network_are_never_asked_through_a_proxy(monkeypatch):
    async with counting_proxy(monkeypatch) as asked, endpoint(reply("directly")) as (client, _):
        assert (await client.chat([], PARAMS, [])).content == "directly"
        async with RouterClient(client._url, concurrency=1, timeout=60, retries=0) as router:
            assert (await router.post("/chat/completions", {}))["choices"][0]["message"]["content"] == "directly"
        assert asked == []
    near = ("http://localhost:8000/v1", "http://node7:8000/v1", "http://10.1.2.3/v1", "http://[::1]:8/v1")
    far = ("https://api.example.com/v1", "http://8.8.8.8/v1")
    assert [_is_near(url) for url in (*near, *far)] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(text="<html>overloaded</html>"),
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": [{"type": "text", "text": "5"}]}}]},
        {"choices": [{"message": {"content": "", "tool_calls": [{"id": "c0"}]}}]},
        {"choices": [{"message": {"content": "5"}}], "usage": [7]},
    ],
)
async def test_a_reply_that_is_no_chat_completion_costs_its_sample_alone(answer):
    async with endpoint(answer) as (client, _):
        with pytest.raises(EngineError, match="not JSON|cannot be used"):
            await client.chat([], PARAMS, [])


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"n": ' + "9" * 5000 + "}", ""])
async def test_arguments_that_cannot_be_read_are_answered_with_an_error(arguments):
    registry = doubler()
    async with endpoint(reply(calls=[call("double", arguments)]), reply("sorry")) as (client, seen):
        sample = await run_chat_loop(
            client, registry, Sample(prompt="go"), PARAMS, LoopBudgets(max_response_tokens=100), registry.schemas()
        )
    assert seen[1]["messages"][-1]["content"].startswith("Error: ") and sample.num_malformed_calls == 1


def refuses_calls(body: dict[str, Any]) -> str | None:
    """As servers that read a conversation's calls: arguments must be text of a JSON object, ids must fit together."""
    waiting: list[str] = []
    for number, message in enumerate(body["messages"]):
        for each in message.get("tool_calls", ()):
            arguments = each["function"]["arguments"]
            try:
                is_object = isinstance(arguments, str) and isinstance(json.loads(arguments, parse_constant=int), dict)
            except ValueError:
                is_object = False
            if not is_object or not each["function"]["name"]:
                return f"messages[{number}]: invalid function call"
            waiting.append(each["id"])
        if message["role"] == "tool":
            if message.get("tool_call_id") not in waiting:
                return f"messages[{number}]: unknown tool_call_id"
            waiting.remove(message["tool_call_id"])
    return f"calls without an answer: {waiting}" if waiting else None


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ('{"n": "print("x")"}', "{}"),
        ("[1]", "{}"),
        ('{"n": NaN}', "{}"),
        (None, "{}"),
        ('{"n": "a\nb"}', r'{"n": "a\nb"}'),
        ({"n": 4}, '{"n": 4}'),
    ],
)
async def test_a_malformed_call_goes_back_in_a_form_that_a_server_reads(arguments: Any, sent: str):
    registry, made = doubler(), call("double", arguments)
    async with strict_endpoint(refuses_calls, reply("", [made]), reply("sorry")) as (client, seen):
        budgets = LoopBudgets(max_response_tokens=100)
        sample = await run_chat_loop(client, registry, Sample(prompt="go"), PARAMS, budgets, registry.schemas())
    assert sample.status is SampleStatus.COMPLETED
    assert seen[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == sent
    assert json.dumps(made["function"], ensure_ascii=False) in sample.response


async def test_calls_without_ids_and_names_are_answered():
    registry = doubler()
    calls = [{"function": {"name": "double", "arguments": '{"n": 4}'}}, {"function": {"arguments": "{}"}}]
    async with strict_endpoint(refuses_calls, reply("", calls), reply("8")) as (client, seen):
        budgets = LoopBudgets(max_response_tokens=100)
        sample = await run_chat_loop(client, registry, Sample(prompt="go"), PARAMS, budgets, registry.schemas())
    assert (sample.status, sample.num_malformed_calls) == (SampleStatus.COMPLETED, 1)
    assert [message["content"] for message in seen[1]["messages"][2:3]] == ["8"]


async def test_a_prompt_with_earlier_calls_is_sent_as_the_api_wants_it():
    def spoken(number: int, **further: Any) -> dict[str, Any]:
        return {"type": "function", **further, "function": {"name": "double", "arguments": {"n": number}}}

    user, answer = {"role": "user", "content": "go"}, {"role": "assistant", "content": "so it is"}
    prompt = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [spoken(1), spoken(2)]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "4"},
        answer,
        user,
        {"role": "assistant", "content": "", "tool_calls": [spoken(3, id="a"), spoken(4, id="b")]},
        {"role": "tool", "content": "8", "tool_call_id": "b"},
        {"role": "tool", "content": "6"},
        answer,
        user,
    ]
    before = json.dumps(prompt)
    async with strict_endpoint(refuses_calls, reply("42")) as (client, seen):
        sample = await run_chat_loop(
            client, ToolRegistry(), Sample(prompt=prompt), PARAMS, LoopBudgets(max_response_tokens=100), []
        )
    sent = seen[0]["messages"]
    assert sample.response == "42" and json.dumps(prompt) == before
    assert [each["function"]["arguments"] for each in sent[1]["tool_calls"]] == ['{"n": 1}', '{"n": 2}']
    assert [each["id"] for each in sent[1]["tool_calls"]] == [message["tool_call_id"] for message in sent[2:4]]
    assert [message["tool_call_id"] for message in sent[7:9]] == ["b", "a"]


async def test_as_many_requests_are_in_flight_as_allowed():
    count, arrived, all_there = 120, 0, asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            all_there.set()
        await all_there.wait()
        return web.json_response(reply("yes"))

    async with served(handle, concurrency=count) as client:
        calls = [asyncio.ensure_future(client.chat([], PARAMS, [])) for _ in range(count)]
        await asyncio.wait(calls, timeout=120)
        together = all_there.is_set()
        all_there.set()
        assert together and {answer.content for answer in await asyncio.gather(*calls)} == {"yes"}


async def test_the_command_measures_an_endpoint_and_prints_a_table(tmp_path, capsys):
    data = tmp_path / "set.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"what is {n}?", "label": "5"}) + "\n" for n in (5, 6)))
    async with endpoint(reply(r"Answer: \boxed{5}")) as (client, seen):
        flags = [
            "--eval-endpoint-url", client._url.removesuffix("/chat/completions"), "--eval-endpoint-model", "m",
            "--eval-prompt-data", "five", str(data), "--n-samples-per-eval-prompt", "2", "--apply-chat-template",
            "--output-dir", str(tmp_path / "out"), "--no-progress",
        ]  # fmt: skip
        assert await asyncio.to_thread(_main_off_the_main_thread, flags) == 0
        assert len(seen) == 4
        assert await asyncio.to_thread(_main_off_the_main_thread, flags) == 0
        assert len(seen) == 4  # nothing was missing
    out = capsys.readouterr().out
    assert "mean@2" in out and "100.0 %" in out
    metrics = json.loads((tmp_path / "out" / "eval" / "figures.json").read_text())
    assert metrics["val-core/five/acc/mean@2"] == 1.0 and metrics["eval/five/response_length"] == 7


def _main_off_the_main_thread(flags: list[str]) -> int:
    """Signal handlers can only be set in the main thread, which runs the server here."""
    from unittest import mock

    with mock.patch("slime_retool.errors.signal.signal"):
        return eval_main(flags)


ENDPOINT = ("--eval-endpoint-url", "http://127.0.0.1:1/v1", "--eval-endpoint-model", "m")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--eval-prompt-data NAME FILE is required"),
        (["--eval-prompt-data", "a", "FILE", "--eval-endpoint-url", "ftp://x"], "must be an address like http:"),
        (["--eval-prompt-data", "a", "FILE", "--eval-endpoint-url", "http://x/v1"], "needs --eval-endpoint-model"),
        (["--eval-prompt-data", "a", "FILE", *ENDPOINT, "--input-key", "question"], "row 1: no column 'question'"),
    ],
)
def test_mistakes_are_refused_in_one_line(tmp_path, capsys, flags, message):
    (tmp_path / "set.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    flags = [str(tmp_path / "set.jsonl") if flag == "FILE" else flag for flag in flags]
    assert eval_main([*flags, "--output-dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_evaluation_takes_the_flags_of_an_sft_run(run_args, tmp_path):  # noqa: F811
    sft = "--loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only "
    sft += f"--n-samples-per-prompt 1 --input-key messages --eval-input-key prompt --save {tmp_path}/save "
    sft += "--rollout-function-path slime_retool.rollout.sft_rollout.generate_rollout"
    evaluation = ["--eval-prompt-data", "a", run_args["--prompt-data"], "--output-dir", str(tmp_path / "out")]
    config = _as_evaluation(parse_config([*argv(run_args), *sft.split(), *evaluation]))
    validate_evaluation(config)
    validate(resolve(config))
    assert config.num_engines == 1 and not config.loss.supervised


def test_an_evaluation_is_not_refused_for_a_batch_and_its_cache_holds_more_than_one_sample():
    """With the flags of a training run on eight processes, none of which is about batches."""
    flags = {"device": "cpu", "colocate": True, "actor_num_gpus_per_node": 8, "rollout_max_context_len": 100}
    config = _as_evaluation(Config(**flags, eval_prompt_data=["a", "a.jsonl"]))
    check_batches(config)
    assert kv_tokens(config) >= 16 * 100
