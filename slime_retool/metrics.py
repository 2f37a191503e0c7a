"""Where metrics go: a JSONL file always, TensorBoard and Weights & Biases when asked for."""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil

from slime_retool.errors import ConfigError
from slime_retool.types import ShownSample, Span, timed

SHOWN_COLUMNS = tuple(each.name for each in fields(ShownSample))


class Tracker(Protocol):
    """Takes metrics. What it raises ends the run."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Some metrics of a rollout (-1: before training); others follow in further calls. NaN may be among them."""

    def close(self) -> None:
        """The run is over, whichever way it ended."""


@runtime_checkable
class SampleTracker(Protocol):
    """A `Tracker` that also shows a few samples."""

    def log_samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Some samples of a rollout that is dumped. Their texts are a model's: nothing in them is markup."""


def json_figures(metrics: dict[str, float]) -> dict[str, float | None]:
    """`metrics` as JSON can hold them: null for what is no finite number."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class JsonlTracker:
    """One line per call: `{"step": 3, "time": ..., "train/loss": ...}`; values that are not finite become null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if cut_off:  # the run before was killed within a line
            self._file.write("\n")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        finite = json_figures(metrics)
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """`first`: the rollout that the run begins with. What a resumed one had logged from there on is replaced."""

    def __init__(self, folder: Path, first: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first or None)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        self._writer.add_text("samples", "\n\n".join(map(_as_markdown, samples)), step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """`settings` are the arguments of `wandb.init`; `key` logs in first.

    The run's id is kept in `id_file`, where a run that resumes finds it and goes on with the same W&B run.
    """

    def __init__(
        self, settings: Mapping[str, Any], key: str | None, id_file: Path, saved_id: str | None = None
    ) -> None:
        """`saved_id`: that in the checkpoint which the run resumes, for a folder that has no `id_file` yet."""
        import wandb

        if key:
            wandb.login(key=key)
        if not id_file.exists():
            id_file.write_text(saved_id or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8])
        self.id = id_file.read_text()
        self._run = wandb.init(**settings, id=self.id, resume="allow")
        self._run.define_metric("rollout")
        self._run.define_metric("*", step_metric="rollout")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # W&B drops what is logged below its step 0, and the evaluation before training has step -1. It also drops what
        # a resumed run logs of steps that were there.
        self._run.log({"rollout": step, **metrics}, step=step + 1)

    def log_samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        import wandb

        rows = [[getattr(sample, name) for name in SHOWN_COLUMNS] for sample in samples]
        self._run.log({"rollout": step, "samples": wandb.Table(list(SHOWN_COLUMNS), rows)}, step=step + 1)

    def close(self) -> None:
        self._run.finish()


class PrometheusTracker:
    """The newest value of every metric, for a Prometheus that scrapes http://127.0.0.1:`port`/metrics."""

    def __init__(self, port: int, meaning: Callable[[str], str]) -> None:
        """`meaning`: of a metric, its help text. Raises ConfigError where the port cannot be had."""
        import prometheus_client

        self._meaning, self._gauge = meaning, prometheus_client.Gauge
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, "127.0.0.1", self._registry)
        except OSError as error:
            raise ConfigError(f"--prometheus-port {port} cannot be listened on ({error}); give another port") from error

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._set("step", "the newest rollout that any metric is of; -1: before training", step)
        for name, value in metrics.items():
            self._set(name, self._meaning(name), value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, name: str, meaning: str, value: float) -> None:
        plain = "slime_retool_" + re.sub(r"\W", "_", name, flags=re.ASCII)
        if plain not in self._gauges:
            self._gauges[plain] = self._gauge(plain, meaning, registry=self._registry)
        self._gauges[plain].set(value)


class Metrics:
    """All trackers of a run as one: metrics.jsonl in `folder`, `own`, TensorBoard's files there, a W&B run so set.

    `first`: the rollout that the run begins with, beyond 0 where it resumes an earlier one, whose checkpoint held
    `saved` (`state_dict`).
    """

    def __init__(
        self, folder: Path, *own: Tracker, tensorboard: bool = False, wandb: Mapping[str, Any] | None = None,
        wandb_key: str | None = None, first: int = 0, saved: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._ids: dict[str, str] = {}
        self._trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl"), *own]
        if tensorboard:
            self._trackers.append(TensorBoardTracker(folder / "tensorboard", first))
        if wandb is not None:
            tracker = WandbTracker(wandb, wandb_key, folder / "wandb_id.txt", (saved or {}).get("wandb"))
            self._ids["wandb"] = tracker.id
            self._trackers.append(tracker)

    def state_dict(self) -> dict[str, str]:
        """Ids of the runs that trackers keep elsewhere, for a checkpoint."""
        return self._ids

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[ShownSample]) -> None:
        """Show samples of a rollout, if there are any, where a tracker can."""
        for tracker in self._trackers:
            if samples and isinstance(tracker, SampleTracker):
                tracker.log_samples(step, samples)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def _as_markdown(sample: ShownSample) -> str:
    """What TensorBoard shows as Markdown: texts as indented blocks, in which nothing is markup."""
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    parts = [f"**sample {sample.index}, group {sample.group}: reward {reward}, turns {sample.turns}, {sample.status}**"]
    for text in (sample.prompt, sample.response):
        parts.append("\n".join(f"    {line}" for line in text.splitlines()) or "    ")
    return "\n\n---\n\n".join(parts)


