"""benchmarks/plan_error.py: its cases, its table, and a run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from benchmarks import moe, plan_error  # noqa: E402
from benchmarks.train_step import Case, make_samples  # noqa: E402
from megatron_bridge.arithmetic import GIB  # noqa: E402
from megatron_bridge.arithmetic.cards import CARDS  # noqa: E402


@pytest.mark.parametrize("case", plan_error.CASES.values(), ids=lambda case: case.name)
def test_every_case_is_one_that_the_plan_can_be_made_for_and_that_an_h200_holds(case):
    gib, seconds = plan_error.predict(case, CARDS["h200"])
    assert 5 < gib < 0.95 * CARDS["h200"].memory_bytes / GIB
    assert 0.2 < seconds < 5  # 5 steps and a start in less than a minute


FUSED = ("--attention-backend", "fused")
KEEP = ("--keep-logits-gib", "20")
ONE_H200 = {
    "4B": (Case(model="qwen3-4B"), None, 6.28),
    "4B, cuDNN": (Case(model="qwen3-4B", micro_batches=4, flags=FUSED), 129.1, 3.20),
    "4B, recomputing, kept logits": (Case(model="qwen3-4B", recompute="full", flags=KEEP), 78.4, 7.84),
    "4B, recomputing, cuDNN": (Case(model="qwen3-4B", recompute="full", micro_batches=4, flags=FUSED), 73.5, 4.10),
    "1.7B, 32k": (Case(model="qwen3-1.7B", max_tokens_per_gpu=32768), None, 6.08),
    "1.7B, 32k, kept logits": (Case(model="qwen3-1.7B", max_tokens_per_gpu=32768, flags=KEEP), 105.8, 5.34),
    "1.7B, 40k, kept logits": (
        Case(model="qwen3-1.7B", max_tokens_per_gpu=40960, micro_batches=7, flags=KEEP), 123.8, 5.54
    ),
    "1.7B, 32k, cuDNN": (
        Case(model="qwen3-1.7B", max_tokens_per_gpu=32768, micro_batches=4, flags=FUSED), 92.1, 2.78
    ),
    "1.7B, cuDNN": (Case(model="qwen3-1.7B", micro_batches=4, flags=FUSED), 61.3, 1.42),
    "0.6B, local": (
        Case(model="qwen3-0.6B", transformer_impl="local", micro_batches=4, flags=FUSED), 31.2, 0.96
    ),
}  # fmt: skip
"""Peak GiB and seconds of a step that train_step.py measured: the table of docs/performance.md, "Planning a run"."""


@pytest.mark.parametrize("name", ONE_H200)
def test_the_plan_is_near_what_one_h200_took(name):
    case, gib, seconds = ONE_H200[name]
    predicted_gib, predicted_seconds = plan_error.predict(case, CARDS["h200"])
    assert predicted_seconds == pytest.approx(seconds, rel=0.1)
    if gib is not None:  # planned as full and all learned; the fullest ones measured held 97 %, 85 % of it learned
        assert 0.99 * gib < predicted_gib < (1.05 if KEEP == case.flags else 1.03) * gib


TWO_H200 = {
    "1.7b_tp2": (31.5, 1.727),
    "4b_tp2": (65.4, 3.625),
    "1.7b_cp2": (51.6, 1.696),
    "4b_dp2_overlap": (106.6, 1.624),
    "1.7b_dp2_full": (23.24, 3.557),
    "1.7b_pp2": (48.3, 1.349),
    "1.7b_pp2_17_11": (57.4, 1.200),
    "4b_pp2_full": (42.4, 2.534),
}
"""The same of plan_error.py's cases of two GPUs."""
FOUR_H200 = {"4b_tp2_pp2": (48.8, 1.720), "4b_tp2_dp2": (54.3, 1.410)}
"""And of four."""
SEVERAL_H200 = TWO_H200 | FOUR_H200


