"""Learning-rate schedule against its closed form."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_utils import tiny_config

from slime_retool.config.schedule import schedule_steps
from slime_retool.errors import ConfigError
from slime_retool.trainer.optimizer import build_scheduler

LR, MIN_LR = 3e-4, 1e-5


def _rates(steps: int, **options: Any) -> list[float]:
    group = {"max_lr": LR, "min_lr": MIN_LR, "wd_mult": 1.0, "lr": 0.0, "weight_decay": 0.0}
    optimizer = SimpleNamespace(param_groups=[group])
    scheduler = build_scheduler(tiny_config(lr=LR, min_lr=MIN_LR, weight_decay=0.1, **options), optimizer)
    rates = []
    for _ in range(steps):
        rates.append(group["lr"])
        assert group["weight_decay"] == 0.1
        scheduler.step(1)
    return rates


def _closed_form(style: str, k: int, warmup: int, total: int) -> float:
    if k <= warmup:
        return LR * (k + 1) / (warmup + 1)
    if style == "constant":
        return LR
    if k > total:
        return MIN_LR
    done = (k - warmup) / (total - warmup)
    share = 1 - done if style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return MIN_LR + (LR - MIN_LR) * share


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_learning_rate_follows_its_closed_form(style: str, warmup: int) -> None:
    got = _rates(25, lr_decay_style=style, lr_decay_iters=20, lr_warmup_iters=warmup)
    assert got == pytest.approx([_closed_form(style, k, warmup, 20) for k in range(25)], rel=1e-12)


def test_no_step_is_spent_at_learning_rate_zero() -> None:
    assert min(_rates(20, lr_decay_style="linear", lr_decay_iters=20, lr_warmup_iters=5)) > 0


def test_length_of_the_schedule_is_the_run_and_warmup_may_be_a_share_of_it() -> None:
    config = tiny_config(
        num_rollout=10, rollout_batch_size=8, global_batch_size=4, lr_decay_style="cosine", lr_warmup_fraction=0.1
    )
    assert schedule_steps(config) == (2, 20)


def test_the_actors_decay_leaves_out_the_critics_warm_up_and_ends_with_the_run() -> None:
    options = {"num_rollout": 10, "num_critic_only_steps": 4, "rollout_batch_size": 8, "global_batch_size": 4}
    config = tiny_config(**options, advantage_estimator="ppo", lr_decay_style="cosine", lr_warmup_fraction=0.5)
    assert schedule_steps(config) == (6, 12)
    assert schedule_steps(config.of_critic()) == (0, 20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr_decay_style": "cosine"}, "--lr-decay-iters"),
        ({"lr_warmup_fraction": 0.1}, "--lr-decay-iters"),
        ({"lr_decay_style": "linear", "lr_decay_iters": 5, "lr_warmup_iters": 5}, "5 warm-up steps"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        schedule_steps(tiny_config(**options))
