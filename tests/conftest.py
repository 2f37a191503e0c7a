"""The order of the test files."""

from __future__ import annotations

import pytest

LONGEST = (
    "test_engine_faults.py", "test_run_faults.py", "test_end_to_end_runs.py", "test_stream_run.py",
    "test_end_to_end.py", "test_placement.py", "test_engine.py", "test_trainer_roles.py", "test_wheel.py",
    "test_trainer_distributed.py", "test_minimal_example.py",
)  # fmt: skip
"""Files of a minute or more: whole runs, engines, trainers of several ranks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: one that starts last would run alone, with the other workers idle."""
    rank = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
