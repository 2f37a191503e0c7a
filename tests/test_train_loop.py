"""The training loop's own decisions, with stand-ins for what it drives."""

from __future__ import annotations

import json
import re
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from benchmarks.check_trace import Piece, differences, sums
from megatron_bridge import convert
from megatron_bridge.checkpoint import checkpoint_name, latest_iteration, write_latest
from slime_retool.cluster.engines import Engines
from slime_retool.config import Config
from slime_retool.engine.process import ServerError
from slime_retool.errors import DataError, RolloutError, SaveError, TrainerDied
from slime_retool.metrics import Laps, Metrics, read_metrics
from slime_retool.train import Loop
from slime_retool.types import RolloutBatch, Span, TrainSample


class Parts:
    """Stands for `Cluster` and `RolloutManager`: nothing is started, and one engine may have died."""

    def __init__(self, *, first: int = 0, error: Exception | None = None, died: bool = False) -> None:
        self.first, self.error, self.died = first, error, died

    def check(self) -> None:
        if self.died:
            raise ServerError("SGLang engine 1 has died")

    def generate(self, rollout_id: int) -> RolloutBatch:
        if self.error is not None:
            raise self.error
        return RolloutBatch([TrainSample(tokens=[1, 2], loss_mask=[0, 1])])

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        self.generate(rollout_id)
        return {}

    @property
    def trainers(self) -> SimpleNamespace:
        return SimpleNamespace(
            train=lambda batch, rollout_id: self.train(batch, rollout_id),
            save=lambda rollout_id, extra, background: self.save(rollout_id, extra),
            finish_save=lambda wait: self.finish_save(wait),
            settle_save=self.nothing,
            kill=self.nothing,
            connect_engines=self.nothing,
        )

    @property
    def engines(self) -> SimpleNamespace:
        engines = SimpleNamespace(start_router=self.nothing, memory=dict, check=self.check)
        engines.checked = partial(Engines.checked, engines)
        return engines

    def start_trainers(self, num_rollout: int, iteration: int | None, laps: Laps) -> tuple[int, dict[str, Any]]:
        return self.first, {}

    def start_engines(self) -> list[str]:
        return []

    def update_weights(self) -> int:
        return 1

    def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
        return {}

    def finish_save(self, wait: bool) -> float | None:
        return 0.0

    def nothing(self, *_: object) -> dict[str, float]:
        return {}

    connect = begin_training = begin_update = begin_generation = save = state_dict = stop_generating = nothing


MODEL = {
    "num_layers": 2, "hidden_size": 1024, "ffn_hidden_size": 1024, "num_attention_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 512,
}  # fmt: skip


def loop(tmp_path: Path, parts: Parts, **values: Any) -> Loop:
    folders = {"save": str(tmp_path / "new"), "load": str(tmp_path / "old"), "save_hf": str(tmp_path / "hf")}
    values = MODEL | folders | {"num_rollout": 2} | values
    config = Config(hf_checkpoint="model", output_dir=str(tmp_path), **{"no_progress": True} | values)
    return Loop(config, parts, parts, Metrics(tmp_path))


@pytest.mark.parametrize("when", [{"eval_interval": 1}, {}], ids=["evaluation", "rollout"])
@pytest.mark.parametrize("error", [RolloutError("too few groups"), DataError("row 3")])
def test_an_engine_that_died_is_named_where_its_samples_failed(when: dict, error: Exception, tmp_path: Path):
    with pytest.raises(ServerError, match="engine 1 has died"):
        loop(tmp_path, Parts(error=error, died=True), debug_rollout_only=True, **when).run()
    with pytest.raises(type(error), match=str(error)):
        loop(tmp_path, Parts(error=error), debug_rollout_only=True, **when).run()


