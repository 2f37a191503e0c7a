"""The same learning run in several parallel layouts: are the loss curves the same within the precision's noise?

    python benchmarks/parallel_curves.py                                   # two GPUs: TP2, PP2, CP2, DP2
    python benchmarks/parallel_curves.py --layouts tp2 pp2 cp2 dp2 tp2xpp2  # four GPUs
    python benchmarks/parallel_curves.py --layouts tp2xpp2 --share-gpu      # one GPU
    python benchmarks/parallel_curves.py --device cpu --model tiny --length 64 --samples 8
    python benchmarks/parallel_curves.py --report one.json two.json         # curves that earlier calls wrote (--output)

Every run starts from one checkpoint (random weights, written and converted once) and fits the same text in the same
order: bytes of this repository's documentation as token ids, `--samples` pieces of up to `--length` bytes a step, SFT
loss, `--steps` optimizer steps of the product's Trainer.

The noise is how far apart runs on one device are that compute the same and round differently: as all layouts do; with
the samples of a step reversed, in micro-batches of half the size; on GPUs also with cuDNN's attention, and with torch's
layers instead of Transformer Engine's. Mean and largest difference are averaged over all pairs of these runs, because
two runs are too few: their difference varies threefold. A layout is `same` when its mean and its largest difference,
averaged over the one-device runs, are within `--factor` times those of the noise (with a floor of a few units in the
last place of fp32). `--report` does so with the curves of several calls.

Each run has processes of its own with a time limit; one that fails is reported and costs no other. On GPUs they run
side by side, as many as the GPUs that the script sees (CUDA_VISIBLE_DEVICES) have room for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
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
from benchmarks.results import installed_versions, write_result
from benchmarks.shapes import ROOT, model_flags, prepare
from benchmarks.texts import repository_text

OPTIONS = ("model", "steps", "samples", "length", "lr", "max_tokens_per_gpu")
"""Of this script, what a curve depends on."""
FLOOR = 4 * 2.0**-23
"""Relative difference that fp32 sums may always have."""


@dataclass(frozen=True)
class Layout(Sizes):
    """How the steps are computed. reordered: other micro-batches, in another order; flags: of slime_retool.train."""

    name: str
    reordered: bool = False
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, name: str) -> Layout:
        """One of ONE_DEVICE, or `tp2xpp2` and the like: what is not named is 1. ValueError for anything else."""
        if name in ONE_DEVICE:
            return ONE_DEVICE[name]
        parts = [re.fullmatch(r"(tp|pp|cp|dp)(\d+)", part) for part in name.split("x")]
        if not all(parts) or len({part[1] for part in parts if part}) != len(parts):
            raise ValueError(f"a layout is written like tp2 or tp2xpp2 (tp, pp, cp, dp), got {name!r}")
        return cls(name, **{part[1]: int(part[2]) for part in parts if part})


ONE_DEVICE = {
    layout.name: layout
    for layout in (
        Layout("one"),
        Layout("one-reordered", reordered=True),
        Layout("one-cudnn", flags=("--attention-backend", "fused")),
        Layout("one-local", flags=("--transformer-impl", "local")),
    )
}
"""The runs that tell what the noise is."""
ON_CPU = ("one", "one-reordered")
"""Of these; there the others are the same as the first."""


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
            *layout.flags,
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
class Curve:
    """A run of a layout: its losses in nats, or why there are none."""

    layout: str
    losses: tuple[float, ...] = ()
    error: str | None = None

    @classmethod
    def of(cls, layout: str, figures: Mapping[str, Any]) -> Curve:
        """From a run's figures: `losses`, or `error`. A loss that is not finite is an error too."""
        losses = tuple(figures.get("losses", ()))
        error = figures.get("error")
        if error is None and not all(math.isfinite(loss) for loss in losses):
            error = "a loss is not finite"
        return cls(layout, losses, error)


@dataclass(frozen=True)
class Difference:
    """Between curves, in nats."""

    mean: float
    largest: float

    @classmethod
    def between(cls, curve: Curve, other: Curve) -> Difference:
        each = [abs(a - b) for a, b in zip(curve.losses, other.losses, strict=True)]
        return cls(statistics.fmean(each), max(each))

    @classmethod
    def average(cls, differences: Sequence[Difference]) -> Difference:
        return cls(
            statistics.fmean(each.mean for each in differences), statistics.fmean(each.largest for each in differences)
        )

    def over(self, noise: Difference, floor: float) -> float:
        """How many times the noise, by mean or by maximum, whichever is worse."""
        return max(self.mean / max(noise.mean, floor), self.largest / max(noise.largest, floor))


@dataclass(frozen=True)
class Row:
    """difference: from the one-device runs (but itself), averaged; times: the noise. None where there are none."""

    curve: Curve
    verdict: str
    difference: Difference | None = None
    times: float | None = None


