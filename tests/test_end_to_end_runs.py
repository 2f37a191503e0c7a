"""Whole runs of the command line: training, resuming, interruption and failure; and nothing left of them afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from run_utils import heed_interrupts, make_model, rl_values
from sglang_utils import processes_with, signal_all

from benchmarks.check_trace import differences, pieces_of, problems, read_trace, sums
from slime_retool.metrics import read_metrics
from slime_retool.run_folder import resume_point

ROOT = Path(__file__).resolve().parents[1]
MARK = "SLIME_RETOOL_TEST_RUN"

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_a_killed_run_resumes_with_the_same_losses(model: Path, tmp_path: Path):
    """SFT of eight steps in one go, and killed after its second step's checkpoint: the same figures to the last bit."""
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n * 7)}]}
        for n in range(9)
    ]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def sft(name: str) -> list[str]:
        values = {
            "device": "cpu", "hf_checkpoint": model / "hf", "ref_load": model / "torch_dist",
            "prompt_data": tmp_path / "sft.jsonl", "input_key": "messages", "loss_type": "sft_loss",
            "rollout_function_path": "slime_retool.rollout.sft_rollout.generate_rollout",
            "num_rollout": 8, "rollout_batch_size": 4, "lr": 1e-3, "lr_decay_style": "cosine",
            "save": tmp_path / name / "save", "load": tmp_path / name / "save", "save_interval": 1,
            "output_dir": tmp_path / name, "eval_interval": 4,
        }  # fmt: skip
        flags = [token for key, value in values.items() for token in ("--" + key.replace("_", "-"), str(value))]
        flags += ["--eval-prompt-data", "held", str(tmp_path / "sft.jsonl")]
        switches = ["--debug-train-only", "--calculate-per-token-loss", "--rollout-shuffle", "--no-progress"]
        return [sys.executable, "-m", "slime_retool.train", *flags, *switches]

    whole, _ = start(sft("whole"))
    output, _ = whole.communicate(timeout=600)
    assert whole.returncode == 0, output
    killed, run = start(sft("killed"))
    saved = tmp_path / "killed" / "save" / "latest_checkpointed_iteration.txt"
    while not (saved.exists() and int(saved.read_text()) >= 1):
        assert killed.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    signal_all(processes_of(run), signal.SIGKILL)
    killed.wait(timeout=300)
    resumed, _ = start(sft("killed"))
    output, _ = resumed.communicate(timeout=600)
    assert resumed.returncode == 0, output
    figures = [
        [
            (row["step"], *(row.get(name) for name in ("train/loss", "train/grad_norm", "train/lr", "eval/held/loss")))
            for row in read_metrics(path)
        ]
        for path in (tmp_path / "whole" / "metrics.jsonl", tmp_path / "killed" / "metrics.jsonl")
    ]
    trained = [[row[:4] for row in rows if row[0] >= 0] for rows in figures]
    assert len(trained[0]) == 8 and trained[0] == trained[1]
    validation = [row[4] for row in figures[0] if row[4] is not None]  # before, after four and after eight steps
    assert validation[1:] == [row[4] for row in figures[1] if row[4] is not None][-2:]
    assert len(validation) == 3 and validation[2] < validation[1] < validation[0]


def command(model: Path, output: Path, **changes: object) -> list[str]:
    values = rl_values(model, output) | {
        "hf_checkpoint": model / "hf", "device": "cpu", "sglang_max_total_tokens": 16384, **changes,
    }  # fmt: skip
    flags = [token for name, value in values.items() for token in ("--" + name.replace("_", "-"), str(value))]
    return [sys.executable, "-m", "slime_retool.train", *flags]


def start(arguments: list[str]) -> tuple[subprocess.Popen[str], str]:
    """Start a run whose processes can be found again: they all inherit one environment variable."""
    run = uuid.uuid4().hex
    env = {**os.environ, MARK: run, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    process = subprocess.Popen(
        arguments, env=env, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, preexec_fn=heed_interrupts,
    )  # fmt: skip
    return process, run


def processes_of(run: str) -> dict[int, str]:
    """Living processes that carry the run's mark: id -> command."""
    return processes_with(f"{MARK}={run}")


def assert_nothing_left(run: str) -> None:
    deadline = time.monotonic() + 120
    while processes_of(run) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(run) == {}


def wait_for_metrics(path: Path, process: subprocess.Popen[str], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.stat().st_size):
        if process.poll() is not None:
            raise AssertionError(f"the run ended early:\n{process.stdout.read()}")
        assert time.monotonic() < deadline, "no metrics in time"
        time.sleep(0.3)


def test_a_run_trains_evaluates_saves_and_leaves_no_process(model: Path, tmp_path: Path):
    arguments = command(model, tmp_path / "out", save=tmp_path / "save", eval_interval=1)
    turns = ["--colocate", "--offload-train", "--offload-rollout"]  # on a CPU all that is missing is the room it makes
    turns += ["--dump-rollouts", "--eval-prompt-data", "small", str(model / "prompts.jsonl"), "--profile-rollout", "1"]
    process, run = start([*arguments, *turns])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert_nothing_left(run)
    steps = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in steps] == [-1, 0, 1]
    assert all(row["train/logprob_abs_diff"] < 1e-4 for row in steps[1:])
    assert all("eval/small/accuracy" in row for row in steps)
    assert [row["rollout/weight_version"] for row in steps[1:]] == [2, 3]
    assert resume_point(str(tmp_path / "save")) == 1
    assert 0 < steps[2]["perf/save_stall_seconds"] and 0 < steps[2]["perf/save_seconds"]
    phases = ("generate", "log_probs", "train", "sync", "offload", "idle")
    for row in steps[1:]:
        seconds = [row[f"perf/{name}_seconds"] for name in phases]
        assert min(seconds) >= 0 and sum(seconds) == pytest.approx(row["perf/step_seconds"])
        assert row["perf/sync_seconds"] > 0 and row["perf/offload_seconds"] > 0
        assert row["perf/generate_seconds"] > row["perf/reward_seconds"] > 0
        rates = [row[f"perf/{name}_tokens_per_second_per_gpu"] for name in ("generate", "train")]
        assert rates[0] * row["perf/generate_seconds"] == pytest.approx(row["rollout/model_tokens"])
        assert rates[1] * row["perf/train_seconds"] == pytest.approx(row["train/tokens"])
        gib = [row[f"memory/{name}_gib"] for name in ("trainer_host", "driver_host", "engine_kv_cache")]
        assert all(0 < value < 64 for value in gib)
        assert row["memory/engine_kv_cache_tokens"] >= 64
        assert "perf/train_mfu" not in row  # the CPU is not a card of the table
    assert_trace_is_right(tmp_path / "out" / "traces" / "rollout_000001.json.gz", steps[2])
    # The same flags on the batches that it trained on: no engine, and the same losses to the last bit.
    replay, run = start([*arguments, *turns, "--replay-rollouts", str(tmp_path / "out"), "--output-dir", str(tmp_path)])
    output, _ = replay.communicate(timeout=600)
    assert replay.returncode == 0, output
    assert "SGLang" not in output
    assert_nothing_left(run)
    first, again = (
        [{name: value for name, value in row.items() if name.startswith("train/")} for row in rows]
        for rows in (steps[1:], read_metrics(tmp_path / "metrics.jsonl"))
    )
    assert again == first and all(row["train/grad_norm"] > 0 for row in again)


