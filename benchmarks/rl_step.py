"""Real RL steps of a model shape with random weights: does every part work on these devices, and how long does it take?

    python benchmarks/rl_step.py --model qwen3-0.6B --rollouts 4 [--output FILE] -- FLAGS OF slime_retool.train
    python benchmarks/rl_step.py --model tiny --rollouts 2 --prompts 2 --samples 2 --response 32 -- --device cpu

Random weights cost nothing to ship and generate as slowly as trained ones. The checkpoint is written and converted,
then `python -m slime_retool.train` runs with the flags after `--` (devices, parallel sizes, SGLang's own). Prints one
JSON object: medians over all rollouts but the first of each phase's seconds, tokens per second, and the mean
difference between the trainer's and the engine's log-probs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.children import child
from benchmarks.shapes import ROOT, model_flags, prepare

REPORTED = (
    "perf/generate_seconds", "perf/log_probs_seconds", "perf/train_seconds", "perf/sync_seconds",
    "perf/offload_seconds", "perf/idle_seconds", "perf/step_seconds", "rollout/tokens_per_second",
    "rollout/cached_token_ratio", "perf/train_tokens_per_second", "train/logprob_abs_diff", "train/grad_norm",
)  # fmt: skip
SHOWN = (
    "train/loss", "train/logprob_abs_diff", "perf/step_seconds", "perf/generate_seconds", "perf/log_probs_seconds",
    "perf/train_seconds", "perf/sync_seconds", "perf/offload_seconds", "perf/idle_seconds", "memory/trainer_peak_gib",
)  # fmt: skip
"""Printed of every step."""
START_SECONDS = 400.0
"""That a start and the first step may take, with kernels to compile."""
Row = dict[str, Any]


def run_training(
    flags: Sequence[object], output: Path, timeout: float, shown: Sequence[str] = SHOWN, *, partial: bool = False
) -> list[Row]:
    """Run `python -m slime_retool.train` with hooks of benchmarks and examples/retool; the figures of every step.

    Prints the figures `shown` of each step as it ends, so that a run which is cut short still tells something.
    Raises CalledProcessError when it fails, TimeoutExpired when what follows its first step takes longer than `timeout`
    seconds, or that step does, START_SECONDS at least; with `partial` the steps until then are returned instead, where
    there are any.
    """
    folders = [ROOT, ROOT / "examples" / "retool", ROOT / "benchmarks", os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "slime_retool.train", "--output-dir", output, "--no-progress", *flags]
    words = [str(part) for part in command]
    begin = time.monotonic()
    end = begin + max(START_SECONDS, timeout)
    rows: list[Row] = []
    try:
        with child(words, env=env) as process:
            while process.poll() is None:
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(words, time.monotonic() - begin)
                time.sleep(0.5)
                known = len(rows)
                rows = _report(output, rows, shown, begin)
                if rows and not known:
                    end = time.monotonic() + timeout
        rows = _report(output, rows, shown, begin)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words)
    except subprocess.TimeoutExpired:
        if not (partial and rows):
            raise
        print(f"stopped after {time.monotonic() - begin:.0f} s and {len(rows)} steps", flush=True)
    return rows


def _report(output: Path, known: list[Row], shown: Sequence[str], begin: float) -> list[Row]:
    """All steps until now; prints those that are new."""
    from slime_retool.metrics import read_metrics

    path = output / "metrics.jsonl"
    ends = "perf/step_seconds"  # among the figures that a step writes last
    rows = [row for row in read_metrics(path) if ends in row] if path.is_file() else []
    for row in rows[len(known) :]:
        figures = (f"{name.partition('/')[2]} {row[name]:.4g}" for name in shown if row.get(name) is not None)
        print(f"{time.monotonic() - begin:6.1f} s  step {row['step']}: {', '.join(figures)}", flush=True)
    return rows


def run(args: argparse.Namespace) -> dict[str, Any]:
    from traces import build_prompt_rows, write_jsonl

    work = args.work
    work.mkdir(parents=True, exist_ok=True)
    weights = prepare(args.weights or work, args.model)
    write_jsonl(build_prompt_rows("rl", args.prompts * args.rollouts, seed=0), work / "prompts.jsonl")
    flags: list[object] = [
        *model_flags(args.model),
        "--hf-checkpoint", weights / "hf", "--ref-load", weights / "torch_dist",
        "--prompt-data", work / "prompts.jsonl",
        "--custom-generate-function-path", "generate_with_retool.generate",
        "--custom-rm-path", "rl_step_hooks.alternating_reward", "--num-rollout", args.rollouts,
        "--rollout-batch-size", args.prompts, "--n-samples-per-prompt", args.samples,
        "--rollout-max-response-len", args.response, "--rollout-max-context-len", args.response + 1024,
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", args.max_tokens, *args.flags,
    ]  # fmt: skip
    rows = run_training(flags, work / "run", args.timeout, partial=True)
    steady = rows[1:] or rows
    figures = {
        name: statistics.median(row[name] for row in steady) for name in REPORTED if all(name in row for row in steady)
    }
    first = {
        f"first/{name}": rows[0][name] for name in ("perf/sync_seconds", "perf/offload_seconds", "perf/step_seconds")
    }
    return {"model": args.model, "flags": args.flags, "rollouts": len(rows), **figures, **first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6B", help="a file of scripts/models (a Qwen3 shape)")
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response", type=int, default=512, help="tokens of one response")
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens of one packed micro-batch")
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_rl_step"), help="scratch folder")
    parser.add_argument("--weights", type=Path, help="folder of the random checkpoint, kept for later runs (--work)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of the training run after its first step")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train")
    args = parser.parse_args()
    args.work = args.work.resolve()
    result = json.dumps(run(args), indent=2)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    main()
