"""The default rollout: groups of samples are generated and scored until enough of them can be trained on.

For each prompt n samples run at once (generate, then reward). A finished group is

- kept, when at least two of its samples are usable (one, for groups of one) and the filter, if any, agrees;
- dropped by the filter (`--dynamic-sampling-filter-path`), or failed (outages left too few usable samples): another
  prompt takes its place.

With `--over-sampling-batch-size` more groups run than are needed; as soon as enough are kept, the rest is cancelled:
one slow reward or one endless answer never delays training. That favours groups that finish early, so the prompts of
the others go back to the data source, which draws them first in the next rollout.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from statistics import fmean

from slime_retool.protocols import DataSource, load_function
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.hooks import Hooks, cancel, run_all, run_sample
from slime_retool.rollout.overlong import mask_overlong, shaped_reward
from slime_retool.rollout.routing import routed_share
from slime_retool.rollout.sample_metrics import sample_metrics, source_metrics
from slime_retool.rollout.sampling import training_sampling_params
from slime_retool.rollout.tally import Group, Tally, rollout_bar, usable
from slime_retool.rollout.transcripts import dump_samples, shown_samples
from slime_retool.types import RolloutBatch, SampleStatus, ShownSample, TrainSample


async def generate_rollout(context: RolloutContext, data: DataSource, rollout_id: int) -> RolloutBatch:
    """One training batch of `rollout_batch_size` groups, ordered by group.

    Failed and aborted samples are left out; the trainer compares each sample with the remaining ones of its group.

    Raises RolloutError when `max_sampling_rounds` times as many prompts did not give enough groups, or no sample could
    be generated at all, and whatever a hook raises that is not a RolloutError.
    """
    started = time.monotonic()
    sampling = _Sampling(context, data, rollout_id)
    await sampling.run()
    batch = await make_batch(
        context, rollout_id, sampling.kept, sampling.tally.finished, sampling.metrics(), started=started
    )
    # Seconds in which at least one sample waited for its reward, mostly while others were still generated.
    batch.metrics["perf/reward_seconds"] = sampling.hooks.reward_time.seconds
    return batch


async def make_batch(
    context: RolloutContext,
    rollout_id: int,
    kept: Sequence[Group],
    finished: Sequence[Group],
    counts: dict[str, float],
    *,
    started: float,
) -> RolloutBatch:
    """The groups `kept` as training samples, and metrics of all that `finished`, which is also what is dumped.

    `counts` are metrics of the groups, `started` is when they were (time.monotonic).
    """
    config = context.config
    trained = [
        mask_overlong(config, sample, TrainSample.from_sample(sample, reward=shaped_reward(config, sample)))
        for group in sorted(kept, key=lambda group: group[0].group_index)
        for sample in usable(group)
    ]
    for term, _ in config.loss_terms:
        if term.provider is not None:
            await load_function(term.provider, f"{term.flag}: provider")(context, trained)
    samples = [sample for group in finished for sample in group]
    seconds = time.monotonic() - started
    model_tokens = sum(sum(sample.loss_mask) for sample in samples)
    metrics = (
        sample_metrics(samples, config.reward_key, config.accuracy_threshold)
        | source_metrics(samples, config.reward_key, config.accuracy_threshold)
        | counts
        | {
            "train_samples": float(len(trained)),
            "overlong_masked": float(sum(train.num_loss_tokens == 0 for train in trained)),
            "trained_reward_mean": fmean(train.reward for train in trained),
            "seconds": seconds,
            "model_tokens": float(model_tokens),
            "tokens_per_second": model_tokens / max(seconds, 1e-9),
        }
    )
    if config.use_rollout_routing_replay:
        metrics["routed_token_ratio"] = routed_share(trained)
    shown: list[ShownSample] = []
    if config.dumps(rollout_id):
        shown = shown_samples(samples, config.reward_key)
        path = config.dump_path("rollout", rollout_id)
        texts = context.template.codec.token_texts
        # Made one by one, as they are written.
        rows = ((sample, {"rollout_id": rollout_id, "token_texts": texts(sample.tokens)}) for sample in samples)
        await asyncio.to_thread(dump_samples, path, rows)
    return RolloutBatch(trained, {f"rollout/{name}": value for name, value in metrics.items()}, shown)


class _Sampling:
    """The loop that keeps enough groups in flight."""

    def __init__(self, context: RolloutContext, data: DataSource, rollout_id: int) -> None:
        config = self._config = context.config
        assert config.rollout_batch_size is not None
        self._data, self._rollout_id = data, rollout_id
        self._target = config.rollout_batch_size
        self._at_once = max(self._target, config.over_sampling_batch_size or 0)
        self.hooks, self._params = Hooks.load(config), training_sampling_params(config, context.template)
        self.tally = Tally(config, rollout_id)
        self.kept: list[Group] = []
        self._surplus: list[Group] = []
        """Good groups that ended together with the last one needed."""
        self._cut_off: list[Group] = []
        """Groups that still ran when the batch was full."""

    async def run(self) -> None:
        running: dict[asyncio.Task[Group], Group] = {}
        bar = rollout_bar(self._config, self._rollout_id)
        try:
            while len(self.kept) < self._target:
                # What is missing, times the over-sampling.
                wanted = math.ceil((self._target - len(self.kept)) * self._at_once / self._target)
                running |= self._start(wanted - len(running))
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: running[task][0].group_index):
                    group = task.result()
                    del running[task]
                    if self.tally.is_good(group):
                        (self.kept if len(self.kept) < self._target else self._surplus).append(group)
                    self.tally.check(len(self.kept), len(running))
                bar.update(len(self.kept) - bar.n)
            self._cut_off = list(running.values())
            unused = [*self._cut_off, *self._surplus]
            self._data.return_groups(sorted(unused, key=lambda group: group[0].group_index))
        finally:
            bar.close()
            self.hooks.failures.close()
            await cancel(list(running))

    def metrics(self) -> dict[str, float]:
        """How many groups ended which way, and the share of samples that were given up."""
        cut_off, surplus = sum(map(len, self._cut_off)), sum(map(len, self._surplus))
        finished = [sample for group in self.tally.finished for sample in group]
        aborted = sum(sample.status == SampleStatus.ABORTED for sample in finished) + cut_off + surplus
        return self.tally.metrics(len(self.kept)) | {
            "groups_returned": float(len(self._cut_off) + len(self._surplus)),
            "aborted_ratio": aborted / (len(finished) + cut_off),
        }

    def _start(self, count: int) -> dict[asyncio.Task[Group], Group]:
        """Draw up to `count` prompts, as far as any may still be drawn, and start them."""
        count = min(count, self.tally.limit - self.tally.num_drawn)
        if count < 1:
            return {}
        self.tally.num_drawn += count
        return {
            asyncio.create_task(run_all(run_sample(self._config, self.hooks, s, self._params) for s in group)): group
            for group in self._data.next_groups(count)
        }
