"""The benchmarks' own arithmetic, and their scripted conversations through the product's tool loop."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "quickstart")]

from base_model import train_tokenizer  # noqa: E402

from benchmarks import (  # noqa: E402
    children,
    convert,
    engine_rate,
    features,
    kernels,
    multiturn,
    parallel_curves,
    sft_batches,
    start,
    step_overhead,
    stream_hooks,
    stream_step,
)
from benchmarks.logprob_diff import line_fit, trend  # noqa: E402
from benchmarks.parallel_curves import Curve, Layout, compare, make_steps, read_curves, table, write_curves  # noqa: E402
from benchmarks.ranks import NO_GPU, rank_environment, run_ranks, side_by_side  # noqa: E402
from benchmarks.rl_step import run_training  # noqa: E402
from benchmarks.scripted_turns import TurnCounts  # noqa: E402
from benchmarks.shapes import model_args, split_shards, tensor_shapes, write_checkpoint  # noqa: E402
from slime_retool.protocols import Completion  # noqa: E402


class CachingEngine:
    """Remembers every sequence as a prefix cache does, and writes as many tokens as it may."""

    def __init__(self) -> None:
        self.held: dict[str | None, int] = {}
        self.prompts: list[list[int]] = []
        self.new_prompt_tokens = 0

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None
    ) -> Completion:
        assert sampling_params["ignore_eos"]
        self.prompts.append(input_ids)
        cached = min(self.held.get(session, 0), len(input_ids) - 1)
        count = sampling_params["max_new_tokens"]
        self.held[session] = len(input_ids) + count - 1
        self.new_prompt_tokens += len(input_ids) - cached
        return Completion([20] * count, [-0.5] * count, "length", 1, len(input_ids), cached)


async def test_single_turn_requests_carry_the_tokens_of_the_conversations():
    options = ["--samples", "4", "--concurrency", "2", "--turns", "3", "--prompt", "30", "--turn", "9"]
    args = multiturn.build_parser().parse_args([*options, "--observation", "6"])
    engine, alone = CachingEngine(), CachingEngine()
    bench = multiturn.Bench(args, engine, train_tokenizer(), {})
    many, counts, loads = await bench.conversations(args.samples, seed=1)
    assert [turn.turn for turn in counts] == [0, 1, 2] * 4
    assert many.generated == sum(turn.generated for turn in counts) == sum(load.generated for load in loads)
    # Each later turn computes its observation anew, and the last token of the turn before.
    assert engine.new_prompt_tokens == sum(load.new_prompt_tokens for load in loads) + 4 * 2
    bench.engine = alone
    single = await bench.single_turns(loads, seed=1)
    assert single.generated == many.generated
    assert alone.new_prompt_tokens == sum(load.new_prompt_tokens for load in loads)


def test_cache_hits_are_counted_over_later_turns_only():
    turns = [TurnCounts(0, 100, 7, 50), TurnCounts(1, 160, 149, 40), TurnCounts(2, 210, 100, 40)]
    figures = multiturn.cache_figures(turns)
    assert figures["prefix_cache_hit"] == pytest.approx(100 * 249 / 370)
    assert figures["possible_cache_hit"] == pytest.approx(100 * (149 + 199) / 370)
    assert figures["reused"] == pytest.approx(100 * 249 / 348)


def test_layouts_are_read_from_their_names():
    assert Layout.parse("tp2xpp2") == Layout("tp2xpp2", tp=2, pp=2)
    assert Layout.parse("tp2xpp2").world_size == 4 and Layout.parse("one-reordered").reordered
    for wrong in ("ep2", "tp", "tp2xtp2", "tp2,pp2", "two"):
        with pytest.raises(ValueError, match="tp2xpp2"):
            Layout.parse(wrong)


def test_a_curve_is_compared_with_the_noise_of_all_runs_on_one_device():
    curves = [
        Curve("one", (8.0, 7.0)),
        Curve("one-reordered", (8.0, 7.004)),
        Curve("one", (8.0, 7.002)),
        Curve("tp2", (8.0, 7.008)),
        Curve("dp2", (8.0, 7.1)),
        Curve.of("pp2", {"losses": [8.0, math.nan]}),
        Curve.of("cp2", {"error": "out of memory"}),
    ]
    rows = compare(curves, factor=3.0)
    assert [row.verdict for row in rows] == ["noise"] * 3 + ["same", "different", "failed", "failed"]
    # The largest differences of the pairs are 4, 2 and 2 thousandths, those from tp2's 8, 4 and 6.
    assert rows[3].times == pytest.approx(6 / (8 / 3)) and rows[0].times == pytest.approx(3 / (8 / 3))
    assert rows[4].difference is not None and rows[4].difference.largest == pytest.approx(0.098)
    assert len(table(rows).splitlines()) == 8


def test_without_two_runs_on_one_device_there_is_nothing_to_compare_with():
    rows = compare([Curve("one", (8.0,)), Curve.of("one-reordered", {"error": "slow"}), Curve("tp2", (9.0,))], 3.0)
    assert [row.verdict for row in rows] == ["nothing to compare with", "failed", "nothing to compare with"]
    assert "9.0000" in table(rows)


def test_curves_of_several_calls_are_compared_when_they_share_the_setting(tmp_path: Path, monkeypatch, capsys):
    setting = {"model": "tiny", "flags": [], "card": "H200", "versions": {"torch": "2"}}
    first, second, other = tmp_path / "new" / "1.json", tmp_path / "2.json", tmp_path / "3.json"
    write_curves(first, setting, [Curve("one", (8.0, 7.0)), Curve("pp2", error="slow"), Curve("tp2", (8.0, 7.002))])
    write_curves(second, setting, [Curve("one", (8.0, 7.001)), Curve("pp2", (8.0, 7.0))])
    write_curves(other, {**setting, "model": "qwen3-4B"}, [])
    found = read_curves([first, second])
    assert found[0] == setting and [curve.layout for curve in found[1]] == ["one", "pp2", "tp2", "one", "pp2"]
    assert found[1][1].error == "slow" and found[1][2].losses == (8.0, 7.002)
    with pytest.raises(ValueError, match=r"3\.json has model 'qwen3-4B'.*1\.json has 'tiny'"):
        read_curves([first, other])

    out = tmp_path / "results"
    command = ["parallel_curves.py", "--out-dir", str(out), "--report", str(second)]
    monkeypatch.setattr(sys, "argv", command)
    assert parallel_curves.main() == 1 and not out.exists()  # one run on one device has no noise
    write_curves(first, setting, [Curve("one", (8.0, 7.0)), Curve("tp2", (8.0, 7.002))])
    monkeypatch.setattr(sys, "argv", [*command, str(first)])
    assert parallel_curves.main() == 0
    result = json.loads((out / "parallel_curves.json").read_text())
    assert result["value"] == pytest.approx(1.5) and result["card"] == "H200" and result["versions"] == {"torch": "2"}
    assert "tp2" in capsys.readouterr().out


def test_every_layout_gets_the_same_pieces_of_text():
    text = bytes(range(256)) * 4
    steps = make_steps(text, steps=3, samples=5, length=40)
    assert steps == make_steps(text, steps=3, samples=5, length=40)
    assert [len(step) for step in steps] == [5, 5, 5]
    assert all(10 <= len(piece) <= 40 and piece in text for step in steps for piece in step)


def test_cases_share_the_devices_and_one_that_needs_more_is_refused():
    both, held, most = threading.Barrier(2, timeout=120), [], []
    lock = threading.Lock()

    def run(name: str, devices: list[str]) -> None:
        with lock:
            assert not set(devices) & set(held)
            held.extend(devices)
            most.append(len(held))
        if name in ("tp1", "tp2"):
            both.wait()  # only passes when these two run at the same time
        with lock:
            del held[: len(held)]

    sizes = {"tp1": 1, "tp2": 2, "tp2xpp2": 4, "pp2": 2}
    assert side_by_side(sizes, ["0", "1", "5"], run) == {"tp2xpp2": "needs 4 GPUs, 3 are visible"}
    assert most[0] in (1, 2) and most[1:] == [3, 2]  # tp1 or tp2 first


def test_a_run_that_is_stopped_leaves_the_steps_it_made(tmp_path: Path, monkeypatch, capsys):
    """A stand-in for `python -m slime_retool.train`: two steps, and it would never end by itself."""
    package = tmp_path / "slime_retool"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import json, pathlib, sys, time\n"
        "path = pathlib.Path(sys.argv[sys.argv.index('--output-dir') + 1]) / 'metrics.jsonl'\n"
        "path.parent.mkdir()\n"
        "rows = [{'step': n, 'train/loss': 2.5 - n, 'perf/step_seconds': 1} for n in range(2)]\n"
        "path.write_text(''.join(json.dumps(row) + '\\n' for row in rows))\n"
        "(path.parent / 'ready').touch()\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr("benchmarks.rl_step.ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    rows = run_training([], tmp_path / "run", 8, ["train/loss"], partial=True)
    assert [row["train/loss"] for row in rows] == [2.5, 1.5]
    assert "step 1: loss 1.5" in capsys.readouterr().out
    with pytest.raises(subprocess.TimeoutExpired):
        run_training([], tmp_path / "run", 1, ["train/loss"])


WILLING = "import time; print(flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WILLING


@pytest.mark.parametrize(("code", "ended_by"), [(WILLING, signal.SIGTERM), (DEAF, signal.SIGKILL)])
def test_a_child_has_ended_when_its_block_is_left(code: str, ended_by: int, monkeypatch):
    monkeypatch.setattr(children, "PATIENCE", 0.5 if code is DEAF else 60.0)
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(KeyboardInterrupt),
        children.child([sys.executable, "-c", code], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    assert process.poll() == -ended_by and signal.getsignal(signal.SIGTERM) == before


async def test_the_benchmark_takes_a_sandbox_level_that_runs_its_programs():
    assert await step_overhead.working_sandbox(["--sandbox-isolation", "none"]) == "none"


def test_a_failing_rank_is_reported_with_its_last_words(tmp_path: Path):
    script = tmp_path / "case.py"
    script.write_text(
        "import argparse, json, pathlib, sys, time\n"
        "parser = argparse.ArgumentParser()\n"
        "for name in ('--rank', '--init-method', '--result', '--fail'):\n    parser.add_argument(name)\n"
        "args = parser.parse_args()\n"
        "if args.fail == args.rank:\n    sys.exit('no such layout')\n"
        "if args.fail:\n    time.sleep(60)\n"
        "if args.rank == '0':\n    pathlib.Path(args.result).write_text(json.dumps({'losses': [1.0]}))\n"
    )
    command = [sys.executable, str(script)]
    assert run_ranks(command, 2, 300, NO_GPU) == {"losses": [1.0]}
    assert "rank 1 ended with 1:\n    no such layout" in run_ranks([*command, "--fail", "1"], 2, 300, NO_GPU)["error"]


def test_the_ranks_of_a_case_meet_without_a_port(tmp_path: Path):
    script = tmp_path / "case.py"
    script.write_text(
        "import argparse, json, pathlib, torch\n"
        "import torch.distributed as dist\n"
        "parser = argparse.ArgumentParser()\n"
        "for name in ('--rank', '--init-method', '--result'):\n    parser.add_argument(name)\n"
        "args = parser.parse_args()\n"
        "dist.init_process_group('gloo', init_method=args.init_method, rank=int(args.rank), world_size=2)\n"
        "value = torch.tensor(1.0 + int(args.rank))\n"
        "dist.all_reduce(value)\n"
        "if args.rank == '0':\n"
        "    how = args.init_method.split(':')[0]\n"
        "    pathlib.Path(args.result).write_text(json.dumps({'sum': value.item(), 'how': how}))\n"
        "dist.destroy_process_group()\n"
    )
    assert run_ranks([sys.executable, str(script)], 2, 300, NO_GPU) == {"sum": 3.0, "how": "file"}


def test_ranks_see_one_gpu_each_and_are_of_different_hosts_only_where_they_share_it():
    apart = [rank_environment(rank, 2, ["3", "5"]) for rank in range(2)]
    assert apart == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    shared = [rank_environment(rank, 4, ["3", "3", "5", "5"]) for rank in range(4)]
    assert [own["CUDA_VISIBLE_DEVICES"] for own in shared] == ["3", "3", "5", "5"]
    assert len({own["NCCL_HOSTID"] for own in shared}) == 4


def test_a_trend_is_a_slope_beyond_its_error_that_matters():
    slope, error = line_fit([1.0, 2.0, 3.0, 4.0])
    assert slope == pytest.approx(1.0) and error == pytest.approx(0.0, abs=1e-9)
    # y = 0, 3, 3, 6 at x = 0..3: slope 9/5, residual sum of squares 1.8, error sqrt(1.8 / 2 / 5)
    assert line_fit([0.0, 3.0, 3.0, 6.0]) == pytest.approx((1.8, math.sqrt(0.18)))
    assert trend([0.010 + 0.001 * i for i in range(10)])["has_trend"]
    assert not trend([0.010, 0.012] * 15)["has_trend"]
    with pytest.raises(ValueError, match="at least 3 steps"):
        line_fit([1.0, 2.0])


def step(**changes: float) -> dict[str, float]:
    row = {"step": 1, "rollout/tool_call_rate": 1.0, "rollout/tool_error_rate": 0.0, "rollout/tool_calls_mean": 3.0}
    row |= {"rollout/tokens_per_second": 9.0, "rollout/cached_token_ratio": 0.9, "train/logprob_abs_diff": 0.01}
    seconds = {"generate": 60.0, "log_probs": 5.0, "train": 20.0, "sync": 1.0, "offload": 8.0, "idle": 6.0}
    row |= {f"perf/{name}_seconds": value for name, value in seconds.items()}
    return row | {"perf/step_seconds": 100.0, **changes}


def test_offload_and_idle_are_a_steps_overhead():
    figures = step_overhead.figures_of([step(**{"perf/step_seconds": 900.0}), step(), step()])
    assert figures["step_overhead_percent"] == pytest.approx(14.0) and figures["first_step_seconds"] == 900.0


def test_a_run_whose_tool_calls_fail_has_no_overhead():
    with pytest.raises(ValueError, match="sandbox flags"):
        step_overhead.figures_of([step(), step(**{"rollout/tool_error_rate": 0.5})])


def test_the_memory_bound_is_a_file_and_a_layer():
    # One layer of `tiny`: q 64x64, k and v 32x64, o 64x64, gate, up, down 128x64, norms 64 + 64 + 16 + 16, bf16.
    layer = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64 + 160)
    assert convert.memory_bound("tiny", 1000) == 1300 + layer


@pytest.mark.parametrize(
    ("model", "matrix"), [("tiny", "mlp.up_proj.weight"), ("tiny_moe", "mlp.experts.3.up_proj.weight")]
)
def test_a_random_checkpoint_has_every_tensor_in_files_of_the_asked_size(model: str, matrix: str, tmp_path: Path):
    from megatron_bridge.hf_config import check_against_hf, read_hf_config
    from megatron_bridge.safetensors_io import SafetensorsCheckpoint

    write_checkpoint(tmp_path, model, shard_bytes=100_000)
    checkpoint, shapes = SafetensorsCheckpoint(tmp_path), tensor_shapes(model_args(model))
    assert {name: entry.shape for name, entry in checkpoint.entries.items()} == shapes
    assert len(checkpoint.files) == len(split_shards(shapes, 100_000)) > 1
    assert abs(checkpoint.read(f"model.layers.1.{matrix}").float().std().item() - 0.02) < 0.001
    kind = "Qwen3MoeForCausalLM" if "moe" in model else "Qwen3ForCausalLM"
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [kind]
    check_against_hf(model_args(model), read_hf_config(tmp_path))


def test_a_kernel_with_a_wrong_value_or_gradient_is_seen() -> None:
    def gradient_off(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.detach() + 1.01 * (x - x.detach()),)

    def same(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.clone(),)

    inputs = [torch.randn(5, 3)]
    assert kernels.relative_errors(same, same, inputs) == 0
    assert kernels.relative_errors(lambda x: (1.02 * x,), same, inputs) == pytest.approx(0.02, rel=1e-3)
    assert kernels.relative_errors(gradient_off, same, inputs) == pytest.approx(0.01, rel=1e-3)
    assert kernels.relative_errors(lambda x: (x / 0 * 0,), same, inputs) == float("inf")


def test_the_kernel_benchmark_runs_and_fails_beyond_its_tolerance(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--device", "cpu"])
    assert kernels.main() == 0 and "SwiGLU" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--device", "cpu", "--tolerance", "-1"])
    assert kernels.main() == 1 and "failed: SwiGLU" in capsys.readouterr().out


def test_a_feature_is_off_by_its_log_probs_its_gradient_and_what_its_steps_did() -> None:
    reference = features.Curve(before=[-1.0, -2.0], after=[-1.5, -2.5], grad_norms=[2.0, 1.0])
    same = features.Difference.between(reference, reference)
    assert (same.forward, same.gradient, same.steps) == (0, 0, 0)
    off = features.Curve(before=[-1.1, -2.0], after=[-1.5, -2.6], grad_norms=[1.9, 7.0])
    found = features.Difference.between(off, reference)
    assert (found.forward, found.gradient, found.steps) == pytest.approx((0.05, 5, 20))


def test_the_features_benchmark_runs_and_fails_beyond_its_bounds(monkeypatch, capsys) -> None:
    words = ["features.py", "--device", "cpu", "--cases", "lora", "--steps", "1", "--forward", "-1"]
    monkeypatch.setattr(sys, "argv", words)
    assert features.main() == 1
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("lora"))
    assert row.split() == ["lora", "0.0e+00", "0.00%", "0.0%", "differs"]


def test_batches_of_sft_made_ahead_and_on_demand_are_the_same_tokens(capsys):
    sft_batches.main(["--batch", "2", "--batches", "3", "--words", "3", "--train-seconds", "0"])
    ahead, on_demand = capsys.readouterr().out.splitlines()
    assert ahead.startswith("ahead: ") and on_demand.startswith("on demand: ")
    assert ahead.partition("for a batch of")[2] == on_demand.partition("for a batch of")[2] != ""


def test_lengths_are_log_uniform_and_those_of_the_sample() -> None:
    lengths = [stream_hooks.drawn_length(1, index, 200, 8000) for index in range(4000)]
    assert lengths[:5] == [stream_hooks.drawn_length(1, index, 200, 8000) for index in range(5)]
    assert min(lengths) >= 200 and max(lengths) <= 8000
    # Below the geometric middle as often as above it; the mean is (8000 - 200) / log(40).
    assert sum(length < (200 * 8000) ** 0.5 for length in lengths) == pytest.approx(2000, abs=150)
    assert sum(lengths) / 4000 == pytest.approx(7800 / math.log(40), rel=0.05)


async def test_a_runs_rollouts_are_sent_once_more_as_what_they_had_the_engine_compute(tmp_path: Path) -> None:
    samples = [([1] * 9, [1, 1, 0, 1]), ([1] * 5, [0, 0]), ([1] * 11, [1] * 6)]  # (tokens, loss mask)
    for number in (0, 3):
        lines = [
            json.dumps({"tokens": tokens, "loss_mask": mask, "response_length": len(mask), "group_index": 7})
            for tokens, mask in samples
        ]
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        (tmp_path / "rollouts" / f"rollout_{number:06d}.jsonl").write_text("\n".join(lines) + "\n")
    rows = [{"step": step, "rollout/tokens_per_second": 10.0 * step} for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollouts = engine_rate.rollouts_of(tmp_path, 1)
    assert {number: ([(load.new_prompt_tokens, load.generated) for load in loads], rate)
            for number, (loads, rate) in rollouts.items()} == {3: ([(6, 3), (5, 6)], 30.0)}  # fmt: skip
    engine, flushed = CachingEngine(), []
    figures = await engine_rate.measure(engine, rollouts, {}, 20, lambda: flushed.append(engine.new_prompt_tokens))
    assert flushed == [11] and figures["run_tokens_per_second"] == {3: 30.0}
    assert figures["engine_share"] == figures["shares"][3] == 100 * 30.0 / figures["alone_tokens_per_second"][3]
    first, second = engine.prompts[:2]
    assert (len(first), len(second)) == (6, 5) and first[:5] == second  # one group, one prompt
    with pytest.raises(SystemExit, match="no dumped rollout from 4 on"):
        engine_rate.rollouts_of(tmp_path, 4)


def test_the_steps_of_a_stream_are_averaged_after_the_warm_up() -> None:
    rows = [{"perf/step_seconds": seconds, "other": 1.0} for seconds in (90.0, 40.0, 3.0, 7.0)]
    rows[3]["rollout/staleness_mean"] = 0.5  # not of every step
    assert stream_step.means(rows, 2) == {"perf/step_seconds": 5.0}
    row = {"val-core/gsm8k/acc/mean@1": 0.5, "val-aux/gsm8k/acc/mean@1/low": 0.4, "val-aux/gsm8k/acc/maj@1": 0.5}
    assert list(stream_step.evaluated(row | rows[0]).values()) == [0.5, 0.4]
    names = [
        stream_step.metric_name(stream_step.build_parser().parse_args(words))
        for words in ([], ["--layout", "shared"], ["--lengths"], ["--lengths", "--layout", "shared"])
    ]
    assert names == ["stream_step_ratio", "stream_shared_ratio", "stream_long_ratio", "stream_long_ratio"]


def test_both_runs_of_a_stream_are_averaged_over_as_many_steps_and_an_even_number() -> None:
    rows: list[dict[str, float]] = [{}] * 9
    assert [stream_step.window(2, rows[:a], rows[:b]) for a, b in ((9, 8), (8, 9), (7, 9), (9, 4), (3, 3))] == [
        8, 8, 6, 4, 3,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="9 and 2 steps were done in time, and 2 are the warm-up; raise --timeout"):
        stream_step.window(2, rows, rows[:2])


def test_a_stall_is_counted_without_the_wait_for_another_write() -> None:
    saves = [
        {"perf/save_stall_seconds": 1.5, "perf/save_wait_seconds": 0.0},
        {"perf/save_seconds": 23.0},
        {"perf/save_stall_seconds": 6.0, "perf/save_wait_seconds": 5.0, "perf/save_seconds": 23.0},
    ]
    assert start.longest_stall(saves) == 1.5
