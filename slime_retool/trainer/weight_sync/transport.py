"""What the transports share: their interface, whom they talk to, and waiting for a peer that may have given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slime_retool.background import in_background
from slime_retool.engine.admin import EngineAdmin, raise_first
from slime_retool.errors import WeightUpdateError
from slime_retool.trainer.core import Trainer
from slime_retool.trainer.gather import CHUNK_BYTES, hf_named_tensors

R = TypeVar("R")
FLATTENED = "flattened_bucket"
"""SGLang's load format for one byte tensor that holds many weights."""


@dataclass(slots=True)
class Peers:
    """Both sides of an update.

    numbers: number of each engine; where it is empty they count from 0. Colocated engines are placed by it.
    workers: processes of one engine (its tensor-parallel size).
    host: address of global rank 0 as the engines reach it.
    bucket_bytes: bytes of one bucket, at least those of the largest whole tensor.
    timeout: seconds that one step may take.
    """

    trainer: Trainer
    engines: list[EngineAdmin]
    workers: int
    host: str
    bucket_bytes: int
    timeout: float
    numbers: list[int] = field(default_factory=list)

    @property
    def chunk_bytes(self) -> int:
        """Bytes that are gathered from other ranks at once: stacks of experts then fit a bucket."""
        return min(CHUNK_BYTES, self.bucket_bytes)

    def engine(self, number: int) -> EngineAdmin | None:
        """The engine of this number; None where it takes no part."""
        numbers = self.numbers or range(len(self.engines))
        return dict(zip(numbers, self.engines, strict=True)).get(number)


class Transport:
    """One way for weights to reach engines that are paused."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def send(self) -> None:
        """Send all weights. Collective: every rank calls; whichever rank sees a failure raises, after its part."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget connections, after a failure or because the engines are others now. By default there are none."""

    def close(self) -> None:
        """Give up connections in an orderly way; never raises for an engine that is gone. By default there are none."""


class FromRankZero(Transport):
    """Global rank 0 sends what it gathers from all ranks."""

    def send(self) -> None:
        trainer = self._peers.trainer
        tensors = hf_named_tensors(trainer.module, trainer.config, chunk_bytes=self._peers.chunk_bytes)
        try:
            if trainer.rank == 0:
                self._send(tensors)
        finally:
            for _ in tensors:  # the other ranks' part; on rank 0 after a failure, what they still send
                pass

    def _send(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Send (Hugging Face name, full tensor) of all weights."""
        raise NotImplementedError


def together(step: Callable[[], R]) -> R:
    """What this rank's part of a step gives. Collective: WeightUpdateError on every rank when any rank's part failed.

    The error says what the first of those ranks says.
    """
    problem: str | None = None
    try:
        result = step()
    except Exception as error:  # told to every rank below
        problem = str(error) if isinstance(error, WeightUpdateError) else f"{type(error).__name__}: {error}"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for each in problems:
        if each is not None:
            raise WeightUpdateError(each)
    return result


def unless_refused(call: Callable[[], R], futures: Sequence[Future[None]]) -> R:
    """The result of `call`, or the first engine's error as soon as there is one.

    `call` runs in a daemon thread: once an engine has refused, nothing but its own timeout would end it.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> R:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread starts on device 0
        return call()

    result = in_background(run, "weight-sync")
    while not result.done():
        raise_first(futures)
        time.sleep(0.0005)
    return result.result()
