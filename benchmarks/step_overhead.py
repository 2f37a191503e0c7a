"""How much of a whole RL step with tool calls is not generation, log-probs, training or weight update.

    python benchmarks/step_overhead.py --layout colocated -- --sglang-attention-backend triton ...       # one GPU
    python benchmarks/step_overhead.py --layout disaggregated -- --sglang-attention-backend triton ...   # two GPUs
    python benchmarks/step_overhead.py --layout colocated --device cpu --model tiny --response 256 \\
        --prompts 2 --samples 2

`python -m slime_retool.train` runs as for a user: Ray, engines and router, trainers, the sandbox of the ReTool recipe.
Random weights never call a tool, so the generate hook (tool_hooks.py) ends each turn after a planned number of tokens
and has the product's registry execute a real program in the sandbox; the result goes back as an observation. A run
in which a call fails has no figure.

step_overhead = 1 - (generate + log_probs + train + sync) / step, by the run's own phase timers (perf/*_seconds), in
percent, median over the rollouts after the first. What is left is moving memory out of the way (offload) and waiting
(idle); both are reported. Tool calls are part of the generation that they overlap with. Each step's timers are printed
as it ends; a run that is not done `--timeout` seconds after its first step is ended, and what its steps gave is
reported but not written as a result. The sandbox's level is the strongest that this host allows, unless the flags
name one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "retool"))

from benchmarks.results import write_result
from benchmarks.rl_step import run_training
from benchmarks.shapes import ROOT, model_flags, prepare

WORK_PHASES = ("generate", "log_probs", "train", "sync")
OTHER_PHASES = ("offload", "idle")
LAYOUTS = {"colocated": ["--colocate"], "disaggregated": ["--rollout-num-gpus", "1"]}
METRICS = {"colocated": "step_overhead", "disaggregated": "step_overhead_disaggregated"}


async def working_sandbox(flags: Sequence[str]) -> str:
    """The strongest isolation level of the sandbox in which this host runs every program of tool_hooks.py.

    Only the level in `flags` is tried where they name one. Raises ValueError when there is none, before anything slow.
    """
    from benchmarks.tool_hooks import PROGRAMS
    from slime_retool.config import parse_config
    from slime_retool.errors import ToolUnavailable
    from slime_retool.sandbox import Sandbox, SandboxPolicy, Status
    from slime_retool.sandbox.host.policy import ISOLATION_LEVELS

    named = "--sandbox-isolation" in flags
    levels = (parse_config(list(flags)).sandbox_isolation,) if named else ISOLATION_LEVELS
    reasons = []
    for level in levels:
        try:
            async with Sandbox(SandboxPolicy(isolation=level)) as box:
                results = [await box.run(program.format(n=1000)) for program in PROGRAMS]
        except ToolUnavailable as error:
            reasons.append(f"{level}: {error}")
            continue
        wrong = [result for result in results if result.status is not Status.OK]
        if not wrong:
            return level
        reasons.append(f"{level}: {wrong[0].error or wrong[0].stderr}")
    raise ValueError("no level of the sandbox runs the tool's programs here: " + "; ".join(reasons))


def overhead_percent(row: dict[str, Any]) -> float:
    """Of one step, from its phase timers."""
    step = row["perf/step_seconds"]
    return 100 * (step - sum(row[f"perf/{name}_seconds"] for name in WORK_PHASES)) / step


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rows after the first. Raises ValueError when tool calls are missing or failed."""
    steady = rows[1:] or rows
    for row in steady:
        if row["rollout/tool_call_rate"] < 1 or row["rollout/tool_error_rate"] > 0:
            raise ValueError(
                f"rollout {row['step']}: {row['rollout/tool_call_rate']:.0%} of the samples called the tool and "
                f"{row['rollout/tool_error_rate']:.0%} of the calls failed; look at the sandbox flags"
            )

    def median(name: str) -> float:
        return statistics.median(row[name] for row in steady)

    return {
        "step_overhead_percent": statistics.median(map(overhead_percent, steady)),
        **{f"{name}_seconds": median(f"perf/{name}_seconds") for name in (*WORK_PHASES, *OTHER_PHASES, "step")},
        "first_step_seconds": rows[0]["perf/step_seconds"],
        "tool_calls_per_sample": median("rollout/tool_calls_mean"),
        "tokens_per_second": median("rollout/tokens_per_second"),
        "cached_token_ratio": median("rollout/cached_token_ratio"),
        "logprob_abs_diff": median("train/logprob_abs_diff"),
        "rollouts": len(rows),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    work = args.work
    work.mkdir(parents=True, exist_ok=True)
    isolation = asyncio.run(working_sandbox(args.flags))
    weights = prepare(args.weights or work, args.model)
    from traces import build_prompt_rows, write_jsonl

    write_jsonl(build_prompt_rows("rl", args.prompts * args.rollouts, seed=0), work / "prompts.jsonl")
    flags: list[object] = [
        *model_flags(args.model), *LAYOUTS[args.layout], "--device", args.device, "--hf-checkpoint", weights / "hf",
        "--ref-load", weights / "torch_dist", "--sandbox-isolation", isolation, "--prompt-data", work / "prompts.jsonl",
        "--custom-generate-function-path", "tool_hooks.generate",
        "--custom-rm-path", "rl_step_hooks.alternating_reward", "--num-rollout", args.rollouts,
        "--rollout-batch-size", args.prompts, "--n-samples-per-prompt", args.samples,
        "--rollout-max-response-len", args.response, "--rollout-max-context-len", args.response + 1024,
        "--max-turns", args.turns, "--max-tool-calls", args.turns,
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", args.max_tokens, *args.flags,
    ]  # fmt: skip
    rows = run_training(flags, work / "run", args.timeout, partial=True)
    return {
        "model": args.model,
        "layout": args.layout,
        "sandbox_isolation": isolation,
        "flags": args.flags,
        "complete": len(rows) == args.rollouts,
        **figures_of(rows),
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="colocated")
    parser.add_argument("--model", default="qwen3-4B", help="a file of scripts/models (a Qwen3 shape), or tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--response", type=int, default=3072, help="bound of a response; half of it is generated")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens of one packed micro-batch")
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_step_overhead"), help="scratch folder")
    parser.add_argument("--weights", type=Path, help="folder of the random checkpoint, kept for later runs (--work)")
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds of the run after its first step")
    parser.add_argument("--out-dir", type=Path, help="results folder (default on GPUs: benchmarks/results)")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    args.work = args.work.resolve()
    figures = run(args)
    print(json.dumps(figures, indent=2))
    out_dir = args.out_dir or (ROOT / "benchmarks" / "results" if args.device == "cuda" else None)
    if out_dir is not None and figures["complete"]:
        write_result(METRICS[args.layout], figures["step_overhead_percent"], "% of the step", out_dir=out_dir)


if __name__ == "__main__":
    main()
