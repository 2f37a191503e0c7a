"""Engines and the router die or hang within a rollout, with the real SGLang, router, Ray, trainer and sandbox."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from run_utils import make_model, rl_values
from sglang_utils import engine_config, signal_all

from faults.fault_hooks import (
    engine_processes,
    find,
    requests_served,
    script,
    send,
    turns_are_token_exact,
)
from slime_retool.cluster.cluster import Cluster
from slime_retool.config import Config, resolve, validate
from slime_retool.engine.admin import EngineAdmin
from slime_retool.engine.process import ServerError
from slime_retool.rollout.manager import RolloutManager
from slime_retool.types import RolloutBatch

pytestmark = pytest.mark.timeout(1200)
HANG_SECONDS = 15.0
SAMPLES = 16


class Run:
    """A run between two rollouts: trainer, two engines, router, rollout side."""

    def __init__(self, cluster: Cluster, rollout: RolloutManager, folder: Path) -> None:
        self.cluster, self.rollout, self.folder = cluster, rollout, folder
        self.rollouts = 0
        self.seen: set[int] = set()

    def generate(self, at: dict[int, Callable[[], Awaitable[None]]]) -> RolloutBatch:
        """One rollout with faults; none of its samples was lost, doubled or changed."""
        script.begin(at)
        batch = self.rollout.generate(self.rollouts)
        self.rollouts += 1
        indices = [sample.index for sample in batch.samples]
        assert len(indices) == len(set(indices)) == SAMPLES and not self.seen & set(indices)
        self.seen |= set(indices)
        assert all(turns_are_token_exact(sample) for sample in batch.samples)
        assert batch.metrics["rollout/groups_failed"] == 0 and "rollout/failed_engine" not in batch.metrics
        return batch

    def train(self, batch: RolloutBatch) -> None:
        """The log-probs of all engines are those of the trainer's weights; and the next ones reach every engine."""
        metrics = self.cluster.trainers.train(batch, self.rollouts)
        assert metrics["train/logprob_abs_diff"] < 1e-4
        self.cluster.begin_update()
        version = self.cluster.update_weights()
        self.cluster.begin_generation()
        self.compare(version)

    def compare(self, version: int) -> None:
        urls = self.cluster.engines.current()
        assert list(urls) == [0, 1]
        assert [EngineAdmin(url).weight_version() for url in urls.values()] == [str(version)] * 2
        now = self.cluster.trainers.weight_checksums()
        assert self.cluster.engines.weight_checksums() == [now, now]

    async def until_all_serve(self, faults: int = 0) -> None:
        """Until both engines serve, and so many have left."""
        service = self.cluster.engines.service
        while service.num_serving < 2 or service.faults < faults:
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("faults")
    model = make_model(tmp_path_factory.mktemp("model"))
    values = rl_values(model, folder) | {
        "rollout_num_gpus": 2, "custom_generate_function_path": "faults.fault_hooks.generate",
        "engine_hang_timeout": HANG_SECONDS, "rollout_request_retries": 0,
    }  # fmt: skip
    config: Config = engine_config(model / "hf", **values)
    config = resolve(config)
    validate(config)
    with RolloutManager(config) as rollout, Cluster(config) as cluster:
        cluster.engines.launch()
        cluster.trainers.start(1)
        urls = cluster.engines.start()
        rollout.connect(cluster.engines.start_router(urls))
        cluster.trainers.connect_engines(urls)
        cluster.begin_update()
        cluster.update_weights()
        cluster.begin_generation()
        yield Run(cluster, rollout, folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_conversations_of_an_engine_go_on_and_its_replacement_joins_in_the_same_rollout(
    number: signal.Signals, run: Run, caplog: pytest.LogCaptureFixture
):
    """Every sample is whole and right; the replacement has answered some of them with the current weights."""
    old, log = run.cluster.engines.current()[1], run.folder / "logs" / "engine_1.log"
    faults = run.cluster.engines.service.faults
    before: list[int] = []

    async def fault() -> None:
        send(old, number)

    async def wait() -> None:
        await run.until_all_serve(faults + 1)
        before.append(requests_served(log))

    batch = run.generate({5: fault, 30: wait})
    assert run.cluster.engines.current()[1] != old and engine_gone(old)
    assert batch.metrics["rollout/engine_moved"] > 0
    said = "was ended by SIGKILL" if number == signal.SIGKILL else "generates nothing"
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([record for record in warnings if said in record.getMessage()]) == 1 and len(warnings) < 5
    run.compare(run.cluster.trainers.weight_version)
    run.train(batch)


def engine_gone(url: str) -> bool:
    try:
        engine_processes(url)
    except ValueError:
        return True
    return False


def test_conversations_go_on_through_another_router(run: Run):
    old = run.cluster.engines.service.url

    async def fault() -> None:
        signal_all(find(str(old.rsplit(":", 1)[1]), "--worker-urls"), signal.SIGKILL)

    batch = run.generate({5: fault})
    assert run.cluster.engines.service.url != old and batch.metrics["rollout/engine_moved"] > 0
    run.train(batch)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_an_engine_that_dies_in_an_update_is_left_out_of_it_and_serves_after_the_next(number: signal.Signals, run: Run):
    batch = run.generate({})
    run.cluster.trainers.train(batch, run.rollouts)
    run.cluster.begin_update()
    send(run.cluster.engines.current()[1], number)
    version = run.cluster.update_weights()
    run.cluster.begin_generation()
    assert [EngineAdmin(url).weight_version() for url in run.cluster.engines.current().values()] == [str(version)]
    run.train(run.generate({20: run.until_all_serve}))


def test_with_no_engine_left_the_rollout_waits_and_when_no_replacement_is_allowed_it_ends_in_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    service = run.cluster.engines.service

    async def fault() -> None:
        for url in run.cluster.engines.current().values():
            send(url, signal.SIGKILL)

    run.train(run.generate({5: fault, 30: partial(run.until_all_serve, service.faults + 2)}))
    monkeypatch.setattr(service, "_max_restarts", service.restarts)
    with pytest.raises(ServerError, match=r"ended by SIGKILL, and --max-engine-restarts \d+ allows no further") as end:
        run.generate({5: fault})
    assert "\n" not in str(end.value)
