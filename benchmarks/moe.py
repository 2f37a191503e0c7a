"""A mixture of experts on one GPU: training speed, agreement with the engine, routing replay, weight updates, LoRA.

    python benchmarks/moe.py                                            # 30B-A3B's width, eight layers, one H200
    python benchmarks/moe.py --parts train sync --model qwen3-30B-A3B:9
    python benchmarks/moe.py --device cpu --model tiny_moe              # does the script work?

Random weights of the model's shape, which spread tokens about evenly over experts. Each part runs in processes of its
own, so that one that fails costs no other; figures are written (`results.py`) as they are there. Flags of
slime_retool.train after `--` go to the parts with an engine.

- train: moe_train_mfu, `train_step.py`'s strict MFU (experts that a token is sent to count, 8 of 128). Memory and time
  of the same steps are kept as a case of `plan_error.py`, which compares them with the plan.
- sync: moe_sync_gbs, bytes of all weights over the seconds of an update by CUDA IPC (`weight_sync.py`); every weight's
  checksum, of each expert, must be equal on both sides.
- logprob: moe_logprob_diff and moe_logprob_diff_replay, the mean |trainer - engine| log-prob of sampled tokens over a
  learning run (`logprob_diff.py`) without and with --use-rollout-routing-replay, from the same weights; k3 estimates
  stand beside them.
- replay: moe_replay_overhead, what repeating given experts adds to the trainer's step. One trainer takes steps on the
  same lengths with experts in its samples and without, by turns; the share is of the medians. Experts are drawn evenly:
  their load is about that of random weights.
- lora: lora_sync_s, an update of rank 32 on attention by its adapters alone (`weight_sync.py` with --lora-flags), and a
  training step of the same as another case of the plan.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import plan_error, train_step
from benchmarks.ranks import NO_GPU, add_rank_options, make_trainer, run_ranks, visible_devices
from benchmarks.results import write_result
from benchmarks.shapes import ROOT
from benchmarks.train_step import Case, make_samples, trainer_flags

REPLAY = "--use-rollout-routing-replay"
SEED = 2000
ENGINE_FLAGS = (
    "--colocate --sglang-attention-backend triton --sglang-sampling-backend pytorch --sglang-cuda-graph-max-bs 128 "
    "--sglang-cuda-graph-backend-prefill disabled --sglang-mem-fraction-static 0.6"
)
"""Of the runs with an engine on the trainer's GPU, which take turns."""
SYNC_FLAGS = ("--update-weight-buffer-size", str(2 * 2**30))
"""Each bucket costs the engine a request, milliseconds whatever its size."""
LORA_FLAGS = "--lora-rank 32 --lora-alpha 32 --lora-weight-update adapters --lora-target-modules linear_qkv linear_proj"
"""Adapters of attention: those of experts are sent merged (docs/algorithms.md)."""
Figures = dict[str, Any]


def case_of(args: argparse.Namespace, name: str, *flags: str) -> Case:
    return Case(
        name, args.model, max_tokens_per_gpu=args.max_tokens_per_gpu, micro_batches=args.micro_batches, flags=flags
    )


def train(args: argparse.Namespace) -> Figures:
    figures = _train_case(args, case_of(args, "moe_train_mfu"))
    keep(args, "moe_train_mfu", figures["strict_mfu_percent"], "% of 989 TFLOP/s")
    return figures


def sync(args: argparse.Namespace) -> Figures:
    figures = _script_figures(args, "weight_sync.py", *_sync_options(args), "--", *SYNC_FLAGS, *args.flags)
    figures["gb_per_second"] = figures["bytes"]["weights"] / figures["sync_ipc_s"] / 1e9
    keep(args, "moe_sync_gbs", figures["gb_per_second"], "GB/s")
    return figures


def logprob(args: argparse.Namespace) -> Figures:
    turns = shlex.split(ENGINE_FLAGS) if args.device == "cuda" else []
    options = [*args.logprob_options, "--model", args.model, "--device", args.device]
    options += ["--work", str(args.work / "logprob"), "--out-dir", str(args.work / "logprob" / "results")]
    own = _script_figures(args, "logprob_diff.py", *options, "--", *turns, *args.flags)
    keep(args, "moe_logprob_diff", own["logprob_diff"], "nats")
    replayed = _script_figures(args, "logprob_diff.py", *options, "--reuse", "--", *turns, *args.flags, REPLAY)
    keep(args, "moe_logprob_diff_replay", replayed["logprob_diff"], "nats")
    shown = ("logprob_diff", "k3", "largest", "entropy", "generate_seconds", "train_seconds", "step_seconds")
    return {kind: {name: run[name] for name in shown} for kind, run in (("own", own), ("replayed", replayed))}


def replay(args: argparse.Namespace) -> Figures:
    case = case_of(args, "moe_replay", REPLAY)
    command = [sys.executable, __file__, "--worker", json.dumps(asdict(case)), "--device", args.device]
    figures = run_ranks([*command, "--steps", str(args.steps)], 1, args.timeout, _devices(args))
    if "error" in figures:
        raise RuntimeError(figures["error"])
    keep(args, "moe_replay_overhead", figures["overhead_percent"], "% of a training step")
    return figures


