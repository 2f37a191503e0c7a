"""The rollout loop against a scripted engine: groups, failures, filters, cancellation, evaluation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import fmean

import pytest
from rollout_hooks import Prompts, scripted_context

from slime_retool.config import Config
from slime_retool.errors import ConfigError, EngineError, RolloutError
from slime_retool.rollout.context import RolloutContext, use_context
from slime_retool.rollout.evaluate import evaluate
from slime_retool.rollout.filters import check_reward_nonzero_std
from slime_retool.rollout.generate import generate
from slime_retool.rollout.hooks import BusyTime
from slime_retool.rollout.rl_rollout import generate_rollout
from slime_retool.rollout.sample_metrics import source_metrics
from slime_retool.rollout.sampling import evaluation_sampling_params, training_sampling_params
from slime_retool.tool_use import LoopBudgets
from slime_retool.types import RolloutBatch, Sample, SampleStatus

SPREAD = "slime_retool.rollout.filters.check_reward_nonzero_std"


def make_config(tmp_path: Path, **values: object) -> Config:
    defaults: dict[str, object] = {
        "device": "cpu",
        "output_dir": str(tmp_path),
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 16,
        "custom_rm_path": "rollout_hooks.index_reward",
        "no_progress": True,
    }
    return Config(**{**defaults, **values})


async def rollout(context: RolloutContext, data: Prompts, rollout_id: int = 0) -> RolloutBatch:
    async with use_context(context):
        return await generate_rollout(context, data, rollout_id)


def echo(prompt: str, _: int) -> str:
    return prompt.upper()


async def test_a_batch_holds_whole_groups_in_order_with_the_ids_that_the_engine_returned(tmp_path):
    config = make_config(tmp_path)
    batch = await rollout(scripted_context(config, echo), Prompts(["abc", "de"], 4))
    assert [s.group_index for s in batch.samples] == [0] * 4 + [1] * 4
    assert [s.index for s in batch.samples] == list(range(8))
    first = batch.samples[0]
    assert list(first.tokens) == [ord(c) for c in "abcABC"]
    assert list(first.loss_mask) == [0, 0, 0, 1, 1, 1]
    assert list(first.rollout_log_probs) == [0.0, 0.0, 0.0, -0.5, -0.5, -0.5]


async def test_each_sample_carries_its_reward(tmp_path):
    batch = await rollout(scripted_context(make_config(tmp_path), echo), Prompts(["a", "b"], 4))
    assert [s.reward for s in batch.samples] == [1.0, 1.0, 0.0, 0.0] * 2


async def test_figures_describe_the_batch(tmp_path):
    config = make_config(tmp_path, rollout_max_response_len=3, accuracy_threshold=0.5)
    batch = await rollout(scripted_context(config, echo), Prompts(["ab", "abcdef"], 4))
    m = batch.metrics
    assert m["rollout/reward_mean"] == m["rollout/accuracy"] == m["rollout/reward_std"] == 0.5
    assert m["rollout/truncated_ratio"] == 0.5  # "ABCDEF" is longer than 3
    assert (m["rollout/response_tokens_mean"], m["rollout/response_tokens_max"]) == (2.5, 3)
    assert m["rollout/log_prob_mean"] == pytest.approx(-0.5)
    assert m["rollout/weight_version_min"] == m["rollout/weight_version_max"] == 3
    assert m["rollout/mean_turns"] == 1 and m["rollout/tool_call_rate"] == 0
    assert m["rollout/groups_kept"] == 2 and m["rollout/samples"] == m["rollout/train_samples"] == 8


async def test_time_with_several_rewards_at_once_counts_once():
    busy, clock = BusyTime(), iter([10.0, 13.0, 20.0, 21.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime_retool.rollout.hooks.time.monotonic", lambda: next(clock))
        with busy, busy, busy:
            pass
        with busy:
            pass
    assert busy.seconds == 4.0


async def test_time_counts_while_a_reward_still_runs():
    busy, clock = BusyTime(), iter([10.0, 12.0, 13.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime_retool.rollout.hooks.time.monotonic", lambda: next(clock))
        with busy:
            assert busy.seconds == 2.0
    assert busy.seconds == 3.0


async def test_an_outage_loses_its_sample_and_the_group_goes_on_without_it(tmp_path):
    config = make_config(tmp_path, custom_rm_path="rollout_hooks.outage_for_odd")
    batch = await rollout(scripted_context(config, echo), Prompts(["a", "b"], 4))
    assert [s.index for s in batch.samples] == [0, 2, 4, 6]
    assert [s.group_index for s in batch.samples] == [0, 0, 1, 1]
    assert batch.metrics["rollout/failed_ratio"] == 0.5
    assert batch.metrics["rollout/failed_reward"] == 4


async def test_a_group_lost_to_an_outage_is_replaced_by_the_next_prompt(tmp_path):
    def answer(prompt: str, _: int) -> str | Exception:
        return EngineError("gone") if prompt == "bad" else prompt

    data = Prompts(["bad", "a", "b"], 4)
    batch = await rollout(scripted_context(make_config(tmp_path), answer), data)
    assert sorted({s.group_index for s in batch.samples}) == [1, 2]
    assert data.drawn == 3
    assert batch.metrics["rollout/groups_failed"] == 1 and batch.metrics["rollout/failed_engine"] == 4


async def test_when_nothing_can_be_generated_the_rollout_says_why(tmp_path):
    config = make_config(tmp_path, custom_generate_function_path="rollout_hooks.outage_generate")
    data = Prompts(["a"], 4)
    with pytest.raises(RolloutError, match="none of 2 groups .* engine: connection refused"):
        await rollout(scripted_context(config, echo), data)
    assert data.drawn <= 3  # not --max-sampling-rounds times as many


@pytest.mark.parametrize(
    ("hooks", "error", "message"),
    [
        ({"custom_rm_path": "rollout_hooks.broken_reward"}, RolloutError, "ZeroDivisionError: a mistake of the user"),
        ({"custom_rm_path": "rollout_hooks.text_reward"}, RolloutError, "returned 'very good'; a reward is a finite"),
        ({"custom_generate_function_path": "rollout_hooks.forgetful_generate"}, ValueError, "PENDING"),
        ({"custom_generate_function_path": "rollout_hooks.unequal_generate"}, ValueError, "must agree"),
    ],
)
async def test_a_mistake_in_a_hook_ends_the_rollout(hooks, error, message, tmp_path):
    with pytest.raises(error, match=message):
        await rollout(scripted_context(make_config(tmp_path, **hooks), echo), Prompts(["a"], 4))


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("empty", "^rollout_hooks.empty_generate must return the sample, got NoneType for sample 0; end it"),
        ("text", "^rollout_hooks.text_generate must return the sample, got str for sample 0"),
        ("forgetful", "^rollout_hooks.forgetful_generate left sample 0 PENDING; set its status"),
        ("unequal", "^rollout_hooks.unequal_generate: sample 0: .* must agree"),
        ("speechless", "^rollout_hooks.speechless_generate left the response of sample 0 empty, .* wrote '.+': set"),
        ("promptless", "^rollout_hooks.promptless_generate returned sample 0 without its prompt: set sample.tokens"),
    ],
)
async def test_a_generate_that_returns_no_sample_to_train_on_is_one_line(hook, message, tmp_path, caplog):
    config = make_config(tmp_path, custom_generate_function_path=f"rollout_hooks.{hook}_generate")
    with pytest.raises(ConfigError, match=message) as error:
        await rollout(scripted_context(config, echo), Prompts(["a"], 4))
    assert "\n" not in str(error.value) and not caplog.messages


async def test_a_reward_that_is_not_a_number_ends_the_rollout(tmp_path):
    config = make_config(tmp_path, custom_rm_path="rollout_hooks.nan_reward")
    with pytest.raises(RolloutError, match="none of 2 groups .*nan_reward returned nan; a reward is a finite number"):
        await rollout(scripted_context(config, echo), Prompts(["a"], 4))


async def test_the_filter_drops_groups_with_equal_rewards_and_draws_others(tmp_path):
    config = make_config(
        tmp_path, custom_rm_path="rollout_hooks.spread_only_for_b", dynamic_sampling_filter_path=SPREAD
    )
    data = Prompts(["a", "a", "b"], 4)
    batch = await rollout(scripted_context(config, echo), data)
    assert sorted({s.group_index for s in batch.samples}) == [2, 5]
    assert batch.metrics["rollout/groups_dropped"] >= 4
    assert batch.metrics["rollout/reward_mean"] < 0.5  # dropped groups are part of what the model can do


async def test_data_without_any_spread_ends_with_an_explanation(tmp_path):
    config = make_config(
        tmp_path,
        custom_rm_path="rollout_hooks.constant_reward",
        dynamic_sampling_filter_path=SPREAD,
        max_sampling_rounds=3,
    )
    data = Prompts(["a"], 4)
    with pytest.raises(RolloutError, match="6 prompts .* only 0 groups .* in 6 every one above 0; .* too easy"):
        await rollout(scripted_context(config, echo), data)
    assert data.drawn == 6


async def test_data_that_no_answer_solves_is_called_too_hard(tmp_path):
    config = make_config(
        tmp_path,
        custom_rm_path="rollout_hooks.spread_only_for_b",
        dynamic_sampling_filter_path=SPREAD,
        max_sampling_rounds=3,
    )
    with pytest.raises(RolloutError, match="in 6 every reward was 0 or less.* mean reward is 0, .* too hard"):
        await rollout(scripted_context(config, echo), Prompts(["a"], 4))


async def test_equal_raw_rewards_are_dropped_although_their_lengths_differ(tmp_path):
    config = make_config(
        tmp_path,
        custom_rm_path="rollout_hooks.constant_reward",
        dynamic_sampling_filter_path=SPREAD,
        max_sampling_rounds=1,
        overlong_buffer_len=10,
    )
    with pytest.raises(RolloutError, match="only 0 groups"):
        await rollout(scripted_context(config, lambda prompt, call: "x" * (8 + call % 4)), Prompts(["a"], 4))


async def test_long_responses_lose_reward_in_training_only(tmp_path):
    """DAPO eq. 13 with L_max 16, L_cache 10: (6 - length) / 10 beyond 6 tokens."""
    config = make_config(
        tmp_path, custom_rm_path="rollout_hooks.constant_reward", overlong_buffer_len=10, overlong_penalty_factor=0.5
    )
    lengths = [3, 6, 7, 16, 4, 11, 20, 1]
    batch = await rollout(
        scripted_context(config, lambda prompt, call: "x" * lengths[call - 1]), Prompts(["a", "b"], 4)
    )
    expected = [1, 1, 1 - 0.05, 1 - 0.5, 1, 1 - 0.25, 1 - 0.5, 1]
    assert [s.reward for s in batch.samples] == pytest.approx(expected)
    assert batch.metrics["rollout/reward_mean"] == 1
    assert batch.metrics["rollout/trained_reward_mean"] == pytest.approx(fmean(expected))


async def test_the_limit_of_the_punishment_is_what_the_prompt_leaves_of_the_context(tmp_path):
    config = make_config(
        tmp_path, custom_rm_path="rollout_hooks.constant_reward", overlong_buffer_len=4, rollout_max_context_len=10
    )
    batch = await rollout(scripted_context(config, lambda *_: "x" * 5), Prompts(["1234"], 4))
    # The limit is 6 of 16, and so is the punished part: 1.5 of 4.
    assert {s.reward for s in batch.samples} == {1 - (5 - 4.5) / 1.5}


async def test_a_short_answer_to_a_long_prompt_is_not_punished(tmp_path):
    config = make_config(
        tmp_path,
        custom_rm_path="rollout_hooks.constant_reward",
        overlong_buffer_len=4096,
        rollout_max_response_len=16384,
        rollout_max_context_len=18432,
    )
    batch = await rollout(scripted_context(config, lambda *_: "x" * 100), Prompts(["p" * 16000], 4))
    assert {s.reward for s in batch.samples} == {1.0}


async def test_groups_that_teach_nothing_are_counted_kept_or_not(tmp_path):
    config = make_config(tmp_path, custom_rm_path="rollout_hooks.reward_by_letter", rollout_batch_size=5)
    batch = await rollout(scripted_context(config, echo), Prompts(list("wwrsl"), 4))
    m = batch.metrics
    assert (m["rollout/groups_finished"], m["rollout/groups_equal"]) == (5, 4)
    assert "rollout/groups_all_wrong" not in m  # a reward alone does not say what is right
    config = make_config(
        tmp_path, custom_rm_path="rollout_hooks.reward_by_letter", rollout_batch_size=5, accuracy_threshold=1.0
    )
    m = (await rollout(scripted_context(config, echo), Prompts(list("wwrsl"), 4))).metrics
    assert (m["rollout/groups_all_wrong"], m["rollout/groups_all_right"]) == (3, 1)


async def test_truncated_samples_teach_nothing_and_stay_in_the_baseline(tmp_path):
    config = make_config(tmp_path, overlong_filtering=True)
    answers = {1: "x" * 17, 2: "x" * 16}  # the limit is 16; the second ended by itself
    batch = await rollout(scripted_context(config, lambda _, call: answers.get(call, "yes")), Prompts(["a", "b"], 4))
    assert [s.num_loss_tokens for s in batch.samples] == [0, 16, 3, 3, 3, 3, 3, 3]
    assert [s.reward for s in batch.samples[:4]] == [1, 1, 0, 0]
    assert batch.metrics["rollout/overlong_masked"] == 1


@pytest.mark.timeout(200)
async def test_prompts_of_groups_that_were_cancelled_or_not_needed_are_returned(tmp_path):
    config = make_config(tmp_path, custom_rm_path="rollout_hooks.sleepy_for_z", over_sampling_batch_size=4)
    data = Prompts(["z", "a", "b", "c"], 4)
    batch = await rollout(scripted_context(config, echo), data)
    trained = {s.group_index for s in batch.samples}
    assert len(trained) == 2 and 0 not in trained
    assert [group[0].group_index for group in data.returned] == sorted({0, 1, 2, 3} - trained)
    assert batch.metrics["rollout/groups_returned"] == 2


@pytest.mark.timeout(200)
async def test_a_reward_that_never_ends_does_not_delay_the_batch(tmp_path):
    config = make_config(tmp_path, custom_rm_path="rollout_hooks.sleepy_for_z", over_sampling_batch_size=4)
    batch = await rollout(scripted_context(config, echo), Prompts(["z", "a", "z", "b"], 4))
    assert sorted({s.group_index for s in batch.samples}) == [1, 3]
    assert batch.metrics["rollout/groups_returned"] == 2


def test_figures_of_each_data_set_that_samples_name():
    def sample(source: str, reward: float, calls: int) -> Sample:
        return Sample("", source=source, reward=reward, num_tool_calls=calls, status=SampleStatus.COMPLETED)

    samples = [sample("a", 1.0, 1), sample("a", 0.0, 0), sample("b", 1.0, 2), sample("", 0.0, 0)]
    metrics = source_metrics(samples, None, 1)
    assert (metrics["a/samples"], metrics["a/accuracy"], metrics["a/tool_call_rate"]) == (2.0, 0.5, 0.5)
    assert (metrics["b/samples"], metrics["b/reward_mean"]) == (1.0, 1.0)
    assert {name.partition("/")[0] for name in metrics} == {"a", "b"}


async def test_a_plain_function_is_a_reward_too(tmp_path):
    config = make_config(tmp_path, custom_rm_path="rollout_hooks.length_reward")
    batch = await rollout(scripted_context(config, echo), Prompts(["abc"], 4))
    assert {s.reward for s in batch.samples} == {3.0}


def test_reward_spread_compares_exactly():
    def group(*rewards: float) -> list[Sample]:
        return [Sample(prompt="", reward=reward) for reward in rewards]

    assert not check_reward_nonzero_std(Config(), group(0.1, 0.1))
    assert check_reward_nonzero_std(Config(), group(0.1, 0.1 + 1e-15))


async def test_samples_are_dumped_with_text_tokens_and_reward(tmp_path):
    config = make_config(tmp_path, dump_rollouts=True)
    await rollout(scripted_context(config, echo), Prompts(["ab", "cd"], 4), rollout_id=7)
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "rollout_000007.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    row = next(row for row in rows if row["index"] == 0)
    assert row["prompt"] == "ab" and row["response"] == "AB" and row["tokens"] == [ord(c) for c in "abAB"]
    assert row["reward"] == {"score": 1.0} and row["status"] == "completed"
    assert row["token_texts"] == list("abAB") and row["rollout_id"] == 7
    assert [(span["name"], span["status"]) for span in row["spans"]] == [("generate", "ok"), ("reward", "ok")]


async def test_dumps_are_written_every_so_often(tmp_path):
    config = make_config(tmp_path, dump_rollouts=True, dump_rollouts_every=2)
    for step in range(4):
        await rollout(scripted_context(config, echo), Prompts(["ab", "cd"], 4), rollout_id=step)
    written = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert written == ["rollout_000000.jsonl", "rollout_000002.jsonl"]


async def test_a_prompt_without_room_for_an_answer_fails_with_the_limit_in_its_message(tmp_path):
    config = make_config(tmp_path, rollout_max_context_len=4, rollout_batch_size=1)
    with pytest.raises(RolloutError, match="prompt of 5 tokens .* within 4 .--rollout-max-context-len"):
        await rollout(scripted_context(config, echo), Prompts(["abcde"], 4))


@pytest.mark.parametrize(
    "limits",
    [
        {"rollout_max_context_len": 10},
        {"max_position_embeddings": 10},
        {"rollout_max_context_len": 10, "max_position_embeddings": 20},
    ],
    ids=["given", "the model's", "both"],
)
async def test_the_turn_is_bounded_by_response_and_context(limits, tmp_path):
    config = make_config(tmp_path, rollout_max_response_len=8, **limits)
    assert config.response_limit(5) == 5 and config.response_limit(1) == 8
    context = scripted_context(config, echo)
    await rollout(context, Prompts(["abcde"], 4))
    assert {params["max_new_tokens"] for _, params, _ in context.engine.requests} == {5}
    assert sorted({session for _, _, session in context.engine.requests}) == [str(i) for i in range(8)]


@pytest.mark.parametrize(("prompt", "opened"), [("q<think>\n", True), ("<think>q", False)])
async def test_a_sample_knows_whether_its_prompt_opened_a_thought(prompt: str, opened: bool, tmp_path):
    config = make_config(tmp_path)
    context, sample = scripted_context(config, echo), Sample(prompt=prompt)
    async with use_context(context):
        await generate(config, sample, training_sampling_params(config))
    assert sample.begins_in_thought == opened


async def test_generated_again_a_sample_starts_from_its_prompt(tmp_path):
    config = make_config(tmp_path)
    context, sample = scripted_context(config, echo), Sample(prompt="abc")
    async with use_context(context):
        await generate(config, sample, training_sampling_params(config))
        once = dataclasses.asdict(sample)
        await generate(config, sample, training_sampling_params(config))
    assert dataclasses.asdict(sample) == once


def test_remaining_tokens_count_the_response_in_both_budgets():
    budgets = LoopBudgets(max_response_tokens=50, max_context_tokens=100)
    for prompt, response, left in ((20, 10, 40), (70, 10, 20), (90, 15, -5)):
        sample = Sample(prompt="", tokens=[0] * (prompt + response), response_length=response)
        assert budgets.remaining(sample) == left


def test_sampling_parameters_come_from_the_flags(tmp_path):
    config = make_config(
        tmp_path, rollout_temperature=0.7, rollout_top_p=0.9, rollout_stop=["</x>"], rollout_stop_token_ids=[5],
        eval_temperature=0.0, eval_max_response_len=99,
    )  # fmt: skip
    train, evaluation = training_sampling_params(config), evaluation_sampling_params(config)
    assert (train["temperature"], train["top_p"], train["top_k"], train["max_new_tokens"]) == (0.7, 0.9, -1, 16)
    assert (train["stop"], train["stop_token_ids"]) == (["</x>"], [5])
    assert (evaluation["temperature"], evaluation["top_p"], evaluation["max_new_tokens"]) == (0.0, 0.9, 99)


async def test_evaluation_scores_every_prompt_n_times_per_set(tmp_path):
    config = make_config(tmp_path, n_samples_per_eval_prompt=4, eval_max_response_len=2, accuracy_threshold=1)
    context = scripted_context(config, echo)
    sets = {"one": [Sample(prompt="ab"), Sample(prompt="cd")], "two": [Sample(prompt="efg")]}
    for rollout_id in (-1, 3):  # a set can be used again
        async with use_context(context):
            metrics = await evaluate(context, sets, rollout_id)
        assert metrics["eval/one/samples"] == 8 and metrics["eval/two/samples"] == 4
        assert metrics["eval/one/accuracy"] == metrics["eval/two/reward"] == 0.5
        assert metrics["eval/one/truncated"] == 0 and metrics["eval/two/truncated"] == 1
        assert metrics["eval/two/response_length"] == 2
        assert metrics["eval/one/mean_turns"] == 1 and metrics["eval/one/tool_call_rate"] == 0
        assert len((tmp_path / "eval" / f"one_{rollout_id:06d}.jsonl").read_text().splitlines()) == 8
    assert sets["one"][0].tokens == []


async def test_an_evaluation_that_could_not_score_anything_is_an_error(tmp_path):
    context = scripted_context(make_config(tmp_path), lambda *_: EngineError("gone"))
    with pytest.raises(RolloutError, match="none of 1 samples .* engine: gone"):
        async with use_context(context):
            await evaluate(context, {"set": [Sample(prompt="a")]})
