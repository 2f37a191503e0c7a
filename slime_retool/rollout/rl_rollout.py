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
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from slime_retool.errors import RolloutError
from slime_retool.protocols import DataSource, FilterFn, load_function
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.hooks import USABLE, Hooks, cancel, run_all, run_sample
from slime_retool.rollout.overlong import mask_overlong, shaped_reward
from slime_retool.rollout.sample_metrics import is_right, sample_metrics, source_metrics
from slime_retool.rollout.sampling import training_sampling_params
from slime_retool.rollout.transcripts import dump_samples, prune_dumps
from slime_retool.types import RolloutBatch, Sample, TrainSample

Group = list[Sample]


async def generate_rollout(context: RolloutContext, data: DataSource, rollout_id: int) -> RolloutBatch:
    """One training batch of `rollout_batch_size` groups, ordered by group.

    Failed and aborted samples are left out; the trainer compares each sample with the remaining ones of its group.

    Raises RolloutError when `max_sampling_rounds` times as many prompts did not give enough groups, or no sample could
    be generated at all, and whatever a hook raises that is not a RolloutError.
    """
    config = context.config
    started = time.monotonic()
    sampling = _Sampling(context, data, rollout_id)
    await sampling.run()
    kept = sorted(sampling.kept, key=lambda group: group[0].group_index)
    trained = [
        mask_overlong(config, sample, TrainSample.from_sample(sample, reward=shaped_reward(config, sample)))
        for group in kept
        for sample in _usable(group)
    ]
    for term, _ in config.loss_terms:
        if term.provider is not None:
            await load_function(term.provider, f"{term.flag}: provider")(context, trained)
    finished = [sample for group in sampling.finished for sample in group]
    seconds = time.monotonic() - started
    model_tokens = sum(sum(sample.loss_mask) for sample in finished)
    metrics = (
        sample_metrics(finished, config.reward_key, config.accuracy_threshold)
        | source_metrics(finished, config.reward_key, config.accuracy_threshold)
        | sampling.metrics()
        | {
            "train_samples": float(len(trained)),
            "overlong_masked": float(sum(train.num_loss_tokens == 0 for train in trained)),
            "trained_reward_mean": fmean(train.reward for train in trained),
            "seconds": seconds,
            "model_tokens": float(model_tokens),
            "tokens_per_second": model_tokens / max(seconds, 1e-9),
        }
    )
    if config.dumps(rollout_id):
        path = Path(config.output_dir) / "rollouts" / f"rollout_{rollout_id:06d}.jsonl"
        texts = context.template.codec.token_texts
        # Made one by one, as they are written.
        rows = ((sample, {"rollout_id": rollout_id, "token_texts": texts(sample.tokens)}) for sample in finished)
        await asyncio.to_thread(dump_samples, path, rows)
        if config.dump_rollouts_keep is not None:
            prune_dumps(path.parent, config.dump_rollouts_keep)
    named = {f"rollout/{name}": value for name, value in metrics.items()}
    # Seconds in which at least one sample waited for its reward, mostly while others were still generated.
    return RolloutBatch(trained, named | {"perf/reward_seconds": sampling.hooks.reward_time.seconds})


def _usable(group: Group) -> Group:
    return [sample for sample in group if sample.status in USABLE]


