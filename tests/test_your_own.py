"""docs/your_own.md, block by block, as a reader would follow it: from an empty folder to a curve."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tool_helpers import ScriptedEngine, tokenizer

from slime_retool.config import Config
from slime_retool.metrics import read_metrics
from slime_retool.protocols import load_function
from slime_retool.rollout.context import RolloutContext, use_context
from slime_retool.types import Sample, SampleStatus

pytestmark = pytest.mark.timeout(3600)
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "your_own.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
"""(language, text), as they stand on the page."""


def write_files(folder: Path) -> None:
    for language, text in BLOCKS:
        if language == "python":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)


def test_the_tool_is_called_and_its_answer_is_rewarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = [
        f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}"}}}}</tool_call>' for item in ("tea", "gold")
    ]
    engine = ScriptedEngine([(calls[0], "stop"), (calls[1], "stop"), ("It costs 3.", "stop")])
    config = Config(rollout_max_response_len=20_000)
    sample = Sample(prompt=[{"role": "user", "content": "What does tea cost?"}], label="3")

    async def main() -> None:
        async with use_context(RolloutContext(config, tokenizer(), engine)):
            await load_function("my_task.generate")(config, sample, {})
            sample.reward = await load_function("my_task.reward_func")(config, sample)

    asyncio.run(main())
    assert sample.status is SampleStatus.COMPLETED and sample.reward == {"score": 1.0, "acc": True}
    assert (sample.num_tool_calls, sample.num_tool_errors) == (2, 1) and "Error: there is no gold." in sample.response
    for answer in ("It costs 4.", "3", ""):
        sample.response = answer
        assert asyncio.run(load_function("my_task.reward_func")(config, sample)) == {"score": 0.0, "acc": False}


def run(block: str, folder: Path) -> None:
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-e", "-c", block], cwd=folder, env=environment, text=True, check=False, timeout=1800,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-9000:]


def check_rows(folder: Path) -> None:
    rows = [text for language, text in BLOCKS if language == "jsonl"]
    files = [(folder / name).read_text().splitlines(keepends=True) for name in ("sft.jsonl", "rl.jsonl")]
    assert rows == [lines[0] for lines in files] and [len(lines) for lines in files] == [8, 8]


def test_every_step_up_to_training_runs_and_every_training_command_is_accepted(tmp_path: Path) -> None:
    write_files(tmp_path)
    for language, block in BLOCKS:
        if language == "bash" and "slime-retool train" in block:
            # Nothing is trained here, so that RL's reference model is the untrained one.
            run(block.rstrip().replace("--ref-load sft/checkpoint", "--ref-load model_td") + " --dry-run", tmp_path)
        elif language == "bash" and "slime-retool view" not in block:
            run(block, tmp_path)
    check_rows(tmp_path)
    assert not (tmp_path / "sft").exists() and not (tmp_path / "rl").exists()


def test_the_whole_page_runs_and_the_curve_rises(tmp_path: Path) -> None:
    write_files(tmp_path)
    for language, block in BLOCKS:
        if language == "bash":
            run(block, tmp_path)
    check_rows(tmp_path)
    losses, accuracy, calls = (
        [row[name] for row in read_metrics(tmp_path / folder / "metrics.jsonl")]
        for folder, name in (("sft", "train/loss"), ("rl", "rollout/accuracy"), ("rl", "rollout/tool_calls_mean"))
    )
    assert len(losses) == 100 and losses[0] > 5 and losses[-1] < 0.1
    assert len(accuracy) == 24 and sum(accuracy[-6:]) > sum(accuracy[:6]) and min(calls) > 0
    assert (tmp_path / "page" / "index.html").is_file()
    assert len(list((tmp_path / "rl" / "rollouts").glob("rollout_*.jsonl"))) == 24  # the page's samples
