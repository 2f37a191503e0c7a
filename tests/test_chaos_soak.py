"""The soak's own arithmetic: whom it strikes, and what it calls a problem."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import chaos_soak
from benchmarks.chaos_soak import FAULTS, Report, judge, outside_band, strike


def results(folder: Path, steps: int, *, memory: float = 1.0, numbers: list[list[int]] | None = None) -> Path:
    """A run's folder after so many steps of two samples each."""
    (folder / "rollouts").mkdir(parents=True)
    rows = [
        {
            "step": step, "train/loss": 0.1,
            **({"memory/driver_host_gib": 1.0 if step < steps // 2 else memory} if step != 3 else {}),
            "rollout/engine_moved": 2.0, **({"rollout/failed_tool": 3.0} if step == 1 else {}),
        }
        for step in range(steps)
    ]  # fmt: skip
    rows.append({"step": steps - 1, "eval/held_out/accuracy": 0.75})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, own in enumerate(numbers or [[2 * step, 2 * step + 1] for step in range(steps)]):
        path = folder / "rollouts" / f"rollout_{step:06d}.jsonl"
        path.write_text("".join(json.dumps({"index": number}) + "\n" for number in own))
    return folder


def test_a_run_that_came_through_has_no_problem(tmp_path: Path):
    report = Report(exit_code=0)
    judge(report, results(tmp_path / "run", 10), 10)
    assert report.problems == [] and (report.steps, report.accuracy, report.moved) == (10, 0.75, 20.0)
    assert report.failed == {"rollout/failed_tool": 3.0} and report.driver_gib == [1.0, 1.0]


@pytest.mark.parametrize(
    ("report", "made", "problem"),
    [
        (Report(exit_code=1), {}, "exit code 1"),
        (Report(exit_code=0, left_over=["sglang::scheduler"]), {}, "1 processes are left"),
        (Report(exit_code=0), {"memory": 1.2}, "the driver grew from 1.0 to 1.2 GiB"),
        (Report(exit_code=0), {"numbers": [[0, 1], [1, 2]]}, r"samples \[1\] were trained on more than once"),
    ],
    ids=["failed", "left over", "grown", "twice"],
)
def test_what_went_wrong_is_a_problem(report: Report, made: dict, problem: str, tmp_path: Path):
    judge(report, results(tmp_path / "run", 10, **made), 10)
    assert len(report.problems) == 1 and re.search(problem, report.problems[0])


def test_a_run_that_stopped_early_is_a_problem(tmp_path: Path):
    report = Report(exit_code=0)
    judge(report, results(tmp_path / "run", 4), 10)
    assert report.problems == ["4 of 10 steps"]


def test_the_band_is_that_of_the_undisturbed_runs_and_of_chance():
    # Two standard errors of 100 answers at 0.7: 0.0917.
    assert outside_band(0.56, [0.65, 0.7, 0.75], 100) is None
    assert outside_band(0.84, [0.65, 0.7, 0.75], 100) is None
    complaint = outside_band(0.55, [0.65, 0.7, 0.75], 100)
    assert complaint is not None and "0.550 is outside of 0.558 to 0.842" in complaint
    assert outside_band(0.85, [0.65, 0.7, 0.75], 100) is not None


COMMANDS = {
    "engine killed": [sys.executable, "-m", "slime_retool.engine.cpu_main", "--port", "1"],
    "router killed": [sys.executable, "/x/slime_retool/engine/router_main.py", "--worker-urls"],
    "trainer killed": ["ray::TrainerActor.trainer"],
    "broker killed": [sys.executable, "-I", "-S", "-X", "utf8", "/x/boot.py", "broker.broker", "7"],
}
OTHERS = [
    [sys.executable, "/x/engine/supervisor.py", "5", "1.0", *COMMANDS["engine killed"]],
    ["ray::EngineActor"], ["sglang::scheduler"], [sys.executable, "-m", "slime_retool.train"],
]  # fmt: skip


def test_each_fault_strikes_the_process_that_it_names():
    for kind, (fits, _) in FAULTS.items():
        command = COMMANDS[kind.replace("stopped", "killed")]
        assert [other for other in [*COMMANDS.values(), *OTHERS] if fits(other)] == [command]


def test_a_strike_reaches_all_below_the_process_it_finds(monkeypatch: pytest.MonkeyPatch):
    code = "import subprocess, sys; print(flush=True) or subprocess.run([sys.executable, '-c', 'input()'])"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdin is not None
    parent.stdout.readline()
    process = psutil.Process(parent.pid)
    while not (children := process.children()):
        pass
    faults = {"it": (lambda command: True, signal.SIGKILL), "no": (lambda command: False, signal.SIGKILL)}
    monkeypatch.setattr(chaos_soak, "FAULTS", faults)
    assert not strike("no", [process], random.Random(1))
    assert strike("it", [process], random.Random(1))
    assert parent.wait(60) == -signal.SIGKILL
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    parent.stdin.close()
    parent.stdout.close()
