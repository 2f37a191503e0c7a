"""Group-relative advantages, against numpy."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from slime_retool.algo.group_relative import group_relative_advantages


def test_advantages_are_the_standardised_rewards_of_the_group() -> None:
    rewards = np.array([1.0, -1.0, 0.3, 0.25])
    want = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert np.allclose(group_relative_advantages(rewards.tolist()), want, atol=1e-12)


def test_without_std_only_the_mean_is_removed() -> None:
    assert group_relative_advantages([1.0, 0.0, 0.5], normalize_std=False) == [0.5, -0.5, 0.0]


@pytest.mark.parametrize("rewards", [[], [0.1], [0.1] * 3, [-1.0] * 7])
def test_equal_rewards_give_exactly_zero(rewards: list[float]) -> None:
    assert group_relative_advantages(rewards) == [0.0] * len(rewards)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_relative_advantages([1.0, float("nan")])


def test_group_relative_imports_without_torch_and_numpy() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import slime_retool.algo.group_relative"
    subprocess.run([sys.executable, "-c", code], check=True)
