"""The synchronous facade: errors reach the caller, resources end, the position in the data is kept."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rollout_hooks import RETURNED, CharTokenizer

from slime_retool.config import Config
from slime_retool.errors import ConfigError
from slime_retool.metrics import JsonlTracker, read_metrics
from slime_retool.rollout.manager import RolloutManager
from slime_retool.types import RolloutBatch, Sample, TrainSample


def make_config(tmp_path: Path, rollout: str = "rollout_with_resource", **values: object) -> Config:
    rows = "".join(json.dumps({"prompt": f"row {i}", "label": "x"}) + "\n" for i in range(6))
    (tmp_path / "rows.jsonl").write_text(rows)
    return Config(
        **{
            "device": "cpu",
            "output_dir": str(tmp_path),
            "prompt_data": str(tmp_path / "rows.jsonl"),
            "rollout_function_path": f"rollout_hooks.{rollout}",
            "rollout_batch_size": 1,
            **values,
        }
    )


def life(tmp_path: Path) -> list[str]:
    path = tmp_path / "life"
    return path.read_text().split() if path.exists() else []


def test_rollouts_share_resources_which_end_with_the_manager(tmp_path):
    with RolloutManager(make_config(tmp_path), tokenizer=CharTokenizer()) as manager:
        assert manager.generate(0).metrics["rollout/id"] == 0
        assert manager.generate(1).metrics["rollout/id"] == 1
        assert life(tmp_path) == ["open"]
    assert life(tmp_path) == ["open", "closed"]
    manager.close()  # again does nothing
    assert life(tmp_path) == ["open", "closed"]


def test_the_position_in_the_data_is_saved_and_restored(tmp_path):
    config = make_config(tmp_path)
    with RolloutManager(config, tokenizer=CharTokenizer()) as first:
        first.generate(0)
        first.generate(1)
        state = json.loads(json.dumps(first.state_dict()))
        expected = first.data.next_groups(1)[0][0].prompt
    with RolloutManager(config, tokenizer=CharTokenizer()) as second:
        second.load_state_dict(state)
        assert second.data.next_groups(1)[0][0].prompt == expected == "row 2"


@pytest.mark.parametrize(("given", "expected"), [({"num_epoch": 3}, 5), ({"num_rollout": 2}, 2)])
def test_an_epoch_has_as_many_rollouts_as_its_rows_need(given, expected, tmp_path):
    """3 epochs of 6 rows in rollouts of 4 prompts: the last one reaches into a fourth epoch."""
    config = make_config(tmp_path, rollout_batch_size=4, **given)
    with RolloutManager(config, tokenizer=CharTokenizer()) as manager:
        assert manager.config.num_rollout == manager._context.config.num_rollout == expected
    assert config.num_rollout == given.get("num_rollout")


def test_an_error_of_the_rollout_function_is_raised_to_the_caller(tmp_path):
    with RolloutManager(make_config(tmp_path, "rollout_that_fails"), tokenizer=CharTokenizer()) as manager:
        with pytest.raises(KeyError, match="a mistake of the user"):
            manager.generate(0)


@pytest.mark.timeout(200)
def test_closing_ends_a_rollout_that_is_still_running(tmp_path):
    manager = RolloutManager(make_config(tmp_path, "rollout_that_never_ends"), tokenizer=CharTokenizer())
    ended: list[BaseException] = []

    def run() -> None:
        try:
            manager.generate(0)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while life(tmp_path) != ["open"]:
        time.sleep(0.01)
    manager.close()
    thread.join()
    assert len(ended) == 1 and life(tmp_path) == ["open", "closed"]


@pytest.mark.parametrize("flag", ["custom_generate_function_path", "custom_rm_path", "rollout_function_path"])
def test_a_hook_that_does_not_exist_is_refused_before_anything_starts(flag: str, tmp_path):
    config = make_config(tmp_path, **{flag: "rollout_hooks.nothing"})
    with pytest.raises(ConfigError, match="--" + flag.replace("_", "-")):
        RolloutManager(config, tokenizer=CharTokenizer())


def one() -> TrainSample:
    return TrainSample([1, 2], [0, 1], [0.0, -1.0])


NO_BATCH = {
    "no batch": ([[one()]], "a slime_retool.types.RolloutBatch, got list"),
    "nothing": (None, "a slime_retool.types.RolloutBatch, got NoneType"),
    "one sample": (RolloutBatch(one()), "a list of samples and a dict of metrics.*, got TrainSample and dict"),
    "no metrics": (RolloutBatch([one()], None), "a list of samples and a dict of metrics.*, got list and NoneType"),
    "samples as generated": (RolloutBatch([one(), Sample(prompt="q")]), "TrainSamples.*, one is of type Sample"),
    "no number": (RolloutBatch([one()], {"rollout/mine": "much"}), "numbers as metrics, 'rollout/mine' is 'much'"),
}


@pytest.mark.parametrize("case", NO_BATCH)
def test_a_rollout_function_that_returns_no_batch_is_named(case: str, tmp_path):
    returned, message = NO_BATCH[case]
    RETURNED[:] = [returned]
    with RolloutManager(make_config(tmp_path, "rollout_that_returns"), tokenizer=CharTokenizer()) as manager:
        with pytest.raises(ConfigError, match=f"rollout_hooks.rollout_that_returns must return {message}"):
            manager.generate(0)


def test_metrics_of_a_rollout_function_are_written_whatever_kind_of_number_they_are(tmp_path):
    RETURNED[:] = [RolloutBatch([one()], {"a": np.float32(0.5), "b": np.int64(2), "c": np.array(3.0), "d": True})]
    with RolloutManager(make_config(tmp_path, "rollout_that_returns"), tokenizer=CharTokenizer()) as manager:
        JsonlTracker(tmp_path / "metrics.jsonl").log(0, manager.generate(0).metrics)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert [row[name] for name in "abcd"] == [0.5, 2.0, 3.0, 1.0]


def test_old_dumps_go_whatever_the_rollout_function_dumps(tmp_path):
    """SFT and a function of one's own write no samples, only what is trained on."""
    RETURNED[:] = [RolloutBatch([one()]) for _ in range(6)]
    flags = {"dump_rollouts": True, "dump_rollouts_every": 2, "dump_rollouts_keep": 2}
    with RolloutManager(make_config(tmp_path, "rollout_that_returns", **flags), tokenizer=CharTokenizer()) as manager:
        for rollout_id in range(6):
            manager.generate(rollout_id)
    left = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert left == ["trained_on_000002.jsonl", "trained_on_000004.jsonl"]