def assert_trace_is_right(path: Path, metrics: dict[str, Any]) -> None:
    """The trace keeps its format, its lanes add up to the step's metrics, and every kind of process is in it."""
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    trace = read_trace(path)
    pieces = pieces_of(trace)
    assert problems(trace) == [] and differences(pieces, metrics) == []
    assert set(sums(pieces)) >= {"perf/eval_seconds", "perf/log_probs_seconds of ranks", "perf/train_seconds of ranks"}
    names = {group: {each.name for each in pieces if each.group == group} for group in {each.group for each in pieces}}
    assert names["driver"] >= {"step", "generate", "log_probs", "train", "offload", "sync", "save", "evaluation"}
    assert names["rollout"] >= {"generate", "request", "reward"}
    assert names["trainers"] >= {"forward", "loss", "backward", "optimizer", "weight update", "save", "offload"}
    counters = {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert counters == {"running requests", "waiting requests", "tokens per second", "share of the cache in use"}
    driver = {each.name: each for each in pieces if each.group == "driver"}
    generated, step = driver["generate"], driver["step"]
    requests = [each for each in pieces if each.name == "request" and each.begin < step.begin + step.seconds]
    assert requests and all(
        generated.begin <= each.begin and each.begin + each.seconds <= generated.begin + generated.seconds
        for each in requests
    )
    # Micro-batches lie within the optimizer steps of their rank, and fill no more than these.
    (trained,) = [each for each in pieces if each.group == "trainers" and each.name == "train"]
    work = [each for each in pieces if each.name in ("forward", "loss", "backward", "optimizer")]
    inside = [each for each in work if trained.begin <= each.begin <= trained.begin + trained.seconds]
    assert metrics["train/micro_batches"] == sum(each.name == "backward" for each in inside)
    assert 0 < sum(each.seconds for each in inside) <= trained.seconds * 1.001


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process(number: signal.Signals, model: Path, tmp_path: Path):
    process, run = start(command(model, tmp_path, num_rollout=100_000))
    wait_for_metrics(tmp_path / "metrics.jsonl", process)
    assert len(processes_of(run)) > 3
    process.send_signal(number)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert_nothing_left(run)


def test_a_first_signal_saves_after_the_step_and_the_run_goes_on_from_there(model: Path, tmp_path: Path):
    arguments = command(model, tmp_path / "out", num_rollout=100_000, save=tmp_path / "save", load=tmp_path / "save")
    process, run = start(arguments)
    wait_for_metrics(tmp_path / "out" / "metrics.jsonl", process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert "the run ends after this step, which is saved" in output and "saved after rollout" in output
    assert_nothing_left(run)
    saved = resume_point(str(tmp_path / "save"))
    assert saved == read_metrics(tmp_path / "out" / "metrics.jsonl")[-1]["step"]
    resumed, run = start([*arguments, "--num-rollout", str(saved + 1)])
    output, _ = resumed.communicate(timeout=600)
    assert resumed.returncode == 0 and f"the checkpoint is at rollout {saved + 1} of {saved + 1}" in output, output
    assert_nothing_left(run)


def test_a_run_that_fails_says_why_and_leaves_no_process(model: Path, tmp_path: Path):
    process, run = start(command(model, tmp_path, custom_rm_path="e2e_hooks.broken_reward"))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1 and "a mistake in the user's reward function" in output
    assert_nothing_left(run)


def test_a_flag_that_sglang_does_not_know_ends_the_run_before_its_loop_begins(model: Path, tmp_path: Path):
    process, run = start([*command(model, tmp_path), "--sglang-attention-backed", "triton", "--sglang-enable-metrics"])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 2, output
    assert output.endswith(
        "\nslime_retool.train: error: SGLang refuses the --sglang-* flags --attention-backed triton --enable-metrics: "
        "sglang.launch_server: error: unrecognized arguments: --attention-backed triton\n"
    )
    assert "starting Ray" in output and "SIGTERM" not in output and "trainer process" not in output
    assert not (tmp_path / "metrics.jsonl").exists()
    assert_nothing_left(run)
