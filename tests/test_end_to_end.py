"""The real parts together: Ray, Megatron-core trainers, SGLang, its router; and nothing left of them afterwards."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from dist_utils import run_distributed
from ray_utils import Host, pretend_hosts
from sglang_utils import engine_config, make_tiny_checkpoint, processes_with
from trainer_utils import make_trainer

from megatron_bridge.convert import convert_hf_to_torch_dist
from megatron_bridge.hf_config import model_args_from_hf, read_hf_config
from slime_retool.cluster.cluster import Cluster
from slime_retool.config import Config, validate
from slime_retool.engine.admin import EngineAdmin
from slime_retool.engine.process import ServerError
from slime_retool.errors import RolloutError, WeightUpdateError
from slime_retool.observe.metrics import read_metrics
from slime_retool.rollout.manager import RolloutManager
from slime_retool.types import RolloutBatch, TrainSample

ROOT = Path(__file__).resolve().parents[1]
MARK = "SLIME_RETOOL_TEST_RUN"

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with a tiny checkpoint in both formats and a few prompts."""
    folder = tmp_path_factory.mktemp("model")
    make_tiny_checkpoint(folder / "hf")
    args = model_args_from_hf(read_hf_config(folder / "hf"))
    convert_hf_to_torch_dist(args, folder / "hf", folder / "torch_dist", progress=False)
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "label": str(n + 1)} for n in range(32)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rl_values(model: Path, output: Path) -> dict[str, object]:
    return {
        "ref_load": str(model / "torch_dist"),
        "prompt_data": str(model / "prompts.jsonl"),
        "custom_rm_path": "e2e_hooks.alternating_reward",
        "num_rollout": 2,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 24,
        "rollout_max_context_len": 256,
        "lr": 1e-3,
        "output_dir": str(output),
    }


def test_two_hosts_with_a_trainer_rank_and_an_engine_each(model: Path, tmp_path: Path, monkeypatch):
    """A tensor-parallel trainer across pretend hosts of different addresses, and an engine on each.

    Log-probs of the same tokens differ by less than 1e-4; after an update every tensor is the same in both engines;
    both serve samples; that one died is an error that names it.
    """
    values = rl_values(model, tmp_path) | {
        "actor_num_nodes": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True, "rollout_num_gpus": 2,
        "rollout_request_retries": 0, "check_weight_update_equal": True,
    }  # fmt: skip
    config: Config = engine_config(model / "hf", **values)
    validate(config)
    with pretend_hosts(Host(), Host(address="127.0.0.2")) as (address, _):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with Cluster(config) as cluster:
            assert cluster.start_trainers() == (0, {})
            urls = cluster.start_engines()
            assert urlsplit(urls[1]).hostname == "127.0.0.2"
            assert urlsplit(urls[0]).hostname not in ("127.0.0.1", "127.0.0.2")
            manager = RolloutManager(config)
            try:
                manager.connect(cluster.start_router(urls))
                cluster.connect_engines(urls)
                assert cluster.update_weights() == 1
                engines = [EngineAdmin(url) for url in urls]
                start = cluster.weight_checksums()
                assert cluster.engine_checksums() == [start, start]
                before = cluster.train(manager.generate(0), 0)
                assert before["train/logprob_abs_diff"] < 1e-4
                assert before["train/grad_norm"] > 0
                assert cluster.update_weights() == 2
                now = cluster.weight_checksums()
                assert cluster.engine_checksums() == [now, now] and now != start
                assert [engine.weight_version() for engine in engines] == ["2", "2"]
                batch = manager.generate(1)
                assert batch.metrics["rollout/weight_version_min"] == 2
                shares = [served(tmp_path, rank) for rank in (0, 1)]
                assert sum(shares) == 32 and min(shares) >= 8
                assert cluster.train(batch, 1)["train/logprob_abs_diff"] < 1e-4
                with pytest.raises(WeightUpdateError, match="update 2 engine 0 holds other values .* of 24 tensors"):
                    cluster._compare_weights(2)  # the trainer has moved on
                cluster.check()
                end_server(urls[1])
                try:
                    assert manager.generate(2).metrics["rollout/failed_engine"] > 0
                except RolloutError as error:  # every group had a sample there: the router sends them as it likes
                    assert "the last error: engine:" in str(error)
                with pytest.raises(ServerError, match="SGLang engine 1 has died"):
                    for _ in range(200):  # its supervisor ends what it left behind first
                        cluster.check()
                        time.sleep(0.1)
            finally:
                manager.close()


