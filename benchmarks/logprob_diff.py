"""Mean |trainer - engine| log-prob of the sampled tokens in bf16 over a learning run, and whether it drifts.

    python benchmarks/logprob_diff.py -- --colocate --no-offload-train --no-offload-rollout \\
        --sglang-mem-fraction-static 0.25 --sglang-attention-backend triton ...       # Qwen3-4B, one H200
    python benchmarks/logprob_diff.py --reuse --suffix _fp32_head -- ... --sglang-enable-fp32-lm-head
    python benchmarks/logprob_diff.py --device cpu --model tiny --sft-steps 3 --rollouts 3 --prompts 2 --samples 2 \\
        --response 16 --sft-batch 4

What makes the figure mean something without trained weights at hand. The difference is the noise of two bf16 forward
passes, seen through the softmax: a token that the model is sure of hardly moves, one that it draws from thousands of
equals moves with every rounding. Weights at random are the worst case (entropy near ln V, 0.028 at the 4B shape). So
the random weights first learn to continue real text, this repository's documentation, by `--sft-steps` of the
product's SFT. They come out with an entropy of one to three nats a token (a trained reasoner's is below one, so the
figure is still on the high side); the entropy is reported beside the figure.

Then `--rollouts` real RL steps run on prompts of the same text: generate, train, update the engine. The reward is the
share of vowels among a response's letters, which differs inside every group and can be learned. The trainer's own
figure `train/logprob_abs_diff` is read at each step: the mean over all learned tokens of |log-prob of the forward
pass before the step - log-prob that the engine returned while sampling|.

Every step's figures are printed as it ends. RL that is not done `--timeout` seconds after its first step is ended,
and what its steps gave is reported but not written as a result. `--reuse` starts RL from what an earlier call left in
`--work`.

SGLang's output layer rounds its logits to bf16 before the softmax (in fp32), the trainer's does not; with its
--enable-fp32-lm-head the engine's product is made in fp32 as well.

Memory of the 4B shape: SFT runs before there is an engine. RL without offloading keeps 8 GB of weights, 16 GB of
gradients and 48 GB of optimizer state on the card, 32 of them only from the first step on. The engine starts after the
trainer, and its --sglang-mem-fraction-static counts what is free then: a quarter of some 95 GB holds its 8 GB of
weights and 100,000 tokens of cache.

logprob_diff_4b = mean over the steps. `slope` is the least-squares slope per step with its standard error; a trend is
a slope of more than three of these that also moves the figure by more than a tenth over the run.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.results import write_result
from benchmarks.rl_step import run_training
from benchmarks.shapes import ROOT, model_flags, prepare
from benchmarks.texts import paragraphs

PHASES = ("perf/step_seconds", "perf/generate_seconds", "perf/train_seconds")


def line_fit(values: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope of values at 0, 1, 2, ... and its standard error; ValueError for fewer than three."""
    n = len(values)
    if n < 3:
        raise ValueError(f"a trend needs at least 3 steps, got {n}")
    middle, mean = (n - 1) / 2, statistics.fmean(values)
    spread = sum((i - middle) ** 2 for i in range(n))
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread
    rest = sum((value - mean - slope * (i - middle)) ** 2 for i, value in enumerate(values))
    return slope, math.sqrt(rest / (n - 2) / spread)


def trend(values: Sequence[float]) -> dict[str, float | bool]:
    """The fit and the verdict, see the module's docstring."""
    slope, error = line_fit(values)
    moved = abs(slope) * (len(values) - 1)
    return {
        "slope": slope,
        "slope_standard_error": error,
        "has_trend": abs(slope) > 3 * error and moved > 0.1 * statistics.fmean(values),
    }


