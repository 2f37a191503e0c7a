"""How far `slime-retool plan` is from what the trainer measures, in memory and in time.

    python benchmarks/plan_error.py                                   # every case that fits the visible GPUs
    python benchmarks/plan_error.py --gpus 1 --cases 4b 4b_full --timeout 90
    python benchmarks/plan_error.py --share-gpu --cases 1.7b_tp2      # memory of layouts, their ranks on one GPU
    python benchmarks/plan_error.py --report                          # predict anew what was measured before
    python benchmarks/plan_error.py --device cpu --model tiny         # that it works; its figures mean nothing

Each case trains on the batches of benchmarks/train_step.py in processes of its own, several cases at a time while GPUs
are free (of those in CUDA_VISIBLE_DEVICES, where that is set). What was measured is kept as
RESULTS/plan_cases/CASE.json, so several calls on different GPUs may share a folder: each prints, and writes the worst
error of, all cases found there.

Memory is the fullest rank's: `memory/trainer_peak_gib` of the trainer's own metrics (what tensors held) against the
plan's weights, gradients, optimizer, activations and logits, without the CUDA context and NCCL's buffers, which torch
does not count. Time is the median timed step against the plan's for samples of the very same lengths; ranks that share
a GPU (--share-gpu) have none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ranks import (
    NO_GPU,
    RANKS_PER_GPU,
    add_rank_options,
    add_share_option,
    make_trainer,
    run_ranks,
    side_by_side,
    visible_devices,
)
from benchmarks.results import write_result
from benchmarks.shapes import ROOT
from benchmarks.train_step import Case, make_samples, trainer_flags
from megatron_bridge.arithmetic import GIB
from megatron_bridge.arithmetic.cards import CARDS, Card, card_of_device
from slime_retool.commands.plan.memory import trainer_memories
from slime_retool.commands.plan.timing import train_seconds
from slime_retool.commands.plan.workload import Workload
from slime_retool.config import parse_config

WARMUP, STEPS = 2, 3
SEED = 1000
"""Of train_step's first warm-up step; each further step counts on."""
SP = ("--sequence-parallel",)
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
CASES = {
    case.name: case
    for case in (
        Case("0.6b", "qwen3-0.6B"),
        Case("1.7b", "qwen3-1.7B"),
        Case("1.7b_full", "qwen3-1.7B", recompute="full", max_tokens_per_gpu=32768, micro_batches=2),
        Case("4b", "qwen3-4B", micro_batches=2),
        Case("4b_full", "qwen3-4B", recompute="full", micro_batches=2),
        Case("1.7b_tp2", "qwen3-1.7B", tp=2, flags=SP),
        Case("4b_tp2", "qwen3-4B", tp=2, flags=SP),
        Case("1.7b_pp2", "qwen3-1.7B", pp=2, micro_batches=6),
        Case("1.7b_pp2_17_11", "qwen3-1.7B", pp=2, micro_batches=6, flags=("--decoder-last-pipeline-num-layers", "11")),
        Case("4b_pp2_full", "qwen3-4B", pp=2, recompute="full", micro_batches=4),
        Case("1.7b_cp2", "qwen3-1.7B", cp=2, micro_batches=8),
        Case("4b_dp2", "qwen3-4B", dp=2, micro_batches=2),
        Case("1.7b_dp2_full", "qwen3-1.7B", dp=2, recompute="full"),
        Case("4b_dp2_overlap", "qwen3-4B", dp=2, micro_batches=2, flags=OVERLAP),
        Case("4b_tp2_pp2", "qwen3-4B", tp=2, pp=2, micro_batches=6, flags=SP),
        Case("4b_tp2_dp2", "qwen3-4B", tp=2, dp=2, micro_batches=3, flags=SP),
        Case("4b_pp2_dp2_full", "qwen3-4B", pp=2, dp=2, recompute="full", micro_batches=4),
        Case("30b_a3b", "qwen3-30B-A3B:8", micro_batches=4),
        Case("30b_a3b_full", "qwen3-30B-A3B:8", recompute="full", micro_batches=4),
        Case("235b_a22b", "qwen3-235B-A22B:2", micro_batches=4),
    )
}


@dataclass(frozen=True)
class Comparison:
    """One row of the table."""

    case: str
    gib: tuple[float, float]
    """Peak memory of the fullest rank, measured and predicted."""
    seconds: tuple[float, float] | None
    """Of a step, measured and predicted; None where ranks shared a GPU."""
    device: str

    @property
    def gib_error(self) -> float:
        return percent_off(*self.gib)

    @property
    def seconds_error(self) -> float | None:
        return percent_off(*self.seconds) if self.seconds else None


def percent_off(measured: float, predicted: float) -> float:
    return 100 * (predicted / measured - 1)


