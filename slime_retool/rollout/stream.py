"""Rollouts as a stream (`--max-staleness` K above 0): generation goes on across weight updates. See docs/stream.md.

    hand-over of batch w              update to w + 1             hand-over of batch w + 1
    -------|--------------------------------|------------------------------|-------
           train on w                       new groups are drawn           train on w + 1

Twice `--rollout-batch-size` groups are open: one batch being finished while the next is under way. A batch is handed
over when enough groups are complete, and none is still open that would be too old for the next one: a group's oldest
token may be written by weights K updates older than those it trains. So nothing long is lost to haste. Groups beyond
what a batch takes, and too old for the next, are dropped and counted, and their prompts are drawn again.

New groups are drawn right after an update: what is drawn before it is an update older when it is trained, and with
K = 1 would have half the time to end.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_retool.config.config import BATCHES_OPEN
from slime_retool.dumps import json_value
from slime_retool.protocols import DataSource
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.hooks import Hooks, cancel, run_all, run_sample
from slime_retool.rollout.open_turns import (
    OpenTurns,
    Record,
    pack_floats,
    pack_ints,
    runs_of,
    unpack_floats,
    unpack_ints,
    values_of,
)
from slime_retool.rollout.rl_rollout import make_batch
from slime_retool.rollout.routing import pack_experts, unpack_experts
from slime_retool.rollout.sampling import training_sampling_params
from slime_retool.rollout.tally import Group, Tally, rollout_bar, usable
from slime_retool.types import NO_VERSION, STALENESS, RolloutBatch, Sample, SampleStatus

LENGTH_BINS = 4
"""Staleness and drops are reported for responses up to each quarter of --rollout-max-response-len."""


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group from its first request until it is trained on or dropped."""

    samples: Group
    ended: set[int] = field(default_factory=set)
    """Places in `samples` that are generated and scored."""
    task: asyncio.Task[None] | None = None

    @property
    def number(self) -> int:
        return self.samples[0].group_index


