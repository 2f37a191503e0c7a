"""What Ray makes of processes that die, with the real Ray and small stand-ins for what it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from sglang_utils import processes_with

from slime_retool.cluster.connection import connect
from slime_retool.cluster.trainers import Trainers
from slime_retool.config import Config
from slime_retool.errors import TrainerDied

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_below_an_engine_outlives_a_driver_that_is_killed(number: signal.Signals, tmp_path: Path):
    """Ray's worker kills its children as it ends: the supervisor, before that could end what the server started."""
    name, value = "SLIME_RETOOL_TEST_RUN", uuid.uuid4().hex
    driver = subprocess.Popen(
        [sys.executable, str(HERE / "ray_driver.py"), str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, name: value, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )  # fmt: skip
    assert driver.stdout is not None and driver.stdout.readline().strip() == "ready"
    family = [command for command in processes_with(f"{name}={value}").values() if "time.sleep(600)" in command]
    assert len(family) == 4  # supervisor, server, child, grandchild
    driver.send_signal(number)
    driver.wait()
    deadline = time.monotonic() + 120
    while (left := processes_with(f"{name}={value}")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == {}


@ray.remote(num_cpus=0)
class Rank:
    def pid(self) -> int:
        return os.getpid()

    def stuck(self) -> None:
        time.sleep(600)

    def loses_its_peer(self) -> None:
        raise RuntimeError("connection closed by peer")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    connect(Config(device="cpu"))
    yield
    ray.shutdown()


def trainers(*ranks: Any) -> Trainers:
    made = Trainers(Config(device="cpu"), [], several_hosts=False)
    made._groups = [list(ranks)]
    return made


def test_a_rank_that_died_is_named_also_where_only_its_peers_are_waited_for(cluster: None):
    ranks = [Rank.remote() for _ in range(3)]
    pids = ray.get([rank.pid.remote() for rank in ranks])
    waiting = [ranks[0].loses_its_peer.remote(), ranks[2].stuck.remote()]
    os.kill(pids[1], signal.SIGKILL)
    # Ray waits a second for the reason.
    told = "a process of the run ended, or its host: The actor (died unexpectedly|is temporarily unavailable)"
    with pytest.raises(TrainerDied, match=told):
        trainers(*ranks)._results(waiting)


def test_an_error_of_ranks_that_live_is_raised_as_it_is(cluster: None):
    ranks = [Rank.remote() for _ in range(2)]
    with pytest.raises(RuntimeError, match="^connection closed by peer$") as error:
        trainers(*ranks)._results([rank.loses_its_peer.remote() for rank in ranks])
    assert not isinstance(error.value, TrainerDied)


def test_trainers_that_are_killed_end_wherever_they_are(cluster: None):
    rank = Rank.remote()
    pid = ray.get(rank.pid.remote())
    rank.stuck.remote()
    made = trainers(rank)
    made.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists() and made._groups == []
