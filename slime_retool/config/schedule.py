"""How long a learning-rate schedule is."""

from __future__ import annotations

import math
from dataclasses import replace

from slime_retool.config.config import Config
from slime_retool.errors import ConfigError


def with_num_rollout(config: Config, num_rows: int) -> Config:
    """`config` with --num-epoch counted in rollouts, now that an epoch is known to have `num_rows` prompts.

    ConfigError when the schedule does not fit that many.
    """
    if config.num_epoch is None or config.num_rollout is not None:
        return config
    assert config.rollout_batch_size is not None
    config = replace(config, num_rollout=math.ceil(config.num_epoch * num_rows / config.rollout_batch_size))
    check_schedule(config)
    return config


def schedule_steps(config: Config) -> tuple[int, int | None]:
    """(warm-up steps, steps of the whole decay; None = constant, it never ends).

    ConfigError when the schedule's length is unknown or too short.
    """
    total = _decay_steps(config, config.num_critic_only_steps)
    decays = config.lr_decay_style != "constant"
    if total is None and (decays or config.lr_warmup_fraction is not None):
        raise ConfigError(
            f"--lr-decay-style {config.lr_decay_style} (or --lr-warmup-fraction) needs the schedule's length: "
            "give --lr-decay-iters or --num-rollout"
        )
    warmup = config.lr_warmup_iters
    if config.lr_warmup_fraction is not None:
        assert total is not None
        warmup = round(config.lr_warmup_fraction * total)
    if not decays:
        return warmup, None
    assert total is not None
    _require_decay(warmup, total, "--lr-warmup-iters or --lr-warmup-fraction")
    return warmup, total


def check_schedule(config: Config) -> None:
    """Refuse (ConfigError) schedules that `schedule_steps` would refuse in the trainer, as soon as it can be known.

    With --num-epoch that is once the data has been read (`with_num_rollout`).
    """
    if config.debug_rollout_only or (config.num_rollout is None and config.lr_decay_iters is None):
        return
    schedule_steps(config)
    total = _decay_steps(config, 0)
    if config.uses_critic and config.lr_decay_style != "constant" and total is not None:
        _require_decay(config.critic_lr_warmup_iters, total, "--critic-lr-warmup-iters")


def _decay_steps(config: Config, critic_only: int) -> int | None:
    """Optimizer steps of the run, or --lr-decay-iters. In the first `critic_only` rollouts there are none."""
    if config.lr_decay_iters is not None or config.num_rollout is None:
        return config.lr_decay_iters
    rollouts = config.num_rollout - critic_only
    return (rollouts if rollouts > 0 else config.num_rollout) * config.steps_per_rollout


def _require_decay(warmup: int, total: int, flags: str) -> None:
    if warmup >= total:
        raise ConfigError(
            f"{warmup} warm-up steps leave nothing of a schedule of {total}; lower {flags}, or raise --lr-decay-iters"
        )
