"""Speed of the trainer's step, by the product's own Trainer, on random weights of a model's shape.

    python benchmarks/train_step.py                                   # all named cases, one GPU
    python benchmarks/train_step.py --cases train_mfu_4b --profile
    python benchmarks/train_step.py --model qwen3-1.7B --tp 2 --micro-batches 8 -- --sequence-parallel
    python benchmarks/train_step.py --device cpu --model tiny --max-tokens-per-gpu 512

Each case runs in child processes of its own (one for each GPU) with a time limit, so that one that fails costs no
other. Prints a row for each and, for a named case on a GPU, writes benchmarks/results/CASE.json. Flags of
slime_retool.train may follow `--`.

Batches. Sequence lengths are log-uniform between 200 and 8,192 tokens (mean 2,150: many short answers, a long tail),
drawn anew for each step from a seed, until they fill 97% of `--micro-batches` times `--max-tokens-per-gpu`, and packed
by the trainer: eight micro-batches of 16k tokens make an optimizer step, at 1.7B seven of 40k. A sample's prompt is 200
tokens (a quarter of a shorter sample); of its response every run of 400 tokens ends with 60 of a tool's output, which
are not learned.

MFU = model FLOPs / time / 989 TFLOP/s (dense bf16 of H100 and H200 SXM). Model FLOPs of a training step are 6 N for
each token plus causal attention, 6 * layers * heads * head width * s^2 for each sequence of s tokens; of a forward a
third of both. N counts every matrix, the output layer once and the input embedding not at all. Recomputation counts
nothing. The trainer makes logits only where a token is learned; the column `strict` counts the output layer's FLOPs
only there, and is what the result file holds. Time is the whole call of `Trainer.train` (or `Trainer.log_probs`),
packing and optimizer included.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ranks import NO_GPU, Sizes, add_rank_options, make_trainer, run_ranks, too_few, visible_devices
from benchmarks.shapes import ROOT, model_flags

PEAK_FLOPS = 989e12
SHORTEST, LONGEST = 200, 8192


@dataclass(frozen=True)
class Case(Sizes):
    """One row of the table. A field's name is its option."""

    name: str = "custom"
    model: str = "qwen3-0.6B"
    recompute: str = "none"
    transformer_impl: str = "auto"
    max_tokens_per_gpu: int = 16384
    micro_batches: int = 8
    forward_only: bool = False
    flags: tuple[str, ...] = field(default=())


KEEP_LOGITS = ("--keep-logits-gib", "20")
"""Where the card has room for all logits of a micro-batch."""
CASES = {
    case.name: case
    for case in (
        Case("train_mfu_4b", "qwen3-4B"),
        Case("train_mfu_4b_recompute", "qwen3-4B", recompute="full", flags=KEEP_LOGITS),
        Case("logprob_mfu_4b", "qwen3-4B", forward_only=True),
        Case("train_mfu_1.7b", "qwen3-1.7B", max_tokens_per_gpu=40960, micro_batches=7, flags=KEEP_LOGITS),
        Case("train_mfu_0.6b_local", "qwen3-0.6B", transformer_impl="local", flags=KEEP_LOGITS),
    )
}


def trainer_flags(case: Case, device: str) -> list[str]:
    recompute = {
        "none": [],
        "selective": ["--recompute-granularity", "selective"],
        "full": ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    }[case.recompute]
    return [
        *model_flags(case.model), *recompute, "--device", device, "--transformer-impl", case.transformer_impl,
        *case.size_flags(), "--use-dynamic-batch-size", "--max-tokens-per-gpu", str(case.max_tokens_per_gpu),
        *case.flags,
    ]  # fmt: skip


def draw_lengths(total: int, longest: int, rng: random.Random) -> list[int]:
    """Log-uniform lengths, as many as fit into `total` tokens."""
    lengths: list[int] = []
    shortest = min(SHORTEST, longest)
    while True:
        length = round(math.exp(rng.uniform(math.log(shortest), math.log(longest))))
        if sum(lengths) + length > total:
            return lengths or [length]
        lengths.append(length)


