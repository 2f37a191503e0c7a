"""What a set of generated samples is described by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev

from slime_retool.rollout.hooks import USABLE
from slime_retool.types import NO_VERSION, Sample, SampleStatus


def is_right(sample: Sample, reward_key: str | None, threshold: float | None) -> bool | None:
    """Whether the answer is right: what the reward function says ("acc" of its dict), else whether the reward reaches
    `threshold` (`--accuracy-threshold`). None where neither is there: a reward alone does not say."""
    if isinstance(sample.reward, dict) and "acc" in sample.reward:
        return bool(sample.reward["acc"])
    return None if threshold is None else sample.reward_value(reward_key) >= threshold


def sample_metrics(
    samples: Sequence[Sample], reward_key: str | None, accuracy_threshold: float | None = None
) -> dict[str, float]:
    """Metrics of all finished samples; means are over the usable (completed or truncated) ones.

    `accuracy` is there when all of them can be judged, see `is_right`. `model_tokens` are those the model wrote,
    `response_tokens` also count observations. `failed_<boundary>` count outages. With no usable sample only shares and
    counts are there.
    """
    metrics: dict[str, float] = {"samples": float(len(samples))}
    if not samples:
        return metrics
    statuses = Counter(sample.status for sample in samples)
    for status in (SampleStatus.TRUNCATED, SampleStatus.ABORTED, SampleStatus.FAILED):
        metrics[f"{status.value}_ratio"] = statuses[status] / len(samples)
    errors = (sample.error or "rollout" for sample in samples if sample.status == SampleStatus.FAILED)
    for boundary, count in Counter(error.partition(":")[0] for error in errors).items():  # "engine: ..."
        metrics[f"failed_{boundary}"] = float(count)
    usable = [sample for sample in samples if sample.status in USABLE]
    if not usable:
        return metrics
    rewards = [sample.reward_value(reward_key) for sample in usable]
    verdicts = [is_right(sample, reward_key, accuracy_threshold) for sample in usable]
    if None not in verdicts:
        metrics["accuracy"] = fmean(map(bool, verdicts))
    model_tokens = [sum(sample.loss_mask) for sample in usable]
    calls = sum(sample.num_tool_calls for sample in usable)
    versions = {version for s in usable for version in {*s.weight_versions, *s.token_versions}} - {NO_VERSION}
    metrics |= {
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "response_tokens_mean": fmean(sample.response_length for sample in usable),
        "response_tokens_max": float(max(sample.response_length for sample in usable)),
        "model_tokens_mean": fmean(model_tokens),
        "model_tokens_max": float(max(model_tokens)),
        "mean_turns": fmean(sample.num_turns for sample in usable),
        "tools_offered_ratio": fmean(bool(sample.tools) for sample in usable),
        "tool_call_rate": fmean(sample.num_tool_calls > 0 for sample in usable),
        "tool_calls_mean": calls / len(usable),
        "tool_error_rate": sum(sample.num_tool_errors for sample in usable) / max(calls, 1),
        "malformed_call_rate": fmean(sample.num_malformed_calls > 0 for sample in usable),
        # Observations hold 0.0, so the sum is over the model's own tokens.
        "log_prob_mean": sum(sum(sample.rollout_log_probs) for sample in usable) / max(sum(model_tokens), 1),
    }
    if call_seconds := tool_seconds(usable):
        metrics |= {"tool_seconds_mean": fmean(call_seconds), "tool_seconds_max": max(call_seconds)}
    if versions:
        metrics |= {"weight_version_min": float(min(versions)), "weight_version_max": float(max(versions))}
    return metrics


def tool_seconds(samples: Sequence[Sample]) -> list[float]:
    """How long each executed call took, its wait for a free place included."""
    calls = (span for sample in samples for span in sample.spans if span["name"] == "tool")
    return [span["seconds"] for span in calls if span["status"] in ("ok", "error")]


SOURCE_METRICS = (
    "samples", "accuracy", "reward_mean", "tool_call_rate", "mean_turns", "response_tokens_mean", "truncated_ratio",
)  # fmt: skip


def source_metrics(
    samples: Sequence[Sample], reward_key: str | None, accuracy_threshold: float | None = None
) -> dict[str, float]:
    """`<source>/<metric>` of the data sets that samples name (`Sample.source`), for a few metrics of each."""
    metrics: dict[str, float] = {}
    for source in sorted({sample.source for sample in samples} - {""}):
        of_source = sample_metrics([s for s in samples if s.source == source], reward_key, accuracy_threshold)
        metrics |= {f"{source}/{name}": of_source[name] for name in SOURCE_METRICS if name in of_source}
    return metrics