@pytest.mark.parametrize(
    ("first", "values", "source"),
    [
        (0, {}, "new"),
        (1, {}, "new"),
        (2, {}, "old"),
        (0, {"num_rollout": 0}, None),
        (0, {"debug_rollout_only": True}, None),
        (0, {"debug_rollout_only": True, "save": None}, None),
    ],
    ids=["trained", "resumed", "nothing left to do", "nothing to do", "nothing trained", "nothing saved"],
)
def test_the_exported_checkpoint_is_the_last_one_there_is(first, values, source, tmp_path: Path, monkeypatch):
    exported = []
    monkeypatch.setattr(convert, "convert_torch_dist_to_hf", lambda source, *_, **__: exported.append(source))
    loop(tmp_path, Parts(first=first), **values).run()
    assert exported == ([] if source is None else [str(tmp_path / source)])


class Told(Parts):
    """Notes what the loop does with engines that generate across updates; a request ends when it is told twice."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.running = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("begin_training", "begin_update", "update_weights", "begin_generation", "hold"):
            self.events.append(name)
        return super().__getattribute__(name)

    def generate(self, rollout_id: int) -> RolloutBatch:
        self.events.append("generate")
        self.running = 2
        return super().generate(rollout_id)

    def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
        self.events.append("train")
        return {}

    @property
    def engines(self) -> SimpleNamespace:
        return SimpleNamespace(**super().engines.__dict__, abort=self.abort)

    def hold(self) -> None: ...

    def begin_evaluation(self, rollout_id: int) -> None:
        self.events.append(f"evaluation {rollout_id} begins")

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        self.events.append(f"evaluation {rollout_id} ends")
        return {}

    def abort(self) -> None:
        self.events.append("abort")
        self.running -= 1

    def drained(self, seconds: float) -> bool:
        return self.running == 0

    def go_on(self, version: int, *, draws: bool) -> None:
        self.events.append(f"go on {version}{'' if draws else ', draws nothing'}")


@pytest.mark.parametrize("turns", [True, False], ids=["in turns", "side by side"])
def test_requests_are_interrupted_before_an_update_or_before_engines_leave(turns: bool, tmp_path: Path):
    parts = Told()
    values = {"num_rollout": 1, "max_staleness": 1, "save": None, "save_hf": None, "colocate": True}
    loop(tmp_path, parts, offload_rollout=turns, offload_train=turns, **values).run()
    update = ["begin_update", "update_weights", "begin_generation", "go on 1"]
    first = ["begin_training", "hold", *update, "generate"]  # the first weights: nothing runs yet
    last = [*update[:-1], "go on 1, draws nothing"]
    ended = ["hold", "abort", "abort"]
    if turns:
        assert parts.events == [*first, *ended, "begin_training", "train", "hold", *last]
    else:
        assert parts.events == [*first, "begin_training", "train", *ended, *last]


def test_an_evaluation_goes_on_beside_the_next_generation_and_ends_before_the_next_update(tmp_path: Path):
    parts = Told()
    values = {"num_rollout": 2, "max_staleness": 1, "save": None, "save_hf": None, "eval_interval": 1}
    loop(tmp_path, parts, offload_rollout=True, **values).run()
    of_interest = [event for event in parts.events if event in ("generate", "hold", "train") or "evaluation" in event]
    assert of_interest == [
        "hold", "evaluation -1 ends",
        "generate", "hold", "train", "hold", "evaluation 0 begins",
        "generate", "evaluation 0 ends", "hold", "train", "hold", "evaluation 1 ends",
    ]  # fmt: skip


class Paced(Told):
    """By a clock of its own each generation takes 4 s, each evaluation 100 s, training 2 s and an update 0.5 s."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_800_000_000.0

    def generate(self, rollout_id: int) -> RolloutBatch:
        self.now += 4
        return super().generate(rollout_id)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        self.now += 100
        return super().evaluate(rollout_id)

    def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
        self.now += 2
        return super().train(batch, rollout_id)

    def update_weights(self) -> int:
        self.now += 0.5
        return super().update_weights()


