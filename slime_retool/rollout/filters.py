"""Filters for `--dynamic-sampling-filter-path`: which groups are worth training on."""

from __future__ import annotations

from slime_retool.config import Config
from slime_retool.types import Sample


def keep_groups_with_reward_spread(args: Config, group: list[Sample]) -> bool:
    """Keep a group unless all its rewards are exactly equal: it would have no advantage and teach nothing.

    DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476, section 3.2).
    """
    rewards = {sample.reward_value(args.reward_key) for sample in group}
    return len(rewards) > 1
