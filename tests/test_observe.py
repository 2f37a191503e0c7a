"""Trackers: metrics.jsonl has one row a step, whatever happened to the run that wrote it; W&B gets all of them."""

from __future__ import annotations

import html
import json
import re
import socket
import time
import urllib.request
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from run_utils import make_checkpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from slime_retool.cli import main
from slime_retool.config import Config
from slime_retool.config.printable import wandb_settings
from slime_retool.engine.process import held_ports
from slime_retool.errors import ConfigError
from slime_retool.metrics import JsonlTracker, Metrics, read_metrics
from slime_retool.rollout.transcripts import shown_samples
from slime_retool.run_folder import set_aside
from slime_retool.train import first_rollout, trackers_of
from slime_retool.types import Sample, ShownSample


def log(path: Path, *rows: tuple[int, dict[str, float]]) -> None:
    tracker = JsonlTracker(path)
    for step, metrics in rows:
        tracker.log(step, metrics)
    tracker.close()


def figures(path: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k != "time"} for row in read_metrics(path)]


def test_figures_of_a_step_are_merged_and_a_resumed_run_replaces_them(tmp_path: Path):
    path = tmp_path / "run" / "metrics.jsonl"
    log(path, (0, {"loss": 3.0}), (0, {"save": 1.0}), (1, {"loss": 2.0}))
    log(path, (1, {"loss": 2.5}))
    assert figures(path) == [{"step": 0, "loss": 3.0, "save": 1.0}, {"step": 1, "loss": 2.5}]


