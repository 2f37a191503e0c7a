"""Does a trace of --profile-rollout keep its format's rules, and do its lanes add up to the step's metrics?

    python benchmarks/check_trace.py OUTPUT_DIR/traces/rollout_000012.json.gz
    python benchmarks/check_trace.py TRACE --shell /path/to/trace_processor_shell

The first reads the file by the rules of the trace-event format. The second asks Perfetto's own parser (the package
`perfetto`, and the program trace_processor_shell that https://get.perfetto.dev/trace_processor downloads): it must have
found no error and have every slice where it is, and its slices must add up as well. Exit code 1 where anything is off.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SHARE = 0.02
LEAST = 0.002
"""Seconds that a sum may be off however short the phase is."""
PHASES = ("generate", "log_probs", "train", "sync", "offload")


class Piece(NamedTuple):
    """One slice."""

    group: str
    lane: str
    name: str
    begin: float
    seconds: float


def read_trace(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="ascii") as file:
        return json.load(file)


def problems(trace: dict[str, Any]) -> list[str]:
    """What breaks the rules of the format, or of a timeline that can be read: names, numbers, slices that nest."""
    found: list[str] = []
    named: set[tuple[str, int, int]] = set()
    tracks: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        where = f"event {event}"[:200]
        kind, process, thread = event.get("ph"), event.get("pid"), event.get("tid")
        if kind not in ("X", "C", "M") or not isinstance(event.get("name"), str) or not isinstance(process, int):
            found.append(f"{where} has no known kind, name or process")
        elif kind == "M":
            place = (event["name"], process, thread)
            if place in named:
                found.append(f"{where} names what has a name")
            named.add(place)
            if event["name"].endswith("_name") and not event["args"].get("name"):
                found.append(f"{where} gives no name")
        elif type(event.get("ts")) is not int or event["ts"] < 0:
            found.append(f"{where} has no time in whole microseconds")
        elif kind == "C":
            if not event["args"] or not all(isinstance(value, (int, float)) for value in event["args"].values()):
                found.append(f"{where} counts something else than numbers")
        elif type(event.get("dur")) is not int or event["dur"] < 0 or not isinstance(thread, int):
            found.append(f"{where} has no duration in whole microseconds, or no thread")
        else:
            tracks[process, thread].append((event["ts"], event["ts"] + event["dur"], event["name"]))
            if ("process_name", process, 0) not in named or ("thread_name", process, thread) not in named:
                found.append(f"{where} is on a track without a name")
    for track, slices in tracks.items():
        open_ends: list[tuple[int, str]] = []
        for begin, end, name in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1][0] <= begin:
                open_ends.pop()
            if open_ends and end > open_ends[-1][0]:
                found.append(f"track {track}: {name!r} ends {end - open_ends[-1][0]} us after {open_ends[-1][1]!r}")
            open_ends.append((end, name))
    return found


def pieces_of(trace: dict[str, Any]) -> list[Piece]:
    """Every slice, with the names of its group and lane."""
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    return [
        Piece(
            names["process_name", event["pid"], 0],
            names["thread_name", event["pid"], event["tid"]],
            event["name"],
            event["ts"] / 1e6,
            event["dur"] / 1e6,
        )
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]


def sums(pieces: Sequence[Piece]) -> dict[str, float]:
    """The lanes' sums under the names of the metrics that they should be equal to.

    An evaluation within the step is of the weights before it (--max-staleness), and waiting for it no part of the step.
    """
    step_ends = [each.begin + each.seconds for each in pieces if (each.group, each.name) == ("driver", "step")]
    driver: dict[str, float] = defaultdict(float)
    waited = 0.0
    ranks: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for piece in pieces:
        if piece.group == "trainers":
            ranks[piece.name][piece.lane] += piece.seconds
        elif piece.group != "driver":
            continue
        elif piece.name == "evaluation" and piece.begin < max(step_ends, default=0.0):
            waited += piece.seconds
        else:
            driver[piece.name] += piece.seconds
    found = {f"perf/{name}_seconds": driver[name] for name in PHASES}
    found["perf/log_probs_seconds"] += driver["values"]
    if driver["train critic"] and not any(piece.lane.startswith("critic") for piece in pieces):
        found["perf/critic_seconds"] = driver["train critic"]  # else it is beside the policy's
    found["perf/idle_seconds"] = driver["step"] - driver["save"] - waited - sum(found.values())
    found["perf/step_seconds"] = driver["step"] - driver["save"] - waited
    if driver["evaluation"]:
        found["perf/eval_seconds"] = driver["evaluation"]
    for metric, names in {"log_probs": ("values", "log_probs"), "train": ("train",)}.items():
        slowest = [max(ranks[name].values()) for name in names if ranks[name]]
        if slowest:  # which is the metric
            found[f"perf/{metric}_seconds of ranks"] = sum(slowest)
    return found


def differences(pieces: Sequence[Piece], metrics: dict[str, float]) -> list[str]:
    """Sums that are off by more than SHARE of the metric (of the step, for what is left of it)."""
    found = []
    for name, seconds in sums(pieces).items():
        metric = metrics.get(name.removesuffix(" of ranks"))
        if metric is None:
            continue
        whole = metrics["perf/step_seconds"] if name == "perf/idle_seconds" else metric
        if abs(seconds - metric) > max(SHARE * abs(whole), LEAST):
            found.append(f"{name}: the lanes add up to {seconds:.4f} s, the metric is {metric:.4f} s")
    return found


def ask_perfetto(path: Path, shell: Path) -> tuple[list[Piece], list[str]]:
    """The slices as Perfetto's trace processor has them, and the errors that it counted."""
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    slices = """
        select process.name as grouping, thread.name as lane, slice.name as name, slice.ts as ts, slice.dur as dur
        from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
        join process using (upid)"""
    errors = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    with TraceProcessor(trace=str(path), config=TraceProcessorConfig(bin_path=str(shell))) as processor:
        pieces = [
            Piece(row.grouping, row.lane, row.name, row.ts / 1e9, row.dur / 1e9) for row in processor.query(slices)
        ]
        return pieces, [f"Perfetto counts {row.value} {row.name}" for row in processor.query(errors)]


def lost(pieces: Iterable[Piece], theirs: Iterable[Piece]) -> list[Piece]:
    """Those of `pieces`, in microseconds, that `theirs` lack or have at another time or place."""
    left: Counter[Piece] = Counter()
    for some, sign in ((theirs, 1), (pieces, -1)):
        for piece in some:
            left[piece._replace(begin=round(piece.begin * 1e6), seconds=round(piece.seconds * 1e6))] += sign
    return [piece for piece, number in left.items() if number < 0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--shell", type=Path, help="trace_processor_shell: check with Perfetto's own parser too")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    pieces, metrics = pieces_of(trace), trace["otherData"]["metrics"]
    found = problems(trace) + differences(pieces, metrics)
    if args.shell is not None:
        theirs, errors = ask_perfetto(args.trace, args.shell)
        found += errors + [f"in Perfetto {each}" for each in differences(theirs, metrics)]
        if missing := lost(pieces, theirs):
            found.append(f"Perfetto lacks or changed {len(missing)} of {len(pieces)} slices, first {missing[0]}")
    for name, seconds in sums(pieces).items():
        metric = metrics.get(name.removesuffix(" of ranks"))
        print(f"{name:36} lanes {seconds:9.4f} s" + ("" if metric is None else f"  metric {metric:9.4f} s"))
    print("\n".join(found) if found else f"{args.trace}: {len(pieces)} slices, nothing is off")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
