"""The same learning run in several parallel layouts: are the loss curves the same within the precision's noise?

    python benchmarks/parallel_curves.py                                   # two GPUs: TP2, PP2, CP2, DP2
    python benchmarks/parallel_curves.py --layouts tp2 pp2 cp2 dp2 tp2xpp2  # four GPUs
    python benchmarks/parallel_curves.py --layouts tp2xpp2 --share-gpu      # one GPU
    python benchmarks/parallel_curves.py --device cpu --model tiny --length 64 --samples 8

Every run starts from one checkpoint (random weights, written and converted once) and fits the same text in the same
order: bytes of this repository's documentation as token ids, `--samples` pieces of up to `--length` bytes a step, SFT
loss, `--steps` optimizer steps of the product's Trainer.

The noise is what the same run on one device shows when only the order of additions changes: the samples of a step
reversed, in micro-batches of half the size. A layout is `same` when its mean and its largest difference from the
one-device curve are within `--factor` times those of the noise (with a floor of a few units in the last place of
fp32). Each layout runs in processes of its own with a time limit; one that fails is reported and costs no other. On
GPUs layouts run side by side, as many as the GPUs that the script sees (CUDA_VISIBLE_DEVICES) have room for.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ranks import (
    NO_GPU,
    Sizes,
    add_rank_options,
    add_share_option,
    make_trainer,
    places,
    run_ranks,
    side_by_side,
)
from benchmarks.results import write_result
from benchmarks.shapes import ROOT, model_flags, prepare
from benchmarks.texts import repository_text

BASELINE, NOISE = "tp1", "tp1-reordered"
FLOOR = 4 * 2.0**-23
"""Relative difference that fp32 sums may always have."""


@dataclass(frozen=True)
class Layout(Sizes):
    """`tp2xpp2` and the like; what is not named is 1."""

    name: str

    @classmethod
    def parse(cls, name: str) -> Layout:
        """ValueError for anything else."""
        parts = [re.fullmatch(r"(tp|pp|cp|dp)(\d+)", part) for part in name.removesuffix("-reordered").split("x")]
        if not all(parts) or len({part[1] for part in parts if part}) != len(parts):
            raise ValueError(f"a layout is written like tp2 or tp2xpp2 (tp, pp, cp, dp), got {name!r}")
        return cls(name, **{part[1]: int(part[2]) for part in parts if part})

    @property
    def reordered(self) -> bool:
        return self.name == NOISE


def make_steps(text: bytes, steps: int, samples: int, length: int, seed: int = 0) -> list[list[bytes]]:
    """Pieces of the text, of random lengths and places, for each step."""
    rng = random.Random(seed)
    pieces = []
    for _ in range(steps * samples):
        size = rng.randint(length // 4, length)
        begin = rng.randrange(len(text) - size)
        pieces.append(text[begin : begin + size])
    return [pieces[step * samples : (step + 1) * samples] for step in range(steps)]


def run_rank(args: argparse.Namespace, layout: Layout) -> list[float]:
    """The loss of every step."""
    from slime_retool.config import parse_config
    from slime_retool.types import RolloutBatch, TrainSample

    tokens = args.max_tokens_per_gpu // (2 if layout.reordered else 1)
    config = parse_config(
        [
            *model_flags(args.model),
            *layout.size_flags(),
            "--device",
            args.device,
            "--ref-load",
            args.checkpoint,
            "--loss-type",
            "sft_loss",
            "--calculate-per-token-loss",
            "--lr",
            str(args.lr),
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu",
            str(tokens),
            "--num-rollout",
            str(args.steps),
            "--lr-warmup-iters",
            "4",
            *args.flags,
        ]  # fmt: skip
    )
    trainer = make_trainer(config, args)
    trainer.load()
    losses = []
    for number, pieces in enumerate(make_steps(repository_text().encode(), args.steps, args.samples, args.length)):
        samples = [
            TrainSample(list(piece), [0] + [1] * (len(piece) - 1), index=index) for index, piece in enumerate(pieces)
        ]
        if layout.reordered:
            samples.reverse()
        losses.append(trainer.train(RolloutBatch(samples), number)["train/loss"])
    trainer.shutdown()
    return losses


@dataclass(frozen=True)
class Difference:
    """Between two curves, relative to nothing: losses are in nats."""

    mean: float
    largest: float

    @classmethod
    def between(cls, curve: list[float], baseline: list[float]) -> Difference:
        each = [abs(a - b) for a, b in zip(curve, baseline, strict=True)]
        return cls(sum(each) / len(each), max(each))


def ratio(found: Difference, noise: Difference, loss: float) -> float:
    """How many times the noise the difference is, by mean or by maximum, whichever is worse."""
    floor = FLOOR * loss
    return max(found.mean / max(noise.mean, floor), found.largest / max(noise.largest, floor))


def compare(curves: dict[str, dict[str, Any]], factor: float) -> list[dict[str, Any]]:
    """A row for each layout: its differences from the baseline, and the verdict."""
    rows: list[dict[str, Any]] = []
    baseline = curves.get(BASELINE, {}).get("losses")
    noise = None
    if baseline and "losses" in curves.get(NOISE, {}):
        noise = Difference.between(curves[NOISE]["losses"], baseline)
    for name, figures in curves.items():
        row: dict[str, Any] = {"layout": name}
        if "error" in figures:
            row |= {"verdict": "failed", "error": figures["error"]}
        elif not all(math.isfinite(value) for value in figures["losses"]):
            row |= {"verdict": "failed", "error": "a loss is not finite"}
        else:
            losses = figures["losses"]
            row |= {"first": losses[0], "last": losses[-1]}
            if baseline and noise and name != BASELINE:
                found = Difference.between(losses, baseline)
                row |= {"mean": found.mean, "largest": found.largest, "ratio": ratio(found, noise, baseline[0])}
                row["verdict"] = "noise" if name == NOISE else "same" if row["ratio"] <= factor else "different"
            else:
                row["verdict"] = "baseline" if name == BASELINE else "nothing to compare with"
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'layout':<16}{'first loss':>11}{'last loss':>11}{'mean |d|':>11}{'max |d|':>11}{'x noise':>9}  verdict"]
    for row in rows:
        cells = [f"{row[key]:.4f}" if key in row else "" for key in ("first", "last")]
        cells += [f"{row[key]:.2e}" if key in row else "" for key in ("mean", "largest")]
        cells.append(f"{row['ratio']:.2f}" if "ratio" in row else "")
        widths = (11, 11, 11, 11, 9)
        padded = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{row['layout']:<16}{padded}  {row['verdict']}")
    return "\n".join(lines)


def run_all(args: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    weights = prepare(args.weights or work, args.model)
    layouts = {name: Layout.parse(name) for name in (BASELINE, NOISE, *args.layouts)}
    curves: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()

    def finish(name: str, curve: dict[str, Any]) -> None:
        with lock:
            curves[name] = curve
            shown = " ".join(f"{loss:.4f}" for loss in curve.get("losses", []))
            print(f"{name}: {curve.get('error', shown)}", flush=True)
            if args.output is not None:  # after each layout: what stops the script costs only what is missing
                args.output.write_text(json.dumps(rows_of(), indent=2) + "\n")

    def rows_of() -> list[dict[str, Any]]:
        rows = compare({name: curves[name] for name in layouts if name in curves}, args.factor)
        return [{**row, "losses": curves[row["layout"]].get("losses", [])} for row in rows]

    def run(name: str, devices: Sequence[str]) -> None:
        names = ("model", "device", "steps", "samples", "length", "lr", "max_tokens_per_gpu")
        options = [word for key in names for word in (f"--{key.replace('_', '-')}", str(vars(args)[key]))]
        worker = ["--worker", name, "--checkpoint", str(weights / "torch_dist"), *options]
        # The flags of the run are put last, behind what run_ranks adds.
        command = [sys.executable, __file__, *worker, *(f"--flag={flag}" for flag in args.flags)]
        finish(name, run_ranks(command, layouts[name].world_size, args.timeout, devices))

    if args.device == "cpu":
        for name in layouts:
            run(name, NO_GPU)
    else:
        sizes = {name: layout.world_size for name, layout in layouts.items()}
        for name, why in side_by_side(sizes, places(args.share_gpu), run).items():
            finish(name, {"error": why})
    return rows_of()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["tp2", "pp2", "cp2", "dp2"], help="beside tp1")
    parser.add_argument("--model", default="qwen3-0.6B", help="a file of scripts/models (a Qwen3 shape), or tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=32, help="samples of one step")
    parser.add_argument("--length", type=int, default=2048, help="longest sample, tokens")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--factor", type=float, default=3.0, help="times the noise that still counts as the same")
    parser.add_argument("--weights", type=Path, help="folder of the random checkpoint, kept for later runs")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds of one layout")
    parser.add_argument("--output", type=Path, help="write rows and curves here (JSON)")
    parser.add_argument("--out-dir", type=Path, help="results folder (default on GPUs: benchmarks/results)")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train, for every layout")
    add_share_option(parser)
    add_rank_options(parser, "--checkpoint")
    parser.add_argument("--flag", action="append", default=[], help=argparse.SUPPRESS)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    if args.worker:
        args.flags = args.flag
        losses = run_rank(args, Layout.parse(args.worker))
        if args.rank == 0:
            Path(args.result).write_text(json.dumps({"losses": losses}))
        return 0
    for name in args.layouts:
        Layout.parse(name)
    with tempfile.TemporaryDirectory(prefix="curves-") as work:
        rows = run_all(args, Path(work))
    print(table(rows))
    good = all(row["verdict"] in ("baseline", "noise", "same") for row in rows)
    out_dir = args.out_dir or (ROOT / "benchmarks" / "results" if args.device == "cuda" else None)
    if out_dir is not None and good:
        write_result("parallel_curves", max(row["ratio"] for row in rows[2:]), "x noise", out_dir=out_dir)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"parallel_curves: {error}")
