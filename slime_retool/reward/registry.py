"""The built-in reward of `--rm-type`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from slime_retool.errors import MissingLabel, UnreadableLabel
from slime_retool.reward.score import compute_score
from slime_retool.types import Sample

if TYPE_CHECKING:
    from slime_retool.config import Config


def check_label(args: Config, sample: Sample) -> None:
    """Refuse a data row that `default_reward` cannot score, before a run starts.

    Raises MissingLabel without a label, and UnreadableLabel where even the label itself, put in a box, is not right.
    """
    label = _label(sample)
    if not compute_score(f"Answer: \\boxed{{{label}}}", label, args.rm_type)["acc"]:
        raise UnreadableLabel(f"its own answer {label!r} is not right by {args.rm_type}")


async def default_reward(args: Config, sample: Sample) -> dict[str, Any]:
    """Score `sample.response` against `sample.label` by `args.rm_type` (see `compute_score`).

    Raises MissingLabel when the sample has no label, RewardError on an outage of the scorer.
    """
    label = _label(sample)
    if args.rm_type == "dapo":  # microseconds
        return compute_score(sample.response, label)
    return await asyncio.to_thread(compute_score, sample.scored_text, label, args.rm_type)


def _label(sample: Sample) -> str:
    if sample.label is None:
        raise MissingLabel("it has no label to compare with; check --label-key, or give a --custom-rm-path of your own")
    return sample.label
