"""How long a run takes from its command to its first rollout, part by part, and how long a save keeps it waiting.

    python benchmarks/start.py --model qwen3-1.7B -- --colocate --sglang-attention-backend triton ...        # one GPU
    python benchmarks/start.py --model tiny --prompts 2 --samples 2 --response 32 -- --device cpu --colocate

`python -m slime_retool.train` runs as for a user, with an evaluation before training, a checkpoint every few
rollouts and the tools of the ReTool recipe, on random weights of the model's shape (or on `--hf` and `--torch-dist`).
It starts `--starts` times, the later ones with the kernels that the first has compiled. With `--cold` the first finds
none, wherever libraries may have kept some, and compiles all (which takes a compiler, nvcc among others).

start_seconds: from the start of the process to the beginning of the first rollout (start/total_seconds), of the last
start. save_stall_s: what the loop waited for a checkpoint (perf/save_stall_seconds), the longest of all starts. Where a
save came before the write of the last one had ended, that wait (perf/save_wait_seconds) is taken off: it says how fast
the disk is. Both are written as results, every part is printed. A checkpoint of the first start is never resumed by the
next.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.results import write_result
from benchmarks.rl_step import run_training
from benchmarks.shapes import ROOT, model_flags, prepare

SAVES = ("perf/save_stall_seconds", "perf/save_wait_seconds", "perf/save_seconds")
SHOWN = ("perf/step_seconds", "perf/generate_seconds", "perf/train_seconds", *SAVES)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The parts of each start, and seconds of each save."""
    from traces import build_prompt_rows, write_jsonl

    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    hf, torch_dist = args.hf, args.torch_dist
    if hf is None:
        weights = prepare(args.weights or work, args.model)
        hf, torch_dist = weights / "hf", weights / "torch_dist"
    rows = build_prompt_rows("rl", args.prompts * args.rollouts, seed=0)
    write_jsonl(rows, work / "prompts.jsonl")
    write_jsonl(rows[: args.evaluated], work / "held.jsonl")
    kernels: list[object] = []
    if args.cold:
        shutil.rmtree(work / "kernels", ignore_errors=True)
        kernels = ["--kernel-cache-dir", work / "kernels"]
    flags: list[object] = [
        *(model_flags(args.model) if args.hf is None else ()),
        "--hf-checkpoint", hf, "--ref-load", torch_dist, "--prompt-data", work / "prompts.jsonl",
        "--custom-generate-function-path", "generate_with_retool.generate",
        "--custom-rm-path", "rl_step_hooks.alternating_reward", "--num-rollout", args.rollouts,
        "--rollout-batch-size", args.prompts, "--n-samples-per-prompt", args.samples,
        "--rollout-max-response-len", args.response, "--rollout-max-context-len", args.response + 1024,
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", args.max_tokens,
        "--eval-prompt-data", "held", work / "held.jsonl", "--eval-interval", 1000,
        "--save", work / "save", "--save-interval", args.save_interval, "--save-keep", 1, *kernels, *args.flags,
    ]  # fmt: skip
    starts, saves = [], []
    for number in range(args.starts):
        shutil.rmtree(work / "save", ignore_errors=True)
        steps = run_training(flags, work / f"run_{number + 1}", args.timeout, SHOWN)
        starts.append({name: value for name, value in steps[0].items() if name.startswith("start/")})
        saves += [saved for row in steps if (saved := {name: row[name] for name in SAVES if name in row})]
        seconds = {name: round(value, 1) for name, value in starts[-1].items()}
        print(f"start {number + 1}: {json.dumps(seconds)}", flush=True)
    shutil.rmtree(work / "save", ignore_errors=True)
    return {"model": str(args.hf or args.model), "flags": args.flags, "starts": starts, "saves": saves}


def longest_stall(saves: list[dict[str, float]]) -> float:
    """Seconds that the loop waited for one save, without the wait for the write of another."""
    begun = [save for save in saves if "perf/save_stall_seconds" in save]
    return max(save["perf/save_stall_seconds"] - save["perf/save_wait_seconds"] for save in begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-1.7B", help="a Qwen3 shape of scripts/models, with random weights")
    parser.add_argument("--hf", type=Path, help="a real checkpoint instead of --model")
    parser.add_argument("--torch-dist", type=Path, help="the same in torch_dist")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="keep kernels in the scratch folder, which has none before")
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--save-interval", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--evaluated", type=int, default=16, help="problems of the evaluation before training")
    parser.add_argument("--response", type=int, default=512, help="tokens of one response")
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens of one packed micro-batch")
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_start"), help="scratch folder")
    parser.add_argument("--weights", type=Path, help="folder of the random checkpoint, kept for later runs (--work)")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds of a start's steps after the first")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train")
    args = parser.parse_args()
    if (args.hf is None) != (args.torch_dist is None):
        parser.error("--hf and --torch-dist are the same weights in two formats: give both, or neither")
    args.work = args.work.resolve()
    result = run(args)
    print(json.dumps(result, indent=2))
    write_result("start_seconds", result["starts"][-1]["start/total_seconds"], "s", out_dir=args.results)
    write_result("save_stall_s", longest_stall(result["saves"]), "s", out_dir=args.results)


if __name__ == "__main__":
    main()
