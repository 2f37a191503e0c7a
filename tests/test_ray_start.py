"""Ray's start beside the reading of the data: what goes wrong in either, and that Ray ends with the block."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import ray

from slime_retool.cluster import connection
from slime_retool.cluster.connection import RayStart
from slime_retool.config import Config
from slime_retool.errors import ConfigError


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(ray, "shutdown", lambda: told.append("shutdown"))
    return told


def starts(monkeypatch: pytest.MonkeyPatch, start: Callable[[], None]) -> RayStart:
    monkeypatch.setattr(connection, "connect", lambda config: start())
    return RayStart(Config(device="cpu"))


def test_ray_starts_beside_what_the_block_does_and_its_thread_stays_until_the_end(events, monkeypatch) -> None:
    go = threading.Event()
    threads: list[threading.Thread] = []

    def start() -> None:
        threads.append(threading.current_thread())
        go.wait()
        events.append("started")

    with starts(monkeypatch, start) as ray_start:
        events.append("read")
        go.set()
        ray_start.wait()
        # The kernel ends Ray's processes with the thread that began them.
        assert threads[0].is_alive() and threads[0] is not threading.current_thread()
    assert events == ["read", "started", "shutdown"] and not threads[0].is_alive()


def test_an_error_of_the_start_is_raised_where_it_is_waited_for(events, monkeypatch) -> None:
    def start() -> None:
        raise ConfigError("no Ray cluster answers")

    with pytest.raises(ConfigError, match="no Ray cluster answers"), starts(monkeypatch, start) as ray_start:
        ray_start.wait()
    assert events == ["shutdown"]


def test_a_block_that_fails_ends_ray_once_it_has_started(events, monkeypatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def start() -> None:
        begun.set()
        go.wait()
        events.append("started")

    with pytest.raises(ValueError, match="row 3"), starts(monkeypatch, start):
        assert begun.wait(60)
        go.set()
        raise ValueError("row 3")
    assert events == ["started", "shutdown"]