def test_waiting_for_the_evaluation_of_the_step_before_is_shown_and_no_part_of_the_step(tmp_path: Path, monkeypatch):
    parts, written = Paced(), []

    class Profiler:
        def __init__(self, *_: Any) -> None: ...

        def close(self) -> None: ...

        def write(self, driver: list[Span], metrics: dict[str, float]) -> None:
            pieces = [Piece("driver", "step", each["name"], each["start"], each["seconds"]) for each in driver]
            written.append((pieces, metrics))

    clock = SimpleNamespace(time=lambda: parts.now, monotonic=lambda: parts.now)
    for module in ("metrics", "train", "types"):
        monkeypatch.setattr(f"slime_retool.{module}.time", clock)
    monkeypatch.setattr("slime_retool.train.StepProfiler", Profiler)
    values = {"num_rollout": 2, "max_staleness": 1, "save": None, "save_hf": None, "eval_interval": 1}
    loop(tmp_path, parts, profile_rollout=[0, 1], skip_eval_before_train=True, **values).run()
    steps = [{each.name: each for each in pieces}["step"] for pieces, _ in written]
    inside = [
        [(each.seconds, each.begin < step.begin + step.seconds) for each in pieces if each.name == "evaluation"]
        for (pieces, _), step in zip(written, steps, strict=True)
    ]
    assert inside == [[], [(100, True), (100, False)]]
    assert [step.seconds for step in steps] == [6.5, 106.5]
    for pieces, metrics in written:
        assert metrics["perf/step_seconds"] == 6.5 and metrics["perf/idle_seconds"] == 2  # nobody measured training
        assert sums(pieces)["perf/step_seconds"] == 6.5 and differences(pieces, metrics) == []
    assert sums(written[1][0])["perf/eval_seconds"] == 100


EVALUATED = {"step": 1, "eval/a/reward": 0.5}
TRAINED = {"step": 1, "train/loss": 0.5}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([TRAINED, EVALUATED, {"step": 1, "eval/b/reward": None}], []),
        ([EVALUATED, TRAINED, EVALUATED | {"eval/b/reward": 1.0}, {"step": 2, "train/loss": 0.1}], []),
        ([TRAINED, EVALUATED], [1]),
        ([TRAINED, EVALUATED | {"eval/bb/reward": 1.0}], [1]),
        ([TRAINED, EVALUATED | {"step": 0, "eval/b/reward": 1.0}], [1]),
        ([EVALUATED | {"eval/b/reward": 1.0}, TRAINED], [1]),
        ([TRAINED], [1]),
        ([], [1]),
    ],
    ids=["both", "again", "one of two", "another set", "another step", "before it was run again", "none", "no file"],
)
def test_a_resumed_run_evaluates_first_only_what_was_not_evaluated(lines, expected, tmp_path: Path):
    if lines:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluated: list[int] = []

    class Evaluating(Parts):
        def evaluate(self, rollout_id: int) -> dict[str, float]:
            evaluated.append(rollout_id)
            return {"eval/a/reward": 0.5, "eval/b/reward": 0.5}

    sets = {"eval_prompt_data": ["a", "a.jsonl", "b", "b.jsonl"], "eval_interval": 4, "save_hf": None}
    loop(tmp_path, Evaluating(first=2), num_rollout=3, **sets).run()
    assert evaluated == [*expected, 2]  # and after the last
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl") if "eval/a/reward" in row][-1] == 2


