"""The sglang-router in front of the engines: one address, and every sample stays with its engine."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_retool.config import Config
from slime_retool.engine import router_main
from slime_retool.engine.process import Server

HOST = "127.0.0.1"
STARTUP_TIMEOUT = 120.0


class RouterProcess(Server):
    """A running router over `worker_urls`. Constructing it starts the process and waits until it is ready.

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
