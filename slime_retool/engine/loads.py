"""How busy engines are while a step is recorded: SGLang's /v1/loads, asked a few times a second."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any

from slime_retool.engine.process import direct

POLL_SECONDS = 0.2
ANSWER_SECONDS = 2.0
COUNTERS = {
    "running requests": "num_running_reqs",
    "waiting requests": "num_waiting_reqs",
    "tokens per second": "gen_throughput",
    "share of the cache in use": "token_usage",
}
"""What is shown -> SGLang's name. Of several data-parallel ranks the sum, of shares the largest."""

Points = dict[str, list[tuple[float, dict[str, float]]]]
"""By counter: (Unix time, value of each engine)."""


class LoadRecorder:
    """Asks every engine in a thread of its own until `stop`. An engine that does not answer leaves a gap."""

    def __init__(self, engines: Callable[[], Mapping[int, str]]) -> None:
        """`engines`: {number: URL} of those that serve now."""
        self._engines = engines
        self._points: Points = {name: [] for name in COUNTERS}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-loads", daemon=True)
        self._thread.start()

    def stop(self) -> Points:
        """What the engines said."""
        self._stop.set()
        self._thread.join()
        return self._points

    def _run(self) -> None:
        while not self._stop.is_set():
            for number, url in self._engines().items():
                if loads := ask(url):
                    now = time.time()
                    for name, value in counters(loads).items():
                        self._points[name].append((now, {f"engine {number}": value}))
            self._stop.wait(POLL_SECONDS)


def ask(url: str) -> list[dict[str, Any]]:
    """The load of each data-parallel rank of one server; none where it does not answer as SGLang does."""
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/loads?include=core")
    try:
        with direct.open(request, timeout=ANSWER_SECONDS) as reply:
            return list(json.loads(reply.read())["loads"])
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        return []


def counters(loads: list[dict[str, Any]]) -> dict[str, float]:
    """Values of `COUNTERS`, those that are there."""
    values = {name: [float(load[key]) for load in loads if key in load] for name, key in COUNTERS.items()}
    return {name: max(each) if "share" in name else sum(each) for name, each in values.items() if each}
