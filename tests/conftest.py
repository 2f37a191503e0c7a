"""The order of the test files; and modules that a test wrote are gone after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def forget_written_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Several pages and tests write a `my_task.py`: one must not find another's."""
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(written):
            del sys.modules[name]
