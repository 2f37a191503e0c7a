"""Hooks of the end-to-end tests, named by dotted path."""

from __future__ import annotations

from typing import Any

from slime_retool.types import Sample


async def alternating_reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """Rewards that differ inside every group, so that a random model has something to learn from."""
    return {"score": float(sample.index % 2), "acc": bool(sample.index % 2)}


async def broken_reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    raise ZeroDivisionError("a mistake in the user's reward function")
