"""The whole job on this machine, in minutes: convert, SFT, RL with tools, and what each stage was worth.

    python examples/quickstart/run.py [--seed N] [--short] [--output-dir DIR] [-- FLAGS OF THE RL STAGE]

A Qwen3-architecture model of about a million random weights is converted to torch_dist, taught by SFT on
traces whose tool output was really executed, and improved by GRPO: SGLang generates behind its router, a sandbox
runs the code, Megatron-core trains. These are the same command lines as for a 4B model, with smaller numbers. A
held-out set of problems, disjoint from both training sets, is answered greedily before, between and after.

Writes DIR/summary.json, DIR/curves.png and everything in between (checkpoints, logs, transcripts).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prepare import convert_command, model_flags, write_inputs

from slime_retool.errors import ConfigError, run_command
from slime_retool.metrics import read_metrics

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPE = HERE.parent / "retool"
STAGES = ("base", "sft", "rl")
OWNED = ("base", "base_torch_dist", "base_eval", "data", "sft", "sft_hf", "rl", "summary.json", "curves.png")
"""What a run writes into its output folder, and deletes there when an earlier run has left its mark."""
MARK = ".quickstart"


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    sft_rows: int
    sft_batch: int
    sft_steps: int
    sft_lr: float
    rl_prompts: int
    rl_samples: int
    rl_rollouts: int
    rl_lr: float
    eval_rows: int


FULL = Size(
    sft_rows=6400, sft_batch=32, sft_steps=400, sft_lr=4e-3,
    rl_prompts=16, rl_samples=8, rl_rollouts=24, rl_lr=3e-4, eval_rows=128,
)  # fmt: skip
SHORT = Size(
    sft_rows=256, sft_batch=16, sft_steps=6, sft_lr=4e-3,
    rl_prompts=4, rl_samples=4, rl_rollouts=2, rl_lr=3e-4, eval_rows=16,
)  # fmt: skip


@dataclass
class Quickstart:
    """One run: its folders, its stages and the seconds they took."""

    out: Path
    seed: int
    size: Size
    rl_flags: tuple[str, ...] = ()
    """Further flags of the RL stage."""
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """All stages in order. Returns the summary, which is also written to summary.json."""
        begin = time.monotonic()
        self._clean()
        self._write_inputs(self._rl_rows())
        self._stage("convert", convert_command(self.out))
        self._stage("eval", self._evaluate_base())
        self._stage("sft", self._sft())
        self._stage("rl", self._rl())
        return self._summarise(time.monotonic() - begin)

    def _clean(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if any(self.out.iterdir()) and not (self.out / MARK).exists():
            raise ConfigError(f"--output-dir {self.out} holds files of something else; name a new folder")
        (self.out / MARK).touch()
        for name in OWNED:
            path = self.out / name
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()

    def _write_inputs(self, rl_rows: int) -> None:
        size = self.size
        write_inputs(
            self.out, seed=self.seed, sft_rows=size.sft_rows, rl_rows=rl_rows, eval_rows=size.eval_rows
        )  # fmt: skip

    def _rl_rows(self) -> int:
        return self.size.rl_prompts * self.size.rl_rollouts

    def _stage(self, name: str, command: list[str]) -> None:
        """Run one command line of the toolkit; its output and progress bars go straight to the terminal."""
        print(f"\n=== {name}\n{shlex.join(command)}\n", flush=True)
        begin = time.monotonic()
        path = f"{ROOT}:{RECIPE}"
        done = subprocess.run(command, cwd=ROOT, env=_environment(path), check=False)
        self.seconds[name] = time.monotonic() - begin
        if done.returncode:
            print(f"\nstage {name} failed (exit code {done.returncode}); its logs are in {self.out}", file=sys.stderr)
            raise SystemExit(1)

    def _train(self, stage: str, *more: str) -> list[str]:
        return [
            sys.executable, "-m", "slime_retool.train", *model_flags(self.out),
            "--device", "cpu", "--seed", str(self.seed), "--rollout-seed", str(self.seed),
            "--output-dir", str(self.out / stage), *more,
        ]  # fmt: skip

    def _generation(self) -> list[str]:
        """Flags of everything that generates: the evaluation set, the hooks and the limits."""
        return [
            "--custom-generate-function-path", "generate_with_retool.generate",
            "--custom-rm-path", "generate_with_retool.reward_func", "--reward-key", "score",
            "--eval-prompt-data", "held_out", str(self.out / "data" / "eval.jsonl"),
            "--eval-temperature", "0", "--rollout-max-response-len", "64", "--max-turns", "4", "--max-tool-calls", "3",
            "--max-observation-tokens", "32", "--rollout-max-context-len", "256", "--tool-concurrency", "4",
            "--prompt-data", str(self.out / "data" / "rl.jsonl"), "--rollout-shuffle",
            "--rollout-batch-size", str(self.size.rl_prompts), "--n-samples-per-prompt", str(self.size.rl_samples),
            "--dump-rollouts",
        ]  # fmt: skip

    def _evaluate_base(self) -> list[str]:
        return self._train(
            "base_eval", "--hf-checkpoint", str(self.out / "base"), "--debug-rollout-only", "--num-rollout", "0",
            "--eval-interval", "1", *self._generation(),
        )  # fmt: skip

    def _sft(self) -> list[str]:
        size = self.size
        return self._train(
            "sft",
            "--hf-checkpoint", str(self.out / "base"), "--ref-load", str(self.out / "base_torch_dist"),
            "--save", str(self.out / "sft" / "checkpoints"), "--save-hf", str(self.out / "sft_hf"),
            "--rollout-function-path", "slime_retool.rollout.sft_rollout.generate_rollout",
            "--prompt-data", str(self.out / "data" / "sft.parquet"), "--input-key", "messages", "--rollout-shuffle",
            "--num-rollout", str(size.sft_steps), "--rollout-batch-size", str(size.sft_batch),
            "--loss-type", "sft_loss", "--calculate-per-token-loss", "--disable-compute-advantages-and-returns",
            "--debug-train-only", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192",
            "--lr", str(size.sft_lr), "--min-lr", str(size.sft_lr / 10), "--lr-decay-style", "cosine",
            "--lr-warmup-fraction", "0.05", "--weight-decay", "0.0", "--adam-beta1", "0.9", "--adam-beta2", "0.95",
        )  # fmt: skip

    def _rl(self) -> list[str]:
        size = self.size
        return self._train(
            "rl",
            "--hf-checkpoint", str(self.out / "sft_hf"), "--ref-load", str(self.out / "sft" / "checkpoints"),
            "--save", str(self.out / "rl" / "checkpoints"), "--num-rollout", str(size.rl_rollouts),
            "--eval-interval", str(max(1, size.rl_rollouts // 2)), *self._generation(),
            "--advantage-estimator", "grpo", "--eps-clip", "0.2", "--eps-clip-high", "0.28",
            "--calculate-per-token-loss", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192",
            "--lr", str(size.rl_lr), "--lr-decay-style", "constant", "--weight-decay", "0.0",
            "--adam-beta1", "0.9", "--adam-beta2", "0.98", *self.rl_flags,
        )  # fmt: skip

    def _summarise(self, total: float) -> dict[str, Any]:
        base = read_metrics(self.out / "base_eval" / "metrics.jsonl")
        sft = read_metrics(self.out / "sft" / "metrics.jsonl")
        rl = read_metrics(self.out / "rl" / "metrics.jsonl")
        evaluations = [row for row in base[-1:] + rl if "eval/held_out/accuracy" in row]
        picked = dict(zip(STAGES, (evaluations[0], evaluations[1], evaluations[-1]), strict=True))
        inside_rl = sum(row.get("perf/eval_seconds", 0.0) for row in rl)
        differences = [row["train/logprob_abs_diff"] for row in rl if "train/logprob_abs_diff" in row]
        summary = {
            "seed": self.seed,
            **{
                name: {stage: round(row[f"eval/held_out/{name}"], 4) for stage, row in picked.items()}
                for name in ("accuracy", "tool_call_rate", "mean_turns")
            },
            "seconds": {
                "convert": round(self.seconds["convert"], 1),
                "sft": round(self.seconds["sft"], 1),
                "rl": round(self.seconds["rl"] - inside_rl, 1),
                "eval": round(self.seconds["eval"] + inside_rl, 1),
                "total": round(total, 1),
            },
            "logprob_abs_diff": sum(differences) / len(differences),
        }
        (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        plot(self.out / "curves.png", sft, rl, picked)
        print(table(summary, self.out))
        return summary


def _environment(python_path: str) -> dict[str, str]:
    """This process's environment, with `python_path` before what PYTHONPATH says."""
    python_path = os.pathsep.join(filter(None, (python_path, os.environ.get("PYTHONPATH"))))
    # Two threads for each of a dozen processes would fight over two cores.
    return {**os.environ, "PYTHONPATH": python_path, "TOKENIZERS_PARALLELISM": "false"}


