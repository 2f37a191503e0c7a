"""Scores of responses against ground truth."""

from slime_retool.reward.format import format_score
from slime_retool.reward.registry import check_label, default_reward
from slime_retool.reward.runner import RewardRunner
from slime_retool.reward.score import compute_score
from slime_retool.reward.shaping import conversation_messages, shape_tool_use

__all__ = [
    "RewardRunner",
    "compute_score",
    "conversation_messages",
    "check_label",
    "default_reward",
    "format_score",
    "shape_tool_use",
]
