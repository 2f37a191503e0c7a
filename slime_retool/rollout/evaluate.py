"""Evaluation: the same hooks, evaluation sampling parameters, nothing trained."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tqdm import tqdm

from slime_retool.config import Config
from slime_retool.data.source import copy_sample
from slime_retool.errors import RolloutError
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.dump import dump_samples
from slime_retool.rollout.figures import sample_figures
from slime_retool.rollout.hooks import USABLE, Hooks, run_all, run_sample
from slime_retool.rollout.sampling import evaluation_sampling_params
from slime_retool.types import Sample

# Name of a figure of `sample_figures` -> its name in `eval/<set>/<name>`.
REPORTED = {
    "accuracy": "accuracy",
    "reward_mean": "reward",
    "tool_call_rate": "tool_call_rate",
    "tool_error_rate": "tool_error_rate",
    "malformed_call_rate": "malformed_call_rate",
    "mean_turns": "mean_turns",
    "response_tokens_mean": "response_length",
    "truncated_ratio": "truncated",
    "failed_ratio": "failed",
    "samples": "samples",
}


async def evaluate(
    context: RolloutContext, eval_sets: dict[str, list[Sample]], rollout_id: int = -1
) -> dict[str, float]:
    """Generate and score `n_samples_per_eval_prompt` responses to every prompt of every set.

    Returns `eval/<name>/<figure>` for the figures of `REPORTED`. `accuracy` is the share of scored samples whose reward
    is above 0; samples lost to outages are not part of it, and counted in `failed`. Transcripts are written to
    `output_dir/eval/<name>_<rollout_id>.jsonl`.

    Raises RolloutError when no sample of a set could be scored, and whatever a hook raises that is not a RolloutError.
    """
    config = context.config
    hooks, params = Hooks.load(config), evaluation_sampling_params(config)
    copies = {name: _copies(config, samples) for name, samples in eval_sets.items()}
    total = sum(map(len, copies.values()))
    with tqdm(total=total, desc="evaluation", unit="sample", leave=False, disable=config.no_progress) as bar:

        async def run(sample: Sample) -> Sample:
            sample = await run_sample(config, hooks, sample, params)
            bar.update()
            return sample

        results = await run_all(run(sample) for samples in copies.values() for sample in samples)
    metrics: dict[str, float] = {}
    for name, samples in copies.items():
        done, results = results[: len(samples)], results[len(samples) :]
        path = Path(config.output_dir) / "eval" / f"{_file_name(name)}_{rollout_id:06d}.jsonl"
        await asyncio.to_thread(dump_samples, path, [(sample, {"rollout_id": rollout_id}) for sample in done])
        if not any(sample.status in USABLE for sample in done):
            error = next((sample.error for sample in done if sample.error), "samples were aborted")
            raise RolloutError(f"evaluation set {name!r}: none of {len(done)} samples could be scored; {error}")
        figures = sample_figures(done, config.reward_key)
        metrics |= {f"eval/{name}/{reported}": figures[figure] for figure, reported in REPORTED.items()}
    return metrics


def _copies(config: Config, samples: list[Sample]) -> list[Sample]:
    """Fresh samples, so that a set can be evaluated again and again."""
    n = config.n_samples_per_eval_prompt
    return [copy_sample(sample, group * n + i, group) for group, sample in enumerate(samples) for i in range(n)]


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)
