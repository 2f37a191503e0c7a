"""The metrics of one evaluation set.

With n samples per problem and k = 1, 2, 4, ... n (see `rollout.statistics` for the formulas):

    eval/<set>/accuracy                     mean over problems of the share of right answers
    eval/<set>/...                          what the samples are described by (`rollout.sample_metrics`)
    val-core/<set>/acc/mean@n               the same accuracy, under the name that verl's users look for
    val-aux/<set>/acc/mean@n/low, /high     its 95 % confidence interval
    val-aux/<set>/acc/pass@k, maj@k         maj@k where the reward names the answer it found ("pred")
    val-aux/<set>/num_turns/mean, min, max  messages of the conversation, the prompt counted as one
    val-aux/<set>/code/pass_rate            executed calls that ended without an error
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from statistics import fmean

from slime_retool.reward.shaping import conversation_messages
from slime_retool.rollout.hooks import USABLE
from slime_retool.rollout.sample_metrics import sample_metrics
from slime_retool.rollout.statistics import estimate, majority_at_k, pass_at_k, powers_up_to
from slime_retool.types import Sample

# Name of a metric of `sample_metrics` -> its name in `eval/<set>/<name>`.
REPORTED = {
    "reward_mean": "reward",
    "tool_call_rate": "tool_call_rate",
    "tool_error_rate": "tool_error_rate",
    "malformed_call_rate": "malformed_call_rate",
    "mean_turns": "mean_turns",
    "truncated_ratio": "truncated",
    "failed_ratio": "failed",
    "samples": "samples",
}


def is_right(sample: Sample, reward_key: str | None) -> bool:
    """The reward's "acc" where it has one, else whether the reward is above 0."""
    if isinstance(sample.reward, dict) and "acc" in sample.reward:
        return bool(sample.reward["acc"])
    return sample.reward_value(reward_key) > 0


def answer_of(sample: Sample) -> str | None:
    """The answer that the reward function found ("pred"); None when it found none, or does not tell."""
    found = sample.reward.get("pred") if isinstance(sample.reward, dict) else None
    return None if found is None or str(found) == "" else str(found)


def set_metrics(name: str, samples: Sequence[Sample], per_problem: int, reward_key: str | None) -> dict[str, float]:
    """All metrics of the set `name`; `samples` hold at least one usable one.

    Problems count by their usable samples; one that lost all of them to outages is left out (see `failed`).
    """
    usable = [sample for sample in samples if sample.status in USABLE]
    problems: dict[int, list[Sample]] = {}
    for sample in usable:
        problems.setdefault(sample.group_index, []).append(sample)
    verdicts = [[is_right(sample, reward_key) for sample in group] for group in problems.values()]
    answers = [[answer_of(sample) for sample in group] for group in problems.values()]
    described = sample_metrics(samples, reward_key)
    mean = estimate([fmean(right) for right in verdicts])
    core, aux = f"val-core/{name}", f"val-aux/{name}"
    metrics = {f"eval/{name}/accuracy": mean.mean}
    metrics |= {f"eval/{name}/{reported}": described[metric] for metric, reported in REPORTED.items()}
    # A chat API returns no ids, only their number.
    lengths = [sample.metadata.get("completion_tokens", sample.response_length) for sample in usable]
    metrics[f"eval/{name}/response_length"] = fmean(lengths)
    metrics[f"{core}/acc/mean@{per_problem}"] = mean.mean
    metrics[f"{aux}/acc/mean@{per_problem}/low"] = mean.low
    metrics[f"{aux}/acc/mean@{per_problem}/high"] = mean.high
    complete = min(map(len, verdicts))
    if complete > 1:
        voted = any(answer is not None for given in answers for answer in given)
        for k in powers_up_to(complete):
            metrics[f"{aux}/acc/pass@{k}"] = fmean(pass_at_k(len(right), sum(right), k) for right in verdicts)
            if voted:
                metrics[f"{aux}/acc/maj@{k}"] = fmean(map(majority_at_k, answers, verdicts, repeat(k)))
    metrics |= _turns(aux, usable)
    if described["tool_calls_mean"]:
        metrics[f"{aux}/code/pass_rate"] = 1 - described["tool_error_rate"]
    return metrics


def all_sets_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`val-aux/num_turns/mean` (min, max) over all sets together."""
    return _turns("val-aux", [sample for sample in samples if sample.status in USABLE])


def _turns(prefix: str, usable: Sequence[Sample]) -> dict[str, float]:
    turns = [conversation_messages(sample) for sample in usable]
    return {
        f"{prefix}/num_turns/mean": fmean(turns),
        f"{prefix}/num_turns/min": float(min(turns)),
        f"{prefix}/num_turns/max": float(max(turns)),
    }
