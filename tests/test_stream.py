"""Generation across weight updates: every token with its own log-prob and version, no group lost or doubled."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_hooks import CharTokenizer, Prompts
from stream_engine import Model, next_token, steps, update

from slime_retool.config import Config
from slime_retool.errors import ConfigError, RewardError, RolloutError
from slime_retool.protocols import Completion
from slime_retool.rollout.context import RolloutContext, use_context
from slime_retool.rollout.evaluate import evaluate
from slime_retool.rollout.json_client import EngineStats
from slime_retool.rollout.manager import RolloutManager
from slime_retool.rollout.open_turns import Aside, OpenTurns, Record
from slime_retool.rollout.places import Places, Use
from slime_retool.rollout.stream import Stream, _shifted
from slime_retool.tool_use.loop import append_turn
from slime_retool.types import NO_VERSION, RolloutBatch, Sample, TrainSample

FILTER = "slime_retool.rollout.filters.check_reward_nonzero_std"


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
        return [[self.sample_of_row(row, row * self.copies + i, row) for i in range(self.copies)] for row in drawn]

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
    turns = OpenTurns(model, concurrency=1000, tokenizer=CharTokenizer(), keeps_cache=False)
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
        turns.hold()
        model.abort()
        assert await turns.places.empty(1)
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
    turns = OpenTurns(model, concurrency=8, tokenizer=CharTokenizer(), keeps_cache=False)

    async def converse(engine: OpenTurns, observations: list[int], count: int) -> list[int]:
        tokens = [1, 2, 3]
        for turn in range(count):
            completion = await engine.generate(tokens, {"max_new_tokens": 2}, session="7")
            tokens = [*tokens, *completion.ids, observations[turn]]
        return tokens

    await converse(turns, [50, 51, 52], 2)
    state = json.loads(json.dumps(turns.record("7").state_dict()))
    for observations, asked in (([50, 51, 52], 1), ([60, 51, 52], 2)):
        again = OpenTurns(model, concurrency=8, tokenizer=CharTokenizer(), keeps_cache=False)
        again.restore("7", Record.from_state(state))
        before = model.requests
        tokens = await converse(again, observations, 3)
        # Where the first tool answers otherwise, the second turn is new as well.
        assert model.requests - before == asked
        record = again.record("7")
        assert record.tokens == tokens[:-1] and len(record.turns) == 3
        for turn in record.turns:
            for place in range(turn.start, turn.end):
                token, log_prob = next_token(record.tokens[:place], 1, False)
                assert record.tokens[place] == token or record.tokens[place] == ord(".")
                assert record.log_probs[place] == pytest.approx(log_prob)


async def test_a_stop_text_is_found_across_an_interruption():
    """The engine looks for it within one request: what it writes behind "</co" + "de>" is cut off."""
    text = "print(1)</code>\nOutput: 2"

    class Halves:
        """Interrupted after `self.first` characters, then it writes all that is left."""

        def __init__(self, first: int) -> None:
            self.first, self.prompts = first, []

        async def generate(self, input_ids, sampling_params, *, session=None):
            self.prompts.append(len(input_ids))
            part = text[: self.first] if len(self.prompts) == 1 else text[self.first :]
            ids = [ord(c) for c in part]
            finish = "abort" if len(self.prompts) == 1 else "length"
            return Completion(ids, [-0.5 - len(self.prompts)] * len(ids), finish, len(self.prompts), len(input_ids), 0)

    for first in range(len("print(1)<"), len("print(1)</code>")):
        turns = OpenTurns(Halves(first), concurrency=1, tokenizer=CharTokenizer(), keeps_cache=False)
        params = {"max_new_tokens": 64, "stop": ["</code>"]}
        completion = await turns.generate([1, 2], params, session="0")
        assert "".join(map(chr, completion.ids)) == "print(1)</code>"
        assert completion.finish_reason == "stop"
        assert completion.versions == [1] * first + [2] * (len("print(1)</code>") - first)
        assert completion.log_probs == [-0.5 - version for version in completion.versions]
    turns = OpenTurns(Halves(8), concurrency=1, tokenizer=CharTokenizer(), keeps_cache=False)
    whole = await turns.generate([1, 2], {"max_new_tokens": 64}, session="0")
    assert "".join(map(chr, whole.ids)) == text and whole.finish_reason == "length"


async def test_a_turn_over_many_updates_keeps_its_budget():
    """Ended after every 3 tokens: 11 are asked for, and 11 come; the last request asks for the 2 that are left."""
    asked = []

    class Hasty:
        async def generate(self, input_ids, sampling_params, *, session=None):
            asked.append(sampling_params["max_new_tokens"])
            count = min(3, asked[-1])
            finish = "abort" if count == 3 else "length"
            spans = [{"name": "request", "tokens": count}]
            return Completion([9] * count, [-1.0] * count, finish, len(asked), len(input_ids), 0, spans=spans)

    turns = OpenTurns(Hasty(), concurrency=1, tokenizer=CharTokenizer(), keeps_cache=False)
    completion = await turns.generate([1, 2], {"max_new_tokens": 11}, session="0")
    assert asked == [11, 8, 5, 2] and len(completion.ids) == 11 and completion.finish_reason == "length"
    assert completion.versions == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4] and completion.weight_version == 4
    counts = turns.take_counts()
    assert (counts.interrupted, counts.continued, counts.reread_tokens) == (3, 3, 5 + 8 + 11)
    assert [span["tokens"] for span in completion.spans] == [3, 3, 3, 2]
    sample = Sample(prompt="", tokens=[1, 2])
    append_turn(sample, completion, 11)
    assert [(span["name"], span["tokens"], span["turn"]) for span in sample.spans] == [
        ("request", count, 1) for count in (3, 3, 3, 2)
    ]
    record = turns.record("0")
    assert record is not None and record.spans == []  # the next turn's are its own
    # The update comes with the last token: nothing more is asked for.
    asked.clear()
    completion = await turns.generate([1, 2], {"max_new_tokens": 3}, session="1")
    assert asked == [3] and completion.finish_reason == "length" and len(completion.ids) == 3


async def test_a_conversation_finds_no_cache_of_weights_before_it_began():
    """With `keeps_cache` the key is the version of its first token, or that of the engine before there is any."""
    keys = []

    class Keyed:
        async def generate(self, input_ids, sampling_params, *, session=None, cache_key=None):
            keys.append(cache_key)
            return Completion([9], [-1.0], "stop", len(keys), len(input_ids), 0)

    turns = OpenTurns(Keyed(), concurrency=1, tokenizer=CharTokenizer(), keeps_cache=True)
    turns.let_go(1)
    first = await turns.generate([1, 2], {"max_new_tokens": 5}, session="0")
    turns.let_go(2)
    second = await turns.generate([1, 2, *first.ids, 3], {"max_new_tokens": 5}, session="0")
    turns.let_go(3)
    await turns.generate([1, 2, *first.ids, 3, *second.ids, 4], {"max_new_tokens": 5}, session="0")
    await turns.generate([1, 2], {"max_new_tokens": 5}, session="1")
    await Aside(turns).generate([1, 2], {"max_new_tokens": 5}, session="0")
    assert keys == ["1", "1", "1", "3", "3"]


async def test_places_are_given_to_the_oldest_conversation_first_and_to_none_while_held():
    places, order = Places(1), []

    async def work(priority: int) -> None:
        async with places.place(priority):
            order.append(priority)
            await asyncio.sleep(0)

    places.hold()
    tasks = [asyncio.create_task(work(priority)) for priority in (5, 3, 9, 3, -1)]
    await asyncio.sleep(0.01)
    assert order == [] and await places.empty(0)
    tasks[2].cancel()
    places.let_go()
    assert not await places.empty(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [-1, 3, 3, 5] and await places.empty(0)
    # One that is cancelled in the moment it is given a place hands it on.
    holder = asyncio.create_task(work(0))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(work(priority)) for priority in (1, 2)]
    await asyncio.sleep(0)
    while not waiting[0].done():
        await asyncio.sleep(0)
        if order[-1] == 0 and places.running == 1 and holder.done():
            waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order[-1] == 2 and await places.empty(0)


async def test_evaluation_uses_the_present_weights_and_is_not_mixed_up_with_training(tmp_path):
    """The same numbers of samples, at the same time: neither finds the other's replies."""
    model = Model(length_by(4, 60))
    config = make_config(tmp_path, n_samples_per_eval_prompt=2, eval_max_response_len=32)
    async with streaming(config, model) as (stream, turns, data):
        await steps(stream, turns, model, 3)
        held = {"set": [Sample(prompt=f"{row:04d}:", label="x") for row in (0, 1, 2, 40)]}
        context = RolloutContext(config=config, tokenizer=CharTokenizer(), engine=Aside(turns))
        async with use_context(context):
            metrics = await evaluate(context, held, 3)
        after = await steps(stream, turns, model, 3)
    assert metrics["eval/set/samples"] == 8
    lines = [json.loads(line) for line in (tmp_path / "eval" / "set_000003.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and {version for line in lines for version in line["token_versions"]} == {4}
    for step, batch in enumerate(after, start=4):
        for sample in batch.samples:
            check_tokens(sample, step, 1)


async def outage_sometimes(args: Any, sample: Sample) -> dict[str, float]:
    """A scorer that is down for every seventh sample, and takes its time for others."""
    await asyncio.sleep(0.0005 * (sample.index % 3))
    if sample.index % 7 == 3:
        raise RewardError("the judge is down")
    return {"score": float(sample.index % 5 < 2)}


async def test_the_filter_and_outages_are_made_up_for(tmp_path):
    """Groups of equal rewards and of one usable sample are replaced; every batch is full all the same."""
    config = make_config(
        tmp_path, custom_rm_path="test_stream.outage_sometimes", over_sampling_batch_size=6,
        dynamic_sampling_filter_path=FILTER,
    )  # fmt: skip
    model = Model(length_by(5, 40))
    async with streaming(config, model) as (stream, turns, data):
        batches = await steps(stream, turns, model, 8)
    for step, batch in enumerate(batches):
        groups = Counter(s.group_index for s in batch.samples)
        assert len(groups) == 3 and set(groups.values()) == {2}
        assert all(s.index % 7 != 3 for s in batch.samples)
        for sample in batch.samples:
            check_tokens(sample, step + 1, 1)
    assert sum(batch.metrics["rollout/groups_dropped"] for batch in batches) > 0
    assert sum(batch.metrics["rollout/groups_failed"] for batch in batches) > 0


async def test_a_batch_that_cannot_be_filled_ends_the_run_with_the_reason(tmp_path):
    config = make_config(tmp_path, custom_rm_path="rollout_hooks.outage_for_odd", n_samples_per_prompt=2)
    async with streaming(config, Model(length_by(6, 20))) as (stream, turns, data):
        with pytest.raises(RolloutError, match="none of .* groups could be generated.*the judge is down"):
            await stream.next_batch(0)


async def same_reward(args: Config, sample: Sample, **kwargs: Any) -> dict[str, float]:
    return {"score": 1.0}


async def reward_of_even_groups(args: Config, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """The samples of every other group differ in it."""
    return {"score": float(sample.index % 2 if sample.group_index % 2 == 0 else 1)}


async def test_where_the_filter_takes_all_no_more_prompts_are_drawn_than_the_flags_say(tmp_path):
    """Two rounds of three, and the three that are open for the next batch."""
    config = make_config(
        tmp_path, custom_rm_path="test_stream.same_reward", dynamic_sampling_filter_path=FILTER, max_sampling_rounds=2,
        over_sampling_batch_size=6,
    )  # fmt: skip
    async with streaming(config, Model(length_by(6, 20))) as (stream, turns, data):
        with pytest.raises(RolloutError, match="gave only 0 groups to train on, 3 are needed"):
            await asyncio.wait_for(stream.next_batch(0), 60)
    assert data.drawn == 9


@pytest.mark.parametrize(("reward", "kept", "running"), [("reward_of_even_groups", 1, 10), ("same_reward", 0, 24)])
async def test_as_many_more_prompts_are_drawn_as_the_filter_takes(reward, kept, running, tmp_path):
    """Of the first two groups one is good: for each that lacks of six two are open. Or none is: four times as many."""
    config = make_config(
        tmp_path, custom_rm_path=f"test_stream.{reward}", dynamic_sampling_filter_path=FILTER,
        over_sampling_batch_size=12, max_sampling_rounds=100,
    )  # fmt: skip
    model = Model(lambda tokens: 8 + int("".join(map(chr, tokens[:4]))) // 2 * 2)  # each group a little longer
    async with streaming(config, model) as (stream, _, data):
        while not stream._rejected:
            await asyncio.sleep(0)
        assert (len(stream._kept), len(stream._running)) == (kept, running)
        assert data.drawn == kept + running + 1


async def test_nothing_runs_after_the_end(tmp_path):
    model = Model(lambda tokens: 100_000)
    async with streaming(make_config(tmp_path), model):
        while model.running < 12:
            await asyncio.sleep(0)
    assert model.running == 0 and asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_engines_use_is_told_by_shares_of_the_time(tmp_path, monkeypatch):
    model = Model(lambda tokens: 8)
    async with streaming(make_config(tmp_path), model) as (stream, turns, data):
        monkeypatch.setattr(turns.places, "take_use", lambda: Use(seconds=4.0, busy_seconds=1.0, request_seconds=10.0))
        metrics = (await stream.next_batch(0)).metrics
    assert metrics["rollout/engine_busy_share"] == 0.25 and metrics["rollout/requests_running_mean"] == 2.5


def test_versions_of_a_checkpoint_go_on_from_this_run_s_and_none_is_below_0():
    assert _shifted([9, NO_VERSION, 4, 2], -3) == [6, NO_VERSION, 1, 0]


async def test_a_mistake_in_a_hook_ends_the_run_though_it_happens_between_batches(tmp_path):
    config = make_config(tmp_path, custom_rm_path="rollout_hooks.text_reward")
    async with streaming(config, Model(length_by(6, 20))) as (stream, turns, data):
        with pytest.raises(Exception, match="very good"):
            await stream.next_batch(0)


async def test_what_is_too_old_is_dropped_whole_counted_and_drawn_again(tmp_path):
    """Six complete groups of weights 1 wait for places in batches of three: weights 3 may not be trained on three."""
    model = Model(lambda tokens: 8)
    async with streaming(make_config(tmp_path), model) as (stream, turns, data):
        while len(stream._kept) < 6:
            await asyncio.sleep(0)
        await update(stream, turns, model, 2)
        batch = await stream.next_batch(0)
        rows = [sample.row for sample in data.returned[0]] if data.returned else []
    assert {s.group_index for s in batch.samples} == {0, 1, 2}
    assert batch.metrics["rollout/groups_dropped_stale"] == 3
    assert batch.metrics["rollout/samples_dropped_stale_ratio"] == 0.5
    # Three tokens of the 64 that may be.
    assert [batch.metrics[f"rollout/samples_dropped_stale/q{part}"] for part in (1, 2, 3, 4)] == [6, 0, 0, 0]
    assert [group[0].group_index for group in data.returned] == [3, 4, 5] and rows == [3, 3]
    assert batch.metrics["rollout/staleness_max"] == batch.metrics["rollout/staleness_mean"] == 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_group_is_lost_or_doubled_whatever_happens(data, tmp_path_factory):
    """Random answers, batches, staleness, filters, outages and updates at any time."""
    seed = data.draw(st.integers(0, 10_000), label="seed")
    staleness = data.draw(st.integers(1, 3), label="K")
    values = {
        "max_staleness": staleness,
        "rollout_batch_size": data.draw(st.integers(3, 5), label="batch"),
        "n_samples_per_prompt": data.draw(st.sampled_from([1, 2, 3]), label="samples"),
        "rollout_max_response_len": data.draw(st.sampled_from([3, 50]), label="limit"),
        "over_sampling_batch_size": data.draw(st.sampled_from([None, 8]), label="over"),
        "custom_rm_path": data.draw(
            st.sampled_from(["test_stream.outage_sometimes", "rollout_hooks.constant_reward"]), label="reward"
        ),
        "max_sampling_rounds": 1000,
    }
    if values["n_samples_per_prompt"] > 1 and values["custom_rm_path"].startswith("test_stream"):
        values["dynamic_sampling_filter_path"] = data.draw(st.sampled_from([None, FILTER]), label="filter")
    pauses = data.draw(st.lists(st.integers(0, 30), min_size=6, max_size=6), label="ticks between hand-over and update")
    config = make_config(tmp_path_factory.mktemp("stream"), **values)

    async def run() -> None:
        model = Model(length_by(seed, 40))
        async with streaming(config, model) as (stream, turns, rows):
            trained: list[RolloutBatch] = []
            for step, pause in enumerate(pauses):
                trained.append(await stream.next_batch(step))
                for _ in range(pause):  # the trainer works
                    await asyncio.sleep(0)
                await update(stream, turns, model, model.version + 1)
            state = stream.state_dict()
        dropped = [group[0].group_index for group in rows.returned]
        assert len(dropped) == sum(batch.metrics["rollout/groups_dropped_stale"] for batch in trained)
        taken = [number for batch in trained for number in {s.group_index for s in batch.samples}]
        bad = sum(batch.metrics[f"rollout/groups_{why}"] for batch in trained for why in ("dropped", "failed"))
        bad += len(stream._rejected)
        waiting = [group["group_index"] for group in state["groups"]]
        every = [*taken, *dropped, *waiting]
        assert len(every) == len(set(every)) and len(every) + bad == rows.drawn
        for step, batch in enumerate(trained):
            assert len({s.group_index for s in batch.samples}) == config.rollout_batch_size
            for sample in batch.samples:
                check_tokens(sample, step + 1, staleness)

    asyncio.run(run())


class Client(Model):
    """`RouterClient`'s place in a manager."""

    def __init__(self, url: str, *, concurrency: int, **_: Any) -> None:
        super().__init__(length_by(7, 300), version=int(url))
        self.concurrency, self.waiting = concurrency, 0
        self.serves = math.inf
        """So many requests still; later ones wait until it grows."""

    async def generate(self, *args: Any, **options: Any) -> Completion:
        self.waiting += 1
        while self.serves < 1:
            await asyncio.sleep(0.001)
        self.waiting -= 1
        self.serves -= 1
        return await super().generate(*args, **options)

    def take_stats(self) -> EngineStats:
        return EngineStats(prompt_tokens=100, cached_tokens=50, completion_tokens=50)

    async def aclose(self) -> None: ...


def rl_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **values: object) -> RolloutManager:
    """Four-digit prompts, as `length_by` reads them; every sample of a group answers alike."""
    monkeypatch.setattr("slime_retool.rollout.manager.RouterClient", Client)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{row:04d}:", "label": "x"}) + "\n" for row in range(400)))
    config = make_config(
        tmp_path, prompt_data=str(rows), rollout_batch_size=6, rollout_max_response_len=300, num_rollout=99, **values
    )
    return RolloutManager(config, tokenizer=CharTokenizer())


def do_update(manager: RolloutManager) -> None:
    client = manager._client
    manager.hold()
    while not manager.drained(0):
        client.abort()
        manager.drained(0.01)
    client.version += 1
    manager.go_on(client.version)


def test_conversations_that_wait_for_an_engine_do_not_hold_up_the_update_that_it_waits_for(tmp_path, monkeypatch):
    """Engines that started anew while the trainer worked get their weights by the update, and serve after it."""
    with rl_manager(tmp_path, monkeypatch) as manager:
        manager.connect("1")
        client = manager._client
        client.serves = 12
        manager.go_on(1)
        manager.generate(0)
        assert client.waiting and client.running == 0
        do_update(manager)
        assert client.running == 0
        client.serves = math.inf
        batch = manager.generate(1)
    assert len(batch.samples) == 12
    for sample in batch.samples:
        check_tokens(sample, 2, 1)


def test_a_manager_saves_and_resumes_what_is_open(tmp_path, monkeypatch):
    trained: list[tuple[int, TrainSample]] = []
    with rl_manager(tmp_path, monkeypatch) as first:
        first.connect("1")
        first.go_on(1)
        for step in range(4):
            batch = first.generate(step)
            trained += [(step + 1, sample) for sample in batch.samples]
            if step < 3:
                do_update(first)
        first.hold()
        first._client.abort()
        assert first.drained(10)
        state = json.loads(json.dumps(first.state_dict()))
        assert batch.metrics["rollout/reread_ratio"] == batch.metrics["rollout/reread_tokens"] / 100
        first.stop_generating()
        assert first.drained(0) and len(state["stream"]["groups"]) >= 6
    with rl_manager(tmp_path, monkeypatch) as second:
        second.load_state_dict(state)
        assert second.state_dict() == state
        second.connect("5")
        second.go_on(5)
        for step in range(4, 8):
            trained += [(step + 1, sample) for sample in second.generate(step).samples]
            do_update(second)
    for version, sample in trained:
        check_tokens(sample, version, 1)
    indices = [sample.index for _, sample in trained]
    assert len(set(indices)) == len(indices) == 8 * 6 * 2
    rows = {"".join(map(chr, sample.tokens[:4])) for _, sample in trained}
    assert len(rows) == 8 * 6 and max(rows) < "0060"  # no row twice; two batches are open at most


async def test_a_run_that_waits_less_than_the_one_that_saved_draws_what_is_too_old_again(tmp_path):
    """With --max-staleness 3 groups stay open that are older than 1 allows."""
    for seed in range(8):
        model = Model(length_by(seed, 60))
        async with streaming(make_config(tmp_path, max_staleness=3), model) as (stream, turns, data):
            for step in range(5):
                await stream.next_batch(step)
                await update(stream, turns, model, model.version + 1)
            turns.hold()
            model.abort()
            while not await turns.places.empty(1):
                pass
            state = json.loads(json.dumps(stream.state_dict()))
        model = Model(length_by(seed, 60), version=model.version)
        async with streaming(make_config(tmp_path, max_staleness=1), model, data, state) as (stream, turns, data):
            for step in range(3):
                assert (await stream.next_batch(step)).metrics["rollout/staleness_max"] <= 1
                await update(stream, turns, model, model.version + 1)


def test_a_run_that_waits_draws_the_prompts_that_were_open_again(tmp_path, monkeypatch):
    with rl_manager(tmp_path, monkeypatch) as first:
        first.connect("1")
        first.go_on(1)
        first.generate(0)
        first.hold()
        state = json.loads(json.dumps(first.state_dict()))
    rows = [group["row"] for group in state["stream"]["groups"]]
    with rl_manager(tmp_path, monkeypatch, max_staleness=0) as second:
        second.load_state_dict(state)
        again = second.data.next_groups(len(rows) + 1)
        assert [group[0].row for group in again[:-1]] == rows and again[-1][0].row == 12
        assert "stream" not in second.state_dict()


def test_a_mistake_in_a_checkpoint_of_open_groups_is_not_lost(tmp_path, monkeypatch):
    """The data must be the same: rows are named by their number."""
    with rl_manager(tmp_path, monkeypatch) as first:
        first.connect("1")
        first.go_on(1)
        state = first.state_dict()
    other = tmp_path / "other"
    other.mkdir()
    with rl_manager(other, monkeypatch, rollout_seed=7) as second:
        with pytest.raises(ConfigError, match="rollout_seed 42, now it is 7"):
            second.load_state_dict(state)


async def test_no_more_requests_run_than_there_are_places_and_their_use_is_counted(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("slime_retool.rollout.places.time", SimpleNamespace(monotonic=lambda: now[0]))
    places, most = Places(2), 0

    async def work() -> None:
        nonlocal most
        async with places.place(0):
            most = max(most, places.running)
            now[0] += 1
            await asyncio.sleep(0)

    now[0] += 4  # nothing runs
    await asyncio.gather(*(work() for _ in range(6)))
    assert most == 2 and places.running == 0
    use = places.take_use()
    assert use.seconds == 10 and use.busy_seconds == 6
    assert 6 < use.request_seconds < 12
    now[0] += 3
    assert places.take_use() == Use(seconds=3.0)
