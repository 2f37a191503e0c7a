"""What a reward hook returns becomes Python's, or costs the sample: named, counted, never trained on."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from slime_retool.errors import RewardError
from slime_retool.reward.runner import as_reward


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.bool_(False), 0.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        ({"score": np.float64(2), "acc": np.bool_(True), "pred": "x"}, {"score": 2.0, "acc": True, "pred": "x"}),
        ({"score": 1, "why": np.array([1, 2])}, {"score": 1.0, "why": np.array([1, 2])}),
    ],
)
def test_scalars_of_every_library_are_numbers(value: Any, expected: Any) -> None:
    reward = as_reward(value, None, "my.reward")
    assert str(reward) == str(expected) and type(reward) is type(expected)
    if not isinstance(value, dict):
        assert json.loads(json.dumps(reward)) == expected


@pytest.mark.parametrize(
    "value",
    [None, "1.0", [1.0], math.nan, math.inf, np.float32("nan"), torch.tensor([1.0, 2.0]), object(), 1 + 2j],
)
def test_anything_else_is_refused_by_name(value: Any) -> None:
    for reward, says in ((value, "my.reward returned "), ({"score": value}, "my.reward returned as 'score' ")):
        with pytest.raises(RewardError) as error:
            as_reward(reward, None, "my.reward")
        assert str(error.value).startswith(says) and str(error.value).endswith("; a reward is a finite number")
        assert len(str(error.value)) < 200


def test_a_dict_without_the_entry_that_is_trained_on_says_which_it_has() -> None:
    says = r"my.reward returned no entry 'points', only \['acc', 'score'\]; set --reward-key"
    with pytest.raises(RewardError, match=says):
        as_reward({"score": 1, "acc": True}, "points", "my.reward")
