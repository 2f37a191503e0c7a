"""Evaluation: the same hooks, evaluation sampling parameters, nothing trained."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_bridge.flags import public_values
from slime_retool.config import Config
from slime_retool.data.source import copy_sample, digest
from slime_retool.errors import RolloutError
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.eval_metrics import all_sets_metrics, set_metrics
from slime_retool.rollout.hooks import USABLE, Hooks, run_all, run_sample, score_again
from slime_retool.rollout.sampling import evaluation_sampling_params
from slime_retool.rollout.transcripts import Transcripts
from slime_retool.types import Sample

logger = logging.getLogger(__name__)
SCORING = ("reward", "scoring", "hooks", "labels_and_metadata")
"""Settings that --rescore may change."""
TOOLS = (
    *("tool_format", "max_turns", "max_tool_calls", "max_observation_tokens"),
    *("tool_state", "tool_timeout", "tool_memory_mb"),
)
OTHER_WEIGHTS = ("--quantization", "--dtype", "--kv-cache-dtype", "--json-model-override-args", "--torchao-config")
"""Flags with which SGLang makes another model of the same weights."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt")


async def evaluate(
    context: RolloutContext, eval_sets: dict[str, list[Sample]], rollout_id: int = -1, *, resume: bool = False
) -> dict[str, float]:
    """Generate and score `n_samples_per_eval_prompt` responses to every prompt of every set.

    Returns the metrics of `rollout.eval_metrics`. Samples lost to outages are not part of an accuracy, and counted in
    `failed`; a prompt that leaves no room for a response counts as one that got an empty, truncated one.

    Each transcript is written as it ends, to `output_dir/eval/<name>_<rollout_id>.jsonl`; with `resume` those that are
    there already are not generated again (the weights must be the same), and with `config.rescore` they are all scored
    again before anything else; then what only scores depend on may have changed, labels and metadata of the data
    included. One that an outage keeps from being scored again is FAILED, and scored at the next call.

    Raises RolloutError when no sample of a set could be scored, ConfigError when `resume` meets samples of another
    evaluation, and whatever a hook raises that is not a RolloutError.
    """
    config = context.config
    hooks = Hooks.load(config)
    params = evaluation_sampling_params(config, context.template if context.chat is None else None)
    n = config.n_samples_per_eval_prompt
    weights = _weights(config) if resume else None
    copies = {  # fresh samples, so that a set can be evaluated again and again
        name: [copy_sample(sample, group * n + i, group) for group, sample in enumerate(samples) for i in range(n)]
        for name, samples in eval_sets.items()
    }
    total = sum(map(len, copies.values()))
    with (
        hooks.failures,
        ExitStack() as files,
        tqdm(total=total, desc="evaluation", unit="sample", leave=False, disable=config.no_progress or None) as bar,
    ):
        transcripts = {}
        for name, samples in eval_sets.items():
            # Different for different names.
            file = re.sub(r"[^\w.-]", lambda match: f"%{ord(match[0]):02x}", name)
            transcripts[name] = files.enter_context(
                Transcripts(
                    Path(config.output_dir) / "eval" / f"{file}_{rollout_id:06d}.jsonl",
                    further={"rollout_id": rollout_id, "eval_set": name},
                    setting=_setting(config, hooks, params, samples) | {"weights": weights},
                    resume=resume,
                    may_differ=SCORING if config.rescore else (),
                )
            )
            kept, of_set = transcripts[name].kept, copies[name]
            unscored = [
                each.unscored(of_set[index])
                for index, each in kept.items()
                if config.rescore or each.sample.status not in USABLE
            ]
            for count, what in (
                (len(kept) - len(unscored), "keep their scores; --rescore scores them again"),
                (len(unscored), "are scored again"),
            ):
                if count:
                    logger.info(
                        "evaluation set %r: %d of %d samples are there already and %s", name, count, len(of_set), what
                    )
            if unscored:
                scored = await run_all(score_again(config, hooks, sample) for sample in unscored)
                transcripts[name].write_again((sample, of_set[sample.index]) for sample in scored)

        async def run(name: str, sample: Sample) -> Sample:
            if kept := transcripts[name].kept.get(sample.index):
                done = kept.sample
            else:
                row, with_ids = eval_sets[name][sample.group_index], context.chat is None
                done = await run_sample(config, hooks, sample, params, with_ids=with_ids, answers_all=True)
                transcripts[name].add(done, row)
            bar.update()
            return done

        results = await run_all(run(name, sample) for name, samples in copies.items() for sample in samples)
    metrics = all_sets_metrics(results) if any(sample.status in USABLE for sample in results) else {}
    for name, samples in copies.items():
        done, results = results[: len(samples)], results[len(samples) :]
        if not any(sample.status in USABLE for sample in done):
            error = next((sample.error for sample in done if sample.error), "samples were aborted")
            raise RolloutError(f"evaluation set {name!r}: none of {len(done)} samples could be scored; {error}")
        if errors := Counter(sample.error or "aborted" for sample in done if sample.status not in USABLE):
            error, times = errors.most_common(1)[0]
            logger.warning(
                "evaluation set %r: %d of %d samples failed and are no part of its metrics; %d of them with: %s",
                name, sum(errors.values()), len(done), times, error,
            )  # fmt: skip
        if unasked := [sample.error for sample in done if sample.status in USABLE and sample.error]:
            logger.warning(
                "evaluation set %r: %d of %d samples got no response and count as such; the first: %s",
                name, len(unasked), len(done), unasked[0],
            )  # fmt: skip
        metrics |= await asyncio.to_thread(set_metrics, name, done, config)
    return metrics


def _setting(config: Config, hooks: Hooks, params: dict[str, Any], samples: list[Sample]) -> dict[str, Any]:
    """What a transcript depends on, as far as the configuration knows; its weights are beside it."""
    return {
        "model": config.eval_endpoint_model or config.hf_checkpoint,
        "servers": config.eval_endpoint_url or sorted(config.rollout_external_urls),
        "server_flags": {name: config.sglang_server_flags.get(name) for name in OTHER_WEIGHTS},
        "seed": config.seed,
        "sampling": params,
        "samples_per_prompt": config.n_samples_per_eval_prompt,
        "generate": hooks.generate_path,
        "reward": hooks.reward_path,
        "tools": {name: config.__dict__[name] for name in TOOLS},
        "scoring": config.rm_type,
        "hooks": public_values(*config.hook_args),
        "context_len": config.context_limit,
        "prompts": len(samples),
        # Tell sets apart that have as many prompts. The order of keys counts: chat templates write them in it.
        "data": digest([json.dumps([sample.prompt, sample.tools], default=repr)] for sample in samples),
        "labels_and_metadata": digest([sample.label, sample.metadata] for sample in samples),
    }


def _weights(config: Config) -> str | None:
    """What tells the weights in --hf-checkpoint from those that are written there later; None where others serve."""
    if config.hf_checkpoint is None or config.rollout_external_urls or config.eval_endpoint_url is not None:
        return None
    folder = Path(config.hf_checkpoint)
    files = [path.stat() for path in folder.glob("*") if path.suffix in WEIGHT_FILES]
    if not files:
        return None
    newest = datetime.fromtimestamp(max(file.st_mtime for file in files), timezone.utc).isoformat(" ")
    return f"{sum(file.st_size for file in files)} bytes, the last of them written at {newest}"
