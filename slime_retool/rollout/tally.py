"""What became of the groups of one rollout: kept, dropped by the filter, failed; and when that is hopeless."""

from __future__ import annotations

from statistics import fmean
from typing import NoReturn

from tqdm import tqdm

from slime_retool.config import Config
from slime_retool.errors import RolloutError
from slime_retool.protocols import FilterFn, load_function
from slime_retool.rollout.hooks import USABLE
from slime_retool.rollout.sample_metrics import is_right
from slime_retool.types import Sample

Group = list[Sample]


def usable(group: Group) -> Group:
    """Its samples that can be trained on."""
    return [sample for sample in group if sample.status in USABLE]


def rollout_bar(config: Config, rollout_id: int) -> tqdm[NoReturn]:
    """Its groups, as they become ready."""
    disable = config.no_progress or None
    return tqdm(
        total=config.rollout_batch_size, desc=f"rollout {rollout_id}", unit="group", leave=False, disable=disable
    )


class Tally:
    """Judges the groups that end, and counts them."""

    def __init__(self, config: Config, rollout_id: int) -> None:
        assert config.rollout_batch_size is not None
        self._config, self.rollout_id = config, rollout_id
        self._target = config.rollout_batch_size
        self.limit = config.max_sampling_rounds * self._target
        """Prompts that may be drawn."""
        path = config.dynamic_sampling_filter_path
        self._filter: FilterFn | None = None if path is None else load_function(path, "--dynamic-sampling-filter-path")
        self.num_drawn = 0
        self.finished: list[Group] = []
        """Every group that ended by itself, good or not."""
        self._filtered: list[Group] = []
        """The usable samples of groups that the filter dropped."""
        self._num_failed = 0
        self._last_error = "samples were aborted"

    def is_good(self, group: Group) -> bool:
        """Whether a finished group can be trained on; counts why not."""
        self.finished.append(group)
        samples = usable(group)
        if len(samples) < min(2, len(group)):
            self._num_failed += 1
            self._last_error = next((sample.error for sample in group if sample.error), self._last_error)
            return False
        if self._filter is not None and not self._filter(self._config, samples):
            self._filtered.append(samples)
            return False
        return True

    def check(self, num_kept: int, num_running: int) -> None:
        """Raise RolloutError when it has become clear that the batch cannot be filled: so many groups can be trained
        on, and so many are still to end."""
        if self._num_failed == len(self.finished) >= self._target:
            raise RolloutError(
                f"rollout {self.rollout_id}: none of {self._num_failed} groups could be generated and scored; "
                f"the last error: {self._last_error}"
            )
        if not num_running and self.num_drawn >= self.limit and num_kept < self._target:
            raise RolloutError(self._explanation(num_kept))

    def metrics(self, num_kept: int) -> dict[str, float]:
        """How many groups ended which way."""
        counts = {
            "groups_kept": num_kept,
            "groups_dropped": len(self._filtered),
            "groups_finished": len(self.finished),
            "groups_failed": self._num_failed,
        }
        return {name: float(count) for name, count in (counts | self._alike()).items()}

    def _alike(self) -> dict[str, int]:
        """How many of all finished groups teach nothing: of several usable samples whose rewards are equal; and, where
        the answers can be judged, those that are all wrong or all right."""
        groups = [samples for group in self.finished if len(samples := usable(group)) > 1]
        counts = {"groups_equal": sum(len(set(map(self._reward, group))) == 1 for group in groups)}
        verdicts = [[self._is_right(sample) for sample in group] for group in groups]
        if all(verdict is not None for group in verdicts for verdict in group):
            counts["groups_all_wrong"] = sum(not any(group) for group in verdicts)
            counts["groups_all_right"] = sum(all(group) for group in verdicts)
        return counts

    def _explanation(self, num_kept: int) -> str:
        config = self._config
        text = (
            f"rollout {self.rollout_id}: {self.num_drawn} prompts "
            f"(--max-sampling-rounds {config.max_sampling_rounds} x --rollout-batch-size {self._target}) "
            f"gave only {num_kept} groups to train on, {self._target} are needed. "
        )
        if self._filtered:
            text += f"{len(self._filtered)} were dropped by {config.dynamic_sampling_filter_path}: {self._verdict()}. "
        if self._num_failed:
            text += f"{self._num_failed} failed, the last with: {self._last_error}"
        return text.strip()

    def _verdict(self) -> str:
        """What the dropped groups say about the data, and what helps."""
        rewards = [self._reward(sample) for group in self.finished for sample in usable(group)]
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
