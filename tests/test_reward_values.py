"""What a reward hook returns becomes Python's, or costs the sample: named, counted, never trained on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_retool.dumps import json_value
from slime_retool.errors import RewardError
from slime_retool.reward.runner import as_reward
from slime_retool.rollout.stream import _sample_state
from slime_retool.rollout.transcripts import dump_samples
from slime_retool.types import Sample


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
        ({"score": 1, "acc": torch.tensor(1.0)}, {"score": 1.0, "acc": True}),
        ({"score": 1, "acc": 0}, {"score": 1.0, "acc": False}),
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


@pytest.mark.parametrize("value", [math.nan, np.float32("nan"), None, "no", 0.5, torch.tensor(0.1), [], -1])
def test_an_acc_that_says_neither_right_nor_wrong_is_refused(value: Any) -> None:
    """As truth values NaN, text and every share above 0 would be right answers."""
    with pytest.raises(RewardError, match="my.reward returned as 'acc' .*; it is True or False: is the answer right"):
        as_reward({"score": 0.5, "acc": value}, None, "my.reward")


def test_values_of_numpy_and_torch_in_a_dict_are_written_as_numbers(tmp_path: Path) -> None:
    held = {"a": np.bool_(True), "b": [np.float32(0.25)], "c": torch.tensor(3), "d": np.array([[1, 2]])}
    sample = Sample(prompt="p", reward=as_reward({"score": 1, **held}, None, "my.reward"), metadata=dict(held))
    dump_samples(tmp_path / "samples.jsonl", [(sample, {})])
    row = json.loads((tmp_path / "samples.jsonl").read_text())
    expected = {"a": True, "b": [0.25], "c": 3, "d": [[1, 2]]}
    assert row["reward"] == {"score": 1.0} | expected and row["metadata"] == expected
    assert _sample_state(sample)["metadata"] == expected  # an open conversation of a checkpoint
    assert json.loads(json.dumps(object(), default=json_value)).startswith("<object object")


def test_a_dict_without_the_entry_that_is_trained_on_says_which_it_has() -> None:
    says = r"my.reward returned no entry 'points', only \['acc', 'score'\]; set --reward-key"
    with pytest.raises(RewardError, match=says):
        as_reward({"score": 1, "acc": True}, "points", "my.reward")
