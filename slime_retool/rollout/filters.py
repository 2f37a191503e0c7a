"""Filters for `--dynamic-sampling-filter-path`: which groups are worth training on."""

from __future__ import annotations

from slime_retool.config import Config
from slime_retool.types import Sample


def check_reward_nonzero_std(args: Config, group: list[Sample]) -> bool:
    """Keep a group unless all its rewards are exactly equal: it would have no advantage and teach nothing.

    Compares the rewards as the reward function gave them, before any shaping by length, and by equality: a deviation
    computed in floating point is not exactly 0 where all rewards are.

    DAPO's dynamic sampling (https://arxiv.org/abs/2503.14476, section 3.2).
    """
    return len({sample.reward_value(args.reward_key) for sample in group}) > 1
