"""Generation across weight updates: every token with its own log-prob and version, no group lost or doubled."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_hooks import CharTokenizer, Prompts
from stream_engine import Model, next_token, steps, update

from slime_retool.config import Config
from slime_retool.errors import RolloutError
from slime_retool.protocols import Completion
from slime_retool.rollout.context import RolloutContext, use_context
from slime_retool.rollout.evaluate import evaluate
from slime_retool.rollout.open_turns import Aside, OpenTurns, Record
from slime_retool.rollout.stream import Stream
from slime_retool.types import NO_VERSION, RolloutBatch, Sample, TrainSample


def make_config(tmp_path: Path, **values: object) -> Config:
    defaults: dict[str, object] = {
        "device": "cpu",
        "output_dir": str(tmp_path),
        "max_staleness": 1,
        "rollout_batch_size": 3,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 64,
        "custom_rm_path": "rollout_hooks.index_reward",
        "no_progress": True,
    }
    return Config(**{**defaults, **values})


class Rows(Prompts):
    """Prompts that name the sample, so that answers within a group differ."""

    def __init__(self, copies: int) -> None:
        super().__init__([], copies)

    def next_groups(self, count: int) -> list[list[Sample]]:
        drawn = range(self.drawn, self.drawn + count)
        self.drawn += count
        return [
            [self.sample_of_row(row, row * self.copies + i, row) for i in range(self.copies)] for row in drawn
        ]

    def sample_of_row(self, row: int, index: int, group_index: int) -> Sample:
        return Sample(prompt=f"{index:04d}:", label="x", index=index, group_index=group_index, row=row)


def length_by(seed: int, most: int) -> Any:
    """Tokens of prompt and answer, drawn by the sample's number: most are short, few are `most` long."""

    def length(tokens: list[int]) -> int:
        index = int("".join(map(chr, tokens[:4])))
        return 5 + 1 + int(most ** random.Random(f"{seed} {index}").random())

    return length


@asynccontextmanager
async def streaming(config: Config, model: Model, data: Any = None, state: Any = None):
    data = data or Rows(config.n_samples_per_prompt)
    turns = OpenTurns(model, concurrency=1000, tokenizer=CharTokenizer())
    context = RolloutContext(config=config, tokenizer=CharTokenizer(), engine=turns)
    async with use_context(context):
        stream = Stream(context, data, turns)
        if state is not None:
            stream.load_state_dict(state, model.version)
        stream.go_on(model.version)
        try:
            yield stream, turns, data
        finally:
            await stream.aclose()


def check_tokens(sample: TrainSample, trained_by: int, most: int) -> set[int]:
    """Every token and log-prob are what the weights wrote that it names; returns their ages."""
    tokens, ages = list(sample.tokens), set()
    for place, learned in enumerate(sample.loss_mask):
        if learned:
            age = int(sample.columns["staleness"][place])
            ends = place + 1 == sample.length
            token, log_prob = next_token(tokens[:place], trained_by - age, ends and tokens[place] == ord("."))
            assert (token, pytest.approx(log_prob)) == (tokens[place], sample.rollout_log_probs[place])
            assert 0 <= age <= most
            ages.add(age)
    return ages


async def test_every_token_is_what_its_own_weights_wrote(tmp_path):
    model = Model(length_by(1, 60))
    async with streaming(make_config(tmp_path), model) as (stream, turns, data):
        batches = await steps(stream, turns, model, 12)
    ages = [age for step, batch in enumerate(batches) for s in batch.samples for age in check_tokens(s, step + 1, 1)]
    assert set(ages) == {0, 1}
    mixed = sum(len(check_tokens(s, step + 1, 1)) == 2 for step, batch in enumerate(batches) for s in batch.samples)
    assert mixed > 5  # samples that were interrupted within their one turn
    assert sum(batch.metrics["rollout/requests_interrupted"] for batch in batches) > 5
    assert all(batch.metrics["rollout/groups_dropped_stale"] == 0 for batch in batches)


