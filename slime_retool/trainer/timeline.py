"""What one rank does and when: its phases always timed, every micro-batch while a step is recorded for a trace.

Phases are timed on the host. Micro-batches are timed between marks in the order of the work: on a GPU those are events
in its stream, which cost no waiting, so that a slice is when the GPU was busy and not when the host asked it to be.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slime_retool.trace import RankSpans
from slime_retool.types import Span, timed

Mark = Any
"""A moment: Unix time on the CPU, a torch.cuda.Event in the GPU's stream."""


class Timeline:
    """One for all models of a process."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._on_cuda = device, device.type == "cuda"
        self._host: list[Span] = []
        self._work: list[tuple[str, Mark, Mark, dict[str, Any]]] = []
        self.recording = False

    def record(self) -> None:
        """Keep everything from now on, for `take`."""
        self._host, self._work, self.recording = [], [], True

    def take(self) -> RankSpans:
        """What was recorded; ends the recording."""
        self.recording = False
        host, self._host, done, self._work = self._host, [], self._work, []
        if not self._on_cuda:
            return RankSpans([*host, *(_span(*work) for work in done)], [])
        now = self.mark()
        torch.cuda.synchronize()
        host_now = time.time()

        def at(mark: Any) -> float:
            return host_now - mark.elapsed_time(now) / 1000  # milliseconds

        return RankSpans(host, [_span(name, at(begin), at(end), more) for name, begin, end, more in done])

    @contextmanager
    def span(self, name: str) -> Iterator[Span]:
        """Time what is inside on the host."""
        with timed(name, []) as span:
            yield span
        if self.recording:
            self._host.append(span)

    def mark(self) -> Mark:
        """This moment in the order of the device's work."""
        if not self._on_cuda:
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, begin: Mark, **more: Any) -> None:
        """Work from `begin` to now."""
        self._work.append((name, begin, self.mark(), more))

    @contextmanager
    def work(self, name: str, **more: Any) -> Iterator[None]:
        """Time what is inside in the order of the device's work, while recording."""
        if not self.recording:
            yield
            return
        begin = self.mark()
        yield
        self.add(name, begin, **more)

    def watch_backward(self, output: Tensor, backward: Backward | None) -> None:
        """Let a slice begin when the gradient of `output` is known and end with the backward pass that it is in."""
        if backward is not None and output.requires_grad:
            output.register_hook(backward)

    def backward(self, **more: Any) -> Backward | None:
        """The backward pass of a micro-batch, for `watch_backward`; None while nothing is recorded."""
        return Backward(self, more) if self.recording else None


class Backward:
    """One slice, begun by the first of the hooks it is given to."""

    def __init__(self, timeline: Timeline, more: dict[str, Any]) -> None:
        self._timeline, self._more = timeline, more
        self._begin: Mark | None = None

    def __call__(self, gradient: Tensor) -> None:
        if self._begin is None:
            self._begin = self._timeline.mark()
            # What autograd itself offers to whoever must act when a backward pass has ended (as torch's FSDP does).
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        assert self._begin is not None
        self._timeline.add("backward", self._begin, **self._more)


def _span(name: str, begin: float, end: float, more: dict[str, Any]) -> Span:
    return {"name": name, "start": begin, "seconds": end - begin, "status": "ok", **more}
