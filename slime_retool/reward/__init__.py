"""Scores of responses against ground truth."""

from slime_retool.reward.registry import default_reward
from slime_retool.reward.score import compute_score
from slime_retool.reward.shaping import conversation_messages, shape_tool_use

__all__ = ["compute_score", "conversation_messages", "default_reward", "shape_tool_use"]
