"""benchmarks/moe.py: what its parts run, what they write, and steps with given experts on the CPU."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from benchmarks import moe, plan_error, train_step  # noqa: E402
from benchmarks.shapes import model_args, model_flags  # noqa: E402


def value(folder: Path, metric: str) -> Any:
    return json.loads((folder / f"{metric}.json").read_text())["value"]


def test_a_model_may_be_taken_with_fewer_layers() -> None:
    whole, part = model_args("qwen3-30B-A3B"), model_args("qwen3-30B-A3B:8")
    assert (whole.num_layers, part.num_layers) == (48, 8)
    assert (part.num_experts, part.moe_router_topk, part.moe_ffn_hidden_size, part.hidden_size) == (128, 8, 768, 2048)
    assert model_flags("tiny_moe") != model_flags("tiny")


def test_experts_of_a_token_differ_and_all_are_drawn_alike() -> None:
    ids = moe.drawn_experts(4000, 2, 16, 3, random.Random(0))
    assert len(ids) == 4000 * 2 * 3 and ids.typecode == "B"
    assert all(len(set(ids[i : i + 3])) == 3 for i in range(0, len(ids), 3))
    counts = Counter(ids)
    assert len(counts) == 16 and max(counts.values()) < 1.3 * min(counts.values())
    assert moe.drawn_experts(1, 1, 300, 2, random.Random(0)).typecode == "H"


def test_a_scripts_figures_are_the_object_that_it_prints_last() -> None:
    text = 'step 1\n{\n  "old": 1\n}\nmore\n{\n  "a": {\n    "b": 2\n  }\n}\n'
    assert moe.last_object(text) == {"a": {"b": 2}}


def test_a_training_step_is_kept_as_a_case_of_the_plan(tmp_path: Path, monkeypatch, capsys) -> None:
    """Its samples are those that the plan is asked about: the warm-up is as long."""
    figures = {
        "strict_mfu_percent": 27.5, "peak_gib": 120.0, "step_seconds": 2.0, "tokens_per_second": 30_000.0,
        "device": "NVIDIA H200",
    }  # fmt: skip
    ran: list[Any] = []
    monkeypatch.setattr(train_step, "run_case", lambda case, args: ran.append((case, args)) or figures)
    assert moe.main(["--device", "cpu", "--parts", "train", "--work", str(tmp_path), "--micro-batches", "2"]) == 0
    ((case, args),) = ran
    assert (args.warmup, args.steps) == (plan_error.WARMUP, plan_error.STEPS)
    assert value(tmp_path / "results", "moe_train_mfu") == 27.5
    assert plan_error.load(tmp_path / "results") == [(case, figures)]
    capsys.readouterr()
    assert plan_error.report(argparse.Namespace(out_dir=tmp_path / "results")) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("moe_train_mfu"))
    gib, seconds = plan_error.predict(case, plan_error.card_of("NVIDIA H200"))
    assert f"120.0{gib:>8.1f}" in line and f"2.000{seconds:>8.3f}" in line
    # Eight layers of 128 experts of 3 * 2048 * 768, in bf16 and with fp32 gradient, main weight and two moments.
    assert gib * 2**30 > 18 * 8 * 128 * 3 * 2048 * 768


def test_parts_with_an_engine_write_what_their_scripts_say(tmp_path: Path, monkeypatch) -> None:
    commands: list[list[str]] = []
    figures = {
        "bytes": {"weights": 60e9}, "sync_ipc_s": 0.25, "logprob_diff": 0.01, "k3": 1e-4, "largest": 0.1,
        "entropy": 1.0, "generate_seconds": 2.0, "train_seconds": 3.0, "step_seconds": 6.0,
    }  # fmt: skip

    def script(args: argparse.Namespace, name: str, *options: str) -> dict[str, Any]:
        commands.append([name, *options])
        return figures | {"logprob_diff": 0.002 if moe.REPLAY in options else 0.01}

    monkeypatch.setattr(moe, "_script_figures", script)
    monkeypatch.setattr(moe, "_train_case", lambda args, case: {"flags": case.flags})
    options = ["--device", "cpu", "--work", str(tmp_path), "--parts", "sync", "logprob", "lora", "--", "--seed", "3"]
    assert moe.main(options) == 0
    results = tmp_path / "results"
    assert value(results, "moe_sync_gbs") == 240.0 and value(results, "lora_sync_s") == 0.25
    assert (value(results, "moe_logprob_diff"), value(results, "moe_logprob_diff_replay")) == (0.01, 0.002)
    sync, own, replayed, lora = commands
    assert all(("--seed", "3") in zip(command, command[1:], strict=False) for command in commands)
    assert "--reuse" not in own and "--reuse" in replayed and [word for word in replayed if word not in own] == [
        "--reuse", moe.REPLAY,
    ]  # fmt: skip
    assert lora == [*sync, *moe.LORA_FLAGS.split()]


def test_a_part_that_fails_costs_no_other(tmp_path: Path, monkeypatch, capsys) -> None:
    def fails(args: argparse.Namespace) -> dict[str, Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(moe.PARTS, "sync", fails)
    monkeypatch.setitem(moe.PARTS, "train", lambda args: {"mfu": 1})
    assert moe.main(["--device", "cpu", "--work", str(tmp_path), "--parts", "sync", "train"]) == 1
    assert "sync failed: out of memory" in (said := capsys.readouterr().out) and '"mfu": 1' in said


@pytest.mark.timeout(600)
def test_steps_with_given_experts_run_on_the_cpu(tmp_path: Path) -> None:
    sizes = ["--max-tokens-per-gpu", "256", "--micro-batches", "1", "--steps", "1"]
    command = ["--device", "cpu", "--model", "tiny_moe", "--parts", "replay", "--work", str(tmp_path), *sizes]
    assert moe.main(command) == 0
    assert value(tmp_path / "results", "moe_replay_overhead") > -100
