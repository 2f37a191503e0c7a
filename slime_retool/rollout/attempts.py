"""Attempts at samples, for a trace: those that go on, and those that ended while they were recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime_retool.types import Sample, Span


@dataclass(slots=True, eq=False)
class Attempt:
    """One sample from the call of its `generate` hook to the end of its reward."""

    sample: Sample
    start: float
    """Unix time."""


class Attempts:
    """Whoever runs a sample calls `begin` and `end`. For one event loop."""

    def __init__(self) -> None:
        self._running: dict[Attempt, None] = {}  # in the order of their beginnings
        self._ended: list[list[Span]] | None = None
        """Spans of each that ended since `record`; None while nobody wants them."""

    def begin(self, sample: Sample) -> Attempt:
        attempt = Attempt(sample, time.time())
        self._running[attempt] = None
        return attempt

    def end(self, attempt: Attempt) -> None:
        """`attempt.sample` has all its spans."""
        del self._running[attempt]
        if self._ended is not None:
            self._ended.append(_with_whole(attempt, attempt.sample.spans, time.time()))

    def record(self) -> None:
        """Keep the spans of those that end from now on."""
        self._ended = []

    def take(self, unfinished: Callable[[Sample], Sequence[Span]]) -> list[list[Span]]:
        """Spans of each that ended since `record`, then of those that go on; ends the recording.

        The first span, "sample N", is around the others. `unfinished`: what is known of a turn that is being written.
        """
        now, ended, self._ended = time.time(), self._ended or [], None
        return ended + [
            _with_whole(each, [*each.sample.spans, *unfinished(each.sample)], now, "goes on") for each in self._running
        ]


def _with_whole(attempt: Attempt, spans: Sequence[Span], now: float, status: str | None = None) -> list[Span]:
    sample = attempt.sample
    whole: Span = {
        "name": f"sample {sample.index}",
        "start": attempt.start,
        "seconds": now - attempt.start,
        "status": status or sample.status.value,
        "group": sample.group_index,
        "turns": sample.num_turns,
        "tool_calls": sample.num_tool_calls,
        "response_tokens": sample.response_length,
    }
    reward = sample.reward.get("score") if isinstance(sample.reward, dict) else sample.reward
    if isinstance(reward, (int, float)):
        whole["reward"] = float(reward)
    # Of one that a checkpoint held some are from before its beginning here.
    return [whole, *(dict(span) for span in spans if span["start"] >= attempt.start - 0.001)]