async def test_a_batch_has_whole_groups_and_nothing_comes_twice(tmp_path):
    model = Model(length_by(2, 60))
    async with streaming(make_config(tmp_path), model) as (stream, turns, data):
        batches = await steps(stream, turns, model, 10)
    for batch in batches:
        assert sorted(Counter(s.group_index for s in batch.samples).values()) == [2, 2, 2]
    indices = [s.index for batch in batches for s in batch.samples]
    assert len(indices) == len(set(indices)) == 60
    # 2 batches are open at most, and drawn in order: nothing of what came first is still missing.
    assert data.drawn == (10 + 2) * 3 and set(range(60 - 12)) <= set(indices)


@pytest.mark.parametrize("updated", [False, True], ids=["before the update", "after it"])
async def test_a_checkpoint_holds_the_open_conversations_and_a_resumed_run_loses_none(updated, tmp_path):
    """Saved when the trainer has the batch, or after the update: what the resumed run trains goes on where it was."""
    config, length = make_config(tmp_path, rollout_max_response_len=300, n_samples_per_prompt=4), length_by(3, 300)
    model = Model(length)
    async with streaming(config, model) as (stream, turns, data):
        before = await steps(stream, turns, model, 5)
        before.append(await stream.next_batch(5))
        stream.hold()
        model.abort()
        assert await stream.drained(1)
        if updated:
            await update(stream, turns, model, model.version + 1)
            for _ in range(20):
                await asyncio.sleep(0)
        state, drawn = json.loads(json.dumps(stream.state_dict())), data.drawn
    samples = [s for group in state["groups"] for s in group["samples"]]
    partial = [s for s in samples if "record" in s and len(Record.from_state(s["record"]).tokens) > len("0000:")]
    assert partial and any("sample" in s for s in samples)
    rest = Rows(config.n_samples_per_prompt)
    rest.drawn = drawn
    resumed = Model(length, version=7)  # as many updates as there were, and that of the last batch
    async with streaming(config, resumed, rest, state) as (stream, turns, data):
        after = await steps(stream, turns, resumed, 6)
    trained = [*before, *after]
    for step, batch in enumerate(trained):
        for sample in batch.samples:
            check_tokens(sample, step + 1, 1)
    indices = [s.index for batch in trained for s in batch.samples]
    assert len(indices) == len(set(indices)) == 12 * 12
    open_then = {s["index"] for group in state["groups"] for s in group["samples"]}
    assert open_then <= {s.index for batch in after for s in batch.samples}
    # None was asked for again from its prompt: those are still of the old weights.
    kept = {s.index for batch in after[:2] for s in batch.samples if int(max(s.columns["staleness"])) > 0}
    assert {s["index"] for s in partial} <= kept


async def test_a_finished_turn_of_a_checkpoint_is_not_generated_again_and_its_tools_run_again():
    """Three requests of one conversation; the second run of the hook gets the first two from the record."""
    model = Model(lambda tokens: len(tokens) + 3)
    turns = OpenTurns(model, concurrency=8, tokenizer=CharTokenizer())

    async def converse(engine: OpenTurns, observations: list[int], count: int) -> list[int]:
        tokens = [1, 2, 3]
        for turn in range(count):
            completion = await engine.generate(tokens, {"max_new_tokens": 2}, session="7")
            tokens = [*tokens, *completion.ids, observations[turn]]
        return tokens

    await converse(turns, [50, 51, 52], 2)
    state = json.loads(json.dumps(turns.record("7").state_dict()))
    for observations, asked in (([50, 51, 52], 1), ([60, 51, 52], 2)):
        again = OpenTurns(model, concurrency=8, tokenizer=CharTokenizer())
        again.restore("7", Record.from_state(state))
        before = model.requests
        tokens = await converse(again, observations, 3)
        assert model.requests - before == asked  # where the first tool answers otherwise, the second turn is new as well
        record = again.record("7")
        assert record.tokens == tokens[:-1] and len(record.turns) == 3
        for turn in record.turns:
            for place in range(turn.start, turn.end):
                token, log_prob = next_token(record.tokens[:place], 1, False)
                assert record.tokens[place] == token or record.tokens[place] == ord(".")
                assert record.log_probs[place] == pytest.approx(log_prob)
