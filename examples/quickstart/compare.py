"""Every algorithm on the quickstart's task, from one and the same SFT checkpoint.

    python examples/quickstart/compare.py [--algorithms grpo dapo ...] [--seed N] [--short] [--output-dir DIR]

Convert and SFT as in `run.py`, then one RL run per algorithm with equal data, seeds and learning rate, each evaluated
greedily on the same held-out problems before, half-way and after. Stages that have finished are kept: the same command
goes on where a stopped one was, and one with another seed or other sizes is refused. Prints a table and writes
DIR/comparison.{json,md,png}. Exit code 1 when an algorithm did not improve (not checked with --short).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from prepare import convert_command
from run import FULL, SHORT, Quickstart

from slime_retool.errors import ConfigError, run_command
from slime_retool.metrics import read_metrics

ALGORITHMS: dict[str, list[str]] = {
    "grpo": ["--advantage-estimator", "grpo", "--eps-clip", "0.2"],
    "dapo": [
        "--advantage-estimator", "grpo", "--eps-clip", "0.2", "--eps-clip-high", "0.28", "--calculate-per-token-loss",
        "--dynamic-sampling-filter-path", "slime_retool.rollout.filters.check_reward_nonzero_std",
        "--overlong-filtering", "--overlong-buffer-len", "16",
    ],
    "gspo": ["--advantage-estimator", "gspo", "--eps-clip", "0.02", "--eps-clip-high", "0.03"],
    "cispo": [
        "--advantage-estimator", "cispo", "--eps-clip", "0.2", "--eps-clip-high", "2", "--calculate-per-token-loss",
    ],
    "rloo": ["--advantage-estimator", "rloo", "--calculate-per-token-loss"],
    "reinforce_plus_plus": ["--advantage-estimator", "reinforce_plus_plus", "--calculate-per-token-loss"],
    "ppo": [
        "--advantage-estimator", "ppo", "--calculate-per-token-loss", "--critic-lr", "1e-3", "--normalize-advantages",
    ],
}  # fmt: skip
CRITIC_ONLY = 2
"""First rollouts of PPO that train no policy, where the run has more."""
DONE = "done"
"""File in a stage's folder that says it has finished."""


class Comparison(Quickstart):
    """The quickstart's stages, with one RL stage for each algorithm."""

    def compare(self, names: list[str]) -> dict[str, Any]:
        self.out.mkdir(parents=True, exist_ok=True)
        self._check_settings()
        # More problems than one run uses: dynamic sampling drops groups.
        self._once("data", lambda: self._write_inputs(4 * self._rl_rows()))
        self._once("base_torch_dist", lambda: self._stage("convert", convert_command(self.out)))
        self._once("sft", lambda: self._stage("sft", self._sft()))
        for name in names:
            self._once(f"rl_{name}", lambda name=name: self._stage(name, self._rl_with(name)))
        return {name: self._figures(name) for name in names}

    def _check_settings(self) -> None:
        """Finished stages of another seed or other sizes must not pass for this comparison's."""
        file = self.out / "settings.json"
        settings = {"seed": self.seed, **asdict(self.size)}
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else settings
        changed = [f"{name} {before[name]}, now {value}" for name, value in settings.items() if before[name] != value]
        if changed:
            raise ConfigError(
                f"{self.out} holds stages of another comparison ({'; '.join(changed)}); give another --output-dir"
            )
        file.write_text(json.dumps(settings) + "\n", encoding="utf-8")

    def _once(self, folder: str, work: Any) -> None:
        if not (self.out / folder / DONE).exists():
            work()
            (self.out / folder / DONE).touch()

    def _rl_with(self, name: str) -> list[str]:
        """Two optimizer steps per rollout, so that ratios and clips matter."""
        size = self.size
        critic = ["--num-critic-only-steps", str(min(CRITIC_ONLY, size.rl_rollouts - 1))] if name == "ppo" else []
        return self._train(
            f"rl_{name}",
            "--hf-checkpoint", str(self.out / "sft_hf"), "--ref-load", str(self.out / "sft" / "checkpoints"),
            "--num-rollout", str(size.rl_rollouts), "--global-batch-size", str(size.rl_prompts * size.rl_samples // 2),
            "--eval-interval", str(max(1, size.rl_rollouts // 2)), *self._generation(),
            "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192",
            "--lr", str(size.rl_lr), "--lr-decay-style", "constant", "--adam-beta1", "0.9", "--adam-beta2", "0.98",
            *ALGORITHMS[name], *critic,
        )  # fmt: skip

    def _figures(self, name: str) -> dict[str, Any]:
        rows = read_metrics(self.out / f"rl_{name}" / "metrics.jsonl")
        accuracy = [row["eval/held_out/accuracy"] for row in rows if "eval/held_out/accuracy" in row]
        steps = [row for row in rows if "rollout/reward_mean" in row]
        return {
            "before": accuracy[0],
            "after": accuracy[-1],
            "best": max(accuracy),
            "reward": [row["rollout/reward_mean"] for row in steps],
            "kl_to_old": [row.get("train/ppo_kl", 0.0) for row in steps],
            "clip_fraction": [row.get("train/clip_fraction", 0.0) for row in steps],
        }


def table(figures: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| algorithm | held-out accuracy before | after | mean reward, first and last quarter | clipped tokens |",
        "|---|---|---|---|---|",
    ]
    for name, f in figures.items():
        quarter = max(1, len(f["reward"]) // 4)
        first, last = f["reward"][:quarter], f["reward"][-quarter:]
        lines.append(
            f"| {name} | {100 * f['before']:.1f}% | {100 * f['after']:.1f}% | {sum(first) / len(first):.2f}, "
            f"{sum(last) / len(last):.2f} | {100 * sum(f['clip_fraction']) / len(f['clip_fraction']):.2f}% |"
        )
    return "\n".join(lines)


def plot(path: Path, figures: dict[str, Any]) -> None:
    """Mean reward of every rollout."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, f in figures.items():
        axes.plot(f["reward"], label=f"{name} ({100 * f['before']:.0f}% to {100 * f['after']:.0f}%)")
    axes.set(xlabel="rollout", ylabel="mean reward", title="RL from one SFT checkpoint (held-out accuracy)")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=sorted(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/compare"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rollouts", type=int, help="of each RL run (default: the quickstart's)")
    parser.add_argument("--short", action="store_true", help="a few steps of each: a check, not a result")
    args = parser.parse_args()
    size = SHORT if args.short else FULL
    if args.rollouts is not None:
        size = replace(size, rl_rollouts=args.rollouts)
    out = args.output_dir.resolve()
    figures = Comparison(out, args.seed, size).compare(args.algorithms)
    text = table(figures)
    (out / "comparison.json").write_text(json.dumps(figures, indent=1) + "\n")
    (out / "comparison.md").write_text(text + "\n")
    plot(out / "comparison.png", figures)
    print(f"\n{text}\n\n{out}/comparison.png")
    worse = [name for name, f in figures.items() if f["after"] <= f["before"]]
    if worse and not args.short:
        print(f"no better than before: {', '.join(worse)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_command("compare.py", main))
