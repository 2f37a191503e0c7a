"""The sglang-router in front of the engines: one address, and every sample stays with its engine."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from slime_retool.config import Config
from slime_retool.engine import router_main
from slime_retool.engine.process import Server, ServerError, direct

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
STARTUP_TIMEOUT = 120.0
ADMIN_SECONDS = 10.0
"""For the router to do what it was asked."""


class RouterProcess(Server):
    """A running router over `worker_urls`. Constructing it starts the process and waits until all of them have joined.

    It answers as soon as one has, which alone would then get the first requests, with all further turns of their
    samples. An engine that does not join within ADMIN_SECONDS is warned of and not waited for.

    The policy `manual` sends all requests of a routing key (`rollout.engine_client` names the sample) to one engine, a
    new key to the engine with the fewest requests: all turns of a sample find their prefix in the same cache.
    `cache_aware` looks for the longest prefix instead. Where all prompts begin alike (a system message, tools) that
    crowds one engine until the router evens out, and then a third of the samples change their engine half-way.

    A failed request is passed on to the client and never run a second time by the router: its own retries and its
    circuit breaker are off. `rollout.engine_client` retries, and counts.
    """

    def __init__(self, config: Config, worker_urls: Sequence[str]) -> None:
        """Raises ServerError, with the log's end, when the router does not become ready."""

        def command(ports: list[int]) -> list[str]:
            # The router panics when its metrics port is taken, so that one is chosen too.
            port, metrics_port = ports
            words = [sys.executable, router_main.__file__, "--worker-urls", *worker_urls]
            words += ["--host", HOST, "--port", str(port), "--policy", "manual", "--assignment-mode", "min_load"]
            words += ["--prometheus-host", HOST, "--prometheus-port", str(metrics_port), "--log-level", "warn"]
            words += ["--disable-retries", "--disable-circuit-breaker"]
            words += ["--request-timeout-secs", str(math.ceil(config.rollout_request_timeout) + 60)]
            words += ["--worker-startup-timeout-secs", str(int(STARTUP_TIMEOUT))]
            words += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
            return words

        self._start(
            "sglang-router",
            command,
            host=HOST,
            health_path="/readiness",  # 200 once a worker is registered and healthy
            timeout=STARTUP_TIMEOUT,
            log_path=Path(config.output_dir) / "logs" / "router.log",
            environment=os.environ,
            num_ports=2,
            grace=3.0,
        )
        try:
            self.wait_until_ready(lambda: self._has_all({*worker_urls}), ADMIN_SECONDS, "sglang-router")
        except ServerError:
            if not self.alive:
                self.stop()
                raise
            logger.warning("the router has not taken all engines in within %g s", ADMIN_SECONDS)

    def _has_all(self, worker_urls: set[str]) -> bool:
        try:
            return self._workers().keys() >= worker_urls
        except ServerError:  # it is busy, or gone
            return False

    def add(self, worker_url: str) -> None:
        """Send requests to this engine too. Raises ServerError where the router does not take it."""
        self._ask("/workers", "POST", {"url": worker_url})
        self._wait_until(lambda: worker_url in self._workers(), f"taken {worker_url} in")

    def remove(self, worker_url: str) -> None:
        """Send no further request to this engine; those that it has run on. Raises ServerError."""
        workers = self._workers()
        if worker_url in workers:
            self._ask(f"/workers/{workers[worker_url]}", "DELETE")
        self._wait_until(lambda: worker_url not in self._workers(), f"taken {worker_url} out")

    def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + ADMIN_SECONDS
        while not done():
            if time.monotonic() > deadline:
                raise ServerError(f"the router has not {what} within {ADMIN_SECONDS:g} s")
            time.sleep(0.01)

    def _workers(self) -> dict[str, str]:
        """{URL: the router's name} of the engines that it sends requests to."""
        return {worker["url"]: worker["id"] for worker in self._ask("/workers", "GET")["workers"]}

    def _ask(self, path: str, method: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with direct.open(request, timeout=ADMIN_SECONDS) as reply:
                return json.loads(reply.read())
        except (OSError, ValueError, HTTPException) as error:
            raise ServerError(f"the router does not answer {method} {path}: {error}") from error