def predict(case: Case, card: Card) -> tuple[float, float]:
    """(GiB of the fullest rank, seconds of a step) by the plan, for the case's flags and the samples it is timed on."""
    config = parse_config(trainer_flags(case, "cuda"))
    assert config.vocab_size is not None
    steps = [make_samples(case, config.vocab_size, seed=SEED + WARMUP + index) for index in range(STEPS)]
    samples = [sample for step in steps for sample in step]
    lengths = [sample.length for sample in samples]
    tokens, count = sum(lengths), round(len(samples) / STEPS)
    config = replace(config, rollout_batch_size=count)
    workload = Workload(
        samples=count,
        mean_prompt=0.0,
        mean_response=tokens / len(samples),
        longest=max(lengths),
        attended=sum(n * n for n in lengths) / tokens,
        learned=sum(sample.num_loss_tokens for sample in samples) / tokens,
    )
    memory, _ = trainer_memories(config, workload)
    return memory.allocated / GIB, train_seconds(config, card, workload)


def card_of(device: str) -> Card:
    """The plan's card for a device; what is none (a CPU) is compared with an H200."""
    return card_of_device(device) or CARDS["h200"]


def compare(case: Case, figures: dict[str, Any]) -> Comparison:
    gib, seconds = predict(case, card_of(figures["device"]))
    measured = figures["step_seconds"]
    both = None if measured is None else (measured, seconds)
    return Comparison(case.name, (figures["peak_gib"], gib), both, figures["device"])


HEADER = f"{'case':<18}{'GiB':>8}{'plan':>8}{'error':>8}{'step s':>9}{'plan':>8}{'error':>8}{'tok/s/GPU':>11}  layout"


def row(found: Comparison, case: Case, tokens_per_second: float) -> str:
    if found.seconds is None:
        times, device = f"{'':>36}", f"sharing one {found.device}"
    else:
        times = f"{found.seconds[0]:>9.3f}{found.seconds[1]:>8.3f}{found.seconds_error:>+7.1f}%"
        times += f"{tokens_per_second:>11,.0f}"
        device = found.device
    layout = " ".join(f"{name}{size}" for name in ("tp", "pp", "cp", "dp") if (size := asdict(case)[name]) > 1)
    return (
        f"{found.case:<18}{found.gib[0]:>8.1f}{found.gib[1]:>8.1f}{found.gib_error:>+7.1f}%{times}"
        f"  {layout or 'one rank'}, {device}"
    )


