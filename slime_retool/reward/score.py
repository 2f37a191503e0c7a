r"""`compute_score`: one response against one ground truth.

`dapo` is the rule published with Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025),
and used by the ReTool recipes: the content of the last \boxed{...} in the last 300 characters must be the ground truth,
character for character. It is meant for training on integers, and pays nothing for 34.0 or \text{34}.

`math_verify` asks whether the answer is right: the last box of the whole response, or else the last "Answer: ..." line,
must mean the same as the ground truth (`reward.equality`). What stands in a thought that was cut off is no answer.

Both look at what the model itself says: what only stands in a tool call or in a tool's output is no answer.
"""

from __future__ import annotations

from typing import Any

from slime_retool.config.groups import RM_TYPES
from slime_retool.errors import ConfigError
from slime_retool.reward.boxed import last_answer, published_box, without_open_thought, without_tool_text
from slime_retool.reward.equality import same_answer
from slime_retool.reward.symbolic import shared_verifier

DAPO_WINDOW = 300
"""Characters at the end of a response that the published rule looks at."""
MAX_COMPARISONS = 32
"""Symbolic comparisons of one score; a set of many expressions needs several."""
MAX_SLOW = 4
"""Symbolic comparisons of one problem's votes that may take too long; each of them takes seconds."""


def compute_score(response: str, ground_truth: str, mode: str = "dapo") -> dict[str, Any]:
    """Score `response`, the model's text alone: never pass the prompt in.

    Returns {"score": 1.0 or -1.0, "acc": whether it is right, "pred": the answer found, or ""}. `math_verify` may block
    for some seconds: call it off the event loop, from any thread. Raises ConfigError for an unknown mode, RewardError
    when the math-verify worker cannot be started.
    """
    if mode not in RM_TYPES:
        raise ConfigError(f"reward mode must be one of {', '.join(RM_TYPES)}, got {mode!r}")
    ground_truth = str(ground_truth)
    spoken = without_tool_text(response)
    if mode == "dapo":
        answer = published_box(spoken[-DAPO_WINDOW:])
        return _scored(answer == ground_truth != "", answer)
    answer = last_answer(without_open_thought(spoken))
    correct = answer is not None and same_answer(ground_truth, answer, _Symbolic())
    return _scored(correct, answer and answer.strip())


class Equality:
    """Whether two answers are one by a mode's rule: for counting votes. It may block for some seconds.

    Every pair is compared, so that votes do not depend on the order in which answers came, until MAX_SLOW of them took
    too long or crashed.
    """

    def __init__(self, mode: str) -> None:
        self._by_meaning, self._slow = mode == "math_verify", 0

    def __call__(self, one: str, other: str) -> bool:
        return one == other or (self._by_meaning and same_answer(one, other, self._compare))

    def _compare(self, one: str, other: str) -> bool:
        if self._slow == MAX_SLOW:
            return False
        same = shared_verifier().compare(one, other)
        self._slow += same is None
        return same is True


class _Symbolic:
    """Comparisons for one purpose: so many and no more, and none after one that took too long or crashed."""

    def __init__(self) -> None:
        self._left = MAX_COMPARISONS

    def __call__(self, ground_truth: str, answer: str) -> bool:
        if self._left == 0:
            return False
        same = shared_verifier().compare(ground_truth, answer)
        self._left = 0 if same is None else self._left - 1
        return same is True


def _scored(correct: bool, answer: str | None) -> dict[str, Any]:
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": answer or ""}