class Stream:
    """The groups in flight, from one weight update to the next. For one event loop."""

    def __init__(self, context: RolloutContext, data: DataSource, engine: OpenTurns) -> None:
        config = self._config = context.config
        assert config.rollout_batch_size is not None and config.max_staleness > 0
        self._context, self._data, self._engine = context, data, engine
        self._target = config.rollout_batch_size
        self._most = max(self._target, config.over_sampling_batch_size or 0) / self._target
        self._params = training_sampling_params(config, context.template)
        self._hooks = Hooks.load(config)
        self.version = 0
        """Of the engine's weights."""
        self._running: set[OpenGroup] = set()
        self._kept: list[OpenGroup] = []
        """Complete groups that wait for their batch."""
        self._tally = Tally(config, 0)
        self._rejected: list[Group] = []
        """Groups that ended since the last hand-over and cannot be trained on."""
        self._num_good = self._num_ended = 0.0
        """Of the groups that ended, and the good ones among them; each hand-over halves what was before it."""
        self._draws = True
        self._ended: asyncio.Queue[OpenGroup] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._pump_task: asyncio.Task[None] | None = None
        self._since = time.monotonic()
        self._reward_seconds = 0.0

    # The stream

    async def next_batch(self, rollout_id: int) -> RolloutBatch:
        """The next batch of `rollout_batch_size` groups, for a trainer that holds the engine's weights.

        Raises what `generate_rollout` does. What is open goes on; nothing new is drawn before `go_on`.
        """
        self._draws = True
        self._tally.rollout_id = rollout_id
        self._fill()
        with rollout_bar(self._config, rollout_id) as bar:
            while not self._is_ready():
                self._changed.clear()
                self._tally.check(len(self._kept), len(self._running))
                assert self._pump_task is not None
                changed = asyncio.create_task(self._changed.wait())
                try:
                    await asyncio.wait((changed, self._pump_task), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if self._pump_task.done():
                    await self._pump_task  # raises
                bar.update(min(len(self._kept), self._target) - bar.n)
        return await self._hand_over(rollout_id)

    def go_on(self, version: int, *, draws: bool = True) -> None:
        """The engine holds weights `version`: go on with what was interrupted, and draw new groups, if so."""
        self.version = version
        self._draws = draws
        self._engine.let_go(version)
        self._fill()

    async def aclose(self) -> None:
        """End everything; nothing is known of it any more."""
        for group in (*self._running, *self._kept):
            self._forget(group)
        tasks = [group.task for group in self._running] + [self._pump_task]
        self._running.clear()
        await cancel([task for task in tasks if task is not None])

    def _is_ready(self) -> bool:
        """Whether a batch can be handed over. What would be too old for the next one is waited for."""
        due = sum(self._is_due(group) for group in self._kept)
        waits = due < self._target and any(self._is_due(group) for group in self._running)
        return len(self._kept) >= self._target and not waits

    def _is_due(self, group: OpenGroup) -> bool:
        return self._oldest(group) + self._config.max_staleness <= self.version

    def _oldest(self, group: OpenGroup) -> int:
        """The oldest weight version that wrote a token of the group; the present one before there is any."""
        versions = (self._first_version(sample) for sample in group.samples)
        return min((version for version in versions if version is not None), default=self.version)

    def _first_version(self, sample: Sample) -> int | None:
        record = self._engine.record(str(sample.index))
        if record is not None:
            return record.oldest
        return next((version for version in sample.token_versions if version != NO_VERSION), None)

    def _fill(self) -> None:
        """Draw what is missing of the groups that are to be open, times what the filter and outages take of them."""
        if self._pump_task is None:
            self._pump_task = asyncio.create_task(self._pump())
        if not self._draws:
            return
        lost = self._num_ended / self._num_good if self._num_good else self._most
        factor = min(self._most, lost) if self._num_ended else 1.0
        wanted = math.ceil((BATCHES_OPEN * self._target - len(self._kept)) * factor) - len(self._running)
        count = min(wanted, self._tally.limit + (BATCHES_OPEN - 1) * self._target - self._tally.num_drawn)
        if count > 0:
            self._tally.num_drawn += count
            for samples in self._data.next_groups(count):
                self._start(OpenGroup(samples))

    def _start(self, group: OpenGroup) -> None:
        self._running.add(group)
        group.task = asyncio.create_task(self._run(group))
        group.task.add_done_callback(lambda _: self._ended.put_nowait(group))

    async def _run(self, group: OpenGroup) -> None:
        async def run(place: int) -> Sample:
            sample = group.samples[place]
            if place not in group.ended:
                sample = await run_sample(self._config, self._hooks, sample, self._params)
                group.samples[place] = sample
                group.ended.add(place)
            return sample

        await run_all(run(place) for place in range(len(group.samples)))

    async def _pump(self) -> None:
        """Judge groups as they end and draw others for those that are no good, also while the trainer works."""
        while True:
            group = await self._ended.get()
            if group not in self._running:  # dropped
                continue
            assert group.task is not None
            group.task.result()
            self._running.discard(group)
            self._num_ended += 1
            if self._tally.is_good(group.samples):
                self._num_good += 1
                self._kept.append(group)
            else:
                self._rejected.append(group.samples)
                self._forget(group)
            self._fill()
            self._changed.set()

    async def _hand_over(self, rollout_id: int) -> RolloutBatch:
        self._draws = False
        self._num_good, self._num_ended = self._num_good / 2, self._num_ended / 2
        self._kept.sort(key=lambda group: (self._oldest(group), group.number))
        taken, self._kept = self._kept[: self._target], self._kept[self._target :]
        late = [group for group in (*self._kept, *self._running) if self._is_due(group)]
        self._kept = [group for group in self._kept if group not in late]
        for group in late:
            self._running.discard(group)
        await cancel([group.task for group in late if group.task is not None and not group.task.done()])
        self._data.return_groups([group.samples for group in late])
        started, self._since = self._since, time.monotonic()
        reward, self._reward_seconds = self._reward_seconds, self._hooks.reward_time.seconds
        counts = self._tally.metrics(len(taken)) | self._metrics(taken, late)
        groups, rejected = [group.samples for group in taken], self._rejected
        self._tally, self._rejected = Tally(self._config, rollout_id + 1), []
        for group in (*taken, *late):
            self._forget(group)
        self._hooks.failures.close()
        batch = await make_batch(self._context, rollout_id, groups, [*groups, *rejected], counts, started=started)
        by_index = {sample.index: sample for group in groups for sample in group}
        for trained in batch.samples:
            ages = _staleness(by_index[trained.index], self.version)
            trained.columns[STALENESS] = array("f", [0.0] * (trained.length - len(ages)) + ages)
        batch.metrics["perf/reward_seconds"] = self._hooks.reward_time.seconds - reward
        return batch

    def _forget(self, group: OpenGroup) -> None:
        for sample in group.samples:
            self._engine.forget(str(sample.index))

    # Metrics

    def _metrics(self, taken: Sequence[OpenGroup], late: Sequence[OpenGroup]) -> dict[str, float]:
        """Staleness of a batch, what updates cost since the last one, and how busy the engine was."""
        samples = [sample for group in taken for sample in usable(group.samples)]
        late_samples = [sample for group in late for sample in group.samples]
        ages = {sample.index: _ages(sample, self.version) for sample in samples}
        every = _total(ages.values())
        use, updates = self._engine.places.take_use(), self._engine.take_counts()
        continued = sum(len(each) > 1 for each in ages.values())
        metrics = {
            "staleness_mean": _mean(every),
            "staleness_max": float(max(every, default=0)),
            "groups_open": float(len(self._running) + len(self._kept)),
            "groups_dropped_stale": float(len(late)),
            "samples_dropped_stale_ratio": len(late_samples) / max(len(late_samples) + len(samples), 1),
            "samples_over_updates": float(continued),
            "requests_interrupted": float(updates.interrupted),
            "requests_continued": float(updates.continued),
            "reread_tokens": float(updates.reread_tokens),
            "engine_busy_share": use.busy_seconds / max(use.seconds, 1e-9),
            "requests_running_mean": use.request_seconds / max(use.seconds, 1e-9),
        }
        for part, chosen in self._by_length(samples).items():
            if chosen:
                metrics[f"staleness_mean/{part}"] = _mean(_total(ages[sample.index] for sample in chosen))
        for part, chosen in self._by_length(late_samples).items():
            metrics[f"samples_dropped_stale/{part}"] = float(len(chosen))
        return metrics

    def _by_length(self, samples: Iterable[Sample]) -> dict[str, list[Sample]]:
        """Samples by the tokens of their response: "q1" holds those of up to a quarter of the longest allowed, ..."""
        parts: dict[str, list[Sample]] = {f"q{number}": [] for number in range(1, LENGTH_BINS + 1)}
        for sample in samples:
            record = self._engine.record(str(sample.index))
            length = sample.response_length
            if record is not None and record.turns:
                length = max(length, len(record.tokens) - record.turns[0].start)
            share = length / self._config.rollout_max_response_len
            parts[f"q{min(LENGTH_BINS, max(1, math.ceil(share * LENGTH_BINS)))}"].append(sample)
        return parts

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the groups that are open, each sample as far as it is. What a request has written that is still at
        the engine is not known here."""
        groups = sorted([*self._running, *self._kept], key=lambda group: group.number)
        # The trainer's, once it has the batch, are an update ahead of the engine's.
        version = self.version + (not self._draws)
        return {"version": version, "groups": [self._group_state(group) for group in groups]}

    def load_state_dict(self, state: dict[str, Any], version: int) -> None:
        """Go on with the groups of a checkpoint. `version`: its weights', as this run counts; `go_on` comes next.

        Those that are too old for this run's --max-staleness, which may be smaller, are drawn again.
        """
        self.version = version
        shift = version - state["version"]
        for group_state in state["groups"]:
            samples, ended = [], set()
            for place, sample_state in enumerate(group_state["samples"]):
                sample = self._data.sample_of_row(group_state["row"], sample_state["index"], group_state["group_index"])
                if "record" in sample_state:
                    record = Record.from_state(sample_state["record"])
                    record.versions = _shifted(record.versions, shift)
                    self._engine.restore(str(sample.index), record)
                elif "sample" in sample_state:
                    _set_sample(sample, sample_state["sample"], shift)
                    ended.add(place)
                samples.append(sample)
            group = OpenGroup(samples, ended)
            if self._oldest(group) + self._config.max_staleness < version:
                self._forget(group)
                self._data.return_groups([samples])
            else:
                self._start(group)

    def _group_state(self, group: OpenGroup) -> dict[str, Any]:
        samples = []
        for place, sample in enumerate(group.samples):
            state: dict[str, Any] = {"index": sample.index}
            record = self._engine.record(str(sample.index))
            if place in group.ended:
                state["sample"] = _sample_state(sample)
            elif record is not None:
                state["record"] = record.state_dict()
            samples.append(state)
        return {"row": group.samples[0].row, "group_index": group.number, "samples": samples}


def rows_of(state: dict[str, Any]) -> list[int]:
    """The rows of the open groups of a checkpoint, for a run that draws them again instead."""
    return [group["row"] for group in state["groups"]]


_PLAIN = (
    "response", "weight_versions", "num_turns", "num_tool_calls", "num_tool_errors", "num_malformed_calls", "error",
    "response_length", "reward", "metadata", "tools", "spans",
)  # fmt: skip


def _sample_state(sample: Sample) -> dict[str, Any]:
    """JSON-able; what JSON cannot hold (from metadata, say) as its `repr`."""
    plain = {name: getattr(sample, name) for name in _PLAIN}
    return {
        **json.loads(json.dumps(plain, default=json_value)),
        "status": sample.status.value,
        "tokens": pack_ints(sample.tokens),
        "loss_mask": runs_of(sample.loss_mask),
        "rollout_log_probs": pack_floats(sample.rollout_log_probs),
        "token_versions": runs_of(sample.token_versions),
        "routed_experts": pack_experts(sample.routed_experts),
    }


def _set_sample(sample: Sample, state: dict[str, Any], shift: int) -> None:
    for name in _PLAIN:
        setattr(sample, name, state[name])
    sample.status = SampleStatus(state["status"])
    sample.tokens, sample.loss_mask = unpack_ints(state["tokens"]), values_of(state["loss_mask"])
    sample.rollout_log_probs = unpack_floats(state["rollout_log_probs"])
    sample.routed_experts = unpack_experts(state.get("routed_experts"))  # a checkpoint of before may have none
    sample.token_versions = _shifted(values_of(state["token_versions"]), shift)
    sample.weight_versions = _shifted(sample.weight_versions, shift)


def _shifted(versions: Sequence[int], shift: int) -> list[int]:
    return [version if version == NO_VERSION else max(0, version + shift) for version in versions]


def _versions(sample: Sample) -> list[int]:
    """The weight version of each token of the response. Where a hook named none: the oldest of its turns."""
    if any(version != NO_VERSION for version in sample.token_versions):
        return sample.token_versions
    least = min(sample.weight_versions, default=NO_VERSION)
    return [least if learned else NO_VERSION for learned in sample.loss_mask]


def _staleness(sample: Sample, version: int) -> list[float]:
    """Updates between each token of the response and weights `version`; 0 where the engine wrote nothing."""
    return [0.0 if each == NO_VERSION else float(version - each) for each in _versions(sample)]


def _ages(sample: Sample, version: int) -> Counter[int]:
    """How many tokens are how many updates older than weights `version`."""
    counts = Counter(_versions(sample))
    del counts[NO_VERSION]
    return Counter({version - each: count for each, count in counts.items()})


def _total(ages: Iterable[Counter[int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for each in ages:
        total.update(each)
    return total


def _mean(ages: Counter[int]) -> float:
    return sum(age * count for age, count in ages.items()) / max(ages.total(), 1)
