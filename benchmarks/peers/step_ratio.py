"""Medians of both sides' steps after the first two, and how many times ours the peer's whole step is.

    python benchmarks/peers/step_ratio.py --peer verl --ours RUN/metrics.jsonl --theirs FILE --output peer.json

`--theirs` is what verl's logger `file`, or trl_step.py, wrote. A phase has the name that each side gives it. Of other
peers `--output` keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime_retool.metrics import read_metrics

WARM_STEPS = 2
PHASES = {
    "step": ("perf/step_seconds", "timing_s/step"),
    "generate": ("perf/generate_seconds", "timing_s/gen"),
    "log_probs": ("perf/log_probs_seconds", "timing_s/old_log_prob"),
    "train": ("perf/train_seconds", "timing_s/update_actor"),
    "update": ("perf/sync_seconds", "timing_s/update_weights"),
}
"""Phase -> its metric on our side and on theirs; TRL, which trains what generates, has no update."""
Row = dict[str, Any]


def peer_steps(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line)["data"] for line in lines]
    return [row for row in rows if PHASES["step"][1] in row]


def medians(rows: list[Row], side: int) -> dict[str, float]:
    """Phase -> median of the steps after the first two."""
    steady = rows[WARM_STEPS:]
    found = {name: [row[metrics[side]] for row in steady if metrics[side] in row] for name, metrics in PHASES.items()}
    return {name: round(statistics.median(values), 4) for name, values in found.items() if values}


def compared(ours: list[Row], theirs: list[Row], why: str) -> Row:
    """The entry of summary.json: the ratio, or null and why there is none."""
    entry: Row = {"step_ratio": None, "steps": [len(ours), len(theirs)]}
    entry |= {"ours_seconds": medians(ours, 0), "theirs_seconds": medians(theirs, 1)}
    if "step" in entry["ours_seconds"] and "step" in entry["theirs_seconds"]:
        entry["step_ratio"] = round(entry["theirs_seconds"]["step"] / entry["ours_seconds"]["step"], 3)
    else:
        entry["why"] = why or "a side did not finish more than two steps"
    return entry


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("verl", "trl"), required=True)
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--theirs", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--why", default="", help="said where there is no ratio")
    args = parser.parse_args(argv)
    ours = [row for row in read_metrics(args.ours) if PHASES["step"][0] in row] if args.ours.exists() else []
    result = json.loads(args.output.read_text()) if args.output.exists() else {}
    result[args.peer] = compared(ours, peer_steps(args.theirs), args.why)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
