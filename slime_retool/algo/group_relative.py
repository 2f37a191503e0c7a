"""Group-relative advantages (GRPO). Plain Python: imports neither torch nor numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it."""


def group_relative_advantages(rewards: Sequence[float], *, normalize_std: bool = True) -> list[float]:
    """Advantages of the samples of one prompt: (r_i - mean(r)) / (std(r) + 1e-6).

    `std` is the unbiased standard deviation (divided by n - 1), as in GRPO (https://arxiv.org/abs/2402.03300,
    eq. in section 4.1.2); with `normalize_std=False` only the mean is taken off (Dr. GRPO,
    https://arxiv.org/abs/2503.20783). Equal rewards, and a group of one, give exactly 0.

    Raises ValueError when a reward is not finite.
    """
    for reward in rewards:
        if not math.isfinite(reward):
            raise ValueError(f"rewards must be finite numbers, got {list(rewards)}; check the reward function")
    if not rewards or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + STD_EPSILON) for c in centred]