def write_texts(work: Path) -> None:
    """SFT conversations (continue a paragraph from its first words) and the RL prompts (other cuts of the same)."""
    sft, rl = [], []
    for text in paragraphs():
        words = text.split(" ")
        for rows, cut in ((sft, max(1, len(words) // 4)), (rl, max(1, len(words) // 3))):
            prompt = {"role": "user", "content": "Continue: " + " ".join(words[:cut])}
            if rows is sft:
                rows.append({"messages": [prompt, {"role": "assistant", "content": " ".join(words[cut:])}]})
            else:
                rows.append({"prompt": [prompt], "label": ""})
    for name, rows in (("sft", sft), ("rl", rl)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def learn_text(args: argparse.Namespace, work: Path) -> None:
    """Random weights -> work/sft (torch_dist) and work/sft_hf, by the product's SFT."""
    weights = prepare(args.weights or work, args.model)
    for folder in ("sft", "sft_hf"):
        shutil.rmtree(work / folder, ignore_errors=True)
    flags: list[object] = [
        *model_flags(args.model), "--device", args.device, "--debug-train-only",
        "--hf-checkpoint", weights / "hf", "--ref-load", weights / "torch_dist",
        "--save", work / "sft", "--no-save-optim",
        "--save-hf", work / "sft_hf", "--prompt-data", work / "sft.jsonl", "--input-key", "messages",
        "--rollout-function-path", "slime_retool.rollout.sft_rollout.generate_rollout", "--loss-type", "sft_loss",
        "--calculate-per-token-loss", "--rollout-shuffle", "--num-rollout", args.sft_steps,
        "--rollout-batch-size", args.sft_batch, "--lr", args.sft_lr, "--lr-warmup-iters", max(1, args.sft_steps // 8),
        "--lr-decay-style", "cosine", "--use-dynamic-batch-size", "--max-tokens-per-gpu", args.max_tokens,
        "--skip-bad-rows",  # the documentation quotes marks of turns
        *(flag for flag in args.sft_flags.split()),
    ]  # fmt: skip
    rows = run_training(flags, work / "sft_run", args.timeout, ("train/loss", "perf/step_seconds"))
    print(f"SFT: loss {rows[0]['train/loss']:.2f} -> {rows[-1]['train/loss']:.2f}", flush=True)


def run(args: argparse.Namespace) -> dict[str, Any]:
    work = args.work
    work.mkdir(parents=True, exist_ok=True)
    write_texts(work)
    learned = work / "sft.model"  # written last: holds the model's name
    if args.reuse and learned.is_file() and learned.read_text() == args.model:
        print(f"the weights in {work} are used again", flush=True)
    else:
        learned.unlink(missing_ok=True)
        learn_text(args, work)
        learned.write_text(args.model)
    flags: list[object] = [
        *model_flags(args.model), "--device", args.device, "--hf-checkpoint", work / "sft_hf",
        "--ref-load", work / "sft", "--prompt-data", work / "rl.jsonl", "--rollout-shuffle",
        "--custom-rm-path", "rl_step_hooks.vowel_reward", "--num-rollout", args.rollouts,
        "--rollout-batch-size", args.prompts, "--n-samples-per-prompt", args.samples,
        "--rollout-max-response-len", args.response, "--rollout-max-context-len", args.response + 1024,
        "--rollout-max-prompt-len", 1000, "--lr", args.lr,
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", args.max_tokens, "--skip-bad-rows", *args.flags,
    ]  # fmt: skip
    shown = ("train/logprob_abs_diff", "train/entropy", "rollout/reward_mean", *PHASES, "memory/trainer_peak_gib")
    rows = run_training(flags, work / "rl_run", args.timeout, shown, partial=True)

    def column(name: str) -> list[float]:
        return [row[name] for row in rows]

    diffs, rewards = column("train/logprob_abs_diff"), column("rollout/reward_mean")
    return {
        "model": args.model,
        "logprob_diff": statistics.fmean(diffs),
        "largest": max(diffs),
        **(trend(diffs) if len(diffs) > 2 else {}),
        "k3": statistics.fmean(column("mismatch/k3_kl")),
        "entropy": statistics.fmean(column("train/entropy")),
        "reward_first_last": [rewards[0], rewards[-1]],
        "tokens_per_step": statistics.fmean(column("train/loss_tokens")),
        "complete": len(rows) == args.rollouts,
        **{f"{name.removeprefix('perf/')}": statistics.median(column(name)) for name in PHASES},
        "steps": [float(f"{value:.3g}") for value in diffs],
        "flags": args.flags,
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4B", help="a file of scripts/models (a Qwen3 shape), or tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sft-steps", type=int, default=80)
    parser.add_argument("--sft-batch", type=int, default=32, help="conversations of one SFT step")
    parser.add_argument("--sft-lr", type=float, default=1e-4)
    parser.add_argument("--sft-flags", default="", help="more flags of slime_retool.train for SFT, in one string")
    parser.add_argument("--reuse", action="store_true", help="start RL from what an earlier run left in --work")
    parser.add_argument("--rollouts", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response", type=int, default=192, help="tokens of one response")
    parser.add_argument("--lr", type=float, default=2e-6, help="of RL")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens of one packed micro-batch")
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_logprob_diff"), help="scratch folder")
    parser.add_argument("--weights", type=Path, help="folder of the random checkpoint, kept for later runs (--work)")
    parser.add_argument("--suffix", default="", help="of the result's name, logprob_diff_4b: another variant's")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of each run after its first step")
    parser.add_argument("--out-dir", type=Path, help="results folder (default on GPUs: benchmarks/results)")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train for RL")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    args.work = args.work.resolve()
    figures = run(args)
    print(json.dumps(figures, indent=2))
    out_dir = args.out_dir or (ROOT / "benchmarks" / "results" if args.device == "cuda" else None)
    if out_dir is not None and figures["complete"]:
        metric = f"logprob_diff_{args.model.rpartition('-')[2].lower()}{args.suffix}"
        write_result(metric, figures["logprob_diff"], "nats", out_dir=out_dir)


if __name__ == "__main__":
    main()
