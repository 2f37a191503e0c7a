"""The real parts together: Ray, Megatron-core trainers, SGLang and its router."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from dist_utils import run_distributed
from faults.fault_hooks import engine_processes
from ray_utils import Host, pretend_hosts
from run_utils import make_model, rl_values
from sglang_utils import engine_config
from trainer_utils import make_trainer

from slime_retool.cluster.cluster import Cluster
from slime_retool.config import Config, resolve, validate
from slime_retool.engine.admin import EngineAdmin
from slime_retool.engine.process import ServerError
from slime_retool.errors import WeightUpdateError
from slime_retool.rollout.manager import RolloutManager
from slime_retool.types import RolloutBatch, TrainSample

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_two_hosts_with_a_trainer_rank_and_an_engine_each(model: Path, tmp_path: Path, monkeypatch):
    """A tensor-parallel trainer across pretend hosts of different addresses, and an engine on each.

    Log-probs of the same tokens differ by less than 1e-4; after an update every tensor is the same in both engines;
    both serve samples; that one died is an error that names it, where it may not be replaced.
    """
    values = rl_values(model, tmp_path) | {
        "actor_num_nodes": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True, "rollout_num_gpus": 2,
        "rollout_request_retries": 0, "check_weight_update_equal": True, "max_engine_restarts": 0,
    }  # fmt: skip
    config: Config = engine_config(model / "hf", **values)
    config = resolve(config)
    validate(config)
    with pretend_hosts(Host(), Host(address="127.0.0.2")) as (address, _):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with Cluster(config) as cluster:
            assert cluster.trainers.start(2) == (0, {})
            urls = cluster.engines.start()
            assert urlsplit(urls[1]).hostname == "127.0.0.2"
            assert urlsplit(urls[0]).hostname not in ("127.0.0.1", "127.0.0.2")
            manager = RolloutManager(config)
            try:
                manager.connect(cluster.engines.start_router(urls))
                cluster.trainers.connect_engines(urls)
                assert cluster.update_weights() == 1
                engines = [EngineAdmin(url) for url in urls]
                start = cluster.trainers.weight_checksums()
                assert cluster.engines.weight_checksums() == [start, start]
                before = cluster.trainers.train(manager.generate(0), 0)
                assert before["train/logprob_abs_diff"] < 1e-4
                assert before["train/grad_norm"] > 0
                assert cluster.update_weights() == 2
                now = cluster.trainers.weight_checksums()
                assert cluster.engines.weight_checksums() == [now, now] and now != start
                assert [engine.weight_version() for engine in engines] == ["2", "2"]
                batch = manager.generate(1)
                assert batch.metrics["rollout/weight_version_min"] == 2
                shares = [served(tmp_path, rank) for rank in (0, 1)]
                assert sum(shares) == 32 and min(shares) >= 8
                assert cluster.trainers.train(batch, 1)["train/logprob_abs_diff"] < 1e-4
                with pytest.raises(WeightUpdateError, match="update 2 engine 0 holds other values .* of 24 tensors"):
                    cluster.compare_weights(2)  # the trainer has moved on
                cluster.engines.check()
                end_server(urls[1])
                match = "SGLang engine 1 was ended by SIGKILL, and --max-engine-restarts 0 allows no further"
                for _ in range(2):
                    with pytest.raises(ServerError, match=match):
                        manager.generate(2)  # the other engine may be faster than the watch
                        cluster.engines.check()
            finally:
                manager.close()


def served(output: Path, rank: int) -> int:
    """Completed requests in the engine's access log."""
    return (output / "logs" / f"engine_{rank}.log").read_text().count('POST /generate HTTP/1.1" 200')


def end_server(url: str) -> None:
    """Kill the SGLang process that serves `url`."""
    os.kill(engine_processes(url)[0], signal.SIGKILL)


def train_twice(rank: int, world_size: int, config: Config, samples: list[TrainSample]) -> list[dict[str, float]]:
    """Metrics of two rollouts of a trainer with all roles in one process."""
    trainer = make_trainer(rank, world_size, config)
    first, _ = trainer.load()
    figures = [trainer.train(RolloutBatch(samples), first + i) for i in range(2)]
    trainer.shutdown()
    return figures


def test_a_critic_with_processes_of_its_own_trains_beside_the_actor_and_resumes(model: Path, tmp_path: Path):
    """One process for the actor, two for the critic; the same figures as together in one, to rounding."""
    rng = random.Random(0)
    samples = [
        TrainSample(
            [rng.randrange(256) for _ in range(12)], [0] * 4 + [1] * 8, rollout_log_probs=[0.0] * 4 + [-5.0] * 8,
            reward=rng.random(), index=index, group_index=index // 4,
        )
        for index in range(16)
    ]  # fmt: skip
    values = rl_values(model, tmp_path) | {"advantage_estimator": "ppo", "kl_coef": 0.1, "global_batch_size": 8}

    def run() -> list[dict[str, float]]:
        folder = {"save": str(tmp_path / "save"), "load": str(tmp_path / "save")}
        config: Config = engine_config(model / "hf", **values, **folder, critic_num_gpus_per_node=2)
        config = resolve(config)
        validate(config)
        with Cluster(config) as cluster:
            first, extra = cluster.trainers.start(2)
            assert extra == ({"seen": first} if first else {})
            figures = [cluster.trainers.train(RolloutBatch(samples), first + i) for i in range(2 - first)]
            log_probs = cluster.trainers.log_probs(samples)
            assert len(log_probs) == 16 * 12 and all((value < 0) == (i % 12 >= 4) for i, value in enumerate(log_probs))
            cluster.trainers.save(first, {"seen": first + 1}, background=False)
        return figures

    apart = run()
    config: Config = engine_config(model / "hf", **values)
    config = resolve(config)
    validate(config)
    [together] = run_distributed(train_twice, 1, config, samples)
    for got, want in zip(apart, together, strict=True):
        assert want["critic/value_loss"] > 0
        for name, value in want.items():
            if name.startswith(("train/", "critic/")) and not name.endswith("micro_batches"):
                assert got[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    again = run()
    assert len(again) == 1 and again[0]["critic/explained_variance"] != 0.0
