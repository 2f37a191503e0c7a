"""How long a run and its learning-rate schedule are, after which rollouts it saves and evaluates."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from megatron_bridge.arithmetic import GIB
from slime_retool.config.config import Config
from slime_retool.config.require import require
from slime_retool.errors import ConfigError
from slime_retool.run_folder import free_bytes

logger = logging.getLogger(__name__)


def with_num_rollout(config: Config, num_rows: int) -> Config:
    """`config` with --num-epoch counted in rollouts, now that an epoch is known to have `num_rows` prompts.

    ConfigError when the schedule does not fit that many.
    """
    if config.num_epoch is None or config.num_rollout is not None:
        return config
    assert config.rollout_batch_size is not None
    config = replace(config, num_rollout=math.ceil(config.num_epoch * num_rows / config.rollout_batch_size))
    check_schedule(config)
    check_profiled(config)
    return config


def check_profiled(config: Config) -> None:
    """Raise ConfigError for a rollout of --profile-rollout that never comes, once the number of rollouts is known."""
    for rollout_id in config.profile_rollout:
        require(
            config.num_rollout is None or rollout_id < config.num_rollout,
            f"--profile-rollout {rollout_id} is none of the run's {config.num_rollout} rollouts, which count from 0",
        )


def schedule_steps(config: Config, flag_of: Callable[[str], str] = str) -> tuple[int, int | None]:
    """(warm-up steps, steps of the whole decay; None = constant, it never ends) of a model with these options.

    ConfigError when the schedule's length is unknown or too short; `flag_of` names the model's own flags.
    """
    total = config.lr_decay_iters
    if total is None and config.num_rollout is not None:
        # Those before train no policy.
        total = (config.num_rollout - config.policy_starts_at) * config.steps_per_rollout
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

    With --num-epoch that is once the data has been read (`with_num_rollout`).
    """
    if config.debug_rollout_only or (config.num_rollout is None and config.lr_decay_iters is None):
        return
    require(
        not config.num_rollout or config.policy_starts_at < config.num_rollout,
        f"--num-critic-only-steps {config.policy_starts_at} leaves none of the run's {config.num_rollout} rollouts to "
        "train the policy; lower it, or raise --num-rollout (or --num-epoch)",
    )
    for role in config.roles:
        schedule_steps(role.config, role.flag)


def saves_after(config: Config, rollout_id: int) -> bool:
    """Whether a checkpoint follows this rollout: every --save-interval, and at the end."""
    return config.save is not None and _is_due(config, config.save_interval, rollout_id)


def evaluates_after(config: Config, rollout_id: int) -> bool:
    """Whether an evaluation follows this rollout: every --eval-interval, and at the end."""
    return config.eval_interval is not None and _is_due(config, config.eval_interval, rollout_id)


def _is_due(config: Config, interval: int | None, rollout_id: int) -> bool:
    done = rollout_id + 1
    return done == config.num_rollout or (interval is not None and done % interval == 0)


def warn_of_room(config: Config, first: int) -> None:
    """Warn when what is saved from rollout `first` on, of which nothing is deleted, takes more than is free."""
    if config.save is None or config.save_keep is not None or config.debug_rollout_only:
        return
    assert config.num_rollout is not None
    count = sum(saves_after(config, rollout_id) for rollout_id in range(first, config.num_rollout))
    each, free = config.bytes_of_a_save, free_bytes(config.save)
    if count * each > free:
        logger.warning(
            "--save %s: %d checkpoints of %.1f GiB are to come, %.1f GiB are free; --save-keep N deletes old ones",
            config.save, count, each / GIB, free / GIB,
        )  # fmt: skip
