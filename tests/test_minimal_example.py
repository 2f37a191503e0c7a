"""examples/minimal/rl_loop.py as a user runs it: real engine, sandbox and trainer, in two steps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from run_utils import heed_interrupts
from sglang_utils import processes_with

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "minimal"
STEP = re.compile(
    r"step (\d+): weights (\d+), reward \S+, tool calls (\d+), loss \S+, kl (\S+), gradient (\S+); "
    r"engine at (\d+), (\d+)/24 tensors new"
)

pytestmark = pytest.mark.timeout(1200)


def start(script: str, *flags: object, mark: str = "NONE=1") -> subprocess.Popen[str]:
    name, value = mark.split("=")
    command = [sys.executable, EXAMPLE / script, *flags]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), name: value}
    return subprocess.Popen(
        [*map(str, command)], env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Supervised for long enough that some of its calls are right."""
    folder = tmp_path_factory.mktemp("start")
    assert start("warm_start.py", "--output-dir", folder, "--steps", 300).wait() == 0
    return folder / "model"


def test_two_steps_call_the_tool_learn_and_move_the_engine(model: Path, tmp_path: Path):
    out, _ = start("rl_loop.py", "--model", model, "--steps", 2, "--output-dir", tmp_path).communicate()
    steps = [match.groups() for match in map(STEP.fullmatch, out.splitlines()) if match is not None]
    assert len(steps) == 2, out
    for number, (step, sampled_from, calls, kl, gradient, version, new) in enumerate(steps):
        assert (int(step), int(sampled_from), int(version)) == (number, number, number + 1)
        assert int(calls) > 0
        assert abs(float(kl)) < 1e-5
        assert float(gradient) > 0 and int(new) == 24


def test_ctrl_c_ends_whatever_the_example_started(model: Path, tmp_path: Path):
    mark = f"SLIME_RETOOL_TEST_RUN={uuid.uuid4().hex}"
    run = start("rl_loop.py", "--model", model, "--steps", 1000, "--output-dir", tmp_path, mark=mark)
    assert run.stdout is not None and run.stdout.readline().startswith("step 0:")
    assert "slime_retool.engine.cpu_main" in " ".join(processes_with(mark).values())
    run.send_signal(signal.SIGINT)
    run.communicate()
    assert run.returncode == 130 and processes_with(mark) == {}


def test_the_page_is_one_page():
    assert len((EXAMPLE / "rl_loop.py").read_text().splitlines()) <= 150
