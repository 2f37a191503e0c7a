"""The built-in reward of `--rm-type`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from slime_retool.errors import MissingLabel
from slime_retool.reward.score import compute_score
from slime_retool.types import Sample

if TYPE_CHECKING:
    from slime_retool.config import Config


def check_label(args: Config, sample: Sample) -> None:
    """Raise MissingLabel for a data row without a label, before a run starts: `default_reward` needs one."""
    if sample.label is None:
        raise MissingLabel("it has no label to compare with; check --label-key, or give a --custom-rm-path of your own")


async def default_reward(args: Config, sample: Sample) -> dict[str, Any]:
    """Score `sample.response` against `sample.label` by `args.rm_type` (see `compute_score`).

    Raises MissingLabel when the sample has no label, RewardError on an outage of the scorer.
    """
    check_label(args, sample)
    assert sample.label is not None
    if args.rm_type == "dapo":  # microseconds
        return compute_score(sample.response, sample.label)
    return await asyncio.to_thread(compute_score, sample.response, sample.label, args.rm_type)
