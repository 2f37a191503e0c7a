"""Engines, their owners and the router die between real Ray actors; scripted servers stand for SGLang."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import ray

from faults import scripted_engine
from faults.fault_hooks import find
from faults.scripted_engine import continuation
from slime_retool.cluster import engines as module
from slime_retool.cluster.connection import connect
from slime_retool.cluster.engines import Engines
from slime_retool.cluster.placement import place
from slime_retool.config import Config
from slime_retool.engine.process import Server, ServerError
from slime_retool.rollout.engine_client import RouterClient
from slime_retool.rollout.json_client import EngineStats

CONVERSATIONS, TURNS, TURN_TOKENS = 16, 3, 8
FAULT_AT, WAIT_AT = 5, 20
"""Answers after which something happens."""


class ScriptedServer(Server):
    """Stands for `engine.server.EngineProcess`."""

    def __init__(self, config: Config, rank: int) -> None:
        self._start(
            f"engine {rank}", lambda ports: [sys.executable, scripted_engine.__file__, str(ports[0])],
            host="127.0.0.1", health_path="/health", timeout=120, grace=1.0, environment=os.environ,
            log_path=Path(config.output_dir) / "logs" / f"engine_{rank}.log",
        )  # fmt: skip


@ray.remote(num_cpus=0, max_concurrency=2)
class ScriptedActor:
    """Stands for `cluster.actors.EngineActor`."""

    def __init__(self, config: Config, rank: int, gpus: list[str] | None, *, several_hosts: bool) -> None:
        self._config, self._rank = config, rank
        self._engine: Any = None

    def start(self) -> str:
        self.stop()
        self._engine = ScriptedServer(self._config, self._rank)
        return self._engine.url

    def ended(self) -> str | None:
        return None if self._engine.alive else self._engine.ending

    def log_tail(self) -> str:
        return self._engine.log_tail()

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()


class Fleet:
    """Two engines and conversations with them."""

    def __init__(self, engines: Engines) -> None:
        self.engines, self.service = engines, engines.service
        self._sessions = 0

    def converse(self, fault: Callable[[], object], until: Callable[[], bool] = lambda: True) -> EngineStats:
        """Conversations of several turns, none of which may fail; `fault` and then a wait for `until` are among them.

        Every turn is answered as it would be without a fault.
        """
        self._sessions += CONVERSATIONS  # the router sends known ones where they were
        return asyncio.run(self._converse(fault, until))

    async def _converse(self, fault: Callable[[], object], until: Callable[[], bool]) -> EngineStats:
        answers = 0

        async def conversation(client: RouterClient, number: int) -> None:
            nonlocal answers
            ids = [number, number + 1]
            for _ in range(TURNS):
                sent = list(ids)
                completion = await client.generate(
                    sent, {"max_new_tokens": TURN_TOKENS}, session=str(self._sessions + number)
                )
                assert completion.ids == continuation(sent, TURN_TOKENS)
                ids += [*completion.ids, 7]
                answers += 1
                if answers == FAULT_AT:
                    fault()
                if answers == WAIT_AT:
                    while not until():
                        await asyncio.sleep(0.05)

        limits = {"concurrency": 64, "timeout": 120, "retries": 0}
        async with RouterClient(self.service.url, service=self.service, **limits) as client:
            await asyncio.gather(*(conversation(client, number) for number in range(CONVERSATIONS)))
            assert answers == CONVERSATIONS * TURNS
            return client.take_stats()

    def servers(self, *numbers: int) -> list[int]:
        """Processes of engines."""
        ports = [str(urlsplit(self.engines.current()[number]).port) for number in numbers]
        found = [pid for port in ports for pid in find(scripted_engine.__file__, port) if pid_runs_server(pid)]
        assert len(found) == len(numbers)
        return found


def pid_runs_server(pid: int) -> bool:
    """Not its supervisor, whose command line ends with the server's."""
    return psutil.Process(pid).cmdline()[1] == scripted_engine.__file__


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    config = Config(
        device="cpu", rollout_num_gpus=2, output_dir=str(folder), debug_rollout_only=True, engine_hang_timeout=4.0,
        max_engine_restarts=5,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EngineActor", ScriptedActor)
        connect(config)
        engines = Engines(config, place(config).engines)
        try:
            engines.start_router(engines.start())
            yield Fleet(engines)
        finally:
            engines.stop_router()
            engines.close()
            ray.shutdown()
    assert find(scripted_engine.__file__) == []


def ends(pid: int) -> bool:
    """A supervisor gives its server a moment."""
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_conversations_of_an_engine_go_on_and_its_replacement_joins(number: signal.Signals, fleet: Fleet):
    old, faults = fleet.engines.current()[1], fleet.service.faults
    [server] = fleet.servers(1)
    stats = fleet.converse(
        lambda: os.kill(server, number), lambda: fleet.service.num_serving == 2 and fleet.service.faults > faults
    )
    assert stats.moved > 0 and stats.retries == 0 and fleet.service.faults == faults + 1
    assert fleet.engines.current()[1] != old and ends(server)


def test_conversations_go_on_through_another_router(fleet: Fleet):
    old = fleet.service.url
    routers = find("--worker-urls", str(urlsplit(old).port))  # and its supervisor
    [router] = [pid for pid in routers if psutil.Process(pid).ppid() in routers]
    stats = fleet.converse(lambda: os.kill(router, signal.SIGKILL))
    assert stats.moved > 0 and fleet.service.url != old


def test_an_engine_whose_owner_died_ends_and_is_replaced(fleet: Fleet):
    [server] = fleet.servers(0)
    owner = psutil.Process(server).parent().parent()
    assert owner.cmdline()[0].startswith("ray::ScriptedActor")
    restarts = fleet.service.restarts
    fleet.converse(owner.kill, lambda: fleet.service.num_serving == 2 and fleet.service.restarts > restarts)
    assert fleet.service.restarts == restarts + 1 and ends(server)


def test_with_no_engine_left_conversations_wait_until_no_replacement_is_allowed(fleet: Fleet):
    def all_die() -> None:
        for server in servers:
            os.kill(server, signal.SIGKILL)

    servers = fleet.servers(0, 1)
    assert fleet.converse(all_die).moved > 0  # the fourth and fifth replacement
    fleet.service.hold(settle=True)
    fleet.service.let_go()
    servers = fleet.servers(0, 1)
    with pytest.raises(ServerError, match="was ended by SIGKILL, and --max-engine-restarts 5 allows no further") as end:
        fleet.converse(all_die)
    assert "\n" not in str(end.value)
