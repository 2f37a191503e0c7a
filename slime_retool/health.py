"""What a run's metrics say about its health: a run that learns nothing says so, with the likely cause."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

QUIET_STEPS = 20
"""A warning comes again after so many steps at the earliest."""

MISMATCH = 0.1
"""Nats per token. Engine and trainer in one precision differ by about 0.01, bf16 against another kernel by 0.02."""
COLLAPSED = 0.01
"""Nats per token: nearly every token is certain, and samples of one prompt are the same."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Symptom:
    """Something that no healthy step shows."""

    name: str
    shows: Callable[[Metrics], bool]
    """Of one step's metrics. A metric that is missing (KeyError) shows nothing."""
    says: str
    """With metrics by name in braces."""


SYMPTOMS = (
    Symptom(
        "groups_equal",
        lambda m: m["rollout/groups_equal"] == m["rollout/groups_finished"] > 0,
        "in every group all rewards are equal, so no sample teaches anything (mean reward "
        "{rollout/reward_mean:.3g}): the prompts are too hard or too easy for this model, or the reward function "
        "does not tell answers apart; look at a few with --dump-rollouts and `slime-retool view`",
    ),
    Symptom(
        "truncated",
        lambda m: m["rollout/truncated_ratio"] == 1,
        "every response was cut off, after {rollout/response_tokens_mean:.0f} tokens on average: raise "
        "--rollout-max-response-len or --rollout-max-context-len, or the model never writes the end token of its "
        "chat template (more SFT, or --rollout-stop)",
    ),
    Symptom(
        "no_tool_call",
        lambda m: m["rollout/tools_offered_ratio"] > 0 == m["rollout/tool_call_rate"],
        "tools are offered and no response calls one ({rollout/malformed_call_rate:.0%} try and fail): the model "
        "may not know this --tool-format; SFT on traces with calls comes first",
    ),
    Symptom(
        "mismatch",
        lambda m: m["mismatch/abs_diff"] > MISMATCH,
        "the trainer's log-probs differ from the engine's by {mismatch/abs_diff:.3f} nats per token: check "
        "precision and quantisation of the engine, the chat template, and --check-weight-update-equal; --use-tis "
        "bounds the damage",
    ),
    Symptom(
        "entropy",
        lambda m: m["rollout/samples"] > 0 and m["train/entropy"] < COLLAPSED,  # of samples, not of SFT
        "the policy's entropy is {train/entropy:.4f} nats per token, so samples of a prompt are all the same: lower"
        " --lr, or raise --entropy-coef, --eps-clip-high or --rollout-temperature",
    ),
)


class HealthCheck:
    """Warns of each symptom that a step shows, at most once in `QUIET_STEPS` steps."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}

    def look_at(self, step: int, metrics: Metrics) -> None:
        for symptom in SYMPTOMS:
            try:
                shows = symptom.shows(metrics)
            except KeyError:
                continue
            if shows and step - self._said.get(symptom.name, step - QUIET_STEPS) >= QUIET_STEPS:
                self._said[symptom.name] = step
                logger.warning("step %d: %s", step, symptom.says.format_map(metrics))
