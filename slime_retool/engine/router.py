"""The sglang-router in front of the engines: one address, cache-aware placement."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from slime_retool.config import Config
from slime_retool.engine import router_main
from slime_retool.engine.process import (
    PORT_TRIES,
    ServerError,
    SupervisedProcess,
    answers,
    free_ports,
    port_was_taken,
)

Policy = Literal["cache_aware", "round_robin", "power_of_two", "random", "manual"]
STARTUP_TIMEOUT = 120.0


class RouterProcess:
    """A running router over `worker_urls`. Constructing it starts the process and waits until it is ready.

    A failed request is passed on to the client and never run a second time by the router: its own retries and its
    circuit breaker are off. `rollout.engine_client` retries, and counts.
    """

    def __init__(
        self,
        config: Config,
        worker_urls: Sequence[str],
        *,
        policy: Policy = "cache_aware",
        host: str = "127.0.0.1",
    ) -> None:
        """Raises ServerError, with the log's end, when the router does not become ready."""
        self.host = host
        self.log_path = Path(config.output_dir) / "logs" / "router.log"
        for attempt in range(PORT_TRIES):
            # The router panics when its metrics port is taken, so that one is chosen too.
            self.port, metrics_port = free_ports(2, host)
            command = [sys.executable, router_main.__file__]
            command += ["--worker-urls", *worker_urls]
            command += ["--host", host, "--port", str(self.port), "--policy", policy]
            command += ["--prometheus-host", host, "--prometheus-port", str(metrics_port), "--log-level", "warn"]
            command += ["--disable-retries", "--disable-circuit-breaker"]
            command += ["--request-timeout-secs", str(math.ceil(config.rollout_request_timeout) + 60)]
            command += ["--worker-startup-timeout-secs", str(int(STARTUP_TIMEOUT))]
            command += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
            self._process = SupervisedProcess(command, log_path=self.log_path, environment=dict(os.environ), grace=3.0)
            try:
                # /readiness is 200 once a worker is registered and healthy.
                self._process.wait_until_ready(
                    lambda: answers(f"{self.url}/readiness"), STARTUP_TIMEOUT, "sglang-router"
                )
                return
            except ServerError as error:
                self._process.stop()
                if attempt == PORT_TRIES - 1 or not port_was_taken(error):
                    raise
            except BaseException:
                self._process.stop()
                raise

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the supervisor above the router."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.alive

    def log_tail(self) -> str:
        return self._process.log_tail()

    def stop(self) -> None:
        """End the router; safe to call twice."""
        self._process.stop()

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
