"""Our hooks for equal work: every answer has exactly the tokens that its data row says."""

from __future__ import annotations

from typing import Any

from slime_retool.config import Config
from slime_retool.rollout.generate import generate as generate_turn
from slime_retool.types import Sample


def score(response: str) -> float:
    """As good as a coin, the same for every trainer, and free."""
    return float(len(response) % 2)


async def generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    limit = int(sample.metadata["limit"])
    return await generate_turn(args, sample, {**sampling_params, "max_new_tokens": limit, "ignore_eos": True})


async def reward_func(args: Config, sample: Sample, **kwargs: Any) -> float:
    return score(sample.response)
