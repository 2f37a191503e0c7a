"""Whole runs of the command line in which processes die: what they go on with, and that nothing outlives them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from run_utils import make_model
from test_end_to_end_runs import assert_nothing_left, command, processes_of, start

from megatron_bridge.checkpoint import latest_rollout
from megatron_bridge.convert import convert_torch_dist_to_hf
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
        loss_type="faults.run_hooks.FAULTY", reward_timeout=20, rollout_max_response_len=64,
    )  # fmt: skip
    process, run = start([*arguments, "--dump-rollouts", "--no-async-save"])
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
    assert [row["rollout/train_samples"] for row in rows] == [SAMPLES, SAMPLES, SAMPLES - 1]
    assert rows[2]["rollout/failed_reward"] == 1
    for rollout, row in enumerate(rows):
        dumped = [json.loads(line) for line in (out / "rollouts" / f"rollout_{rollout:06d}.jsonl").open()]
        assert sorted(sample["index"] for sample in dumped) == [*range(rollout * SAMPLES, (rollout + 1) * SAMPLES)]
        usable = [sample for sample in dumped if sample["status"] == "completed"]
        assert len(usable) == row["rollout/train_samples"] and row["train/logprob_abs_diff"] < 1e-4


def test_an_update_goes_on_when_the_only_engine_died_while_trainers_worked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With --max-staleness requests run then. The engine's replacement can have no weights but those of the update."""
    happened = tmp_path / "faults"
    happened.mkdir()
    monkeypatch.setenv("FAULTS_FOLDER", str(happened))
    arguments = command(
        model, tmp_path / "out", num_rollout=4, max_staleness=1, loss_type="faults.run_hooks.KILLS_AN_ENGINE",
        rollout_max_response_len=160, rollout_num_gpus=1,
    )  # fmt: skip
    process, run = start([*arguments, "--use-tis", "--dump-rollouts"])
    output, _ = process.communicate(timeout=1000)
    assert process.returncode == 0, output
    assert_nothing_left(run)
    assert (happened / "engine").exists() and output.count("serves again") == 1
    rows = {row["step"]: row for row in read_metrics(tmp_path / "out" / "metrics.jsonl")}
    assert [rows[step]["rollout/train_samples"] for step in range(4)] == [SAMPLES] * 4
    files = [tmp_path / "out" / "rollouts" / f"rollout_{step:06d}.jsonl" for step in range(4)]
    indices = [json.loads(line)["index"] for file in files for line in file.open()]
    assert len(indices) == len(set(indices)) == 4 * SAMPLES


def test_engines_that_start_do_not_outlive_the_driver(model: Path, tmp_path: Path):
    process, run = start(command(model, tmp_path))
    deadline = time.monotonic() + 600
    while not any("sglang::" in name for name in processes_of(run).values()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    assert_nothing_left(run)


def test_a_full_disk_ends_the_run_in_one_line_and_the_checkpoints_before_are_whole(model: Path, tmp_path: Path):
    """SFT that saves every step, to a disk (of its own mount namespace) with room for a few checkpoints."""
    rows = [{"messages": [{"role": role, "content": "ab"} for role in ("user", "assistant")]} for _ in range(4)]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "device": "cpu", "hf_checkpoint": model / "hf", "ref_load": model / "torch_dist", "loss_type": "sft_loss",
        "prompt_data": tmp_path / "sft.jsonl", "input_key": "messages", "num_rollout": 50, "rollout_batch_size": 2,
        "rollout_function_path": "slime_retool.rollout.sft_rollout.generate_rollout", "output_dir": tmp_path / "out",
        "save": tmp_path / "disk" / "save", "save_interval": 1,
    }  # fmt: skip
    flags = [token for name, value in values.items() for token in ("--" + name.replace("_", "-"), str(value))]
    train = [sys.executable, "-m", "slime_retool.train", *flags, "--debug-train-only", "--calculate-per-token-loss"]
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size=6m disk "$0" && "$@"; code=$?; cp -r "$0/save" "$0/../kept"; exit $code'
    process, run = start(["unshare", "-Urm", "sh", "-c", script, str(tmp_path / "disk"), *train])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1, output
    assert_nothing_left(run)
    last = output.rstrip().splitlines()[-1]
    assert "SaveError: the checkpoint of rollout" in last and "the checkpoints before it are whole" in last
    assert "Traceback" not in output
    latest = latest_rollout(str(tmp_path / "kept"))
    assert latest is not None and f"rollout {latest + 1} " in last
    convert_torch_dist_to_hf(tmp_path / "kept", tmp_path / "hf", model / "hf", progress=False)
