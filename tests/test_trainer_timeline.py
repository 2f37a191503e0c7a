"""What a rank records for a trace: every micro-batch, within the phases that the metrics measure; nothing changes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dist_utils import run_distributed
from trainer_utils import make_trainer, random_samples, sharpen, tiny_config, weights

from benchmarks.check_trace import problems
from slime_retool.trace import RankSpans, Trace, units_of
from slime_retool.trainer.timeline import Timeline
from slime_retool.types import RolloutBatch


def _train(rank: int, world: int, values: dict[str, Any], recorded: bool) -> tuple[dict[str, float], Any, RankSpans]:
    trainer = make_trainer(rank, world, tiny_config(global_batch_size=3, **values))
    sharpen(trainer)
    if recorded:
        trainer.timeline.record()
    metrics = trainer.train(RolloutBatch(random_samples()), 0)
    after = weights(trainer)
    spans = trainer.timeline.take()
    trainer.train(RolloutBatch(random_samples()), 1)
    assert trainer.timeline.take() == RankSpans([], [])  # recorded no longer
    return metrics, after, spans


@pytest.mark.parametrize(
    ("world", "values"),
    [
        (1, {}),
        (1, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        (2, {"pipeline_model_parallel_size": 2, "actor_num_gpus_per_node": 2}),
    ],
    ids=["one rank", "recomputation", "two stages"],
)
def test_every_micro_batch_is_recorded_within_its_phase_and_training_stays_the_same(world: int, values: dict) -> None:
    plain = run_distributed(_train, world, values, False)
    recorded = run_distributed(_train, world, values, True)
    for rank, ((metrics, before, nothing), (again, after, spans)) in enumerate(zip(plain, recorded, strict=True)):
        assert nothing.host == [] and nothing.device == spans.device == []
        assert {name: value for name, value in metrics.items() if not name.startswith(("perf", "memory"))} == {
            name: value for name, value in again.items() if not name.startswith(("perf", "memory"))
        }
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        trace = Trace()
        trace.add("trainers", {"rank": units_of(spans.host)})
        assert problems({"traceEvents": trace._events}) == []
        phases = {span["name"]: span for span in spans.host if span["name"] in ("log_probs", "train")}
        for name, span in phases.items():
            assert span["seconds"] <= again[f"perf/{name}_seconds"] * 1.00001  # the slowest rank's, in single precision
        inside: dict[str, Counter[str]] = {name: Counter() for name in phases}
        for span in spans.host:
            for name, phase in phases.items():
                if span is not phase and phase["start"] <= span["start"] <= phase["start"] + phase["seconds"]:
                    inside[name][span["name"]] += 1
        micro_batches, last = again["train/micro_batches"], rank == world - 1
        assert micro_batches > 2
        assert inside["train"] == Counter(
            forward=micro_batches, backward=micro_batches, optimizer=2, **({"loss": micro_batches} if last else {})
        )
        passes = inside["log_probs"]
        assert passes["pass"] == 1 and passes["forward"] > 1
        outputs = {"outputs": passes["forward"]} if last else {}
        assert passes == Counter({"pass": 1, "forward": passes["forward"], **outputs})
        assert all(span["tokens"] > 0 for span in spans.host if span["name"] in ("forward", "backward", "loss"))


def test_the_critics_values_are_among_the_forward_only_passes() -> None:
    ((metrics, _, spans),) = run_distributed(_train, 1, {"advantage_estimator": "ppo"}, True)
    seconds = {span["name"]: span["seconds"] for span in spans.host}
    assert metrics["perf/log_probs_seconds"] == pytest.approx(seconds["values"] + seconds["log_probs"], rel=1e-5)
    assert metrics["perf/critic_seconds"] == seconds["train critic"]


def test_a_gpus_work_is_timed_by_events_in_its_stream(monkeypatch) -> None:
    """The stream is behind the host, which asks for all of it at once; the last event ends when the host knows so."""
    stream, host = [100.0], [50.0]

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = stream[0]

        def elapsed_time(self, later: Event) -> float:
            return (later.at - self.at) * 1000

    def synchronize() -> None:
        host[0] = 60.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr("slime_retool.trainer.timeline.time", SimpleNamespace(time=lambda: host[0]))
    timeline = Timeline(torch.device("cuda", 0))
    with timeline.work("before anything is recorded"):
        pass
    timeline.record()
    with timeline.work("forward", tokens=7):
        stream[0] += 2
    stream[0] += 1
    with timeline.work("loss"):
        stream[0] += 0.5
    with timeline.span("train"):
        pass
    spans = timeline.take()
    assert [span["name"] for span in spans.host] == ["train"]
    assert spans.device == [
        {"name": "forward", "start": 56.5, "seconds": 2.0, "status": "ok", "tokens": 7},
        {"name": "loss", "start": 59.5, "seconds": 0.5, "status": "ok"},
    ]