def test_a_resumed_run_says_where_it_goes_on_and_which_flags_have_changed(tmp_path: Path, caplog):
    caplog.set_level("INFO")
    kept: dict[str, Any] = {}

    class Resumed(Parts):
        def save(self, rollout_id: int, extra: dict[str, Any]) -> None:
            kept.update(json.loads(json.dumps(extra)))

        def start_trainers(self, *_: object) -> tuple[int, dict[str, Any]]:
            return self.first, {"flags": kept["flags"]} if kept else {}

    values = {"save_hf": None, "wandb_key": "s3cret", "rollout_num_gpus": 1}
    loop(tmp_path, Resumed(), **values).run()
    assert "resumed" not in caplog.text and "s3cret" not in json.dumps(kept)
    loop(tmp_path, Resumed(first=2), num_rollout=2, **values).run()
    assert f"resumed at rollout 2 from {tmp_path / 'old'}" in caplog.text and "differ" not in caplog.text
    flags = {"lr": 3e-6, "load": "elsewhere", "sglang_server_flags": {"--enable-metrics": []}}
    loop(tmp_path, Resumed(first=2), num_rollout=4, **values, **flags).run()
    (line,) = [record.getMessage() for record in caplog.records if "differ" in record.getMessage()]
    changes = ["--lr 1e-06 -> 3e-06", "--num-rollout 2 -> 4", "--sglang-* {} -> {'--enable-metrics': []}"]
    assert sorted(line.split(": ", 1)[1].split(", ")) == changes


@pytest.mark.parametrize("no_progress", [True, False])
def test_without_a_terminal_each_rollout_is_a_line_with_its_metrics_and_there_are_no_bars(
    no_progress: bool, tmp_path: Path, caplog, capsys
):
    class Trained(Parts):
        def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
            return {"train/loss": 0.5 - rollout_id, "train/hidden": 1.0}

        def evaluate(self, rollout_id: int) -> dict[str, float]:
            return {"eval/set/accuracy": 0.25}

    caplog.set_level("INFO")
    values = {"eval_interval": 2, "save_hf": None, "eval_prompt_data": ["set", "set.jsonl"]}
    loop(tmp_path, Trained(), **values, no_progress=no_progress).run()
    lines = [message for message in caplog.messages if re.match("rollout|evaluation", message)]
    assert [re.sub(r"[0-9.]+ s$", "", line) for line in lines] == [
        "evaluation before training: set 0.250".replace("set", "eval/set/accuracy"),
        "rollout 0 of 2: loss 0.5, ",
        "rollout 1 of 2: loss -0.5, ",
        "evaluation after rollout 1: eval/set/accuracy 0.250",
    ]
    assert "-1:" not in caplog.text and capsys.readouterr().err == ""


@pytest.mark.parametrize(("interval", "said"), [(None, True), (1, False)])
def test_a_run_that_saves_only_at_its_end_says_so_at_its_start(interval, said, tmp_path: Path, caplog):
    caplog.set_level("INFO")
    loop(tmp_path, Parts(), save_interval=interval, save_hf=None).run()
    assert ("the one checkpoint is written after the last rollout" in caplog.text) == said


class SavingParts(Parts):
    """Writes what stands for checkpoints, and remembers which were there after each one."""

    def __init__(self, *folders: Path) -> None:
        super().__init__()
        self.folders, self.seen = folders, []

    def save(self, rollout_id: int, extra: dict[str, Any]) -> None:
        self.seen.append([path.name for folder in self.folders for path in sorted(folder.glob("iter_*"))])
        for folder in self.folders:
            (folder / checkpoint_name(rollout_id)).mkdir(parents=True)
            write_latest(folder, rollout_id)


def test_old_checkpoints_go_when_the_new_ones_of_actor_and_critic_are_there(tmp_path: Path):
    actor, critic = tmp_path / "new", tmp_path / "critic"
    parts = SavingParts(actor, critic)
    values = {"advantage_estimator": "ppo", "critic_save": str(critic), "save_hf": None}
    loop(tmp_path, parts, num_rollout=7, save_interval=2, save_keep=2, **values).run()
    one, three, five, six = map(checkpoint_name, (1, 3, 5, 6))
    assert parts.seen == [[], [one] * 2, [one, three] * 2, [three, five] * 2]
    for folder in (actor, critic):
        assert sorted(path.name for path in folder.glob("iter_*")) == [five, six]


