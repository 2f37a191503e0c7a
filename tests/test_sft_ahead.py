"""While the trainer works on a batch of SFT the next one is made; all else is as if it were not."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_data_rendering import assistant, byte_tokenizer, user

from slime_retool.config import Config, parse_config, resolve
from slime_retool.data.readers import write_rows
from slime_retool.data.source import PromptDataSource
from slime_retool.errors import DataError
from slime_retool.rollout import sft_rollout
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.manager import RolloutManager
from slime_retool.types import RolloutBatch

ROLLOUTS, BATCH = 6, 2
GOOD = [[user(f"q{i}"), assistant("a" * (i + 1))] for i in range(5)]
TOO_LONG = [user("q"), assistant("a" * 500)]


def config_of(tmp_path: Path, conversations: list[Any], *flags: str) -> Config:
    write_rows(tmp_path / "sft.jsonl", [{"messages": messages} for messages in conversations])
    return resolve(parse_config([
        "--prompt-data", str(tmp_path / "sft.jsonl"), "--input-key", "messages", "--loss-type", "sft_loss",
        "--rollout-batch-size", str(BATCH), "--num-rollout", str(ROLLOUTS), "--max-sampling-rounds", "1",
        "--device", "cpu", "--output-dir", str(tmp_path), *flags,
    ]))  # fmt: skip


def one_by_one(config: Config) -> tuple[list[RolloutBatch], list[dict[str, Any]]]:
    """Every batch and the data's position after it, nothing made before it is asked for."""
    context = RolloutContext(config, byte_tokenizer(), engine=None)
    data = PromptDataSource(config, context.tokenizer)
    batches, positions = [], []
    for rollout_id in range(ROLLOUTS):
        batches.append(asyncio.run(sft_rollout.generate_rollout(context, data, rollout_id)))
        positions.append(data.state_dict())
    return batches, positions


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rollouts whose batch was begun; each is whole when the next line is reached."""
    begun: list[int] = []
    make = sft_rollout.generate_rollout

    async def noted(context: RolloutContext, data: PromptDataSource, rollout_id: int) -> RolloutBatch:
        begun.append(rollout_id)
        return await make(context, data, rollout_id)

    monkeypatch.setattr(sft_rollout, "generate_rollout", noted)
    return begun


def settled(manager: RolloutManager) -> None:
    """Wait for the batch that is being made."""
    assert manager._ahead is not None
    concurrent.futures.wait([manager._ahead[1]])


def test_batches_and_positions_are_those_of_making_each_when_it_is_asked_for(tmp_path, asked):
    config = config_of(tmp_path, GOOD, "--rollout-shuffle")
    batches, positions = one_by_one(config)
    asked.clear()
    with RolloutManager(config, tokenizer=byte_tokenizer()) as manager:
        for rollout_id in range(ROLLOUTS):
            assert manager.generate(rollout_id) == batches[rollout_id]
            if rollout_id < ROLLOUTS - 1:
                settled(manager)
                assert asked == [*range(rollout_id + 2)]
            assert manager.state_dict() == positions[rollout_id]
    assert asked == [*range(ROLLOUTS)]  # none after the last


def test_a_batch_is_made_while_the_caller_is_busy(tmp_path, monkeypatch):
    made = threading.Event()
    convert = sft_rollout.to_train_sample

    def noted(tokenize: Callable[..., Any], sample: Any) -> Any:
        if sample.index >= BATCH:
            made.set()
        return convert(tokenize, sample)

    monkeypatch.setattr(sft_rollout, "to_train_sample", noted)
    with RolloutManager(config_of(tmp_path, GOOD), tokenizer=byte_tokenizer()) as manager:
        manager.generate(0)
        assert made.wait(60)  # nothing was asked of the manager since


def test_a_run_resumed_from_a_checkpoint_trains_on_the_batch_that_was_ready_but_not_trained_on(tmp_path):
    config = config_of(tmp_path, GOOD, "--rollout-shuffle")
    batches, _ = one_by_one(config)
    with RolloutManager(config, tokenizer=byte_tokenizer()) as first:
        for rollout_id in range(3):
            first.generate(rollout_id)
        settled(first)
        saved = json.loads(json.dumps(first.state_dict()))
    with RolloutManager(config, tokenizer=byte_tokenizer()) as second:
        second.load_state_dict(saved)
        assert [second.generate(rollout_id) for rollout_id in range(3, ROLLOUTS)] == batches[3:]


def test_going_back_forgets_what_was_made_ahead(tmp_path):
    config = config_of(tmp_path, GOOD)
    batches, positions = one_by_one(config)
    with RolloutManager(config, tokenizer=byte_tokenizer()) as manager:
        assert [manager.generate(rollout_id) for rollout_id in range(3)] == batches[:3]
        manager.load_state_dict(positions[0])
        assert [manager.generate(rollout_id) for rollout_id in (1, 2)] == batches[1:3]


def test_another_rollout_than_the_next_gets_the_rows_that_come_next(tmp_path):
    config = config_of(tmp_path, GOOD)
    batches, positions = one_by_one(config)
    with RolloutManager(config, tokenizer=byte_tokenizer()) as manager:
        manager.generate(0)
        assert manager.generate(4) == batches[1] and manager.state_dict() == positions[1]
        assert manager.generate(5) == batches[2]


def test_an_error_is_raised_by_the_call_that_asks_for_its_batch(tmp_path):
    config = config_of(tmp_path, [*GOOD[:4], TOO_LONG, TOO_LONG], "--rollout-max-context-len", "300")
    _, positions = one_by_one(replace(config, max_sampling_rounds=9))
    with RolloutManager(config, tokenizer=byte_tokenizer()) as manager:
        manager.generate(0)
        manager.generate(1)
        settled(manager)
        assert manager.state_dict() == positions[1]
        with pytest.raises(DataError, match="0 of 2 conversations can be trained on"):
            manager.generate(2)


def test_a_manager_that_is_closed_makes_no_more_samples(tmp_path, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    made: list[int] = []
    convert = sft_rollout.to_train_sample

    def slow(tokenize: Callable[..., Any], sample: Any) -> Any:
        made.append(sample.index)
        if sample.index >= BATCH:
            begun.set()
            assert go_on.wait(60)
        return convert(tokenize, sample)

    monkeypatch.setattr(sft_rollout, "to_train_sample", slow)
    before = set(threading.enumerate())
    with RolloutManager(config_of(tmp_path, GOOD), tokenizer=byte_tokenizer()) as manager:
        manager.generate(0)
        assert begun.wait(60)
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
    assert made == [*range(BATCH + 1)]
