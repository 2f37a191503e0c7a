"""After which rollouts a run saves and evaluates, and whether its disk holds what it will save."""

from __future__ import annotations

import logging

from megatron_bridge.arithmetic import GIB
from slime_retool.config.config import Config
from slime_retool.run_folder import free_bytes

logger = logging.getLogger(__name__)


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