class _Sampling:
    """The loop that keeps enough groups in flight."""

    def __init__(self, context: RolloutContext, data: DataSource, rollout_id: int) -> None:
        config = self._config = context.config
        assert config.rollout_batch_size is not None
        self._data, self._rollout_id = data, rollout_id
        self._target = config.rollout_batch_size
        self._limit = config.max_sampling_rounds * self._target
        self._at_once = max(self._target, config.over_sampling_batch_size or 0)
        self.hooks, self._params = Hooks.load(config), training_sampling_params(config, context.template)
        path = config.dynamic_sampling_filter_path
        self._filter: FilterFn | None = None if path is None else load_function(path, "--dynamic-sampling-filter-path")
        self.kept: list[Group] = []
        self.finished: list[Group] = []
        """Every group that ended by itself, kept or not."""
        self._filtered: list[Group] = []
        """The usable samples of groups that the filter dropped."""
        self._surplus: list[Group] = []
        """Good groups that ended together with the last one needed."""
        self._num_drawn = self._num_failed = self._num_returned = 0
        self._last_error = "samples were aborted"

    async def run(self) -> None:
        running: dict[asyncio.Task[Group], Group] = {}
        bar = tqdm(
            total=self._target,
            desc=f"rollout {self._rollout_id}",
            unit="group",
            leave=False,
            disable=self._config.no_progress or None,
        )
        try:
            while len(self.kept) < self._target:
                # What is missing, times the over-sampling.
                wanted = math.ceil((self._target - len(self.kept)) * self._at_once / self._target)
                running |= self._start(wanted - len(running))
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: running[task][0].group_index):
                    self._judge(task.result())
                    del running[task]
                bar.update(len(self.kept) - bar.n)
            unused = sorted([*running.values(), *self._surplus], key=lambda group: group[0].group_index)
            self._data.return_groups(unused)
            self._num_returned = len(unused)
        finally:
            bar.close()
            self.hooks.failures.close()
            await cancel(list(running))

    def metrics(self) -> dict[str, float]:
        """How many groups ended which way."""
        counts = {
            "groups_kept": len(self.kept),
            "groups_dropped": len(self._filtered),
            "groups_finished": len(self.finished),
            "groups_failed": self._num_failed,
            "groups_returned": self._num_returned,
        }
        return {name: float(count) for name, count in (counts | self._alike()).items()}

    def _alike(self) -> dict[str, int]:
        """How many of all finished groups teach nothing: of several usable samples whose rewards are equal; and, where
        the answers can be judged, those that are all wrong or all right."""
        groups = [usable for group in self.finished if len(usable := _usable(group)) > 1]
        counts = {"groups_equal": sum(len(set(map(self._reward, group))) == 1 for group in groups)}
        verdicts = [[self._is_right(sample) for sample in group] for group in groups]
        if all(verdict is not None for group in verdicts for verdict in group):
            counts["groups_all_wrong"] = sum(not any(group) for group in verdicts)
            counts["groups_all_right"] = sum(all(group) for group in verdicts)
        return counts

    def _start(self, count: int) -> dict[asyncio.Task[Group], Group]:
        """Draw up to `count` prompts, as far as any may still be drawn, and start them."""
        count = min(count, self._limit - self._num_drawn)
        if count < 1:
            return {}
        self._num_drawn += count
        return {
            asyncio.create_task(run_all(run_sample(self._config, self.hooks, s, self._params) for s in group)): group
            for group in self._data.next_groups(count)
        }

    def _judge(self, group: Group) -> None:
        """Keep a finished group, or count why not. Raises when it has become clear that the batch cannot be filled."""
        self.finished.append(group)
        usable = _usable(group)
        if len(usable) < min(2, len(group)):
            self._num_failed += 1
            self._last_error = next((sample.error for sample in group if sample.error), self._last_error)
        elif self._filter is not None and not self._filter(self._config, usable):
            self._filtered.append(usable)
        elif len(self.kept) < self._target:
            self.kept.append(group)
        else:
            self._surplus.append(group)
        if self._num_failed == len(self.finished) >= self._target:
            raise RolloutError(
                f"rollout {self._rollout_id}: none of {self._num_failed} groups could be generated and scored; "
                f"the last error: {self._last_error}"
            )
        if len(self.finished) == self._num_drawn >= self._limit and len(self.kept) < self._target:
            raise RolloutError(self._explanation())

    def _explanation(self) -> str:
        config = self._config
        text = (
            f"rollout {self._rollout_id}: {self._num_drawn} prompts "
            f"(--max-sampling-rounds {config.max_sampling_rounds} x --rollout-batch-size {self._target}) "
            f"gave only {len(self.kept)} groups to train on, {self._target} are needed. "
        )
        if self._filtered:
            text += f"{len(self._filtered)} were dropped by {config.dynamic_sampling_filter_path}: {self._verdict()}. "
        if self._num_failed:
            text += f"{self._num_failed} failed, the last with: {self._last_error}"
        return text.strip()

    def _verdict(self) -> str:
        """What the dropped groups say about the data, and what helps."""
        rewards = [self._reward(sample) for group in self.finished for sample in _usable(group)]
        wrong = sum(all(self._reward(sample) <= 0 for sample in group) for group in self._filtered)
        right = sum(all(self._reward(sample) > 0 for sample in group) for group in self._filtered)
        text = (
            f"in {wrong} every reward was 0 or less, in {right} every one above 0; over all samples "
            f"the mean reward is {fmean(rewards):.3g}, the lowest {min(rewards):.3g}, the highest {max(rewards):.3g}. "
        )
        if wrong > 2 * right:
            return text + (
                "The prompts are too hard for this model (or the reward function misses right answers): choose easier "
                "ones, train longer with SFT, raise --n-samples-per-prompt or --rollout-max-response-len"
            )
        if right > 2 * wrong:
            return text + "The prompts are too easy for this model: choose harder ones, or stop here"
        return (
            text
            + "Most prompts are too hard or too easy for this model: choose others, or raise --n-samples-per-prompt"
        )

    def _is_right(self, sample: Sample) -> bool | None:
        return is_right(sample, self._config.reward_key, self._config.accuracy_threshold)

    def _reward(self, sample: Sample) -> float:
        return sample.reward_value(self._config.reward_key)
