"""`slime-retool`: its table of commands, their --help, and what a user meets when something is not as expected."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slime_retool import __version__
from slime_retool.cli import COMMANDS, main
from slime_retool.errors import ConfigError, EngineError, SaveError, run_command
from slime_retool.metrics import Metrics
from slime_retool.rollout.transcripts import Transcripts, dump_samples
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.dump import dump_trained
from slime_retool.types import Sample, SampleStatus, TrainSample

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_the_page_names_every_command(arguments: list[str], code: int, capsys):
    assert main(arguments) == code
    page = capsys.readouterr().out
    assert all(f"\n  {name} " in page and purpose in page for name, (_, purpose) in COMMANDS.items())


@pytest.mark.parametrize(("arguments", "code"), [(["convert"], 2), (["convert", "--help"], 0)])
def test_the_first_word_of_two_names_the_commands_that_begin_with_it(arguments: list[str], code: int, capsys):
    assert main(arguments) == code
    page = capsys.readouterr().out
    assert "convert to-megatron" in page and "convert to-hf" in page and "doctor" not in page


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["evl", "--lr", "1"], "unknown command 'evl'; did you mean `slime-retool eval`?"),
        (["data", "chekc", "FILE"], "unknown command 'data chekc'; did you mean `slime-retool data check`?"),
        (["--lr", "1"], "unknown command '--lr'; see `slime-retool --help`"),
    ],
)
def test_an_unknown_command_is_refused_with_the_nearest_one(arguments: list[str], hint: str, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"slime-retool: error: {hint}\n"


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"slime-retool {__version__}\n"
    packaged = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert packaged.split()[-1] == __version__


HEAVY = ("torch", "megatron", "sglang", "ray", "transformers")
HELP = """
import contextlib, io, json, sys
from slime_retool.cli import COMMANDS, main
pages = {}
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as page:
        try:
            code = main([*name.split(), "--help"])
        except SystemExit as done:
            code = done.code
    pages[name] = [code, page.getvalue()]
