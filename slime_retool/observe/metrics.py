"""Where figures go: a JSONL file always, TensorBoard and Weights & Biases when asked for."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, Protocol

from megatron_bridge.flags import secrets_of
from slime_retool.config import Config


class Tracker(Protocol):
    """Takes one step's figures."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlTracker:
    """One line per call: `{"step": 3, "time": ..., "train/loss": ...}`; non-finite figures become null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if cut_off:  # the run before was killed within a line
            self._file.write("\n")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    def __init__(self, config: Config) -> None:
        import wandb

        if config.wandb_key:
            wandb.login(key=config.wandb_key)
        secrets = secrets_of(Config)
        stored = {name: value for name, value in vars(config).items() if name not in secrets}
        self._run = wandb.init(
            project=config.wandb_project,
            group=config.wandb_group,
            name=config.wandb_name,
            mode=config.wandb_mode,
            dir=config.output_dir,
            config=stored,
        )
        self._run.define_metric("rollout")
        self._run.define_metric("*", step_metric="rollout")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # W&B drops what is logged below its step 0, and the evaluation before training has step -1.
        self._run.log({"rollout": step, **metrics}, step=step + 1)

    def close(self) -> None:
        self._run.finish()


class Metrics:
    """All trackers of a run behind one `log`."""

    def __init__(self, config: Config) -> None:
        folder = Path(config.output_dir)
        self._trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl")]
        if config.use_tensorboard:
            self._trackers.append(TensorBoardTracker(folder / "tensorboard"))
        if config.use_wandb:
            self._trackers.append(WandbTracker(config))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, merged by step; after a resume, later figures of a step replace earlier ones.

    A line that was cut off when a run was killed is left out: its step was run again.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            steps.setdefault(row["step"], {}).update(row)
    return [steps[step] for step in sorted(steps)]
