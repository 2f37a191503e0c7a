"""What a reference run leaves as evidence, without its weights: small files that tables.py makes tables of.

    python evidence.py --work WORK --output-dir DIR [--pack FILE]

can be called at any time, also while the run goes on. For each model of the run DIR/MODEL holds

    outcomes.jsonl      each evaluation: {run, set, rollout, right, tool, cut}: a character for each sample, in order;
                        1 or 0, and - where an outage cost the sample. each: samples of a problem, where more than one
    transcripts.jsonl   TRANSCRIPTS answers of the first RL run's last evaluation, at even distances over the problems
    RUN/metrics.jsonl, RUN/command.txt
    selection.json      which programs became traces
    times.jsonl         begin and end of each step of the whole run
    leaks.json          training questions that were left out
    engine_rate.json    the engine's speed on the run's lengths, where the step `rate` measured it

and, in a package only, answers.jsonl (every evaluated answer, without token ids) and logs/ (the end of every log).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from program_traces import read_jsonl, write_jsonl

TRANSCRIPTS = 200
LOG_LINES = 60
NOT_MODELS = ("programs", "served", "packed", "results")
"""Other folders of a run with evaluations, servers or copies in them."""
USABLE = ("completed", "truncated")
_INTERPRETER = re.compile(r"\S+/python[\d.]* -m")
Row = dict[str, Any]


def model_folders(work: Path) -> list[Path]:
    """Folders of models that something was measured of: they hold a run with metrics, or an evaluation."""
    runs = {path.parent for pattern in ("*/*/eval", "*/*/metrics.jsonl") for path in work.glob(pattern)}
    return sorted({run.parent for run in runs} - {work / name for name in NOT_MODELS})


def evaluations(folder: Path) -> Iterator[tuple[str, str, int, list[Row]]]:
    """(run, set, rollout, samples in the problems' order) of every evaluation of a model, in order of time.

    One that is still being written, or was stopped, is left out: short answers are the first to be there.
    """
    for path in sorted(folder.glob("*/eval/*_*.jsonl")):
        name, _, number = path.stem.rpartition("_")
        rows = sorted(read_jsonl(path), key=lambda row: row["index"])
        if rows and len(rows) >= wanted_of(path):
            yield path.parents[1].name, name, int(number), rows


def wanted_of(path: Path) -> int:
    """How many samples an evaluation has when it is complete."""
    beside = path.with_suffix(".setting.json")
    if not beside.exists():
        return 0
    setting = json.loads(beside.read_text(encoding="utf-8"))
    return setting["prompts"] * setting["samples_per_prompt"]


def outcome(rows: list[Row]) -> Row:
    """A character for each sample."""

    def marks(told: list[bool | None]) -> str:
        return "".join("-" if one is None else "01"[one] for one in told)

    usable = [row["status"] in USABLE for row in rows]
    each = len(rows) // len({row["group_index"] for row in rows})
    return ({"each": each} if each > 1 else {}) | {
        "right": marks([row["reward"]["acc"] if ok else None for row, ok in zip(rows, usable, strict=True)]),
        "tool": marks([row["num_tool_calls"] > 0 if ok else None for row, ok in zip(rows, usable, strict=True)]),
        "cut": marks([row["status"] == "truncated" if ok else None for row, ok in zip(rows, usable, strict=True)]),
    }


def answer(row: Row) -> Row:
    """What a reader wants of a sample."""
    return {
        "problem": row["group_index"],
        "question": row["prompt"][-1]["content"],
        "label": row["label"],
        "response": row["response"],
        "right": bool(row["reward"]["acc"]) if row["status"] in USABLE else None,
        "tool_calls": row["num_tool_calls"],
        "tool_errors": row["num_tool_errors"],
        "status": row["status"],
        "tokens": row["response_length"],
    }


def spread(rows: list[Row], count: int) -> list[Row]:
    """`count` of the rows at even distances, from the first on."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def chosen(found: list[tuple[str, str, int, list[Row]]]) -> list[Row]:
    """Transcripts of the first RL run's last evaluation, as many of each set."""
    runs = sorted({run for run, *_ in found if run.startswith("rl_") and not run.startswith("rl_plain")})
    if not runs:
        return []
    mine = [entry for entry in found if entry[0] == runs[0]]
    last = max(number for _, _, number, _ in mine)
    sets = [(name, rows) for _, name, number, rows in mine if number == last]
    return [
        {"run": runs[0], "set": name, **answer(row)}
        for name, rows in sets
        for row in spread(rows, TRANSCRIPTS // len(sets))
    ]


def collect(work: Path, out: Path, *, everything: bool = False) -> None:
    """Fill `out`, which may hold an earlier collection."""
    for folder in model_folders(work):
        place = out / folder.name
        place.mkdir(parents=True, exist_ok=True)
        found = list(evaluations(folder))
        lines = [{"run": run, "set": name, "rollout": number, **outcome(rows)} for run, name, number, rows in found]
        write_jsonl(place / "outcomes.jsonl", lines)
        write_jsonl(place / "transcripts.jsonl", chosen(found))
        if everything:
            answers = ({"run": run, "set": name, "rollout": number, **answer(row)}
                       for run, name, number, rows in found for row in rows)  # fmt: skip
            write_jsonl(place / "answers.jsonl", answers)
        for path in sorted([*folder.glob("*/metrics.jsonl"), *folder.glob("*/command.txt")]):
            (place / path.parent.name).mkdir(exist_ok=True)
            # Commands name their folders; where those were on the host of the run is nobody's business.
            text = path.read_text(encoding="utf-8").replace(f"{work}/", "$WORK/")
            text = _INTERPRETER.sub("python -m", text)
            (place / path.parent.name / path.name).write_text(text, encoding="utf-8")
        sources = ("data/selection.json", "engine_rate.json", "../prepared/leaks.json", "../times.jsonl")
        for source in map(folder.joinpath, sources):
            if source.exists():
                shutil.copyfile(source, place / source.name)
    if everything:
        for path in sorted((work / "logs").rglob("*.log")):
            kept = out / "logs" / path.relative_to(work / "logs")
            kept.parent.mkdir(parents=True, exist_ok=True)
            lines_kept = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
            kept.write_text("\n".join(lines_kept) + "\n")


def pack(work: Path, file: Path) -> None:
    """Everything in one compressed file; it appears whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    with tempfile.TemporaryDirectory() as folder:
        collect(work, Path(folder) / "data", everything=True)
        with tarfile.open(part, "w:xz") as archive:
            archive.add(Path(folder) / "data", "data")
    part.replace(file)
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the run's folder")
    parser.add_argument("--output-dir", type=Path, help="where the files go")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write one .tar.xz that also holds answers and logs")
    args = parser.parse_args()
    if args.output_dir is None and args.pack is None:
        parser.error("give --output-dir, --pack or both")
    if args.output_dir is not None:
        collect(args.work, args.output_dir)
    if args.pack is not None:
        pack(args.work, args.pack)


if __name__ == "__main__":
    main()