def served(output: Path, rank: int) -> int:
    """Completed requests in the engine's access log."""
    return (output / "logs" / f"engine_{rank}.log").read_text().count('POST /generate HTTP/1.1" 200')


def end_server(url: str) -> None:
    """Kill the SGLang process that serves `url`."""
    port = str(urlsplit(url).port).encode()
    commands = {int(path.parent.name): path.read_bytes().split(b"\0") for path in Path("/proc").glob("[0-9]*/cmdline")}
    found = [pid for pid, words in commands.items() if words[1:3] == [b"-m", b"sglang.launch_server"] and port in words]
    assert len(found) == 1
    os.kill(found[0], signal.SIGKILL)


def train_twice(rank: int, world_size: int, config: Config, samples: list[TrainSample]) -> list[dict[str, float]]:
    """Metrics of two rollouts of a trainer with all roles in one process."""
    trainer = make_trainer(rank, world_size, config)
    first, _ = trainer.load()
    figures = [trainer.train(RolloutBatch(samples), first + i) for i in range(2)]
    trainer.shutdown()
    return figures


def test_a_critic_with_processes_of_its_own_trains_beside_the_actor_and_resumes(model: Path, tmp_path: Path):
    """One process for the actor, two for the critic; the same figures as together in one, to rounding."""
    rng = random.Random(0)
    samples = [
        TrainSample(
            [rng.randrange(256) for _ in range(12)], [0] * 4 + [1] * 8, rollout_log_probs=[0.0] * 4 + [-5.0] * 8,
            reward=rng.random(), index=index, group_index=index // 4,
        )
        for index in range(16)
    ]  # fmt: skip
    values = rl_values(model, tmp_path) | {"advantage_estimator": "ppo", "kl_coef": 0.1, "global_batch_size": 8}

    def run() -> list[dict[str, float]]:
        folder = {"save": str(tmp_path / "save"), "load": str(tmp_path / "save")}
        config: Config = engine_config(model / "hf", **values, **folder, critic_num_gpus_per_node=2)
        validate(config)
        with Cluster(config) as cluster:
            first, extra = cluster.start_trainers()
            assert extra == ({"seen": first} if first else {})
            figures = [cluster.train(RolloutBatch(samples), first + i) for i in range(2 - first)]
            log_probs = cluster.log_probs(samples)
            assert len(log_probs) == 16 * 12 and all((value < 0) == (i % 12 >= 4) for i, value in enumerate(log_probs))
            cluster.save(first, {"seen": first + 1})
        return figures

    apart = run()
    config: Config = engine_config(model / "hf", **values)
    validate(config)
    [together] = run_distributed(train_twice, 1, config, samples)
    for got, want in zip(apart, together, strict=True):
        assert want["critic/value_loss"] > 0
        for name, value in want.items():
            if name.startswith(("train/", "critic/")) and not name.endswith("micro_batches"):
                assert got[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    again = run()
    assert len(again) == 1 and again[0]["critic/explained_variance"] != 0.0


# The command line, and what is left of it


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
    for pid in processes_of(run):
        os.kill(pid, signal.SIGKILL)
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
        arguments, env=env, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
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
    process, run = start([*arguments, *turns, "--eval-prompt-data", "small", str(model / "prompts.jsonl")])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert_nothing_left(run)
    steps = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in steps] == [-1, 0, 1]
    assert all(row["train/logprob_abs_diff"] < 1e-4 for row in steps[1:])
    assert all("eval/small/accuracy" in row for row in steps)
    assert [row["rollout/weight_version"] for row in steps[1:]] == [2, 3]
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").exists()
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process(number: signal.Signals, model: Path, tmp_path: Path):
    process, run = start(command(model, tmp_path, num_rollout=100_000))
    wait_for_metrics(tmp_path / "metrics.jsonl", process)
    assert len(processes_of(run)) > 3
    process.send_signal(number)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert_nothing_left(run)


def test_a_run_that_fails_says_why_and_leaves_no_process(model: Path, tmp_path: Path):
    process, run = start(command(model, tmp_path, custom_rm_path="e2e_hooks.broken_reward"))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1 and "a mistake in the user's reward function" in output
    assert_nothing_left(run)