def make_samples(case: Case, vocab_size: int, seed: int) -> list[Any]:
    from slime_retool.types import TrainSample

    rng = random.Random(seed)
    total = int(0.97 * case.max_tokens_per_gpu) * case.micro_batches * case.dp
    samples = []
    for index, length in enumerate(draw_lengths(total, min(LONGEST, case.max_tokens_per_gpu), rng)):
        prompt = max(1, min(200, length // 4))
        mask = [0] * prompt + [int(t % 400 < 340) for t in range(length - prompt)]
        tokens = rng.choices(range(vocab_size), k=length)
        samples.append(TrainSample(tokens, mask, reward=float(rng.random() < 0.5), index=index, group_index=index // 8))
    return samples


def flops_of(config: Any, samples: list[Any], *, training: bool, strict: bool) -> float:
    """See the module's docstring."""
    from megatron_bridge.arithmetic.flops import model_flops

    read = sum(sample.num_loss_tokens for sample in samples) if strict else None
    return model_flops(config, [sample.length for sample in samples], training=training, logit_tokens=read)


def run_rank(case: Case, args: argparse.Namespace) -> dict[str, Any] | None:
    """Warm up and time; the first rank's figures."""
    import torch

    from slime_retool.config import parse_config
    from slime_retool.types import RolloutBatch

    config = parse_config(trainer_flags(case, args.device))
    on_gpu = args.device == "cuda"
    trainer = make_trainer(config, args)

    def step(index: int) -> tuple[float, list[Any], dict[str, float]]:
        samples = make_samples(case, config.vocab_size, seed=1000 + index)
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        metrics = {}
        if case.forward_only:
            trainer.log_probs(samples)
        else:
            metrics = trainer.train(RolloutBatch(samples), index)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, samples, metrics

    warm = [step(index)[0] for index in range(args.warmup)]
    done = [step(args.warmup + index) for index in range(args.steps)]
    seconds = sum(took for took, _, _ in done)
    samples = [sample for _, of_step, _ in done for sample in of_step]
    tokens = sum(sample.length for sample in samples)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if on_gpu:
        # A step reports its own peak, and counts anew; a forward-only pass does not.
        steps = [metrics.get("memory/trainer_peak_gib", 0.0) for _, _, metrics in done]
        peak = max(*steps, torch.cuda.max_memory_allocated() / 2**30)
    flops = {
        strict: flops_of(config, samples, training=not case.forward_only, strict=strict) for strict in (False, True)
    }
    scale = 100 / seconds / PEAK_FLOPS / case.world_size
    figures = {
        "tokens_per_second": tokens / seconds / case.world_size,
        "mfu_percent": flops[False] * scale,
        "strict_mfu_percent": flops[True] * scale,
        "peak_gib": peak,
        "step_seconds": statistics.median(took for took, _, _ in done),
        "first_step_seconds": warm[0] if warm else 0.0,
        "tokens_per_step": tokens / len(done),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }
    last = done[-1][2]
    figures |= {name: last[name] for name in ("train/micro_batches", "train/grad_norm", "train/loss") if name in last}
    if args.profile or args.trace:
        trace = args.trace / f"{args.rank}.json.gz" if args.trace else None
        lines = profile(lambda: step(args.warmup + args.steps), on_gpu, trace)
        of_ranks: list[Any] = [None] * case.world_size
        torch.distributed.all_gather_object(of_ranks, [f"rank {args.rank}", *lines])
        figures["kernels"] = [line for lines in of_ranks for line in lines]
    trainer.shutdown()
    return figures if args.rank == 0 else None


def profile(step: Any, on_gpu: bool, trace: Path | None = None) -> list[str]:
    """How busy the device was in one step, and its longest kernels; `trace` gets all of it.

    Without a trace the host is not watched, which would slow it down.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    activities = [ProfilerActivity.CUDA] if on_gpu else []
    activities += [ProfilerActivity.CPU] if trace or not on_gpu else []
    with torch_profile(activities=activities) as profiler:
        wall, _, _ = step()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    if on_gpu:
        return kernel_shares(profiler.events(), wall)
    operations = [(event.key, event.self_cpu_time_total / 1e6, event.count) for event in profiler.key_averages()]
    return longest(operations, wall)


def kernel_shares(events: Sequence[Any], wall: float) -> list[str]:
    """Of a profile's events those that ran on the card: neither the host's, which carry their kernels' time as well,
    nor the spans that libraries mark around kernels.

    NCCL's kernels wait for other ranks, so the share without them is the card's own work.
    """
    from torch.autograd import DeviceType

    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    own = [event for event in kernels if not event.name.startswith("nccl")]
    seconds: dict[str, list[float]] = {}
    for event in kernels:
        seconds.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    busy, working = (100 * covered(found) / 1e6 / wall for found in (kernels, own))
    head = f"{busy:6.1f}% of {wall:.2f} s are busy, {working:.1f}% without NCCL's kernels"
    return [head, *longest([(name, sum(times), len(times)) for name, times in seconds.items()], wall)]


def covered(events: Sequence[Any]) -> float:
    """Microseconds in which at least one of the events ran."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.time_range.start):
        total += max(0.0, event.time_range.end - max(end, event.time_range.start))
        end = max(end, event.time_range.end)
    return total


def longest(figures: Sequence[tuple[str, float, int]], wall: float) -> list[str]:
    """Lines of the 25 longest of (name, seconds, calls)."""
    first = sorted(figures, key=lambda figure: figure[1], reverse=True)[:25]
    return [f"{100 * seconds / wall:6.1f}% {calls:6d} x {name[:90]}" for name, seconds, calls in first]


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of the case, or {"error": the reason}."""
    command = [
        sys.executable, __file__, "--worker", json.dumps(asdict(case)), "--device", args.device,
        "--warmup", str(args.warmup), "--steps", str(args.steps), *(["--profile"] if args.profile else []),
        *(["--trace", str(args.trace)] if args.trace else []),
    ]  # fmt: skip
    if args.device == "cpu":
        return run_ranks(command, case.world_size, args.timeout, NO_GPU)
    devices = visible_devices()
    why = too_few(case.world_size, devices)
    return {"error": why} if why else run_ranks(command, case.world_size, args.timeout, devices)


HEADER = (
    f"{'case':<24}{'MFU':>7}{'strict':>8}{'tok/s/GPU':>11}{'step s':>8}{'first s':>9}{'micro':>7}{'peak GiB':>10}"
    "  device"
)


def row(case: Case, figures: dict[str, Any]) -> str:
    if "error" in figures:
        return f"{case.name:<24} failed: {figures['error'].splitlines()[0]}"
    f = figures
    return (
        f"{case.name:<24}{f['mfu_percent']:>6.1f}%{f['strict_mfu_percent']:>7.1f}%{f['tokens_per_second']:>11,.0f}"
        f"{f['step_seconds']:>8.2f}{f['first_step_seconds']:>9.1f}{f.get('train/micro_batches', 0):>7.0f}"
        f"{f['peak_gib']:>10.1f}  {f['device']}"
    )


def chosen_cases(args: argparse.Namespace) -> list[Case]:
    given = {
        name: args.__dict__[name]
        for name in Case.__dataclass_fields__
        if name not in ("name", "flags") and args.__dict__[name] is not None
    }
    flags = tuple(args.flags)
    if args.model is not None:
        return [Case(**given, flags=flags)]
    return [replace(CASES[name], **given, flags=(*CASES[name].flags, *flags)) for name in args.cases]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--model", help="instead of --cases: a file of scripts/models, or tiny")
    parser.add_argument("--recompute", choices=("none", "selective", "full"))
    parser.add_argument("--transformer-impl", choices=("auto", "transformer_engine", "local"))
    for name in ("max-tokens-per-gpu", "micro-batches", "tp", "pp", "cp", "dp", "ep"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--forward-only", action="store_true", default=None, help="time the log-prob pass")
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds of one case")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--profile", action="store_true", help="after timing, list one step's longest kernels by rank")
    parser.add_argument("--trace", type=Path, help="folder for that step's Chrome trace of every rank, RANK.json.gz")
    parser.add_argument("--out-dir", type=Path, help="results folder (default on GPUs: benchmarks/results)")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train")
    add_rank_options(parser)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    if args.worker:
        fields = json.loads(args.worker)
        case = Case(**{**fields, "flags": tuple(fields["flags"])})
        figures = run_rank(case, args)
        if figures is not None:
            Path(args.result).write_text(json.dumps(figures))
        return 0
    if args.trace is not None:
        args.trace.mkdir(parents=True, exist_ok=True)
    out_dir = args.out_dir or (ROOT / "benchmarks" / "results" if args.device == "cuda" else None)
    rows = []
    for case in chosen_cases(args):
        figures = run_case(case, args)
        rows.append(row(case, figures))
        print(rows[-1], flush=True)
        if "error" in figures:
            print(figures["error"], flush=True)
            continue
        print("\n".join(figures.get("kernels", [])), flush=True)
        if out_dir is not None and case.name in CASES:
            from benchmarks.results import write_result

            write_result(case.name, figures["strict_mfu_percent"], "% of 989 TFLOP/s", out_dir=out_dir)
    print(f"\n{HEADER}")
    print("\n".join(rows))
    return 1 if any(" failed: " in line for line in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
