"""Whole runs of the command line in which processes die: what they go on with, and that nothing outlives them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from run_utils import make_model
from test_end_to_end_runs import assert_nothing_left, command, processes_of, start

from slime_retool.metrics import read_metrics

pytestmark = pytest.mark.timeout(1200)
SAMPLES = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_a_run_outlives_its_trainers_broker_and_scorer_and_nothing_outlives_the_driver(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The faults of `run_hooks`. Every sample is generated and accounted for once; the last checkpoint is whole."""
    happened = tmp_path / "faults"
    happened.mkdir()
    monkeypatch.setenv("FAULTS_FOLDER", str(happened))
    out, save = tmp_path / "out", tmp_path / "save"
    arguments = command(
        model, out, save=save, save_interval=1, num_rollout=5, actor_num_gpus_per_node=2, max_restarts=2,
        custom_generate_function_path="faults.run_hooks.generate", custom_rm_path="faults.run_hooks.reward",
        loss_type="faults.run_hooks.FAULTY", reward_timeout=3, rollout_max_response_len=64,
    )  # fmt: skip
    process, run = start([*arguments, "--dump-rollouts"])
    output, _ = process.communicate(timeout=1000)
    assert process.returncode == -signal.SIGKILL, output
    assert_nothing_left(run)
    assert sorted(path.name for path in happened.iterdir()) == ["broker", "driver", "mid-save", "mid-step", "scorer"]
    assert "broker ended (killed by SIGKILL" in output and "another one is started" in output
    beginnings = [line for line in output.splitlines() if "Trainers start again" in line]
    for line, rollout, again, saved in zip(beginnings, (1, 2), (1, 2), (0, 1), strict=True):
        assert f"in rollout {rollout}. Trainers start again from the checkpoint of rollout {saved} in {save}" in line
        assert f"({again} of 2)" in line
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2"
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    failed = [row.get(f"rollout/failed_{what}", 0) for row, what in zip(rows[1:], ("tool", "reward"), strict=True)]
    assert failed[0] >= 0 and failed[1] == 1
    for rollout, row in enumerate(rows):
        dumped = [json.loads(line) for line in (out / "rollouts" / f"rollout_{rollout:06d}.jsonl").open()]
        assert sorted(sample["index"] for sample in dumped) == [*range(rollout * SAMPLES, (rollout + 1) * SAMPLES)]
        usable = [sample for sample in dumped if sample["status"] == "completed"]
        assert len(usable) == row["rollout/train_samples"] and row["train/logprob_abs_diff"] < 1e-4
        assert all(sample["error"] for sample in dumped if sample["status"] != "completed")


def test_engines_that_start_do_not_outlive_the_driver(model: Path, tmp_path: Path):
    process, run = start(command(model, tmp_path))
    deadline = time.monotonic() + 600
    while not any("sglang::" in name for name in processes_of(run).values()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    assert_nothing_left(run)
