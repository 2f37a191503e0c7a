"""How long a learning-rate schedule is."""

from __future__ import annotations

from collections.abc import Callable

from slime_retool.config.config import Config
from slime_retool.errors import ConfigError


def schedule_steps(config: Config, flag_of: Callable[[str], str] = str) -> tuple[int, int | None]:
    """(warm-up steps, steps of the whole decay; None = constant, it never ends) of a model with these options.

    ConfigError when the schedule's length is unknown or too short; `flag_of` names the model's own flags.
    """
    total = _decay_steps(config)
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
    if warmup >= total:
        given = "--lr-warmup-iters" if config.lr_warmup_fraction is None else "--lr-warmup-fraction"
        raise ConfigError(
            f"{warmup} warm-up steps leave nothing of a schedule of {total}; lower {flag_of(given)}, or raise "
            "--lr-decay-iters"
        )
    return warmup, total


def check_schedule(config: Config) -> None:
    """Refuse (ConfigError) schedules that `schedule_steps` would refuse in the trainer, as soon as it can be known.

    With --num-epoch that is once the data has been read and `num_rollout` follows from it.
    """
    if config.debug_rollout_only or (config.num_rollout is None and config.lr_decay_iters is None):
        return
    for role in config.roles:
        schedule_steps(role.config, role.flag)


def _decay_steps(config: Config) -> int | None:
    """Optimizer steps of the run, or --lr-decay-iters. Before the rollout `policy_starts_at` there are none."""
    if config.lr_decay_iters is not None or config.num_rollout is None:
        return config.lr_decay_iters
    rollouts = config.num_rollout - config.policy_starts_at
    return (rollouts if rollouts > 0 else config.num_rollout) * config.steps_per_rollout
