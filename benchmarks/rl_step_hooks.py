"""The reward of `rl_step.py`: it differs inside every group, so that random weights get a gradient."""

from __future__ import annotations

from typing import Any

from slime_retool.types import Sample


async def alternating_reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    return {"score": float(sample.index % 2)}
