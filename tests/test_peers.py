"""benchmarks/peers: the lengths that both sides get, and what is said of a peer that did not run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "peers"))

import equal_work  # noqa: E402
import limited  # noqa: E402
import step_ratio  # noqa: E402
import trl_step  # noqa: E402

from slime_retool.types import Sample  # noqa: E402


def test_lengths_are_spread_evenly_over_their_logarithms() -> None:
    found = sorted(equal_work.limits(4001, 64, 512))
    assert found[0] >= 64 and found[-1] <= 512
    assert found[2000] == pytest.approx((64 * 512) ** 0.5, rel=0.05)
    assert equal_work.limits(5, 64, 512) == equal_work.limits(5, 64, 512)


def test_a_row_s_length_replaces_the_run_s_and_the_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    async def turn(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        seen.append(params)
        return sample

    monkeypatch.setattr(limited, "generate_turn", turn)
    given = {"max_new_tokens": 512, "temperature": 1.0}
    asyncio.run(limited.generate(None, Sample("q", metadata={"limit": 70}), given))  # type: ignore[arg-type]
    assert seen == [{"max_new_tokens": 70, "temperature": 1.0, "ignore_eos": True}]
    assert given["max_new_tokens"] == 512


def rows(metric: str, *values: float) -> list[dict[str, float]]:
    return [{metric: value} for value in values]


def test_the_ratio_is_of_medians_after_two_steps() -> None:
    ours = rows("perf/step_seconds", 99.0, 99.0, 4.0, 5.0, 6.0)
    theirs = rows("timing_s/step", 1.0, 1.0, 10.0, 9.0, 80.0)
    entry = step_ratio.compared(ours, theirs, "")
    assert entry["step_ratio"] == 2.0 and "why" not in entry


def test_a_peer_that_did_not_run_has_a_reason_and_no_ratio(tmp_path: Path) -> None:
    entry = step_ratio.compared(
        rows("perf/step_seconds", 1.0, 1.0, 1.0), step_ratio.peer_steps(tmp_path / "none"), "it hung"
    )
    assert entry["step_ratio"] is None and entry["why"] == "it hung"


def test_only_lines_of_whole_steps_count(tmp_path: Path) -> None:
    lines = [{"step": 0, "data": {"val/x": 1}}, {"step": 1, "data": {"timing_s/step": 2.0}}]
    (tmp_path / "verl.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert step_ratio.peer_steps(tmp_path / "verl.jsonl") == [{"timing_s/step": 2.0}]


def test_a_rollout_of_trl_is_two_optimizer_steps_and_what_is_not_its_generation_or_log_probs_is_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0, 17.0])
    monkeypatch.setattr(trl_step.time, "perf_counter", lambda: next(clock))
    times = trl_step.RolloutTimes(tmp_path / "trl.jsonl", 2)
    times.add(trl_step.GENERATE, 4.0, in_loss=False)
    times.add(trl_step.LOG_PROBS, 1.0, in_loss=False)
    times.add(trl_step.LOG_PROBS, 2.0, in_loss=True)
    times.add("GRPOTrainer._prepare_inputs", 5.5, in_loss=False)
    for number in (1, 2, 3, 4):
        times.end_of_optimizer_step(number)
    assert step_ratio.peer_steps(tmp_path / "trl.jsonl") == [
        {"timing_s/gen": 4.0, "timing_s/old_log_prob": 1.0, "timing_s/step": 10.0, "timing_s/update_actor": 5.0},
        {"timing_s/step": 7.0, "timing_s/update_actor": 7.0},
    ]


def test_the_comparison_of_one_peer_leaves_the_others_alone(tmp_path: Path) -> None:
    (tmp_path / "ours.jsonl").write_text("".join(f'{{"step": {n}, "perf/step_seconds": 2.0}}\n' for n in range(3)))
    (tmp_path / "theirs.jsonl").write_text(3 * '{"data": {"timing_s/step": 5.0}}\n')
    files = ["--ours", str(tmp_path / "ours.jsonl"), "--theirs", str(tmp_path / "theirs.jsonl")]
    for peer in ("verl", "trl"):
        step_ratio.main(["--peer", peer, *files, "--output", str(tmp_path / "peer.json")])
    found = json.loads((tmp_path / "peer.json").read_text())
    assert {peer: entry["step_ratio"] for peer, entry in found.items()} == {"verl": 2.5, "trl": 2.5}


@pytest.mark.parametrize(("status", "why"), [(0, "a side did not finish more than two steps"), (3, "verl ended with")])
def test_a_peer_that_fails_is_compared_all_the_same(status: int, why: str, tmp_path: Path) -> None:
    """Python stands for both sides: it makes files with the scripts of this folder and does nothing as a trainer."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\ncase "$*" in\n  *verl.trainer*) exit {status} ;;\n  *.py*) exec {sys.executable} "$@" ;;\nesac\n'
    )
    python.chmod(0o755)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": f"{n} + {n}?"}) + "\n" for n in range(4)))
    variables = {
        "PATH": "/usr/bin:/bin", "PYTHON": str(python), "MODEL": "none", "VERL_SITE": str(tmp_path), "DEVICE": "cpu",
        "QUESTIONS": str(questions), "WORK": str(tmp_path / "w"), "RESULT": str(tmp_path / "r" / "peer.json"),
        "STEPS": "2", "PROMPTS": "2",
    }  # fmt: skip
    script = Path(step_ratio.__file__).with_name("verl.sh")
    done = subprocess.run(["bash", str(script)], env=variables, capture_output=True, text=True)
    assert done.returncode == (status != 0), done.stderr
    entry = json.loads((tmp_path / "r" / "peer.json").read_text())["verl"]
    assert entry["step_ratio"] is None and why in entry["why"]
