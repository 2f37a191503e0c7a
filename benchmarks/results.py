"""One result file per measured figure: ``<out_dir>/<metric>.json``."""

from __future__ import annotations

import importlib.metadata
import json
import math
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

PACKAGES = ("torch", "megatron-core", "sglang", "transformer-engine", "flash-attn-4")


def write_result(
    metric: str,
    value: float,
    unit: str,
    *,
    out_dir: Path,
    card: str | None = None,
    versions: dict[str, str] | None = None,
) -> Path:
    """Write ``{metric, value, unit, card, versions, command, date}`` and return its path.

    ``card`` is, unless given, the name of the first CUDA device or ``"cpu"``; ``versions``, unless given, those of
    the packages that are installed; ``date`` is UTC (ISO 8601). A value that is not finite is refused (ValueError): a
    failed run has no figure.
    """
    if not math.isfinite(value):
        raise ValueError(f"the figure {metric} is {value}; only a finite number is a result")
    import torch

    record = {
        "metric": metric,
        "value": value,
        "unit": unit,
        "card": card or (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"),
        "versions": versions or installed_versions(),
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / f"{metric}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def installed_versions() -> dict[str, str]:
    """Of the packages that a figure depends on, those that are installed here."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
