r"""`compute_score`: one response against one ground truth.

`dapo`: the rule of Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025), section 2.4: +1
when the boxed answer equals the ground truth after normalisation, else -1. `math_verify`: the same scores, with
equality judged symbolically by the math-verify library.
"""

from __future__ import annotations

from typing import Any

from slime_retool.errors import ConfigError
from slime_retool.reward.boxed import last_boxed, without_tool_text
from slime_retool.reward.normalize import normalize_answer

MODES = ("dapo", "math_verify")


def compute_score(response: str, ground_truth: str, mode: str = "dapo") -> dict[str, Any]:
    r"""Score the last \boxed{...} that the model itself wrote in `response` (never pass the prompt in).

    Returns {"score": 1.0 or -1.0, "acc": whether it is right, "pred": the answer found, or ""}. `math_verify` may block
    for some seconds: call it off the event loop. Raises ConfigError for an unknown mode, RewardError when the
    math-verify worker cannot be started.
    """
    if mode not in MODES:
        raise ConfigError(f"reward mode must be one of {', '.join(MODES)}, got {mode!r}")
    answer = last_boxed(without_tool_text(response))
    if answer is None:
        return _scored(False, "")
    correct = normalize_answer(answer) == normalize_answer(str(ground_truth)) != ""
    if not correct and mode == "math_verify":
        from slime_retool.reward.symbolic import shared_verifier

        correct = shared_verifier().equal(str(ground_truth), answer)
    return _scored(correct, answer.strip())


def _scored(correct: bool, answer: str) -> dict[str, Any]:
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer}