MIXTURES = {
    "30b_a3b": (replace(plan_error.CASES["30b_a3b"], micro_batches=8), 109.6, 1.964),
    "30b_a3b, LoRA": (replace(plan_error.CASES["30b_a3b"], flags=tuple(moe.LORA_FLAGS.split())), 26.0, 0.731),
    "235b_a22b": (plan_error.CASES["235b_a22b"], 115.0, 1.017),
}
"""Eight layers of 30B-A3B, and two of 235B-A22B, on one H200."""


@pytest.mark.parametrize("name", MIXTURES)
def test_the_plan_is_near_what_a_mixture_took(name):
    case, gib, seconds = MIXTURES[name]
    predicted_gib, predicted_seconds = plan_error.predict(case, CARDS["h200"])
    assert predicted_seconds == pytest.approx(seconds, rel=0.12)
    assert 0.99 * gib < predicted_gib < 1.03 * gib


@pytest.mark.parametrize("name", SEVERAL_H200)
def test_the_plan_is_near_what_several_h200_took(name):
    gib, seconds = SEVERAL_H200[name]
    predicted_gib, predicted_seconds = plan_error.predict(plan_error.CASES[name], CARDS["h200"])
    assert predicted_seconds == pytest.approx(seconds, rel=0.1)
    assert 0.985 * gib < predicted_gib < 1.03 * gib


def test_the_plan_is_made_for_the_samples_that_are_timed():
    """Memory of the longest micro-batch; time in proportion to the tokens: the cases' batches are alike but twice as
    many on two data-parallel ranks."""
    case, two = Case("one", "qwen3-1.7B"), Case("two", "qwen3-1.7B", dp=2)
    tokens = [sum(s.length for s in make_samples(c, 1000, seed=1002)) for c in (case, two)]
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=0.1)
    (gib, seconds), (gib_of_two, seconds_of_two) = (plan_error.predict(c, CARDS["h200"]) for c in (case, two))
    assert seconds_of_two == pytest.approx(seconds, rel=0.1)
    assert gib - gib_of_two == pytest.approx(6 * 1_720_574_976 / GIB, rel=0.01)  # half of the optimizer's 12 bytes


def test_the_worst_error_of_all_cases_in_the_folder_is_written_and_a_failed_one_is_named(tmp_path, capsys):
    gib, seconds = plan_error.predict(plan_error.CASES["1.7b"], CARDS["h200"])
    folder = tmp_path / "plan_cases"
    folder.mkdir()
    good = {"peak_gib": gib / 1.05, "step_seconds": seconds / 0.9, "tokens_per_second": 1.0, "device": "NVIDIA H200"}
    for name, figures in (("1.7b", good), ("4b", {"error": "it broke\nbadly"})):
        record = {"case": asdict(plan_error.CASES[name]), "figures": figures}
        (folder / f"{name}.json").write_text(json.dumps(record))
    args = plan_error.build_parser().parse_args(["--report", "--out-dir", str(tmp_path)])
    assert plan_error.report(args) == 1
    out = capsys.readouterr().out
    assert "4b                 failed: it broke\n" in out and "+5.0%" in out and "-10.0%" in out
    found = {
        name: json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("plan_memory_error", "plan_step_time_error")
    }
    assert [record["value"] for record in found.values()] == [5.0, 10.0]
    assert {record["card"] for record in found.values()} == {"NVIDIA H200"}


def test_a_case_runs_on_the_cpu_and_writes_no_result(tmp_path):
    command = [
        sys.executable, str(ROOT / "benchmarks" / "plan_error.py"), "--device", "cpu", "--model", "tiny",
        "--max-tokens-per-gpu", "256", "--out-dir", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("tiny ") and done.stdout.rstrip().endswith("one rank, cpu")
    figures = json.loads((tmp_path / "plan_cases" / "tiny.json").read_text())["figures"]
    assert figures["step_seconds"] > 0 and figures["peak_gib"] > 0
    assert not list(tmp_path.glob("*.json"))
