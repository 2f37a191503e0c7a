"""What happened in one step as a file that ui.perfetto.dev opens: --profile-rollout.

The format is Chrome's trace events in JSON (complete events "X", counters "C", names "M"), which Perfetto reads:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A process of the trace is a group of
lanes here, a thread one track. Slices of a track lie within each other or apart: `lay_out` sees to it.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from slime_retool.types import Span

NOISE = 1000
"""Microseconds by which the ends of two slices may be off: each is a start by one clock and seconds by another."""


@dataclass(frozen=True, slots=True)
class RankSpans:
    """What a trainer's rank did while it was recorded."""

    host: list[Span]
    device: list[Span]
    """On a GPU: what ran there. Empty on the CPU, where the host's hold all."""

    def moved(self, seconds: float) -> RankSpans:
        """The same, later by so much."""
        return RankSpans(*([{**span, "start": span["start"] + seconds} for span in spans] for spans in self.parts))

    @property
    def parts(self) -> tuple[list[Span], list[Span]]:
        return self.host, self.device


@dataclass(slots=True)
class Slice:
    """A span in whole microseconds of Unix time, which keeps what is nested nested."""

    begin: int
    end: int
    span: Span

    @classmethod
    def of(cls, span: Span) -> Slice:
        return cls(round(span["start"] * 1e6), round((span["start"] + span["seconds"]) * 1e6), span)

    def is_after(self, other: Slice) -> bool:
        """Whether it begins at or after the end of one that began no later, or within it by noise alone."""
        overlap, beyond = other.end - self.begin, self.end - other.end
        return overlap <= 0 or (overlap <= NOISE and beyond > overlap)


@dataclass(slots=True)
class _Track:
    slices: list[Slice] = field(default_factory=list)
    open: list[Slice] = field(default_factory=list)
    """From the outermost to the innermost."""

    def takes(self, new: Slice) -> bool:
        """Whether `new`, which begins no earlier than those before it, lies within or after them; if so it is added."""
        begin, end, depth = new.begin, new.end, len(self.open)
        while depth and new.is_after(self.open[depth - 1]):
            depth -= 1
            begin = max(begin, self.open[depth].end)
        if depth:
            around = self.open[depth - 1]
            if new.end > around.end + NOISE:
                return False
            begin, end = max(begin, around.begin), min(end, around.end)
        new.begin, new.end = begin, max(begin, end)
        del self.open[depth:]
        self.open.append(new)
        self.slices.append(new)
        return True


def lay_out(units: Iterable[Sequence[Span]]) -> list[list[Slice]]:
    """Tracks of slices. Each unit goes to the first track that is free; what overlaps within it goes to further ones.

    The first span of a unit lies around its others, or there is only one. Slices that overlap by noise are cut.
    """
    tracks: list[_Track] = []
    for first, *others in sorted(units, key=lambda unit: (unit[0]["start"], -unit[0]["seconds"])):
        slices = [Slice.of(first), *map(Slice.of, sorted(others, key=lambda span: (span["start"], -span["seconds"])))]
        place = next((track for track in tracks if not track.open or track.open[0].end <= slices[0].begin), None)
        if place is None:
            tracks.append(place := _Track())
        place.open.clear()
        extra: list[_Track] = []
        for each in slices:
            each.begin = max(each.begin, slices[0].begin)
            if not any(track.takes(each) for track in (place, *extra)):
                extra.append(_Track())
                extra[-1].takes(each)
        tracks += extra
    return [track.slices for track in tracks]


def units_of(spans: Iterable[Span]) -> list[list[Span]]:
    """What one process did, as units: each span goes with the one that it began within."""
    units: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span["start"], -span["seconds"])):
        if units and span["start"] < units[-1][0]["start"] + units[-1][0]["seconds"]:
            units[-1].append(span)
        else:
            units.append([span])
    return units


class Trace:
    """Groups of lanes, in the order in which they are added."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._groups = 0

    def add(
        self,
        group: str,
        lanes: Mapping[str, Iterable[Sequence[Span]]] | None = None,
        counters: Mapping[str, Iterable[tuple[float, Mapping[str, float]]]] | None = None,
    ) -> None:
        """Add lanes by name, each of units as in `lay_out`, and counters by name: (Unix time, value of each series)."""
        self._groups += 1
        process = self._groups
        self._name("process_name", process, 0, {"name": group})
        self._name("process_sort_index", process, 0, {"sort_index": process})
        numbers = (number for number in count(1) if number != process)  # Perfetto calls that one the main thread
        for name, units in (lanes or {}).items():
            tracks = lay_out(units)
            for place, slices in enumerate(tracks, start=1):
                number = next(numbers)
                self._name("thread_name", process, number, {"name": f"{name} {place}" if len(tracks) > 1 else name})
                self._name("thread_sort_index", process, number, {"sort_index": number})
                self._events += [_complete(each, process, number) for each in slices]
        for name, points in (counters or {}).items():
            for at, values in points:
                self._events.append(
                    {"ph": "C", "name": name, "pid": process, "ts": round(at * 1e6), "args": dict(values)}
                )

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """The file appears whole or not at all; `about` is kept in it. Time 0 is that of the first event."""
        zero = min((event["ts"] for event in self._events if "ts" in event), default=0)
        events = [{**event, "ts": event["ts"] - zero} if "ts" in event else event for event in self._events]
        whole = {"displayTimeUnit": "ms", "otherData": {**about, "begin": zero / 1e6}, "traceEvents": events}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        with gzip.open(part, "wt", encoding="ascii", compresslevel=5) as file:
            json.dump(whole, file, allow_nan=False, separators=(",", ":"), default=repr)
        os.replace(part, path)

    def _name(self, kind: str, process: int, thread: int, values: dict[str, Any]) -> None:
        self._events.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": values})


def _complete(each: Slice, process: int, thread: int) -> dict[str, Any]:
    further = {name: value for name, value in each.span.items() if name not in ("name", "start", "seconds")}
    return {
        "ph": "X", "cat": "slime_retool", "name": each.span["name"], "pid": process, "tid": thread, "ts": each.begin,
        "dur": each.end - each.begin, "args": further,
    }  # fmt: skip


def trace_path(output_dir: str, rollout_id: int) -> Path:
    """Where the trace of a rollout lies in a run's --output-dir."""
    return Path(output_dir) / "traces" / f"rollout_{rollout_id:06d}.json.gz"
