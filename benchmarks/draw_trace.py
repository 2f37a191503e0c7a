"""A trace of --profile-rollout as a picture: python benchmarks/draw_trace.py TRACE OUT.png

One row for each track, with what is nested drawn lower and thinner, and each counter as a line.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.check_trace import Piece, pieces_of, read_trace  # noqa: E402

COLOURS = {
    "generate": "#3b76d9", "request": "#1f4f9e", "tools": "#d07b00", "reward": "#1b8a50", "queue": "#d9dde5",
    "log_probs": "#7c5cc4", "pass": "#7c5cc4", "outputs": "#5a3fa0", "train": "#1b8a50", "forward": "#4fa37a",
    "loss": "#b9a000", "backward": "#12603a", "optimizer": "#b3261e", "sync": "#d07b00", "weight update": "#d07b00",
    "save": "#a3268f", "evaluation": "#5d6b00", "step": "#c3c9d4", "trainers": "#dfe3ea", "offload": "#98a1b2",
}  # fmt: skip
OTHER = "#98a1b2"
MOST_TRACKS = 12
"""Of a group that are drawn."""


def depths(pieces: list[Piece]) -> list[tuple[Piece, int]]:
    """Each slice of one track, with how many it lies within."""
    open_ends: list[float] = []
    found = []
    for piece in sorted(pieces, key=lambda each: (each.begin, -each.seconds)):
        while open_ends and open_ends[-1] <= piece.begin:
            open_ends.pop()
        found.append((piece, len(open_ends)))
        open_ends.append(piece.begin + piece.seconds)
    return found


def draw(trace: dict[str, Any], out: Path) -> None:
    rows: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    for piece in pieces_of(trace):
        rows[piece.group, piece.lane].append(piece)
    kept: dict[str, int] = defaultdict(int)
    for group, lane in list(rows):
        kept[group] += 1
        if kept[group] > MOST_TRACKS:
            del rows[group, lane]
    counters: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            counters[event["name"]].append((event["ts"] / 1e6, sum(event["args"].values())))
    heights = [0.34 * len(rows), *[0.8] * len(counters)]
    figure, axes = plt.subplots(
        len(heights), 1, sharex=True, squeeze=False, figsize=(14, sum(heights) + 1),
        gridspec_kw={"height_ratios": heights, "hspace": 0.12},
    )  # fmt: skip
    top, *below = axes[:, 0]
    for place, pieces in enumerate(rows.values()):
        for piece, depth in depths(pieces):
            height = 0.9 * 0.78**depth
            colour = COLOURS.get(piece.name, "#dfe3ea" if piece.name.startswith("sample") else OTHER)
            top.broken_barh(
                [(piece.begin, piece.seconds)], (-place - height / 2, height), facecolors=colour, edgecolor="white",
                linewidth=0.4,
            )  # fmt: skip
    top.set_yticks([-place for place in range(len(rows))], [f"{group}: {lane}" for group, lane in rows], fontsize=7)
    top.set_ylim(-len(rows) + 0.4, 0.6)
    used = {piece.name for pieces in rows.values() for piece in pieces}
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in COLOURS if name in used]
    top.legend(
        handles, [name for name in COLOURS if name in used], ncols=9, fontsize=7, loc="lower left",
        bbox_to_anchor=(0, 1), frameon=False,
    )  # fmt: skip
    for lower, (name, points) in zip(below, counters.items(), strict=True):
        times, values = zip(*sorted(points), strict=True)
        lower.step(times, values, where="post", color="#3b76d9", linewidth=1)
        lower.set_ylabel(name, fontsize=6, rotation=0, ha="right", va="center")
        lower.tick_params(labelsize=6)
    axes[-1, 0].set_xlabel("seconds", fontsize=8)
    figure.savefig(out, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    draw(read_trace(args.trace), args.out)


if __name__ == "__main__":
    main()
