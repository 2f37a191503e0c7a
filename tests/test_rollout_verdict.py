"""What a rollout that cannot be filled says about its data, and which groups it keeps on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout_hooks import Prompts, scripted_context
from test_rollout_loop import SPREAD, echo, make_config, rollout

from slime_retool.errors import RolloutError

HARD = "The prompts are too hard for this model"
EASY = "The prompts are too easy for this model"
MIXED = "Most prompts are too hard or too easy for this model"


def config_of(tmp_path: Path, rounds: int, batch: int = 2, **values: object):
    return make_config(
        tmp_path,
        custom_rm_path="rollout_hooks.reward_by_letter",
        dynamic_sampling_filter_path=SPREAD,
        max_sampling_rounds=rounds,
        rollout_batch_size=batch,
        **values,
    )


async def closing_error(tmp_path: Path, letters: str, rounds: int, batch: int = 2) -> str:
    data = Prompts(list(letters), 4)
    with pytest.raises(RolloutError) as error:
        await rollout(scripted_context(config_of(tmp_path, rounds, batch), echo), data)
    assert data.drawn == rounds * batch
    return str(error.value)


@pytest.mark.parametrize(
    ("letters", "wrong", "right", "verdict"),
    [
        ("wwwwww", 6, 0, HARD),
        ("mmmmmm", 6, 0, HARD),
        ("rrrrrr", 0, 6, EASY),
        ("llllll", 0, 6, EASY),
        ("wwwwwr", 5, 1, HARD),
        ("wwwwrr", 4, 2, MIXED),  # exactly twice as many
        ("rrrrww", 2, 4, MIXED),
        ("rrrrrw", 1, 5, EASY),
        ("wwwrrr", 3, 3, MIXED),
    ],
)
async def test_the_verdict_follows_from_the_dropped_groups(letters, wrong, right, verdict, tmp_path):
    text = await closing_error(tmp_path, letters, rounds=3)
    assert "rollout 0: 6 prompts (--max-sampling-rounds 3 x --rollout-batch-size 2) gave only 0 groups" in text
    assert f"in {wrong} every answer was wrong (reward 0 or less), in {right} every one was right" in text
    assert f"6 were dropped by {SPREAD}" in text and verdict in text and "failed" not in text
    assert [other for other in (HARD, EASY, MIXED) if other in text] == [verdict]


async def test_the_rewards_told_of_are_those_of_all_finished_samples(tmp_path):
    text = await closing_error(tmp_path, "mswwwr", rounds=3)
    # -1 four times, 0 and 1 twice each, 0 twelve times, 2 four times: 6 / 24
    assert "only 1 groups to train on, 2 are needed" in text
    assert "the mean reward is 0.25, the lowest -1, the highest 2" in text


async def test_groups_lost_to_outages_are_told_of_with_the_last_error(tmp_path):
    text = await closing_error(tmp_path, "soowoo", rounds=3)
    assert "only 1 groups to train on" in text and "1 were dropped" in text
    assert "4 failed, the last with: reward: " in text and "the judge is down" in text


async def test_without_any_drop_only_outages_are_told_of(tmp_path):
    text = await closing_error(tmp_path, "sooooo", rounds=3)
    assert "dropped" not in text and "5 failed, the last with" in text


async def test_two_usable_samples_make_a_group_and_one_does_not(tmp_path):
    config = config_of(tmp_path, rounds=3)
    batch = await rollout(scripted_context(config, echo), Prompts(["p", "s"], 4))  # two of p's four are usable
    assert [sample.group_index for sample in batch.samples] == [0, 0, 1, 1, 1, 1]
    alone = config_of(tmp_path, rounds=3, n_samples_per_prompt=1)
    with pytest.raises(RolloutError, match="only 0 groups .* 6 were dropped"):
        await rollout(scripted_context(alone, echo), Prompts(["s"], 1))  # usable, but without any spread


async def test_nothing_is_given_up_before_a_whole_batch_has_failed(tmp_path):
    config = config_of(tmp_path, rounds=3, batch=3)
    batch = await rollout(scripted_context(config, echo), Prompts(["o", "o", "s", "s", "s"], 4))
    assert batch.metrics["rollout/groups_failed"] == 2 and batch.metrics["rollout/groups_kept"] == 3
    data = Prompts(["o"], 4)
    with pytest.raises(RolloutError, match="none of 3 groups could be generated and scored; the last error: reward: "):
        await rollout(scripted_context(config, echo), data)
    assert data.drawn < 9


@pytest.mark.parametrize(("at_once", "drawn"), [(None, 4), (4, 4), (6, 6), (7, 7)])
async def test_over_sampling_draws_as_many_prompts_as_it_says(at_once, drawn, tmp_path):
    config = config_of(tmp_path, rounds=3, batch=4, over_sampling_batch_size=at_once)
    data = Prompts(["s"], 4)
    batch = await rollout(scripted_context(config, echo), data)
    assert data.drawn == drawn and batch.metrics["rollout/groups_kept"] == 4
    assert batch.metrics["rollout/groups_returned"] == len(data.returned) == drawn - 4


async def test_a_missing_group_is_replaced_in_the_same_proportion(tmp_path):
    """Two of four dropped with 6 at once: 3 more are drawn (2 missing x 6 / 4)."""
    config = config_of(tmp_path, rounds=5, batch=4, over_sampling_batch_size=6)
    data = Prompts(["w", "w", "w", "w", "s", "s", *"ssssss"], 4)
    await rollout(scripted_context(config, echo), data)
    assert data.drawn == 9