class Phases:
    """Where the seconds of one step go.

    `with phases("sync"): ...` adds to `perf/sync_seconds`. Log-probs and training are measured by the trainer itself;
    what belongs to none of them (Ray, starting and waiting) is `perf/idle_seconds`.
    """

    NAMES = ("generate", "log_probs", "train", "sync", "offload")

    def __init__(self, show: Callable[[str], None] = lambda name: None, *, critic: bool = False) -> None:
        """`show` is told the name of each phase as it begins.

        critic: training the critic is a phase too, after that of the policy; else it is beside it, or there is none.
        """
        self._show = show
        self._started, self._start = time.monotonic(), time.time()
        self._seconds = dict.fromkeys((*self.NAMES, "critic") if critic else self.NAMES, 0.0)
        self._left_out = 0.0
        self.spans: list[Span] = []
        """Of every phase, of whatever else is timed, and at the end of the step."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with self.aside(name) as span:
            yield
        self._seconds[name] += span["seconds"]

    @contextmanager
    def aside(self, name: str) -> Iterator[Span]:
        """What is inside is shown and gets a span, and counts as no phase."""
        self._show(name)
        with timed(name, self.spans) as span:
            yield span

    def leave_out(self, seconds: float) -> None:
        """What took these is no part of the step."""
        self._left_out += seconds

    def metrics(self, measured: Mapping[str, float]) -> dict[str, float]:
        """All phases and the whole step, which ends here; what `measured` holds of them wins."""
        whole = time.monotonic() - self._started
        self.spans.append({"name": "step", "start": self._start, "seconds": whole, "status": "ok"})
        step = whole - self._left_out
        phases = {f"perf/{name}_seconds": seconds for name, seconds in self._seconds.items()}
        phases |= {name: measured[name] for name in phases if name in measured}
        return phases | {"perf/idle_seconds": step - sum(phases.values()), "perf/step_seconds": step}


class Laps:
    """How long the parts of a start take, one after the other: `laps("engines")` adds the seconds since the last call.

    The first one begins with this process.
    """

    def __init__(self) -> None:
        self._last = time.monotonic() - (time.time() - psutil.Process().create_time())
        self._seconds: dict[str, float] = {}

    def __call__(self, name: str) -> None:
        now = time.monotonic()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """`start/<name>_seconds` of every part, and of all."""
        named = {f"start/{name}_seconds": seconds for name, seconds in self._seconds.items()}
        return named | {"start/total_seconds": sum(self._seconds.values())}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())
        return f"{sum(self._seconds.values()):.1f} s: {parts}"


def generation_speed(metrics: Mapping[str, float], gpus: int) -> dict[str, float]:
    """Tokens that the model wrote per second of the generation phase and GPU (CPU: process) of the engines."""
    if not gpus or "rollout/model_tokens" not in metrics:
        return {}
    rate = metrics["rollout/model_tokens"] / max(metrics["perf/generate_seconds"], 1e-9)
    return {"perf/generate_tokens_per_second_per_gpu": rate / gpus}


def headline(metrics: Mapping[str, float]) -> dict[str, str]:
    """The few metrics worth a place beside the progress bar."""
    wanted = {
        "train/loss": "loss",
        "rollout/reward_mean": "reward",
        "rollout/tool_call_rate": "tools",
        "train/logprob_abs_diff": "|dlogp|",
    }
    return {short: f"{metrics[name]:.4g}" for name, short in wanted.items() if name in metrics}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, merged by step; after a resume, later values of a step replace earlier ones.

    A line that was cut off when a run was killed is left out: its step was run again.
    """
    steps: dict[int, dict[str, Any]] = {}
    for row in _rows(path):
        steps.setdefault(row["step"], {}).update(row)
    return [steps[step] for step in sorted(steps)]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line:
            with suppress(json.JSONDecodeError):
                yield json.loads(line)


def is_evaluated(path: Path, step: int, sets: Iterable[str]) -> bool:
    """Whether a metrics.jsonl has all of these evaluation sets for the weights of a step, since that was run last."""
    found: set[str] = set()
    for row in _rows(path) if path.exists() else ():
        if row["step"] == step:
            evaluation = {rest for kind, _, rest in (name.partition("/") for name in row) if kind == "eval"}
            if evaluation:
                found |= evaluation
            elif not {"rollout", "train"}.isdisjoint(name.partition("/")[0] for name in row):  # it was run again
                found = set()
    return all(any(name.startswith(f"{each}/") for name in found) for each in sets)


def host_bytes() -> int:
    """Resident memory of this process now (Linux), page-locked memory included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
