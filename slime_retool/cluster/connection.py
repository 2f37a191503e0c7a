"""The Ray cluster of a run: one that is there already, or one of its own."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from concurrent import futures
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from slime_retool.config import Config
from slime_retool.config.devices import OWN_CLUSTER, ray_address
from slime_retool.errors import ConfigError

logger = logging.getLogger(__name__)
START_TRIES = 3
START_TIMED_OUT = "timed out during startup"
TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"
WORKER_LOGGER = "ray._private.worker"


def connect(config: Config) -> None:
    """Join the Ray cluster of --ray-address or RAY_ADDRESS, else start a private one that `ray.shutdown` ends.

    What this process does on SIGTERM stays; in the main thread Ray puts a handler of its own there. Raises ConfigError
    when no cluster answers.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    # It would warn that it puts none there in another thread.
    logging.getLogger(WORKER_LOGGER).addFilter(_is_not_about_sigterm)
    # Hooks named by dotted path must be importable in the actors as well.
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path if folder and os.path.isdir(folder))
    env = {"env_vars": {"PYTHONPATH": path}}
    options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False, "runtime_env": env}
    address = ray_address(config)
    if address != OWN_CLUSTER:
        logger.info("joining the Ray cluster at %s", address)
        try:
            # Where nothing listens Ray itself would try for ever.
            host, _, port = address.rpartition(":")
            if host and port.isdigit():
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            ray.init(address=address, **options)
        except (OSError, RayError) as error:  # RayError: the cluster asks for another token
            raise ConfigError(
                f"no Ray cluster answers at {address} (--ray-address or RAY_ADDRESS): {error}; start one with "
                "`ray start --head`, or leave both out for a private one"
            ) from error
    else:
        # "local": without an address Ray joins whatever instance it finds on the host, another run's as well.
        # Processes here reserve no CPUs, so any number of them fits on any machine.
        logger.info("starting Ray")
        # Of its token, which nobody else needs in a cluster of one's own, Ray would warn at every start.
        logging.getLogger(TOKEN_LOGGER).setLevel(logging.ERROR)
        # Room for a few rollout batches (Ray's default takes a third of the memory).
        store = min(max(psutil.virtual_memory().total // 10, 80_000_000), 8_000_000_000)
        options |= {"num_cpus": 1, "include_dashboard": False, "object_store_memory": store}
        _start_private(options)
    if in_main_thread and signal.getsignal(signal.SIGTERM) is not handler:
        signal.signal(signal.SIGTERM, handler)


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


class RayStart:
    """`connect` beside whatever else a start does; Ray ends with the block.

    The thread stays until then: the kernel ends Ray's processes with the thread that began them.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._outcome: futures.Future[None] = futures.Future()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)

    def __enter__(self) -> RayStart:
        self._thread.start()
        return self

    def wait(self) -> None:
        """Until Ray is there. Raises what `connect` does. To be called in the main thread."""
        self._outcome.result()
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray's, in C++, came before it and prints a trace

    def __exit__(self, *exc: object) -> None:
        futures.wait([self._outcome])
        ray.shutdown()
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            connect(self._config)
        except Exception as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(None)
        self._end.wait()


def _start_private(options: dict[str, Any]) -> None:
    """A Ray instance of this process's own. Ray gives its node 30 s to start, which a busy machine can exceed."""
    for left in reversed(range(START_TRIES)):
        try:
            ray.init(address="local", **options)
            return
        except Exception as error:  # Ray raises no class of its own here
            if left == 0 or START_TIMED_OUT not in str(error):
                raise
            logger.warning("Ray did not start in time; once more (%s)", error)
            ray.shutdown()