def run_rank(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Train; figures of the timed steps."""
    import torch

    from slime_retool.types import RolloutBatch

    config = parse_config(trainer_flags(case, args.device))
    assert config.vocab_size is not None
    trainer = make_trainer(config, args)
    on_gpu = args.device == "cuda"
    seconds, peaks, tokens = [], [], 0
    shared = args.share_gpu and case.world_size > 1
    warmup, steps = (1, 1) if shared else (WARMUP, STEPS)
    for index in range(warmup + steps):
        samples = make_samples(case, config.vocab_size, seed=SEED + index)
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        metrics = trainer.train(RolloutBatch(samples), index)
        if on_gpu:
            torch.cuda.synchronize()
        if index >= warmup:
            seconds.append(time.perf_counter() - begin)
            peaks.append(metrics["memory/trainer_peak_gib" if on_gpu else "memory/trainer_host_gib"])
            tokens += sum(sample.length for sample in samples)
    trainer.shutdown()
    return {
        "peak_gib": max(peaks),
        "step_seconds": None if shared else statistics.median(seconds),
        "each_step_seconds": [round(value, 4) for value in seconds],
        "tokens_per_second": tokens / sum(seconds) / case.world_size,
        "micro_batches": metrics["train/micro_batches"],
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }


def measure(case: Case, args: argparse.Namespace, devices: Sequence[str] = NO_GPU) -> dict[str, Any]:
    """Run the case on these GPUs and keep its figures; {"error": why} when it fails or runs out of time."""
    command = [sys.executable, __file__, "--worker", json.dumps(asdict(case)), "--device", args.device]
    command += ["--share-gpu"] if args.share_gpu else []
    figures = run_ranks(command, case.world_size, args.timeout, devices)
    keep(case, figures, args.out_dir)
    return figures


def keep(case: Case, figures: dict[str, Any], out_dir: Path) -> None:
    """Write figures of a step on the samples of SEED where `report` finds them.

    It reads `step_seconds`, `peak_gib`, `tokens_per_second` and `device`.
    """
    folder = out_dir / "plan_cases"
    folder.mkdir(parents=True, exist_ok=True)
    record = {"case": asdict(case), "figures": figures}
    (folder / f"{case.name}.json").write_text(json.dumps(record, indent=2) + "\n")


def measure_all(cases: list[Case], args: argparse.Namespace) -> None:
    """As many cases at a time as GPUs are free, the widest first. None begins after --budget seconds."""
    last_begin = time.monotonic() + args.budget
    by_name = {case.name: case for case in sorted(cases, key=lambda case: -case.world_size)}

    def one(name: str, devices: list[str]) -> None:
        if time.monotonic() > last_begin:
            print(f"{name}: left out, --budget {args.budget:.0f} s are over", flush=True)
            return
        case = by_name[name]
        figures = measure(case, args, devices if args.device == "cuda" else NO_GPU)
        if "error" in figures:
            print(f"{name}: failed: {figures['error']}", flush=True)
        else:
            print(f"{HEADER}\n{row(compare(case, figures), case, figures['tokens_per_second'])}", flush=True)

    widths = {name: 1 if args.share_gpu else case.world_size for name, case in by_name.items()}
    side_by_side(widths, usable_devices(args), one)


def usable_devices(args: argparse.Namespace) -> list[str]:
    """Names of the GPUs to use; on the CPU as many free places as --gpus says."""
    names = visible_devices() if args.device == "cuda" else [str(index) for index in range(args.gpus or 1)]
    return names[: args.gpus] if args.gpus else names


def read_case(fields: dict[str, Any]) -> Case:
    """From JSON, which knows no tuples."""
    return Case(**{**fields, "flags": tuple(fields["flags"])})


def load(out_dir: Path) -> list[tuple[Case, dict[str, Any]]]:
    """All cases that were measured into this folder."""
    found = []
    for path in sorted((out_dir / "plan_cases").glob("*.json")):
        record = json.loads(path.read_text())
        found.append((read_case(record["case"]), record["figures"]))
    return found


def report(args: argparse.Namespace) -> int:
    """Print the table of all that is in the folder, and write the worst errors (on GPUs)."""
    measured = load(args.out_dir)
    rows: list[Comparison] = []
    print(f"\n{HEADER}")
    for case, figures in measured:
        if "error" in figures:
            print(f"{case.name:<18} failed: {figures['error'].splitlines()[0]}")
            continue
        rows.append(compare(case, figures))
        print(row(rows[-1], case, figures["tokens_per_second"]))
    on_gpu = [found for found in rows if found.device != "cpu"]
    if on_gpu:
        for metric, errors in (
            ("plan_memory_error", [found.gib_error for found in on_gpu]),
            ("plan_step_time_error", [found.seconds_error for found in on_gpu if found.seconds_error is not None]),
        ):
            if not errors:
                continue
            worst = max(abs(error) for error in errors)
            unit = f"% off, worst of {len(errors)} cases"
            write_result(metric, round(worst, 1), unit, out_dir=args.out_dir, card=on_gpu[0].device)
            print(f"{metric}: {worst:.1f} {unit}")
    return 0 if measured and len(rows) == len(measured) else 1


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    if args.model is not None:
        return [Case(args.model, args.model, max_tokens_per_gpu=args.max_tokens_per_gpu, micro_batches=2)]
    limit = len(usable_devices(args)) * (RANKS_PER_GPU if args.share_gpu else 1)
    chosen = [CASES[name] for name in args.cases or CASES]
    too_wide = [case.name for case in chosen if case.world_size > limit]
    if args.cases and too_wide:
        raise SystemExit(f"--cases {' '.join(too_wide)}: more GPUs than the {limit} that there are")
    return [case for case in chosen if case.world_size <= limit and fits(case, args)]


def fits(case: Case, args: argparse.Namespace) -> bool:
    """Whether the plan says that the case fits the card; says so where it does not."""
    if args.device == "cpu":
        return True
    import torch

    gib, _ = predict(case, card_of(torch.cuda.get_device_name()))
    gib *= case.world_size if args.share_gpu else 1
    room = torch.cuda.get_device_properties(0).total_memory / GIB
    if gib > 0.95 * room:
        print(f"{case.name}: left out, {gib:.0f} GiB do not fit the card's {room:.0f}", flush=True)
    return gib <= 0.95 * room


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), help="default: all that fit the GPUs")
    parser.add_argument("--gpus", type=int, help="use at most this many of the visible GPUs")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one case")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no case begins")
    parser.add_argument("--model", help="instead of --cases: one rank of a file of scripts/models, or tiny")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=1024, help="with --model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--report", action="store_true", help="run nothing: the table of what was measured before")
    parser.add_argument("--out-dir", type=Path, help="results folder (default on GPUs: benchmarks/results)")
    add_share_option(parser)
    add_rank_options(parser)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    if args.out_dir is None:
        args.out_dir = ROOT / "benchmarks" / ("results" if args.device == "cuda" else "results-cpu")
    if args.worker:
        figures = run_rank(read_case(json.loads(args.worker)), args)
        if args.rank == 0:
            Path(args.result).write_text(json.dumps(figures))
        return 0
    if not args.report:
        measure_all(chosen_cases(args), args)
    return report(args)


if __name__ == "__main__":
    sys.exit(main())
