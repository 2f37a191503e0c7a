"""An engine of a made-up model that can be interrupted and updated, and the driver's side of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from slime_retool.protocols import Completion
from slime_retool.rollout.open_turns import OpenTurns
from slime_retool.rollout.stream import Stream
from slime_retool.types import RolloutBatch

END = ord(".")


def next_token(prefix: list[int], version: int, end: bool) -> tuple[int, float]:
    """What weights `version` write after `prefix`, and its log-prob: both tell the prefix and the version."""
    seed = (sum((place + 1) * token for place, token in enumerate(prefix)) * 31 + version * 7) % 9973
    return (END if end else ord("a") + seed % 26), -(seed + 1) / 10_000


class Model:
    """Writes a token a tick; `length(prompt text)` says how long an answer is, its end token included."""

    def __init__(self, length: Callable[[list[int]], int], *, version: int = 1) -> None:
        self.length, self.version, self.requests, self.running = length, version, 0, 0
        self._aborts = 0

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        *,
        session: str | None = None,
        cache_key: str | None = None,
    ) -> Completion:
        self.requests += 1
        self.running += 1
        try:
            return await self._write(input_ids, sampling_params["max_new_tokens"])
        finally:
            self.running -= 1

    async def _write(self, input_ids: list[int], limit: int) -> Completion:
        tokens, log_probs, aborts, finish = list(input_ids), [], self._aborts, ""
        version = self.version
        while not finish:
            await asyncio.sleep(0)
            if self._aborts != aborts:
                finish = "abort"
                break
            assert self.version == version, "weights changed under a running request"
            ends = len(tokens) + 1 >= self.length(tokens)
            token, log_prob = next_token(tokens, version, ends)
            tokens.append(token)
            log_probs.append(log_prob)
            if ends:
                finish = "stop"
            elif len(log_probs) == limit:
                finish = "length"
        return Completion(
            ids=tokens[len(input_ids) :], log_probs=log_probs, finish_reason=finish, weight_version=version,
            prompt_tokens=len(input_ids), cached_tokens=0,
        )  # fmt: skip

    def abort(self) -> None:
        self._aborts += 1


async def update(stream: Stream, turns: OpenTurns, model: Model, version: int) -> None:
    """What the training loop does at a weight update."""
    turns.hold()
    while not await turns.places.empty(0):
        model.abort()
        await asyncio.sleep(0)
    assert model.running == 0
    model.version = version
    stream.go_on(version)


async def steps(stream: Stream, turns: OpenTurns, model: Model, count: int) -> list[RolloutBatch]:
    """So many steps of a run."""
    batches = []
    for step in range(count):
        batches.append(await stream.next_batch(step))
        await update(stream, turns, model, model.version + 1)
    return batches
