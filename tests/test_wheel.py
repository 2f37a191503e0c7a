"""What `pip install` puts on a machine without the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from sglang_utils import make_tiny_checkpoint

from slime_retool.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.timeout(3600)
BUILT_FROM = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "slime_retool", "megatron_bridge", "scripts")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build leaves folders beside its sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    command = ["pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    done = subprocess.run([sys.executable, "-m", *command], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_the_recipes_hooks_and_the_model_scripts(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = [path for package in ("slime_retool", "megatron_bridge") for path in (ROOT / package).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in modules} <= names
    assert "slime_retool/recipes/retool/generate_with_retool.py" in names
    scripts = {Path(name).name for name in names if "/data/share/slime-retool/models/" in name}
    assert scripts == {path.name for path in (ROOT / "scripts" / "models").glob("*.sh")}


def test_commands_and_hooks_run_from_the_wheel_alone(wheel: Path, tmp_path: Path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import slime_retool, slime_retool.recipes.retool.generate_with_retool as hooks; print(slime_retool.__file__)\n"
        "from slime_retool.cli import main; main(['convert', 'to-megatron', '--help'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith(str(tmp_path / "site")), done.stderr
    assert "usage: slime-retool convert to-megatron" in done.stdout


Run = Callable[..., str]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Run:
    """Runs a command in an empty folder, with the wheel installed in a fresh environment. Returns what it printed.

    The packages that the wheel requires are those of this interpreter (by one line of a .pth file, whose folder's own
    .pth files, such as that of an editable install, are not read).
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    purelib = sysconfig.get_path("purelib", "venv", {"base": str(folder / "venv")})
    (Path(purelib) / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment["PATH"] = f"{python.parent}:{environment['PATH']}"

    def run(*command: object, expected: int = 0) -> str:
        done = subprocess.run(
            [str(word) for word in command], cwd=folder / "work", env=environment, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1800,
        )  # fmt: skip
        assert done.returncode == expected, done.stdout[-9000:]
        return done.stdout

    (folder / "work").mkdir()
    # pip's own program, with the fresh environment as the place to install to.
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    found = run(
        "python", "-c", "import megatron_bridge, slime_retool as s; print(s.__file__, megatron_bridge.__file__)"
    )
    assert all(path.startswith(f"{purelib}{os.sep}") for path in found.split()) and len(found.split()) == 2
    make_tiny_checkpoint(folder / "work" / "hf")
    return run


def test_an_installed_wheel_takes_a_model_from_its_checkpoint_through_sft_and_rl_and_back(installed: Run):
    """doctor, convert, data check, SFT, RL, and the trained weights as Hugging Face has them: no checkout in sight."""
    work = Path(installed("pwd").strip())
    assert re.search(r"^megatron-core +\d", installed("slime-retool", "doctor"), re.MULTILINE)
    installed("slime-retool", "convert", "to-megatron", "--hf-checkpoint", "hf", "--save", "td")
    questions = [{"role": "user", "content": f"{n} + 1?"} for n in range(8)]
    answers = [{"role": "assistant", "content": str(n + 1)} for n in range(8)]
    sft = [{"messages": [question, answer]} for question, answer in zip(questions, answers, strict=True)]
    rl = [
        {"prompt": [question], "label": answer["content"]} for question, answer in zip(questions, answers, strict=True)
    ]
    for name, rows in (("sft", sft), ("rl", rl)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checked = installed("slime-retool", "data", "check", "sft.jsonl", "--tokenizer", "hf")
    assert json.loads(checked)["rows"] == 8
    (work / "my_reward.py").write_text(
        "async def longer_is_better(args, sample):\n    return sample.response_length / 10 + sample.index % 2\n"
    )
    shared = ["slime-retool", "train", "--device", "cpu", "--hf-checkpoint", "hf", "--lr", "1e-3", "--num-rollout", "2"]
    said = installed(
        *shared, "--ref-load", "td", "--prompt-data", "sft.jsonl", "--input-key", "messages", "--loss-type", "sft_loss",
        "--rollout-batch-size", "4", "--output-dir", "sft", "--save", "sft/save",
    )  # fmt: skip
    # Nothing is said of a Ray cluster's token, which nobody needs in one of the run's own.
    assert "starting Ray" in said and "authentication" not in said
    installed(
        *shared, "--ref-load", "sft/save", "--prompt-data", "rl.jsonl", "--rollout-batch-size", "2",
        "--custom-rm-path", "my_reward.longer_is_better", "--tool-format", "retool",
        "--custom-generate-function-path", "slime_retool.recipes.retool.generate_with_retool.generate",
        "--n-samples-per-prompt", "4", "--rollout-max-response-len", "24", "--rollout-max-context-len", "1024",
        "--sglang-max-total-tokens", "16384", "--output-dir", "rl", "--save", "rl/save", "--save-hf", "trained",
    )  # fmt: skip
    losses, rewards = (
        [row[name] for row in read_metrics(work / folder / "metrics.jsonl")]
        for folder, name in (("sft", "train/loss"), ("rl", "rollout/reward_mean"))
    )
    assert len(losses) == 2 and losses[1] < losses[0] and len(rewards) == 2 and all(reward > 0.5 for reward in rewards)
    installed(
        "slime-retool", "convert", "to-hf", "--input-dir", "rl/save", "--output-dir", "back", "--origin-hf-dir", "hf"
    )
    weights = {name: (work / name / "model.safetensors").read_bytes() for name in ("hf", "trained", "back")}
    assert weights["back"] == weights["trained"] != weights["hf"]
    refused = installed("slime-retool", "train", "--hf-checkpoint", "none", expected=2)
    assert refused.count("\n") == 1 and "Traceback" not in refused
