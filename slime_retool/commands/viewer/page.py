"""The page of one or two runs: index.html, its script and style, and data pieces beside them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from slime_retool.commands.viewer.columns import Table
from slime_retool.commands.viewer.pieces import PieceWriter, write_data
from slime_retool.commands.viewer.reading import DumpedSample, read_samples, sample_files
from slime_retool.errors import DataError
from slime_retool.metrics import read_metrics

OWNED = ("index.html", "assets", "data")
METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class Page:
    """What was written."""

    path: Path
    samples: int
    steps: int
    size: int
    """Bytes of all files."""


def build_page(
    runs: Sequence[Path], out: Path, *, reward_key: str | None = None, accuracy_threshold: float | None = None,
    hf_checkpoint: str | None = None,
) -> Page:
    """Write the page of `runs` (one or two --output-dirs) into `out`; an earlier page there is replaced.

    Raises DataError for a run without metrics and samples, for rewards that `reward_key` does not name, and where
    `out` holds other files.
    """
    for run in runs:
        if not run.is_dir():
            raise DataError(f"{run} is not a folder; a page needs the --output-dir of a run")
    contents = [(run, _files(run)) for run in runs]
    codec = _codec(hf_checkpoint) if hf_checkpoint is not None else None
    _clear(out)
    names = _names(runs)
    samples = steps = 0
    for (run, paths), name, letter in zip(contents, names, "ab", strict=False):
        folder = out / "data" / letter
        table, writer = Table(reward_key, accuracy_threshold), PieceWriter(folder, letter)
        for path in paths:
            for number, dumped in read_samples(path):
                if codec is not None and dumped.token_texts is None and dumped.sample.tokens:
                    dumped = _with_texts(dumped, codec.token_texts(dumped.sample.tokens))
                try:
                    table.add(dumped)
                except ValueError as error:
                    raise DataError(f"{path}, line {number}: {error}") from error
                writer.add(dumped)
        writer.close()
        metrics = read_metrics(run / METRICS) if (run / METRICS).is_file() else []
        described = {"name": name, "starts": writer.starts, **table.as_dict(), "metrics": _by_name(metrics)}
        write_data(folder / "run.js", f"{letter}/run", described)
        samples, steps = samples + len(table), steps + len(metrics)
    write_data(out / "data" / "runs.js", "runs", list("ab"[: len(runs)]))
    assets = files("slime_retool.commands.viewer") / "assets"
    (out / "assets").mkdir()
    for asset in assets.iterdir():
        place = out if asset.name == "index.html" else out / "assets"
        (place / asset.name).write_bytes(asset.read_bytes())
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return Page(out / "index.html", samples, steps, size)


def _files(run: Path) -> list[Path]:
    try:
        return sample_files(run)
    except DataError:
        if not (run / METRICS).is_file():
            raise
        return []  # SFT, say: curves alone


def _clear(out: Path) -> None:
    """Remove an earlier page, and nothing else."""
    others = sorted(path.name for path in out.iterdir() if path.name not in OWNED) if out.is_dir() else []
    if others or out.is_file():
        raise DataError(f"--out {out} holds {', '.join(others) or 'a file'}, not a page; name a new folder")
    for name in OWNED:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)


def _names(runs: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    parts = [run.resolve().parts for run in runs]
    length = 1
    while length < max(map(len, parts)) and len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def _by_name(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Each metric as a list over the steps, which `step` holds."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_number(row.get(name)) for row in rows] for name in names}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _codec(hf_checkpoint: str) -> Any:
    from slime_retool.chat import load_tokenizer
    from slime_retool.chat.codec import TextCodec

    return TextCodec(load_tokenizer(hf_checkpoint))


def _with_texts(dumped: DumpedSample, texts: list[str]) -> DumpedSample:
    return DumpedSample(dumped.sample, dumped.rollout_id, dumped.eval_set, texts, dumped.trained)
