"""A run that learns nothing says so, with the likely cause, and not at every step."""

from __future__ import annotations

import logging

import pytest

from slime_retool.health import QUIET_STEPS, SYMPTOMS, HealthCheck

HEALTHY = {
    "rollout/samples": 32.0,
    "rollout/groups_finished": 8.0,
    "rollout/groups_equal": 3.0,
    "rollout/reward_mean": 0.25,
    "rollout/truncated_ratio": 0.9,
    "rollout/response_tokens_mean": 800.0,
    "rollout/tools_offered_ratio": 1.0,
    "rollout/tool_call_rate": 0.02,
    "rollout/malformed_call_rate": 0.5,
    "mismatch/abs_diff": 0.02,
    "train/entropy": 0.3,
}
ILL = {
    "groups_equal": ({"rollout/groups_equal": 8.0}, "in every group all rewards are equal", "mean reward 0.25"),
    "truncated": ({"rollout/truncated_ratio": 1.0}, "every response was cut off, after 800 tokens", "--rollout-stop"),
    "no_tool_call": ({"rollout/tool_call_rate": 0.0}, "no response calls one (50% try and fail)", "--tool-format"),
    "mismatch": ({"mismatch/abs_diff": 0.5}, "differ from the engine's by 0.500 nats", "--use-tis"),
    "entropy": ({"train/entropy": 0.001}, "entropy is 0.0010 nats", "--entropy-coef"),
}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return messages


def test_a_healthy_step_and_one_without_metrics_say_nothing(caplog):
    check = HealthCheck()
    check.look_at(0, HEALTHY)
    check.look_at(1, {"train/loss": 1.0, "train/entropy": 0.0})  # SFT
    assert said(caplog) == []


@pytest.mark.parametrize("name", [symptom.name for symptom in SYMPTOMS])
def test_each_symptom_is_named_with_a_remedy_once_in_twenty_steps(name: str, caplog):
    change, what, remedy = ILL[name]
    check, sick = HealthCheck(), HEALTHY | change
    check.look_at(5, sick)
    (message,) = said(caplog)
    assert message.startswith("step 5: ") and what in message and remedy in message
    for step in range(6, 5 + QUIET_STEPS):
        check.look_at(step, sick)
    assert said(caplog) == []
    check.look_at(5 + QUIET_STEPS, sick)
    assert len(said(caplog)) == 1


def test_the_tools_that_nobody_was_offered_are_not_missed(caplog):
    HealthCheck().look_at(0, HEALTHY | {"rollout/tools_offered_ratio": 0.0, "rollout/tool_call_rate": 0.0})
    HealthCheck().look_at(0, HEALTHY | {"rollout/groups_finished": 0.0, "rollout/groups_equal": 0.0})
    assert said(caplog) == []
