"""benchmarks/peers: the lengths that both sides get, and what is said of a peer that did not run."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "peers"))

import equal_work  # noqa: E402
import limited  # noqa: E402
import step_ratio  # noqa: E402

from slime_retool.types import Sample  # noqa: E402


def test_lengths_are_spread_evenly_over_their_logarithms() -> None:
    found = sorted(equal_work.limits(4001, 64, 512))
    assert found[0] >= 64 and found[-1] <= 512
    assert found[2000] == pytest.approx((64 * 512) ** 0.5, rel=0.05)
    assert equal_work.limits(5, 64, 512) == equal_work.limits(5, 64, 512)


def test_a_row_s_length_replaces_the_run_s_and_the_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    async def turn(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        seen.append(params)
        return sample

    monkeypatch.setattr(limited, "generate_turn", turn)
    given = {"max_new_tokens": 512, "temperature": 1.0}
    asyncio.run(limited.generate(None, Sample("q", metadata={"limit": 70}), given))  # type: ignore[arg-type]
    assert seen == [{"max_new_tokens": 70, "temperature": 1.0, "ignore_eos": True}]
    assert given["max_new_tokens"] == 512


def rows(metric: str, *values: float) -> list[dict[str, float]]:
    return [{metric: value} for value in values]


def test_the_ratio_is_of_medians_after_two_steps() -> None:
    ours = rows("perf/step_seconds", 99.0, 99.0, 4.0, 5.0, 6.0)
    theirs = rows("timing_s/step", 1.0, 1.0, 10.0, 9.0, 80.0)
    entry = step_ratio.compared(ours, theirs, "")["verl"]
    assert entry["step_ratio"] == 2.0 and "why" not in entry


def test_a_peer_that_did_not_run_has_a_reason_and_no_ratio(tmp_path: Path) -> None:
    entry = step_ratio.compared(
        rows("perf/step_seconds", 1.0, 1.0, 1.0), step_ratio.verl_steps(tmp_path / "none"), "it hung"
    )
    assert entry["verl"]["step_ratio"] is None and entry["verl"]["why"] == "it hung"


def test_only_lines_of_whole_steps_count(tmp_path: Path) -> None:
    lines = [{"step": 0, "data": {"val/x": 1}}, {"step": 1, "data": {"timing_s/step": 2.0}}]
    (tmp_path / "verl.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert step_ratio.verl_steps(tmp_path / "verl.jsonl") == [{"timing_s/step": 2.0}]