def table(summary: dict[str, Any], out: Path) -> str:
    """The closing table, as text."""
    lines = [
        "",
        f"{'held-out problems':<22}{'base':>8}{'SFT':>8}{'RL':>8}",
        "-" * 46,
        *(
            f"{label:<22}" + "".join(f"{summary[name][stage]:>8.{digits}%}" for stage in STAGES)
            for name, label, digits in (("accuracy", "accuracy", 1), ("tool_call_rate", "calls a tool", 1))
        ),
        f"{'turns':<22}" + "".join(f"{summary['mean_turns'][stage]:>8.2f}" for stage in STAGES),
        "-" * 46,
        "seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in summary["seconds"].items()),
        f"trainer vs engine, mean |difference of log-probs|: {summary['logprob_abs_diff']:.2e}",
        f"summary, curves, transcripts: {out}",
    ]
    return "\n".join(lines)


def plot(path: Path, sft: list[dict[str, Any]], rl: list[dict[str, Any]], picked: dict[str, dict[str, Any]]) -> None:
    """Loss of SFT, reward and tool use of RL, and accuracy per stage, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    left.plot([r["step"] for r in sft], [r["train/loss"] for r in sft])
    left.set(title="SFT", xlabel="step", ylabel="loss per learned token", yscale="log")
    steps = [r for r in rl if "rollout/reward_mean" in r]
    middle.plot([r["step"] for r in steps], [r["rollout/reward_mean"] for r in steps], label="mean reward")
    middle.plot([r["step"] for r in steps], [r["rollout/tool_call_rate"] for r in steps], label="calls a tool")
    middle.set(title="RL", xlabel="rollout")
    middle.legend()
    bars = right.bar(STAGES, [100 * picked[stage]["eval/held_out/accuracy"] for stage in STAGES])
    right.bar_label(bars, fmt="%.1f")
    right.set(title="held-out accuracy", ylabel="%", ylim=(0, 105))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert, SFT, RL and evaluation of a tiny model on this machine.")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, data and sampling (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="a few steps of each stage: a check, not a result")
    parser.add_argument("flags", nargs="*", help="after --: further flags of the RL stage (--max-staleness 1, say)")
    args = parser.parse_args()
    Quickstart(args.output_dir.resolve(), args.seed, SHORT if args.short else FULL, tuple(args.flags)).run()
    return 0


if __name__ == "__main__":
    sys.exit(run_command("run.py", main))
