"""What a rollout measures of itself, in which order it hands groups on, and what a loss term adds to its samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from rollout_hooks import Prompts, scripted_context
from test_rollout_loop import echo, make_config, rollout

from slime_retool.rollout import rl_rollout
from slime_retool.rollout.context import RolloutContext
from slime_retool.types import TrainSample


async def test_tokens_per_second_are_those_the_model_wrote_over_the_time_of_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1000.0, 1000.5])
    monkeypatch.setattr(rl_rollout, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    batch = await rollout(scripted_context(make_config(tmp_path), echo), Prompts(["abc", "de"], 4))
    assert batch.metrics["rollout/seconds"] == 0.5
    assert batch.metrics["rollout/model_tokens"] == 4 * 3 + 4 * 2
    assert batch.metrics["rollout/tokens_per_second"] == 40


@pytest.mark.parametrize("samples", [1, 2])
async def test_groups_of_any_size_are_trained_on_and_returned_in_the_order_of_their_prompts(
    samples: int, tmp_path: Path
) -> None:
    config = make_config(
        tmp_path, rollout_batch_size=2, over_sampling_batch_size=7, n_samples_per_prompt=samples,
        custom_rm_path="rollout_hooks.constant_reward",
    )  # fmt: skip
    data = Prompts(["a", "b"], samples)
    batch = await rollout(scripted_context(config, echo), data)
    trained = [sample.group_index for sample in batch.samples]
    returned = [group[0].group_index for group in data.returned]
    assert trained == sorted(trained) and returned == sorted(returned) and len(returned) == 5
    assert sorted({*trained, *returned}) == list(range(7)) and len(trained) == 2 * samples
    assert batch.metrics["rollout/aborted_ratio"] == 5 / 7


async def test_samples_that_ended_from_outside_are_given_up_too(tmp_path: Path) -> None:
    """Of 3 groups of 4: one ended so and another took its place."""
    config = make_config(tmp_path, custom_generate_function_path="rollout_hooks.generate_or_abort")
    batch = await rollout(scripted_context(config, echo), Prompts(["a", "stopped", "b"], 4))
    assert batch.metrics["rollout/groups_failed"] == 1
    assert batch.metrics["rollout/aborted_ratio"] == 4 / 12


async def test_the_progress_bar_counts_the_groups_that_were_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bar:
        def __init__(self, *, total: int, desc: str, disable: bool | None, **_: object) -> None:
            self.n, self.shown = 0, []
            bars.append(self)
            assert (total, desc, disable) == (3, "rollout 7", None)  # None: on a terminal only

        def update(self, count: int) -> None:
            self.n += count
            self.shown.append(self.n)

        def close(self) -> None:
            self.shown.append("closed")

    bars: list[Bar] = []
    monkeypatch.setattr("slime_retool.rollout.tally.tqdm", Bar)
    config = make_config(
        tmp_path, rollout_batch_size=3, no_progress=False, custom_rm_path="rollout_hooks.spread_only_for_b",
        dynamic_sampling_filter_path="slime_retool.rollout.filters.check_reward_nonzero_std",
    )  # fmt: skip
    await rollout(scripted_context(config, echo), Prompts(["b", "a", "b", "a", "b"], 4), rollout_id=7)
    (bar,) = bars
    assert bar.shown[-2:] == [3, "closed"] and bar.shown[:-1] == sorted(bar.shown[:-1]) and bar.shown[0] <= 2


async def test_a_loss_term_fills_in_its_columns_before_the_samples_are_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def add(context: RolloutContext, samples: list[TrainSample]) -> None:
        assert context.config.distill_coef == 0.5
        for sample in samples:
            sample.columns["teacher_log_probs"] = [float(sample.index)] * sample.length

    monkeypatch.setattr("slime_retool.rollout.teacher.add_teacher_log_probs", add)
    plain = await rollout(scripted_context(make_config(tmp_path), echo), Prompts(["ab", "c"], 4))
    assert all(not sample.columns for sample in plain.samples)
    config = make_config(tmp_path, distill_coef=0.5)
    batch = await rollout(scripted_context(config, echo), Prompts(["ab", "c"], 4))
    assert [set(sample.columns["teacher_log_probs"]) for sample in batch.samples] == [{float(i)} for i in range(8)]