@pytest.mark.parametrize(("keep", "free", "warned"), [(None, 3.5, True), (None, 4.5, False), (2, 3.5, False)])
def test_checkpoints_that_will_not_fit_are_told_of_at_the_start(keep, free, warned, tmp_path, monkeypatch, caplog):
    run = loop(tmp_path, SavingParts(tmp_path / "new"), num_rollout=7, save_interval=2, save_keep=keep, save_hf=None)
    size = run._config.checkpoint_bytes()
    monkeypatch.setattr("slime_retool.config.schedule.free_bytes", lambda folder: int(free * size))
    run.run()
    assert ("4 checkpoints of" in caplog.text and "--save-keep N" in caplog.text) == warned


def test_a_checkpoint_is_written_while_the_trainer_has_its_device_and_after_its_figures_are(tmp_path, monkeypatch):
    """A run that is killed while it saves repeats the step and lacks no figure; the save is no part of the step."""
    calls, known, clock = [], [], [0.0]

    class Recorder(SavingParts):
        def __getattribute__(self, name: str) -> Any:
            if name in ("begin_training", "train", "begin_update", "update_weights", "begin_generation"):
                calls.append(name)
            return super().__getattribute__(name)

        def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
            clock[0] += 7
            return {"train/loss": 0.5}

        def save(self, rollout_id: int, extra: dict[str, Any]) -> None:
            calls.append("save")
            known.extend(read_metrics(tmp_path / "metrics.jsonl"))
            clock[0] += 100

    for module in ("train", "metrics", "types", "cluster.saves"):
        monkeypatch.setattr(f"slime_retool.{module}.time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    loop(tmp_path, Recorder(), num_rollout=1, save_hf=None, rollout_num_gpus=1).run()
    assert calls[-6:] == ["begin_training", "train", "save", "begin_update", "update_weights", "begin_generation"]
    assert known[0]["train/loss"] == 0.5 and "perf/step_seconds" not in known[0]
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert (row["perf/save_stall_seconds"], row["perf/step_seconds"], row["perf/idle_seconds"]) == (100, 7, 7)


@pytest.mark.parametrize(("apart", "idle"), [(False, 1), (True, 4)])
def test_training_the_critic_is_a_phase_unless_it_is_beside_the_policys(apart, idle, tmp_path, monkeypatch):
    """A step of 10 s: 2 of passes, 4 of the policy's steps, 3 of the critic's, which add nothing beside these."""
    measured = {"perf/log_probs_seconds": 2.0, "perf/train_seconds": 4.0, "perf/critic_seconds": 3.0}
    clock = [0.0]

    class Trained(Parts):
        def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
            clock[0] += 10
            return measured

    for module in ("train", "metrics", "types", "cluster.saves"):
        monkeypatch.setattr(f"slime_retool.{module}.time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    values: dict[str, Any] = {"advantage_estimator": "ppo", "critic_num_nodes": 1 if apart else None, "save": None}
    loop(tmp_path, Trained(), num_rollout=1, save_hf=None, **values).run()
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert (row["perf/step_seconds"], row["perf/idle_seconds"]) == (10, idle)
    assert measured.items() <= row.items()


class Clocked(SavingParts):
    """Steps of ten seconds each; a save is being written until the loop has waited for it, or looked `looks` times."""

    def __init__(self, folder: Path, *, looks: int, now: list[float]) -> None:
        super().__init__(folder)
        self.looks, self.now, self.events = looks, now, []
        self.left = 0

    def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
        self.now[0] += 10
        self.events.append(rollout_id)
        return {}

    def save(self, rollout_id: int, extra: dict[str, Any]) -> None:
        assert self.left == 0, "the save before it goes on"
        super().save(rollout_id, extra)
        self.events.append(f"save {rollout_id}")
        self.left = self.looks

    def finish_save(self, wait: bool) -> float | None:
        if wait:
            self.events.append("wait")
            self.now[0] += 5 if self.left > 1 else 0
        self.left = 0 if wait else self.left - 1
        return None if self.left else 3.0


@pytest.mark.parametrize(
    ("looks", "flags", "events"),
    [
        (1, {"save_interval": 2}, [0, 1, "save 1", 2, 3, "save 3", "wait"]),
        (9, {"save_interval": 2}, [0, 1, "save 1", 2, 3, "wait", "save 3", "wait"]),
        (1, {"save_seconds": 15.0}, [0, 1, "save 1", 2, 3, "save 3", "wait"]),
        (1, {"save_seconds": 10.0}, [0, "save 0", 1, "save 1", 2, "save 2", 3, "save 3", "wait"]),
        (1, {"save_seconds": 1000.0}, [0, 1, 2, 3, "save 3", "wait"]),
    ],
    ids=["written by the next step", "slow disk", "every second step is late", "each is", "none is"],
)
def test_a_save_goes_on_beside_the_next_steps_and_never_beside_another(looks, flags, events, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("slime_retool.cluster.saves.time", SimpleNamespace(monotonic=lambda: now[0]))
    parts = Clocked(tmp_path / "new", looks=looks, now=now)
    loop(tmp_path, parts, num_rollout=4, save_hf=None, **flags).run()
    assert parts.events == events
    rows = read_metrics(tmp_path / "metrics.jsonl")
    saved = [row["step"] for row in rows if "perf/save_stall_seconds" in row]
    assert saved == [int(event.split()[1]) for event in events if str(event).startswith("save")]
    assert sum(row.get("perf/save_seconds", 0) == 3.0 for row in rows) >= 1
    waits = [row["perf/save_wait_seconds"] for row in rows if "perf/save_wait_seconds" in row]
    assert waits == [5.0 if events[events.index(f"save {step}") - 1] == "wait" else 0.0 for step in saved]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["metrics", "train", "evaluate", "update", "show", "last save"])
def test_a_first_signal_ends_the_run_after_the_step_with_a_checkpoint(where, number, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")

    class Interrupted(SavingParts):
        trained = 0

        def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
            if where == "train":
                signal.raise_signal(number)
            self.trained += 1
            return {}

        def evaluate(self, rollout_id: int) -> dict[str, float]:
            if rollout_id >= 0:
                signal.raise_signal(number)
                raise AssertionError("the evaluation goes on")
            return {}

        def update_weights(self) -> int:
            if where == "update" and self.trained:
                signal.raise_signal(number)
            return 1

        def finish_save(self, wait: bool) -> float | None:
            if where == "last save" and wait:
                signal.raise_signal(number)
            return super().finish_save(wait)

    before = signal.getsignal(number)
    parts = Interrupted(tmp_path / "new")
    evaluated = {"eval_interval": 1, "eval_prompt_data": ["set", "set.jsonl"]} if where == "evaluate" else {}
    run = loop(tmp_path, parts, num_rollout=1 if where == "last save" else 5, rollout_num_gpus=1, **evaluated)
    owner, name = {"metrics": (run._metrics, "log"), "show": (run, "_show")}.get(where, (None, ""))
    if owner is not None:  # before the first step, and between a step and what follows it
        method = getattr(owner, name)

        def signalled(*arguments: Any) -> None:
            method(*arguments)
            if not run._interrupts.asked:
                signal.raise_signal(number)

        monkeypatch.setattr(owner, name, signalled)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert parts.trained == 1 and latest_iteration(tmp_path / "new") == 0
    assert f"saved after rollout 0 in {tmp_path / 'new'}" in caplog.text
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("flags", [{}, {"save": None}], ids=["the second", "the first, with nothing to save"])
def test_a_signal_ends_the_run_at_once(flags, tmp_path):
    class Interrupted(SavingParts):
        def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
            for _ in range(1 if flags else 2):
                signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the step goes on")

    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path, Interrupted(tmp_path / "new"), num_rollout=5, save_hf=None, **flags).run()
    assert not (tmp_path / "new").exists()


def test_a_signal_where_nothing_is_left_to_do_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("slime_retool.train.warn_of_room", lambda *_: signal.raise_signal(signal.SIGTERM))
    parts = SavingParts(tmp_path / "new")
    parts.first = 2
    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path, parts, save_hf=None).run()
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_holds_the_id_of_the_trackers_run(tmp_path):
    kept: dict[str, Any] = {}

    class Keeping(Parts):
        def save(self, rollout_id: int, extra: dict[str, Any]) -> None:
            kept.update(extra)

    run = loop(tmp_path, Keeping(), save_hf=None)
    run._metrics.state_dict()["wandb"] = "a1b2"
    run.run()
    assert kept["trackers"] == {"wandb": "a1b2"}


class Dying(SavingParts):
    """Trainers that die in the given rollouts, each once; `first` of each start."""

    def __init__(self, folder: Path, dies_in: list[int]) -> None:
        super().__init__(folder)
        self.dies_in, self.trained, self.data = dies_in, [], []
        self.position = 0
        self.restarts: list[bool] = []

    def generate(self, rollout_id: int) -> RolloutBatch:
        self.position += 1
        return super().generate(rollout_id)

    def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
        if rollout_id in self.dies_in:
            self.dies_in.remove(rollout_id)
            raise TrainerDied("a process of the run ended")
        self.trained.append(rollout_id)
        return {}

    def save(self, rollout_id: int, extra: dict[str, Any]) -> None:
        super().save(rollout_id, extra)
        for name in (".metadata", "metadata.json"):
            (self.folders[0] / checkpoint_name(rollout_id) / name).touch()
        self.data.append((rollout_id, extra["data"]))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def restart_trainers(
        self, num_rollout: int, iteration: int | None, *, saved: bool
    ) -> tuple[int, dict[str, Any]]:
        assert iteration == (self.data[-1][0] if saved else None)
        self.restarts.append(saved)
        if "start" in self.dies_in:
            self.dies_in.remove("start")
            raise TrainerDied("a process of the run ended")
        return (self.data[-1][0] + 1, {"data": self.data[-1][1]}) if saved else (0, {})


def test_after_a_trainers_death_the_run_goes_on_from_the_last_checkpoint_it_saved(tmp_path: Path, caplog):
    parts = Dying(tmp_path / "new", [3])
    loop(tmp_path, parts, num_rollout=5, save_interval=2, save_hf=None).run()
    assert parts.trained == [0, 1, 2, 2, 3, 4] and parts.restarts == [True] and parts.position == 5
    [line] = [message for message in caplog.messages if "start again" in message]
    where = f"the checkpoint of rollout 1 in {tmp_path / 'new'} (1 of 3)"
    assert line == f"a process of the run ended; in rollout 3. Trainers start again from {where}"
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_without_a_checkpoint_of_its_own_a_run_begins_again(tmp_path: Path):
    (tmp_path / "new").mkdir()
    write_latest(tmp_path / "new", 7)  # an earlier run's
    parts = Dying(tmp_path / "new", [1])
    loop(tmp_path, parts, num_rollout=3, save_interval=10, save_hf=None).run()
    assert parts.trained == [0, 0, 1, 2] and parts.restarts == [False] and parts.position == 3


def test_deaths_also_while_starting_are_counted_and_the_last_one_is_raised(tmp_path: Path):
    parts = Dying(tmp_path / "new", [1, "start"])
    loop(tmp_path, parts, num_rollout=2, save_interval=1, save_hf=None, max_restarts=2).run()
    assert parts.restarts == [True, True] and parts.trained == [0, 1]
    parts = Dying(tmp_path / "again", [1, 1])
    run = loop(tmp_path, parts, num_rollout=2, save_interval=1, save=str(tmp_path / "again"), max_restarts=1)
    with pytest.raises(TrainerDied, match="in rollout 1, and --max-restarts 1 allows no further start from the check"):
        run.run()


def test_old_checkpoints_stay_until_the_new_one_is_complete(tmp_path, monkeypatch):
    there: list[tuple[bool, list[str]]] = []

    class Watched(Clocked):
        def finish_save(self, wait: bool) -> float | None:
            seconds = super().finish_save(wait)
            there.append((seconds is not None, sorted(path.name for path in self.folders[0].glob("iter_*"))))
            return seconds

    now = [0.0]
    monkeypatch.setattr("slime_retool.cluster.saves.time", SimpleNamespace(monotonic=lambda: now[0]))
    parts = Watched(tmp_path / "new", looks=2, now=now)
    loop(tmp_path, parts, num_rollout=6, save_interval=3, save_keep=1, save_hf=None).run()
    two, five = map(checkpoint_name, (2, 5))
    assert there == [(False, [two]), (True, [two]), (True, [two, five])]
    assert [path.name for path in (tmp_path / "new").glob("iter_*")] == [five]


def test_a_write_that_fails_ends_the_run_and_keeps_the_old_checkpoints(tmp_path, monkeypatch):
    class Failing(Clocked):
        def finish_save(self, wait: bool) -> float | None:
            if 3 in self.events:
                raise SaveError("the disk is full")
            return super().finish_save(wait)

    now = [0.0]
    monkeypatch.setattr("slime_retool.cluster.saves.time", SimpleNamespace(monotonic=lambda: now[0]))
    parts = Failing(tmp_path / "new", looks=1, now=now)
    with pytest.raises(SaveError, match="the disk is full"):
        loop(tmp_path, parts, num_rollout=9, save_interval=2, save_keep=1, save_hf=None).run()
    assert parts.events == [0, 1, "save 1", 2, 3, "save 3"]
    assert (tmp_path / "new" / checkpoint_name(1)).exists()


def test_the_bar_says_which_phase_the_loop_is_in(tmp_path: Path, monkeypatch):
    shown: list[str] = []

    class Bar(tqdm):
        def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
            shown.append(desc or "")

    monkeypatch.setattr("slime_retool.train.tqdm", Bar)
    values = {"num_rollout": 1, "save_hf": None, "rollout_num_gpus": 1, "eval_interval": 1}
    loop(tmp_path, SavingParts(tmp_path / "new"), skip_eval_before_train=True, **values).run()
    phases = ["generate", "offload", "trainers", "save", "sync", "offload", "sync", "offload", "evaluation"]
    assert shown == phases


@pytest.mark.parametrize("error", [RolloutError("too few groups"), TypeError("a mistake in a hook"), OSError("full")])
def test_a_checkpoint_that_is_being_written_is_whole_before_an_error_ends_the_run(error: Exception, tmp_path: Path):
    settled: list[bool] = []

    class Writing(SavingParts):
        def generate(self, rollout_id: int) -> RolloutBatch:
            if rollout_id == 1:
                raise error
            return super().generate(rollout_id)

        @property
        def trainers(self) -> SimpleNamespace:
            trainers = super().trainers
            trainers.settle_save = lambda: settled.append(True)
            return trainers

        def finish_save(self, wait: bool) -> float | None:
            return 1.0 if wait else None

    with pytest.raises(type(error)):
        loop(tmp_path, Writing(tmp_path / "new"), num_rollout=3, save_interval=1, save_hf=None).run()
    assert settled == [True]


@pytest.mark.parametrize("first", [2, 4], ids=["in the middle", "the last"])
@pytest.mark.parametrize("there", [False, True], ids=["cut short", "there"])
def test_a_run_that_ended_within_an_evaluation_makes_it_on_resume(there: bool, first: int, tmp_path: Path):
    made: list[int] = []

    class Evaluated(SavingParts):
        def evaluate(self, rollout_id: int) -> dict[str, float]:
            made.append(rollout_id)
            return {"eval/set/accuracy": 1.0}

    parts = Evaluated(tmp_path / "new")
    parts.first = first
    if there:
        rows = [{"step": first - 1, "eval/set/accuracy": 0.5}, {"step": first - 1, "perf/save_seconds": 1}]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"eval_interval": 2, "eval_prompt_data": ["set", "s.jsonl"], "skip_eval_before_train": True}
    loop(tmp_path, parts, num_rollout=4, save_hf=None, rollout_num_gpus=1, **values).run()
    assert made == [number for number in (1, 3) if number >= first - (not there)]
