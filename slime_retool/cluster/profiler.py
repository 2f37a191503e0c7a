"""--profile-rollout: what all processes did in one step, as a trace of lanes by one clock. See docs/profiling.md."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from slime_retool.config import Config
from slime_retool.engine.loads import LoadRecorder
from slime_retool.trace import RankSpans, Trace, trace_path, units_of
from slime_retool.types import Span

if TYPE_CHECKING:
    from slime_retool.cluster.engines import Engines
    from slime_retool.cluster.trainers import Trainers
    from slime_retool.rollout.manager import RolloutManager

logger = logging.getLogger(__name__)
TRAINER_PHASES = ("values", "log_probs", "train", "train critic")
"""Phases of the step that ranks time themselves."""


class StepProfiler:
    """Records one step: made before it, `write` after it, `close` whatever came of it."""

    def __init__(
        self, config: Config, rollout_id: int, rollout: RolloutManager, trainers: Trainers, engines: Engines
    ) -> None:
        self._config, self._rollout_id = config, rollout_id
        self._rollout = rollout
        self._trainers = None if config.debug_rollout_only else trainers
        rollout.record()
        if self._trainers is not None:
            self._trainers.record()
        self._loads = LoadRecorder(engines.current) if config.num_engines else None

    def close(self) -> None:
        """Ask the engines no more."""
        if self._loads is not None:
            self._loads.stop()

    def write(self, driver: Sequence[Span], metrics: Mapping[str, float]) -> None:
        """Write the trace. `driver`: what the loop did; `metrics`: the step's, whose seconds the trace keeps."""
        points = {} if self._loads is None else self._loads.stop()
        ranks = [] if self._trainers is None else self._trainers.take_spans()
        conversations = self._rollout.take_spans()
        trace = Trace()
        trace.add("driver", {"step": units_of([*driver, *trainer_phases(ranks)])})
        trace.add("rollout", {"conversation": [with_tools_as_one(spans) for spans in conversations]})
        trace.add("engines", counters=points)
        trace.add("tools", {"calls": tool_calls(conversations)})
        lanes = {}
        for name, spans in ranks:
            lanes[name] = units_of(spans.host)
            if spans.device:
                lanes[f"{name}, GPU"] = units_of(spans.device)
        trace.add("trainers", lanes)
        path = trace_path(self._config.output_dir, self._rollout_id)
        seconds = {name: value for name, value in metrics.items() if name.endswith("_seconds")}
        trace.write(path, {"rollout_id": self._rollout_id, "metrics": seconds})
        logger.info("wrote the trace of rollout %d to %s; open it in https://ui.perfetto.dev", self._rollout_id, path)


def trainer_phases(ranks: Sequence[tuple[str, RankSpans]]) -> list[Span]:
    """Passes and training as phases of the step: those of the slowest rank, as the step's metrics have them."""
    spans = [[span for _, rank in ranks for span in rank.host if span["name"] == name] for name in TRAINER_PHASES]
    return [max(each, key=lambda span: span["seconds"]) for each in spans if each]


def with_tools_as_one(conversation: Sequence[Span]) -> list[Span]:
    """The calls of a turn, which run at once, as one span "tools"; each has its own lane elsewhere."""
    turns: dict[int, list[Span]] = {}
    for span in conversation:
        if span["name"] == "tool":
            turns.setdefault(span["turn"], []).append(span)
    merged = []
    for turn, calls in turns.items():
        start = min(call["start"] for call in calls)
        end = max(call["start"] + call["seconds"] for call in calls)
        statuses = ", ".join(call["status"] for call in calls)
        merged.append({"name": "tools", "start": start, "seconds": end - start, "status": statuses, "turn": turn})
    return [*(span for span in conversation if span["name"] != "tool"), *merged]


def tool_calls(conversations: Iterable[Sequence[Span]]) -> list[list[Span]]:
    """Each call that ran, and within it the time that it waited for its turn."""
    units = []
    for whole, *spans in conversations:
        for span in spans:
            if span["name"] == "tool" and span["seconds"] > 0:
                unit: list[Span] = [{**span, "name": span["tool"], "sample": whole["name"]}]
                if span["waited"] > 0:
                    waited = min(span["waited"], span["seconds"])
                    unit.append({"name": "queue", "start": span["start"], "seconds": waited, "status": "ok"})
                units.append(unit)
    return units
