"""Step time of a run that never waits (`--max-staleness 1`) against one that does (0), in one call.

    python benchmarks/stream_step.py --layout colocated --checkpoint HF --model qwen2.5-0.5B -- SGLANG FLAGS ...
    python benchmarks/stream_step.py --layout shared --checkpoint HF --model qwen2.5-0.5B -- ...
    python benchmarks/stream_step.py --layout colocated --lengths --model qwen3-0.6B --response 8192 -- ...
    python benchmarks/stream_step.py --layout shared --model tiny --prompts 4 --samples 4 --response 64 --device cpu

`python -m slime_retool.train` runs twice with the same flags, but for --max-staleness. `--layout colocated`: trainer
and engine take turns on one GPU (--colocate); `shared`: both keep their memory there and work at the same time.

With `--checkpoint` the weights are that model's, and the ReTool recipe solves `--prompt-data` (default: the
quickstart's problems) with its tools. Without, they are random; with `--lengths` every response is as long as was
drawn, log-uniform from --shortest to --response tokens.

The figure is the ratio of the mean step times, the first `--warmup` steps left out: with K = 1 short and long steps
take turns, so medians say nothing, and of the first two one has no long answer and the other those of two batches.
Beside it the JSON has what K = 1 costs: tokens read again, staleness, dropped samples; and what an evaluation after the
last step found, where the flags ask for one (--eval-prompt-data, with --eval-interval as large as --rollouts).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "retool"))

from benchmarks.results import write_result
from benchmarks.rl_step import Row, run_training
from benchmarks.shapes import ROOT, convert, model_flags, prepare

LAYOUTS = {
    "colocated": ["--colocate", "--offload-train", "--offload-rollout"],
    "shared": ["--colocate", "--no-offload-train", "--no-offload-rollout"],
}
REPORTED = (
    "perf/step_seconds", "perf/generate_seconds", "perf/train_seconds", "perf/log_probs_seconds", "perf/sync_seconds",
    "perf/offload_seconds", "perf/idle_seconds", "rollout/tokens_per_second", "rollout/reward_mean",
    "rollout/response_tokens_mean", "rollout/response_tokens_max", "rollout/tool_calls_mean",
    "rollout/tool_seconds_mean", "rollout/tool_seconds_max", "rollout/model_tokens", "train/logprob_abs_diff",
    "train/tokens", "rollout/staleness_mean", "rollout/reread_ratio", "rollout/requests_interrupted",
    "rollout/groups_dropped_stale", "rollout/samples_dropped_stale_ratio", "rollout/engine_busy_share",
    "rollout/requests_running_mean",
)  # fmt: skip
SHOWN = (
    "perf/step_seconds", "perf/generate_seconds", "perf/train_seconds", "perf/sync_seconds", "perf/offload_seconds",
    "train/logprob_abs_diff", "rollout/reward_mean", "rollout/staleness_mean", "rollout/reread_ratio",
)  # fmt: skip


def metric_name(args: argparse.Namespace) -> str:
    return "stream_long_ratio" if args.lengths else f"stream_{'shared' if args.layout == 'shared' else 'step'}_ratio"


def means(rows: Sequence[Row], warmup: int) -> dict[str, float]:
    """Over the steps after the warm-up, of what every one of them has."""
    steady = rows[warmup:]
    return {name: fmean(row[name] for row in steady) for name in REPORTED if all(name in row for row in steady)}


def window(warmup: int, *runs: Sequence[Row]) -> int:
    """The step before which the means of both runs end: as many steps of each, and an even number, as with K = 1 a long
    step and a short one take turns."""
    counted = min(map(len, runs)) - warmup
    if counted < 1:
        raise ValueError(
            f"{' and '.join(str(len(rows)) for rows in runs)} steps were done in time, and {warmup} are the warm-up; "
            "raise --timeout"
        )
    return warmup + counted - counted % 2 * (counted > 1)


def evaluated(row: Row) -> dict[str, Any]:
    """Accuracy of each evaluation set after a step, with its 95 % interval; none where nothing was evaluated."""
    wanted = ("/acc/mean@1", "/acc/mean@1/low", "/acc/mean@1/high")
    return {name: value for name, value in row.items() if name.startswith("val-") and name.endswith(wanted)}


def flags_of(args: argparse.Namespace, work: Path) -> list[object]:
    """Of both runs."""
    from traces import build_prompt_rows, write_jsonl

    if args.checkpoint is None:
        weights = prepare(args.weights or work, args.model)
        hf, converted = weights / "hf", weights / "torch_dist"
    else:
        hf, converted = args.checkpoint, (args.weights or work) / f"{args.checkpoint.name}_torch_dist"
        if not converted.exists():
            convert(hf, converted, args.model)
    prompts = args.prompt_data
    if prompts is None:
        prompts = work / "prompts.jsonl"
        write_jsonl(build_prompt_rows("rl", args.prompts * (args.rollouts + 2), seed=0), prompts)
    if args.lengths:
        hooks = ["stream_hooks.generate", "rl_step_hooks.alternating_reward"]
        more: list[object] = ["--shortest-response", args.shortest]
    else:
        hooks = ["generate_with_retool.generate", "generate_with_retool.reward_func"]
        more = []
    return [
        *model_flags(args.model), *LAYOUTS[args.layout], "--device", args.device, "--hf-checkpoint", hf,
        "--ref-load", converted, "--prompt-data", prompts, "--custom-generate-function-path", hooks[0],
        "--custom-rm-path", hooks[1], "--num-rollout", args.rollouts, "--rollout-batch-size", args.prompts,
        "--n-samples-per-prompt", args.samples, "--rollout-max-response-len", args.response,
        "--rollout-max-context-len", args.response + 1024, "--use-dynamic-batch-size",
        "--max-tokens-per-gpu", args.max_tokens, "--use-rollout-logprobs", *more, *args.flags,
    ]  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    work = args.work
    work.mkdir(parents=True, exist_ok=True)
    flags = flags_of(args, work)
    runs: dict[int, list[Row]] = {}
    for staleness in (0, args.max_staleness):
        print(f"--max-staleness {staleness}", flush=True)
        runs[staleness] = run_training(
            [*flags, "--max-staleness", staleness], work / f"run_{staleness}", args.timeout, SHOWN, partial=True
        )
    last = window(args.warmup, *runs.values())
    figures: dict[str, Any] = {}
    for staleness, rows in runs.items():
        figures[f"staleness_{staleness}"] = {
            "rollouts": len(rows), "averaged": last - args.warmup, **means(rows[:last], args.warmup)
        }  # fmt: skip
        if accuracy := evaluated(rows[-1]):
            figures[f"staleness_{staleness}"]["evaluation"] = accuracy
        if args.rewards:
            figures[f"staleness_{staleness}"]["rewards"] = [round(row["rollout/reward_mean"], 4) for row in rows]
    before, after = (figures[f"staleness_{staleness}"] for staleness in (0, args.max_staleness))
    ratio = after["perf/step_seconds"] / before["perf/step_seconds"]
    return {"model": args.model, "layout": args.layout, "flags": args.flags, metric_name(args): ratio, **figures}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="colocated")
    parser.add_argument("--model", default="qwen3-0.6B", help="a file of scripts/models, or tiny (random weights)")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face checkpoint of that model, with its weights")
    parser.add_argument("--prompt-data", type=Path, help="prompts with tools (default: the quickstart's problems)")
    parser.add_argument("--lengths", action="store_true", help="responses of drawn lengths, without tools")
    parser.add_argument("--shortest", type=int, default=200, help="tokens of the shortest response, with --lengths")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="first steps that are left out")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response", type=int, default=1024, help="bound of a response")
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens of one packed micro-batch")
    parser.add_argument("--rewards", action="store_true", help="also report the mean reward of every step")
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_stream_step"), help="scratch folder")
    parser.add_argument("--weights", type=Path, help="folder of converted weights, kept for later runs (--work)")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds of each run after its first step")
    parser.add_argument("--out-dir", type=Path, help="results folder (default on GPUs: benchmarks/results)")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    args.work = args.work.resolve()
    figures = run(args)
    print(json.dumps(figures, indent=2))
    out_dir = args.out_dir or (ROOT / "benchmarks" / "results" if args.device == "cuda" else None)
    if out_dir is not None:
        write_result(metric_name(args), figures[metric_name(args)], "step time at K = 1 / at K = 0", out_dir=out_dir)


if __name__ == "__main__":
    main()