def compare(curves: Sequence[Curve], factor: float) -> list[Row]:
    """A row for each curve, in their order."""
    known = [curve for curve in curves if curve.layout in ONE_DEVICE and curve.error is None]
    noise = Difference.average([Difference.between(*pair) for pair in combinations(known, 2)]) if known[1:] else None
    rows = []
    for curve in curves:
        if curve.error is not None:
            rows.append(Row(curve, "failed"))
        elif noise is None:
            rows.append(Row(curve, "nothing to compare with"))
        else:
            others = [other for other in known if other is not curve]
            found = Difference.average([Difference.between(curve, other) for other in others])
            times = found.over(noise, FLOOR * known[0].losses[0])
            verdict = "noise" if curve in known else "same" if times <= factor else "different"
            rows.append(Row(curve, verdict, found, times))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'layout':<16}{'first loss':>11}{'last loss':>11}{'mean |d|':>11}{'max |d|':>11}{'x noise':>9}  verdict"]
    for row in rows:
        losses, found = row.curve.losses, row.difference
        cells = [f"{losses[0]:.4f}", f"{losses[-1]:.4f}"] if row.curve.error is None else ["", ""]
        cells += [f"{found.mean:.2e}", f"{found.largest:.2e}"] if found else ["", ""]
        cells.append(f"{row.times:.2f}" if row.times is not None else "")
        padded = "".join(f"{cell:>{width}}" for cell, width in zip(cells, (11, 11, 11, 11, 9), strict=True))
        lines.append(f"{row.curve.layout:<16}{padded}  {row.verdict}")
    return "\n".join(lines)


def setting_of(args: argparse.Namespace) -> dict[str, Any]:
    """All that curves must share to be compared: what is computed, on what, with which versions."""
    import torch

    return {
        **{name: vars(args)[name] for name in (*OPTIONS, "flags")},
        "text": hashlib.sha256(repository_text().encode()).hexdigest(),
        "card": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "versions": installed_versions(),
    }


def write_curves(path: Path, setting: Mapping[str, Any], curves: Sequence[Curve]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = [
        {"layout": curve.layout, **({"losses": curve.losses} if curve.error is None else {"error": curve.error})}
        for curve in curves
    ]
    path.write_text(json.dumps({"setting": setting, "curves": fields}, indent=2) + "\n")


def read_curves(paths: Sequence[Path]) -> tuple[dict[str, Any], list[Curve]]:
    """The setting of several calls and the curves of all. ValueError when they do not share the setting."""
    setting: dict[str, Any] = {}
    curves: list[Curve] = []
    for path in paths:
        record = json.loads(path.read_text())
        setting = setting or record["setting"]
        for name, value in record["setting"].items():
            if setting.get(name) != value:
                raise ValueError(
                    f"--report: {path} has {name} {value!r}, {paths[0]} has {setting.get(name)!r}: only curves of one "
                    "setting can be compared"
                )
        curves += [Curve.of(fields["layout"], fields) for fields in record["curves"]]
    return setting, curves


def run_all(args: argparse.Namespace, setting: Mapping[str, Any], work: Path) -> list[Curve]:
    weights = prepare(args.weights or work, args.model)
    one_device = ONE_DEVICE if args.device == "cuda" else ON_CPU
    layouts = {name: Layout.parse(name) for name in (*one_device, *args.layouts)}
    found: dict[str, Curve] = {}
    lock = threading.Lock()

    def curves() -> list[Curve]:
        return [found[name] for name in layouts if name in found]

    def finish(name: str, figures: Mapping[str, Any]) -> None:
        with lock:
            curve = found[name] = Curve.of(name, figures)
            print(f"{name}: {curve.error or ' '.join(f'{loss:.4f}' for loss in curve.losses)}", flush=True)
            if args.output is not None:  # after each run: what stops the script costs only what is missing
                write_curves(args.output, setting, curves())

    def run(name: str, devices: Sequence[str]) -> None:
        options = [
            word for key in ("device", *OPTIONS) for word in (f"--{key.replace('_', '-')}", str(vars(args)[key]))
        ]
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
    return curves()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["tp2", "pp2", "cp2", "dp2"], help="beside one device")
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
    parser.add_argument("--output", type=Path, help="write the curves here, one after the other (JSON)")
    parser.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="run nothing: compare these outputs")
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
    if args.report:
        setting, curves = read_curves(args.report)
    else:
        setting = setting_of(args)
        with tempfile.TemporaryDirectory(prefix="curves-") as work:
            curves = run_all(args, setting, Path(work))
    rows = compare(curves, args.factor)
    print(table(rows))
    times = [row.times for row in rows if row.verdict in ("same", "different") and row.times is not None]
    good = all(row.verdict in ("noise", "same") for row in rows)
    out_dir = args.out_dir or (ROOT / "benchmarks" / "results" if setting["card"] != "cpu" else None)
    if out_dir is not None and good and times:
        card, versions = setting["card"], setting["versions"]
        write_result("parallel_curves", max(times), "x noise", out_dir=out_dir, card=card, versions=versions)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"parallel_curves: {error}")