def test_figures_that_are_not_finite_are_null(tmp_path: Path):
    log(tmp_path / "metrics.jsonl", (0, {"loss": float("nan")}))
    assert figures(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": None}]


def test_a_line_cut_off_by_a_kill_costs_nothing_but_itself(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    log(path, (0, {"loss": 3.0}), (1, {"loss": 2.0}))
    path.write_bytes(path.read_bytes()[:-7])
    log(path, (1, {"loss": 2.0}), (2, {"loss": 1.0}))
    assert figures(path) == [{"step": step, "loss": 3.0 - step} for step in range(3)]


def test_wandb_keeps_the_evaluation_before_training(tmp_path: Path, monkeypatch):
    """Its step is -1; the figures are looked for in the file that an offline run writes."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = Config(output_dir=str(tmp_path), use_wandb=True, wandb_mode="offline")
    metrics = Metrics(tmp_path, wandb=wandb_settings(config))
    metrics.log(-1, {"eval/untrained": 0.25})
    metrics.log(0, {"train/first": 2.0})
    metrics.log(0, {"eval/trained": 0.5})
    metrics.close()
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    names, deadline = (b"eval/untrained", b"train/first", b"eval/trained"), time.monotonic() + 30
    while time.monotonic() < deadline and names[-1] not in written.read_bytes():
        time.sleep(0.05)  # a process of W&B's own writes it
    assert [name for name in names if name in written.read_bytes()] == list(names)


def test_a_resumed_run_goes_on_with_the_same_wandb_run_and_another_one_does_not(tmp_path: Path, monkeypatch):
    begun: list[dict[str, Any]] = []
    monkeypatch.setattr("wandb.init", lambda **settings: begun.append(settings) or MagicMock())
    config = Config(output_dir=str(tmp_path), use_wandb=True, load=str(tmp_path / "ckpt"))

    def run(first: int) -> None:
        with closing(trackers_of(config, first)) as metrics:
            metrics.log(first, {"loss": 1.0})

    run(0)
    run(4)
    run(5)
    assert set_aside(str(tmp_path)) is not None  # the next one resumes nothing
    run(0)
    one, two, three, other = (settings["id"] for settings in begun)
    assert one == two == three != other and {settings["resume"] for settings in begun} == {"allow"}


def test_a_run_resumed_into_another_folder_finds_its_wandb_run_in_the_checkpoint(tmp_path: Path, monkeypatch):
    begun: list[dict[str, Any]] = []
    monkeypatch.setattr("wandb.init", lambda **settings: begun.append(settings) or MagicMock())
    config = Config(output_dir=str(tmp_path / "first"), use_wandb=True, load=str(tmp_path / "ckpt"))
    with closing(trackers_of(config)) as metrics:
        saved = metrics.state_dict()
    make_checkpoint(tmp_path / "ckpt", 3)
    state = {"rollout_id": 3, "extra": {"trackers": saved}}
    (tmp_path / "ckpt" / "iter_0000003" / "trainer_state.json").write_text(json.dumps(state))
    moved = replace(config, output_dir=str(tmp_path / "second"))
    trackers_of(moved, first_rollout(moved)).close()
    fresh = replace(config, output_dir=str(tmp_path / "third"), load=None)
    trackers_of(fresh, first_rollout(fresh)).close()
    ids = [settings["id"] for settings in begun]
    assert ids[0] == ids[1] == (tmp_path / "second" / "wandb_id.txt").read_text() != ids[2]


def test_a_wandb_run_that_the_environment_names_is_the_one_that_is_resumed(tmp_path: Path, monkeypatch):
    begun: list[dict[str, Any]] = []
    monkeypatch.setattr("wandb.init", lambda **settings: begun.append(settings) or MagicMock())
    for name in ("mine", ""):
        monkeypatch.setenv("WANDB_RUN_ID", name)
        Metrics(tmp_path, wandb={}).close()
    assert [settings["id"] for settings in begun] == ["mine", "mine"]


def test_tensorboard_shows_each_step_of_a_resumed_run_once_and_as_it_was_last(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = Config(output_dir=str(tmp_path), use_tensorboard=True)
    for first, steps, loss in ((0, range(6), 1.0), (4, range(4, 8), 2.0)):  # saved after 3, killed after 5
        with closing(trackers_of(config, first)) as metrics:
            for step in steps:
                metrics.log(step, {"loss": loss})
        time.sleep(1.1)  # files are read in the order of their names, which hold seconds
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in shown] == [(step, 1.0 + (step >= 4)) for step in range(8)]


def test_a_run_begins_after_the_rollout_that_was_saved(tmp_path: Path):
    config = Config(load=str(tmp_path))
    assert first_rollout(config) == 0
    make_checkpoint(tmp_path, 7)
    assert first_rollout(config) == 8 and first_rollout(replace(config, debug_rollout_only=True)) == 0


def test_a_transcript_that_is_being_written_can_be_viewed(tmp_path: Path, capsys):
    row = {
        "index": 0,
        "label": "42",
        "reward": 1.0,
        "status": "completed",
        "prompt": "six times seven?",
        "response": "42",
    }
    line = json.dumps(row)
    (tmp_path / "eval.jsonl").write_text(line + "\n" + line[:40])
    assert main(["view", str(tmp_path / "eval.jsonl")]) == 0
    assert capsys.readouterr().out.count("six times seven?") == 1


def test_what_an_earlier_run_left_is_moved_and_nothing_is_overwritten(tmp_path: Path):
    for run in ("one", "two"):
        for name in ("metrics.jsonl", "rollouts/rollout_000000.jsonl", "eval/set_000000.jsonl", "tensorboard/events"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(run)
        assert set_aside(str(tmp_path)) == tmp_path / f"earlier_{1 if run == 'one' else 2}"
    (tmp_path / "metrics.jsonl").touch()  # of a run that did not come to its first step
    assert set_aside(str(tmp_path)) is None
    left = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert left.pop("metrics.jsonl") == ""
    assert len(left) == 8 and all(text == ("one" if "earlier_1" in name else "two") for name, text in left.items())


HOSTILE = (
    "</pre></code><script>alert(1)</script>",
    "![x](http://elsewhere/x.png) [link](javascript:alert(1))",
    "# title\n\n- item\n\n```\nfence\n```\n**bold**",
    "\ud800 half a pair \x00 \u2028 <img src=x>",
    "",
)


def shown(text: str, index: int = 0) -> ShownSample:
    sample = Sample(prompt=[{"role": "user", "content": text}], response=text, index=index, reward={"score": 0.5})
    return shown_samples([sample], None)[0]


def test_a_few_samples_are_shown_with_bounded_texts():
    samples = [Sample(prompt="p" * 9000, response=f"{index} {'r' * 9000} end", index=index) for index in range(100)]
    table = shown_samples(samples, None)
    assert len(table) <= 8 and [each.index for each in table] == list(range(0, 100, 13))
    for each in table:
        assert len(each.prompt) < 4100 and len(each.response) < 4100
        assert each.response.startswith(f"{each.index} ") and each.response.endswith(" end") and each.reward is None
    assert [each.index for each in shown_samples(samples[:3], None)] == [0, 1, 2] and shown_samples([], None) == []
    said = (("user", "first"), ("assistant", "a"), ("user", "last"), ("assistant", "b"))
    asked = [{"role": role, "content": content} for role, content in said]
    (one,) = shown_samples([Sample(prompt=asked, reward={"points": 2})], "points")
    assert (one.prompt, one.reward) == ("last", 2.0)


def test_tensorboard_shows_samples_as_text_in_which_nothing_is_markup(tmp_path: Path):
    """Its page turns Markdown into HTML by this function of its own."""
    with closing(Metrics(tmp_path, tensorboard=True)) as metrics:
        metrics.log_samples(3, [shown(text, index) for index, text in enumerate(HOSTILE)])
        metrics.log_samples(4, [])
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    (event,) = accumulator.Tensors("samples/text_summary")
    (text,) = (value.decode() for value in event.tensor_proto.string_val)
    page = markdown_to_safe_html(text)
    assert event.step == 3 and set(re.findall(r"<(\w+)", page)) == {"p", "strong", "hr", "pre", "code"}
    said = html.unescape(page)
    for text in HOSTILE:
        for line in text.encode("utf-8", "backslashreplace").decode().replace("\x00", "").splitlines():
            assert said.count(line) >= 2, line


def test_wandb_gets_a_table_of_samples(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    config = Config(output_dir=str(tmp_path), use_wandb=True, wandb_mode="offline")
    with closing(Metrics(tmp_path, wandb=wandb_settings(config))) as metrics:
        metrics.log_samples(3, [shown(text, index) for index, text in enumerate(HOSTILE)])
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    written = json.loads(table.read_text())
    assert written["columns"] == ["index", "group", "prompt", "response", "reward", "turns", "status"]
    texts = [text.encode("utf-8", "backslashreplace").decode() for text in HOSTILE]
    assert [row[:6] for row in written["data"]] == [[index, 0, text, text, 0.5, 0] for index, text in enumerate(texts)]


class Plain:
    """A tracker of one's own that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.told.append((step, metrics))

    def close(self) -> None:
        self.told.append("closed")


class Table(Plain):
    """One that also shows samples."""

    def log_samples(self, step: int, samples: object) -> None:
        self.told.append((step, samples))


def test_a_tracker_of_ones_own_is_told_of_samples_where_it_can_show_them(tmp_path: Path):
    plain, table = Plain(), Table()
    with closing(Metrics(tmp_path, plain, table)) as metrics:
        metrics.log_samples(3, [shown("text")])
    assert table.told == [(3, [shown("text")]), "closed"]
    assert plain.told == ["closed"]


def scraped(port: int) -> dict[str, tuple[str, float]]:
    """Metric -> (help text, value)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    return {each.name: (each.documentation, each.samples[0].value) for each in text_string_to_metric_families(text)}


def test_prometheus_is_served_the_newest_value_of_every_metric_on_this_host_only(tmp_path: Path):
    with held_ports(1) as (port,):  # outside of those that any process may get
        config = Config(output_dir=str(tmp_path), prometheus_port=port)
    names = {"val-core/aime 24/acc/mean@8": 0.25, "hook/own": 1.0, "train/loss": float("nan")}
    with closing(trackers_of(config)) as metrics:
        metrics.log(-1, {"eval/aime/accuracy": 0.125})
        metrics.log(4, names)
        metrics.log(5, {"train/loss": 2.5})
        found = scraped(port)
        ours = psutil.Process().net_connections()
        places = {each.laddr.ip for each in ours if each.laddr.port == port}
    assert places == {"127.0.0.1"}
    assert {name: value for name, (_, value) in found.items()} == {
        "slime_retool_step": 5, "slime_retool_eval_aime_accuracy": 0.125, "slime_retool_hook_own": 1,
        "slime_retool_train_loss": 2.5, "slime_retool_val_core_aime_24_acc_mean_8": 0.25,
    }  # fmt: skip
    assert found["slime_retool_train_loss"][0] == "train/loss: the whole loss"
    assert "verl" in found["slime_retool_val_core_aime_24_acc_mean_8"][0]
    assert found["slime_retool_hook_own"][0] == "hook/own: a metric of a hook"
    with closing(trackers_of(config)):  # the port is free again
        pass


def test_a_port_that_is_taken_is_said_in_one_line(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = Config(output_dir=str(tmp_path), prometheus_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="--prometheus-port .* cannot be listened on .*give another port"):
            trackers_of(config)
