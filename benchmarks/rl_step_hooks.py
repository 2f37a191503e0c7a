"""Rewards of the benchmarks' RL steps: they differ inside every group, so that any weights get a gradient."""

from __future__ import annotations

from typing import Any

from slime_retool.types import Sample


async def alternating_reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    return {"score": float(sample.index % 2)}


async def vowel_reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, float]:
    """The share of vowels among the response's letters: dense, and learnable by a model of any size."""
    letters = [letter for letter in sample.response.lower() if letter.isascii() and letter.isalpha()]
    return {"score": sum(letter in "aeiou" for letter in letters) / max(1, len(letters))}
