"""A short form of `fuzz_sandbox.py`: the same examples each time, and the seeds that once found a fault."""

from __future__ import annotations

from collections.abc import Iterator

import fuzz_sandbox
import pytest
from test_jail import LEVELS


@pytest.mark.parametrize("name", fuzz_sandbox.BORDERS)
def test_no_input_at_a_border_raises(name: str) -> None:
    border = fuzz_sandbox.BORDERS[name]
    for number in (0, *fuzz_sandbox.FOUND.get(name, ())):
        fuzz_sandbox.try_border(border, number, border.examples, None)


@pytest.fixture(scope="module", params=LEVELS[:1])
def running(request: pytest.FixtureRequest) -> Iterator[fuzz_sandbox.Running]:
    with fuzz_sandbox.Running(request.param) as running:
        yield running


@pytest.mark.parametrize("name", ["bytes of a child", "programs", "bytes over HTTP"])
def test_no_input_of_a_real_process_raises_hangs_or_leaks(name: str, running: fuzz_sandbox.Running) -> None:
    border = running.borders()[name]
    for number in (0, *fuzz_sandbox.FOUND.get(name, ())):
        fuzz_sandbox.try_border(border, number, border.examples, None)
    assert running.leaks() == []
