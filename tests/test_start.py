"""The question whether SGLang takes the flags, beside the rest of a start: no real Ray and no real SGLang here."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_utils import make_checkpoint
from sglang_utils import engine_config, processes_with

from slime_retool import train
from slime_retool.cluster import cluster, connection
from slime_retool.commands import eval as evaluation
from slime_retool.config import Config
from slime_retool.engine import flag_check
from slime_retool.errors import CheckpointError, ConfigError, DataError, RolloutError, SaveError
from slime_retool.rollout import manager

ANSWER = """
import sys, time
from pathlib import Path
go, status = sys.argv[-2:]
while not Path(go).exists():
    time.sleep(0.01)
print("sglang.launch_server: error: so it is", file=sys.stderr)
sys.exit(int(status))
"""
"""In place of SGLang's parser: answers with a status when a file is there."""


class Start:
    """What `train.main` and `evaluation.main` start, in order: the rollout side, Ray, then trainers and engines."""

    def __init__(self, go: Path) -> None:
        self.go = go
        self.mark = f"SLIME_RETOOL_TEST_RUN={uuid.uuid4().hex}"
        self.events: list[str] = []
        self.ray_starts: Callable[[], object] = go.touch

    def asking(self) -> dict[int, str]:
        """Processes of the question, which are all that carry the mark."""
        return processes_with(self.mark)

    def wait_for_question(self) -> None:
        """The kernel shows a process's environment a moment after it has begun."""
        deadline = time.monotonic() + 30
        while not self.asking():
            assert time.monotonic() < deadline, "nobody asks SGLang while Ray starts"
            time.sleep(0.01)


class Part:
    """Stands for `Cluster` and `RolloutManager`."""

    rows_skipped = 0

    def __init__(self, name: str, start: Start, config: Config | None = None) -> None:
        self.name, self.start, self.config = name, start, config

    def __enter__(self) -> Part:
        self.start.events.append(f"{self.name} starts")
        if self.name == "Ray":
            self.start.wait_for_question()
            self.start.ray_starts()
        return self

    def __exit__(self, *_: object) -> None:
        self.start.events.append(f"{self.name} ends")

    @property
    def engines(self) -> SimpleNamespace:
        return SimpleNamespace(
            launch=lambda: self.launch(1), start=self.run, start_router=lambda urls: "", checked=nullcontext
        )

    def launch(self, num_rollout: int) -> None:
        self.start.events.append("trainers and engines start")

    def run(self) -> list[str]:
        self.start.events.append("the loop")
        return []

    def connect(self, url: str) -> None: ...

    def stop_generating(self) -> None: ...

    def evaluate(self, *, resume: bool) -> dict[str, float]:
        raise ConfigError("nothing to evaluate")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    start = Start(tmp_path / "go")
    monkeypatch.setenv(*start.mark.split("="))
    monkeypatch.setattr(flag_check, "PARSE", ANSWER)
    monkeypatch.setattr(flag_check, "PARSE_TIMEOUT", 30.0)
    monkeypatch.setattr(connection, "RayStart", lambda config: nullcontext())
    monkeypatch.setattr(cluster, "Cluster", lambda config, ray_start: Part("Ray", start))
    for module in (manager, evaluation):
        monkeypatch.setattr(module, "RolloutManager", lambda config: Part("rollout", start, config))
    monkeypatch.setattr(train, "Loop", lambda *_: Part("loop", start))
    handler = signal.getsignal(signal.SIGTERM)
    yield start
    assert signal.getsignal(signal.SIGTERM) is handler
    assert start.asking() == {}


def run(
    main: Callable[[list[str]], int], start: Start, status: int, monkeypatch: pytest.MonkeyPatch, **values: object
) -> int:
    """Exit code of a run whose flags SGLang answers with `status`."""
    folder = start.go.parent
    answer = {"--answer": [str(start.go), str(status)]}
    sets = ["set", "set.jsonl"]
    config = engine_config(folder, folder, num_rollout=1, eval_prompt_data=sets, sglang_server_flags=answer, **values)
    for module in (train, evaluation):
        monkeypatch.setattr(module, "parse_config", lambda *_: config)
        monkeypatch.setattr(module, "resolve", lambda config: config)
        monkeypatch.setattr(module, "validate", lambda _: None)
    monkeypatch.setattr(evaluation, "validate_evaluation", lambda _: None)
    return main([])


MAINS = pytest.mark.parametrize("main", [train.main, evaluation.main], ids=["train", "eval"])


@MAINS
def test_everything_starts_while_sglang_is_asked_and_the_loop_waits_for_the_answer(main, start: Start, monkeypatch):
    run(main, start, 0, monkeypatch)  # the answer comes only after Ray has begun to start
    launched = "trainers and engines start"
    assert start.events == ["rollout starts", "Ray starts", launched, "the loop", "Ray ends", "rollout ends"]


