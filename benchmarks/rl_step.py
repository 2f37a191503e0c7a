"""Real RL steps of a model shape with random weights: does every part work on these devices, and how long does it take?

    python benchmarks/rl_step.py --model qwen3-0.6B --rollouts 4 [--output FILE] -- FLAGS OF slime_retool.train

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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shapes import ROOT, convert, make_checkpoint, model_flags

REPORTED = (
    "perf/generate_seconds", "perf/log_probs_seconds", "perf/train_seconds", "perf/sync_seconds",
    "perf/offload_seconds", "perf/idle_seconds", "perf/step_seconds", "rollout/tokens_per_second",
    "rollout/cached_token_ratio", "perf/train_tokens_per_second", "train/logprob_abs_diff", "train/grad_norm",
)  # fmt: skip


def run_training(flags: list[object], output: Path, timeout: float) -> list[dict[str, Any]]:
    """Run `python -m slime_retool.train` with hooks of benchmarks and examples/retool; the figures of every step.

    Raises CalledProcessError when it fails, TimeoutExpired when it takes longer than `timeout` seconds.
    """
    from slime_retool.observe.metrics import read_metrics

    folders = [ROOT, ROOT / "examples" / "retool", ROOT / "benchmarks", os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "slime_retool.train", "--output-dir", output, "--no-progress", *flags]
    subprocess.run([str(part) for part in command], check=True, env=env, timeout=timeout)
    return [row for row in read_metrics(output / "metrics.jsonl") if "train/loss" in row]


def run(args: argparse.Namespace) -> dict[str, Any]:
    from traces import build_prompt_rows, write_jsonl

    work = args.work
    work.mkdir(parents=True, exist_ok=True)
    make_checkpoint(work / "hf", args.model)
    convert(work / "hf", work / "torch_dist", args.model)
    write_jsonl(build_prompt_rows("rl", args.prompts * args.rollouts, seed=0), work / "prompts.jsonl")
    flags: list[object] = [
        *model_flags(args.model),
        "--hf-checkpoint", work / "hf", "--ref-load", work / "torch_dist", "--prompt-data", work / "prompts.jsonl",
        "--custom-generate-function-path", "generate_with_retool.generate",
        "--custom-rm-path", "rl_step_hooks.alternating_reward", "--num-rollout", args.rollouts,
        "--rollout-batch-size", args.prompts, "--n-samples-per-prompt", args.samples,
        "--rollout-max-response-len", args.response, "--rollout-max-context-len", args.response + 1024,
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", args.max_tokens, *args.flags,
    ]  # fmt: skip
    rows = run_training(flags, work / "run", args.timeout)
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
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds the training run may take")
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