def lora(args: argparse.Namespace) -> Figures:
    flags = shlex.split(args.lora_flags)
    figures = _script_figures(args, "weight_sync.py", *_sync_options(args), "--", *SYNC_FLAGS, *args.flags, *flags)
    keep(args, "lora_sync_s", figures["sync_ipc_s"], "s")
    return {"sync_s": figures["sync_ipc_s"], **_train_case(args, case_of(args, "moe_lora", *flags))}


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "train": train, "sync": sync, "logprob": logprob, "replay": replay, "lora": lora,
}  # fmt: skip


def keep(args: argparse.Namespace, metric: str, value: float, unit: str) -> None:
    path = write_result(metric, float(f"{value:.4g}"), unit, out_dir=args.out_dir)
    print(f"{metric}: {value:.4g} {unit} ({path})", flush=True)


def _devices(args: argparse.Namespace) -> Sequence[str]:
    return visible_devices()[:1] if args.device == "cuda" else NO_GPU


def _train_case(args: argparse.Namespace, case: Case) -> Figures:
    """Figures of `train_step.py` on the samples that `plan_error.py` predicts for, kept as one of its cases."""
    options = {"warmup": plan_error.WARMUP, "steps": plan_error.STEPS, "profile": False, "trace": None}
    figures = train_step.run_case(case, argparse.Namespace(device=args.device, timeout=args.timeout, **options))
    if "error" in figures:
        raise RuntimeError(figures["error"])
    plan_error.keep(case, figures, args.out_dir)
    found = plan_error.compare(case, figures)
    print(f"{plan_error.HEADER}\n{plan_error.row(found, case, figures['tokens_per_second'])}", flush=True)
    return figures | {"plan_gib": found.gib[1], "plan_gib_error_percent": found.gib_error}


def _sync_options(args: argparse.Namespace) -> list[str]:
    options = ["--measure", "ipc", "--rounds", str(args.rounds), "--work", str(args.work / "sync")]
    options += ["--model", args.model, "--device", args.device, "--results", str(args.work / "sync" / "results")]
    return options


def _script_figures(args: argparse.Namespace, script: str, *options: str) -> Figures:
    """The JSON object that a benchmark prints last. Its other output passes; RuntimeError when it fails."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    print(shlex.join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=args.timeout)
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}; it printed {done.stdout[-2000:]}")
    return last_object(done.stdout)


def last_object(text: str) -> Figures:
    """The JSON object, indented by two, that ends a script's output."""
    lines = text.rstrip().splitlines()
    begin = max(number for number, line in enumerate(lines) if line == "{")
    return json.loads("\n".join(lines[begin:]))


def drawn_experts(tokens: int, layers: int, experts: int, top_k: int, rng: random.Random) -> array[int]:
    """[tokens, layers, top_k] ids, those of one token and layer all different, each expert equally likely."""
    pool = [rng.sample(range(experts), top_k) for _ in range(1024)]
    ids = array("B" if experts <= 255 else "H")
    for _ in range(tokens * layers):
        ids.extend(rng.choice(pool))
    return ids


def run_rank(case: Case, args: argparse.Namespace) -> Figures:
    """Steps with given experts and without, by turns, in one trainer."""
    import torch

    from megatron_bridge.model_config import moe_layers, required
    from slime_retool.config import parse_config
    from slime_retool.types import RolloutBatch, RoutedExperts

    config = parse_config(trainer_flags(case, args.device))
    trainer = make_trainer(config, args)
    layers, top_k = sum(moe_layers(config)), required(config, "moe_router_topk")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    metrics: dict[str, float] = {}
    for index in range(2 * (args.steps + 1)):
        given = index % 2 == 1
        samples = make_samples(case, required(config, "vocab_size"), seed=SEED + index // 2)
        rng = random.Random(index)
        for sample in samples if given else ():
            ids = drawn_experts(sample.length, layers, required(config, "num_experts"), top_k, rng)
            sample.routed_experts = RoutedExperts(ids, layers, top_k)
        if args.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        found = trainer.train(RolloutBatch(samples), index)
        if args.device == "cuda":
            torch.cuda.synchronize()
        if index > 1:  # the first of each warms up
            seconds[given].append(time.perf_counter() - begin)
        metrics = found if given else metrics
    trainer.shutdown()
    own, repeated = (statistics.median(seconds[given]) for given in (False, True))
    return {
        "overhead_percent": 100 * (repeated / own - 1),
        "seconds": {"own": seconds[False], "repeated": seconds[True]},
        "replay": {name: value for name, value in metrics.items() if "experts" in name},
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="qwen3-30B-A3B:8", help="a mixture of experts (NAME:LAYERS)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=16384)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each kind, of replay")
    parser.add_argument("--rounds", type=int, default=4, help="timed updates")
    parser.add_argument("--lora-flags", default=LORA_FLAGS, help="in one string")
    parser.add_argument("--logprob-options", type=shlex.split, default=[], help="of logprob_diff.py, in one string")
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_moe"), help="scratch folder")
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds of one part's process")
    parser.add_argument("--out-dir", type=Path, help="results folder (default on GPUs: benchmarks/results)")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train for parts with an engine")
    add_rank_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.worker:
        case = plan_error.read_case(json.loads(args.worker))
        Path(args.result).write_text(json.dumps(run_rank(case, args)))
        return 0
    args.work = args.work.resolve()
    args.out_dir = args.out_dir or (ROOT / "benchmarks" / "results" if args.device == "cuda" else args.work / "results")
    failed = []
    for part in args.parts:
        try:
            print(json.dumps({part: PARTS[part](args)}, indent=2), flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failed.append(part)
            print(f"{part} failed: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