@MAINS
def test_data_that_cannot_be_used_end_the_run_before_the_rest_starts(main, start: Start, monkeypatch, capsys):
    def refuse(config: Config) -> Part:
        raise DataError("p.jsonl, row 3: no label")

    for module in (manager, evaluation):
        monkeypatch.setattr(module, "RolloutManager", refuse)
    assert run(main, start, 0, monkeypatch) == 2
    assert start.events == [] and capsys.readouterr().err.endswith("error: p.jsonl, row 3: no label\n")


@MAINS
def test_flags_that_sglang_refuses_end_the_run_before_the_loop(main, start: Start, monkeypatch, capsys):
    assert run(main, start, 2, monkeypatch) == 2
    assert start.events == ["rollout starts", "Ray starts", "trainers and engines start", "Ray ends", "rollout ends"]
    message = (
        f"error: SGLang refuses the --sglang-* flags --answer {start.go} 2: sglang.launch_server: error: so it is\n"
    )
    assert capsys.readouterr().err.endswith(message)


@MAINS
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no cluster answers"), 2),
        (DataError("p.jsonl, line 2: not valid JSON"), 2),
        (CheckpointError("iter_0000007 is incomplete"), 2),
        (SaveError("the disk is full"), 1),
        (RolloutError("too few groups"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_question_ends_with_a_start_of_ray_that_fails(
    main, error: BaseException, code: int, start: Start, monkeypatch, capsys
):
    def fail() -> None:
        raise error

    start.ray_starts = fail  # and no answer ever comes
    assert run(main, start, 0, monkeypatch) == code
    assert start.events == ["rollout starts", "Ray starts", "rollout ends"]
    assert capsys.readouterr().err.endswith(f"error: {error}\n") == (code == 2)


def test_an_interrupt_while_the_answer_is_awaited_ends_everything(start: Start, monkeypatch):
    def interrupted(self: object, timeout: float) -> int:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("not reached")

    monkeypatch.setattr(flag_check.SupervisedProcess, "wait", interrupted)
    assert run(train.main, start, 0, monkeypatch) == 130
    assert start.events == ["rollout starts", "Ray starts", "trainers and engines start", "Ray ends", "rollout ends"]


@pytest.mark.parametrize("saved", [True, False])
def test_an_interrupted_run_says_what_it_can_go_on_from(saved: bool, start: Start, monkeypatch, caplog):
    caplog.set_level("INFO")
    folder = start.go.parent / "save"
    if saved:
        make_checkpoint(folder, 4)
    start.ray_starts = lambda: signal.raise_signal(signal.SIGTERM)
    assert run(train.main, start, 0, monkeypatch, save=str(folder), debug_rollout_only=False) == 130
    words = f"of rollout 4; --load {folder} goes on from it" if saved else "no checkpoint was saved: --save DIR with"
    assert words in caplog.text


def test_an_answer_that_does_not_come_is_an_error(start: Start, monkeypatch, capsys):
    start.ray_starts = lambda: None
    monkeypatch.setattr(flag_check, "PARSE_TIMEOUT", 0.1)
    assert run(train.main, start, 0, monkeypatch) == 2
    assert "SGLang did not check its --sglang-* flags within 0.1 s" in capsys.readouterr().err


@MAINS
def test_a_dry_run_reads_the_data_waits_for_the_answer_and_starts_no_ray(main, start: Start, monkeypatch, capsys):
    start.go.touch()
    assert run(main, start, 2, monkeypatch, dry_run=True) == 2
    assert start.events == ["rollout starts", "rollout ends"] and capsys.readouterr().out == ""
    assert run(main, start, 0, monkeypatch, dry_run=True) == 0
    assert start.events == ["rollout starts", "rollout ends"] * 2 and "--dry-run" in capsys.readouterr().out
    assert not (start.go.parent / "metrics.jsonl").exists()


@pytest.mark.parametrize("resumes", [False, True])
def test_figures_of_another_run_are_kept_apart_and_those_of_a_resumed_one_are_not(resumes, start: Start, monkeypatch):
    folder, start.ray_starts = start.go.parent, start.go.touch
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    (folder / "skipped_rows.jsonl").write_text("{}\n")
    (folder / "load").mkdir()
    if resumes:
        make_checkpoint(folder / "load", 7)
    assert run(train.main, start, 0, monkeypatch, load=str(folder / "load"), debug_rollout_only=False) == 0
    assert (folder / "earlier_1" / "metrics.jsonl").exists() != resumes
    assert (folder / "metrics.jsonl").read_text() == ('{"step": 0}\n' if resumes else "")
    assert not (folder / "skipped_rows.jsonl").exists()  # which this run has not written


def test_a_start_that_fails_leaves_the_files_of_an_earlier_run_where_they_are(start: Start, monkeypatch):
    left = [start.go.parent / name for name in ("metrics.jsonl", "skipped_rows.jsonl")]
    for path in left:
        path.write_text('{"step": 0}\n')
    assert run(train.main, start, 2, monkeypatch) == 2
    assert all(path.exists() for path in left)
