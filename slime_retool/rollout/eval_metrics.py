"""The metrics of one evaluation set.

With n samples per problem and k = 1, 2, 4, ... n (see `rollout.statistics` for the formulas):

    eval/<set>/accuracy                     mean over problems of the share of right answers (`is_right`)
    eval/<set>/...                          what the samples are described by (`rollout.sample_metrics`)
    val-core/<set>/acc/mean@n               the same accuracy, under the name that verl's users look for
    val-aux/<set>/acc/mean@n/low, /high     its 95 % confidence interval
    val-aux/<set>/acc/pass@k, maj@k         over the problems with k usable samples (`.../problems@k`, where some have
                                            fewer); maj@k where the reward names the answer it found ("pred")
    val-core/<set>/reward/mean@n, ...       in place of all acc/..., where nothing says which answers are right
    val-aux/<set>/num_turns/mean, min, max  messages of the conversation, the prompt counted as one
    val-aux/<set>/code/pass_rate            executed calls that ended without an error
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from slime_retool.config import Config
from slime_retool.reward.score import Equality
from slime_retool.reward.shaping import conversation_messages
from slime_retool.rollout.hooks import USABLE
from slime_retool.rollout.sample_metrics import is_right, sample_metrics
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


def answer_of(sample: Sample) -> str | None:
    """The answer that the reward function found ("pred"); None when it found none, or does not tell."""
    found = sample.reward.get("pred") if isinstance(sample.reward, dict) else None
    return None if found is None or str(found) == "" else str(found)


def set_metrics(name: str, samples: Sequence[Sample], config: Config) -> dict[str, float]:
    """All metrics of the set `name`; `samples` hold at least one usable one. It may compare answers for some seconds.

    Problems count by their usable samples; one that lost all of them to outages is left out (see `failed`).
    """
    key, threshold, n = config.reward_key, config.accuracy_threshold, config.n_samples_per_eval_prompt
    usable = [sample for sample in samples if sample.status in USABLE]
    problems: dict[int, list[Sample]] = {}
    for sample in usable:
        problems.setdefault(sample.group_index, []).append(sample)
    groups = list(problems.values())
    described = sample_metrics(samples, key, threshold)
    metrics = {f"eval/{name}/{reported}": described[metric] for metric, reported in REPORTED.items()}
    # A chat API returns no ids, only their number.
    lengths = [
        sample.response_length if sample.tokens else sample.metadata.get("completion_tokens", 0) for sample in usable
    ]
    metrics[f"eval/{name}/response_length"] = fmean(lengths)
    judged = "accuracy" in described
    values = [[float(bool(is_right(s, key, threshold)) if judged else s.reward_value(key)) for s in g] for g in groups]
    what, aux = "acc" if judged else "reward", f"val-aux/{name}"
    mean = estimate([fmean(each) for each in values], shares=judged)
    metrics[f"val-core/{name}/{what}/mean@{n}"] = mean.mean
    metrics |= {f"{aux}/{what}/mean@{n}/low": mean.low, f"{aux}/{what}/mean@{n}/high": mean.high}
    if judged:
        metrics[f"eval/{name}/accuracy"] = mean.mean
        answers = [_votes([answer_of(sample) for sample in group], config.rm_type) for group in groups]
        metrics |= {f"{aux}/acc/{k}": value for k, value in _at_k(values, answers, n).items()}
    metrics |= _turns(aux, usable)
    if described["tool_calls_mean"]:
        metrics[f"{aux}/code/pass_rate"] = 1 - described["tool_error_rate"]
    return metrics


def _votes(answers: list[str | None], rm_type: str) -> list[int | None]:
    """A number for each answer, the same for those that `rm_type` finds equal: 1/2 and 0.5 are one vote."""
    same, first = Equality(rm_type), dict.fromkeys(answer for answer in answers if answer is not None)
    kinds: dict[str, int] = {}
    for answer in first:
        kinds[answer] = next((kinds[other] for other in kinds if same(other, answer)), len(kinds))
    return [None if answer is None else kinds[answer] for answer in answers]


def _at_k(right: list[list[float]], answers: list[list[int | None]], n: int) -> dict[str, float]:
    """pass@k and maj@k over the problems with at least k answers, for n > 1 answers per problem."""
    metrics: dict[str, float] = {}
    voted = any(answer is not None for given in answers for answer in given)
    for k in powers_up_to(n) if n > 1 else ():
        enough = [(given, [bool(r) for r in verdicts]) for given, verdicts in zip(answers, right, strict=True)
                  if len(verdicts) >= k]  # fmt: skip
        if not enough:
            break
        metrics[f"pass@{k}"] = fmean(pass_at_k(len(verdicts), sum(verdicts), k) for _, verdicts in enough)
        if voted:
            metrics[f"maj@{k}"] = fmean(majority_at_k(given, verdicts, k) for given, verdicts in enough)
        if len(enough) < len(right):
            metrics[f"problems@{k}"] = float(len(enough))
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