pages["loaded"] = sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps(pages))
"""


@pytest.fixture(scope="module")
def pages() -> dict[str, tuple[int, str]]:
    """Name of each command -> exit code and output of its --help; "loaded" -> what was imported for all of them."""
    done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_help_is_there_for_every_command_and_needs_no_heavy_package(pages):
    assert not set(pages.pop("loaded")) & set(HEAVY)
    for name, (code, page) in pages.items():
        assert code == 0 and page.startswith("usage: ") and "--help" in page, name
        assert name == "train" or page.startswith(f"usage: slime-retool {name}"), name


def test_help_shows_a_commands_own_flags_and_no_others(pages):
    training = ("--lr ", "--adam-beta1", "--tensor-model-parallel-size", "--num-layers", "--save-interval", "--kl-coef")
    assert all(flag in pages["train"][1] for flag in training)
    own = {
        "eval": ("--eval-prompt-data", "--eval-endpoint-url", "--max-turns", "--rollout-temperature"),
        "plan": ("--card", "--mean-prompt", "--mean-response", "--json"),
        "convert to-hf": ("--input-dir", "--output-dir", "--peft"),
        "data check": ("--tokenizer",),
    }
    for name, flags in own.items():
        page = pages[name][1]
        assert all(flag in page for flag in flags), name
        assert not any(flag in page for flag in training), name
        assert "Optimizer" not in page and "Parallelism" not in page, name
    assert "--num-layers" in pages["convert to-megatron"][1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("to-megatron --save OUT", "--hf-checkpoint DIR is required"),
        ("to-megatron", "--hf-checkpoint DIR and --save DIR are required"),
        ("to-hf --input-dir TD --origin-hf-dir HF", "--output-dir DIR is required"),
        ("to-hf --output-dir OUT", "--input-dir DIR and --origin-hf-dir DIR are required"),
        ("init-tokens HF", "--output-dir DIR is required"),
    ],
)
def test_convert_names_the_flags_that_are_missing(arguments: str, said: str, capsys):
    assert main(["convert", *arguments.split()]) == 2
    assert capsys.readouterr().err.endswith(f": {said}\n")


def test_flags_that_help_does_not_show_are_still_taken(capsys):
    assert main(["eval", "--lr", "0.1", "--tensor-model-parallel-size", "2"]) == 2
    assert "--eval-prompt-data NAME FILE is required" in capsys.readouterr().err


def test_every_command_of_the_table_is_a_function():
    assert all(callable(pkgutil.resolve_name(target)) for target, _ in COMMANDS.values())


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("no such flag"), 2, "prog: error: no such flag\n"),
        (SaveError("the disk is full"), 1, ""),
        (EngineError("it died"), 1, ""),
        (KeyboardInterrupt(), 130, "prog: stopped\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_command_ends_in_one_line_and_with_a_code_that_tells(error: BaseException, code, line, capsys, caplog):
    def command() -> int:
        raise error

    assert run_command("prog", command, interrupted="stopped") == code
    assert capsys.readouterr().err == line
    assert (f"{type(error).__name__}: {error}" in caplog.text) == (code == 1)


def test_what_is_no_mistake_of_the_user_keeps_its_traceback_unless_a_command_says_so(capsys):
    def command() -> int:
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        run_command("prog", command)
    assert run_command("prog", command, mistakes=(ValueError, OSError)) == 2
    assert capsys.readouterr().err == "prog: error: odd\n"


def _log(folder: Path) -> None:
    (folder / "metrics.jsonl").symlink_to("/dev/full")
    with contextlib.closing(Metrics(folder)) as metrics:
        metrics.log(0, {"train/loss": 1.0})


def _dump(folder: Path) -> None:
    (folder / "rollout.jsonl.part").symlink_to("/dev/full")
    dump_samples(folder / "rollout.jsonl", [(Sample("q", "2"), {})])


def _dump_trained(folder: Path) -> None:
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "trained_000000.jsonl.part").symlink_to("/dev/full")
    sample = TrainSample(tokens=[1, 2], loss_mask=[0, 1], rollout_log_probs=[0.0, -1.0], reward=1.0)
    dump_trained(folder / "rollouts" / "trained_000000.jsonl", TrainBatch.from_samples([sample]), None, torch.zeros(2))


def _keep_transcripts(folder: Path) -> None:
    with Transcripts(folder / "set.jsonl", further={}, setting={}) as transcripts:
        (folder / "set.jsonl").unlink()
        (folder / "set.jsonl").symlink_to("/dev/full")
        transcripts._file = (folder / "set.jsonl").open("a")  # as if the disk had filled up meanwhile
        transcripts.add(Sample("q", "2"), Sample("q", "2"))


@pytest.mark.parametrize("write", [_log, _dump, _dump_trained, _keep_transcripts], ids=lambda write: write.__name__)
def test_a_full_disk_ends_a_run_in_one_line_whatever_fills_it(write: Callable[[Path], None], tmp_path, capsys, caplog):
    def command() -> int:
        write(tmp_path)
        return 0

    assert run_command("prog", command) == 1
    [record] = caplog.records
    assert "no room is left on the disk of a folder that it writes to, such as --output-dir" in record.getMessage()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EBADF])
def test_a_full_disk_is_named_where_the_system_does_and_other_errors_are_bugs(number: int, caplog):
    def command() -> int:
        raise OSError(number, "so it is", "/out/dump.jsonl")

    if number == errno.EBADF:
        with pytest.raises(OSError, match="so it is"):
            run_command("prog", command)
    else:
        assert run_command("prog", command) == 1
        assert "no room is left on the disk of /out/dump.jsonl (so it is)" in caplog.text


def test_sigterm_ends_a_command_as_ctrl_c_does_and_only_while_it_runs(capsys):
    before = signal.getsignal(signal.SIGTERM)
    ended = []

    def command() -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append(True)
        return 0

    assert run_command("prog", command) == 130 and ended
    assert signal.getsignal(signal.SIGTERM) is before
    assert capsys.readouterr().err == "prog: interrupted\n"


def test_doctor_says_what_is_missing(monkeypatch, capsys):
    from slime_retool.commands import doctor

    monkeypatch.setattr(doctor, "REQUIRED", ("torch", "no-such-package"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "no-such-package       missing\n" in out and "1 required package(s) missing" in out


@pytest.mark.parametrize(("visible", "said"), [(None, "2\n"), ("1", "1\n"), ("", "none: runs use the CPU and gloo\n")])
def test_doctor_counts_the_gpus_that_runs_would_use(visible: str | None, said: str, monkeypatch, capsys):
    glob = Path.glob
    devices = [Path("/dev/nvidia0"), Path("/dev/nvidia1")]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: devices if self == Path("/dev") else glob(self, pattern))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    main(["doctor"])
    assert f"GPUs                  {said}" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [True, False])
def test_doctor_says_where_every_process_compiles_its_imports(kept: bool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "dont_write_bytecode", not kept)
    main(["doctor"])
    assert ("bytecode              not kept" in capsys.readouterr().out) == (not kept)


def dump(path: Path, count: int = 3) -> Path:
    prompt = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "tool_calls": []}]
    status = SampleStatus.COMPLETED
    samples = [Sample(prompt, "2", index=i, response=f"r{i}", reward=float(i - 1), status=status) for i in range(count)]
    dump_samples(path, [(sample, {}) for sample in samples])
    return path


def test_view_shows_samples_and_only_wrong_ones_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = str(dump(tmp_path / "rollout.jsonl"))
    assert main(["view", file]) == 0
    assert [line for line in capsys.readouterr().out.split("\n") if line.startswith("r")] == ["r0", "r1", "r2"]
    assert main(["view", file, "--wrong", "--accuracy-threshold", "0.5"]) == 0
    assert [line for line in capsys.readouterr().out.split("\n") if line.startswith("r")] == ["r0", "r1"]


@pytest.mark.parametrize(
    ("reward", "flags", "wrong"),
    [
        (0.5, ["--accuracy-threshold", "0.5"], False),
        (0.4, ["--accuracy-threshold", "0.5"], True),
        (None, [], True),
        ({"score": 0.4, "acc": False}, [], True),  # shaped above 0
        ({"score": -0.2, "acc": True}, [], False),  # a penalty on a right answer
        ({"points": 0.0}, ["--reward-key", "points", "--accuracy-threshold", "1"], True),
        ({"points": 1.0}, ["--reward-key", "points", "--accuracy-threshold", "1"], False),
    ],
)
def test_view_calls_wrong_what_an_evaluation_does(reward, flags, wrong, tmp_path: Path, capsys):
    dump_samples(tmp_path / "r.jsonl", [(Sample("q", "2", index=0, response="r", reward=reward), {})])
    assert main(["view", str(tmp_path / "r.jsonl"), "--wrong", *flags]) == 0
    assert ("sample 0" in capsys.readouterr().out) == wrong


def test_view_says_which_rewards_there_are_when_none_tells(tmp_path: Path, capsys):
    dump_samples(tmp_path / "r.jsonl", [(Sample("q", "2", index=0, response="r", reward={"points": 1.0}), {})])
    assert main(["view", str(tmp_path / "r.jsonl")]) == 0
    assert "reward {'points': 1.0}" in capsys.readouterr().out
    assert main(["view", str(tmp_path / "r.jsonl"), "--wrong"]) == 2
    assert "rewards alone do not say which answers are wrong; add --accuracy-threshold" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "r.jsonl"), "--wrong", "--accuracy-threshold", "1"]) == 2
    assert "line 1: the reward has no entry 'score', only ['points']; set --reward-key" in capsys.readouterr().err


def test_view_leaves_out_a_last_line_that_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = dump(tmp_path / "rollout.jsonl")
    file.write_bytes(file.read_bytes()[:-30])
    assert main(["view", str(file)]) == 0
    assert "sample 1" in (out := capsys.readouterr().out) and "sample 2" not in out


@pytest.mark.parametrize("text", ['{"step": 1}\n', '{\n "a": 1\n}\n', "[1]\n", "no JSON\n"])
def test_view_names_the_line_of_a_file_that_holds_no_samples(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert main(["view", str(tmp_path / "metrics.jsonl")]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/metrics.jsonl, line 1 is no dumped sample" in error and error.count("\n") == 1


def test_view_ends_quietly_when_its_reader_does(tmp_path: Path):
    file = dump(tmp_path / "rollout.jsonl", 2000)
    viewer = subprocess.Popen(
        [sys.executable, "-m", "slime_retool.cli", "view", str(file), "--limit", "2000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert viewer.stdout is not None and viewer.stderr is not None
    viewer.stdout.readline()
    viewer.stdout.close()
    assert viewer.stderr.read() == "" and viewer.wait() == 0


def test_sandbox_serve_says_in_one_line_that_its_port_is_taken(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["sandbox", "serve", "--port", str(port), "--isolation", "none"]) == 1
    assert "slime-retool sandbox serve: error: " in (error := capsys.readouterr().err) and str(port) in error
    assert "Traceback" not in error


def test_sandbox_serve_refuses_a_limit_that_cannot_work(capsys: pytest.CaptureFixture[str]):
    assert main(["sandbox", "serve", "--concurrency", "0"]) == 2
    assert "sandbox concurrency must be above 0, got 0" in capsys.readouterr().err
    for flag, value, says in (
        ("--memory-mb", "-1", "memory_mb must be above 0, got -1"),
        ("--max-timeout", "nan", "max_timeout must be above 0, got nan"),
        ("--max-timeout", "1e400", "max_timeout must be above 0, got inf"),
        ("--token-file", "/no/token", "cannot be read"),
    ):
        assert main(["sandbox", "serve", "--port", "0", flag, value]) == 2
        assert says in capsys.readouterr().err


def test_a_hook_is_found_in_the_folder_where_the_command_is_given(tmp_path: Path):
    """As with `python -m slime_retool.train`, although an installed command's path begins with its own folder."""
    (tmp_path / "my_task.py").write_text("def reward_func(args, sample, **kwargs):\n    return 1.0\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "q", "label": "1"}\n')
    script = tmp_path / "bin" / "slime-retool"
    script.parent.mkdir()
    script.write_text("import sys\nfrom slime_retool.cli import main\nsys.exit(main())\n")
    words = f"eval --eval-prompt-data a {rows} --eval-endpoint-url http://127.0.0.1:1 --eval-endpoint-model m"
    hook = ["--custom-rm-path", "my_task.reward_function"]
    done = subprocess.run(
        [sys.executable, str(script), *words.split(), *hook],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2,
        "slime-retool eval: error: --custom-rm-path 'my_task.reward_function': module 'my_task' has no function "
        "'reward_function'\n",
    )


@pytest.mark.parametrize("version", ["3.9", "3.14"])
def test_make_names_the_supported_versions_before_it_installs_anything(version: str, tmp_path: Path):
    python = tmp_path / "python"
    major, minor = version.split(".")
    python.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = ({major}, {minor}, 1); $2"\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "install", f"PYTHON={python}", f"VENV={tmp_path}/venv"],
        cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and not (tmp_path / "venv").exists()
    assert done.stderr.startswith(f"{python} is Python {version}, 3.10 to 3.13 are supported: pass PYTHON=")
