"""Placement by a real Ray on three pretend hosts; two of them share an address, two show a part of their GPUs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray_utils import Host, pretend_hosts

from slime_retool.cluster import placement as placement_module
from slime_retool.cluster.files import check_files
from slime_retool.cluster.placement import Placement, Slot, place
from slime_retool.config import Config
from slime_retool.config.devices import check_hosts
from slime_retool.errors import ConfigError

SUBSET = "2,3,10,11"
NAMED = "GPU-aaaa,GPU-bbbb"
Where = tuple[str, str | None]


@dataclass
class Hosts:
    """Node ids: two of four GPUs at this machine's address (the driver is on the first), one of two at 127.0.0.2."""

    driver: str
    second: str
    small: str


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with pretend_hosts(Host(4, visible=SUBSET), Host(4), Host(2, "127.0.0.2", visible=NAMED)) as (address, nodes):
        ray.init(address=address, log_to_driver=False)
        yield Hosts(*nodes)


def config_of(**values: object) -> Config:
    return Config(**{"device": "cuda", **values})


@contextmanager
def placed(**values: object) -> Iterator[Placement]:
    placement = place(config_of(**values))
    try:
        yield placement
    finally:
        placement.release()


def where(slots: list[Slot]) -> list[Where]:
    return [(slot.node, slot.gpu) for slot in slots]


@ray.remote(num_cpus=0)
class Process:
    def seen(self) -> tuple[str, str | None, str]:
        """Host, visible devices, address."""
        context = ray.get_runtime_context()
        return context.get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES"), ray.util.get_node_ip_address()


def seen_by_processes(slots: list[Slot]) -> list[tuple[str, str | None, str]]:
    processes = [Process.options(**slot.options()).remote() for slot in slots]
    return ray.get([process.seen.remote() for process in processes])


def test_colocated_engines_have_the_gpus_of_their_ranks(hosts: Hosts) -> None:
    for gpus, per_engine in ((1, 1), (2, 1), (4, 2)):  # with four: engines of two workers
        with placed(colocate=True, actor_num_gpus_per_node=gpus, rollout_num_gpus_per_engine=per_engine) as placement:
            assert len(set(where(placement.trainers[0]))) == gpus
            assert len({slot.node for slot in placement.trainers[0]}) == 1
            assert [len(engine) for engine in placement.engines] == [per_engine] * (gpus // per_engine)
            assert where(sum(placement.engines, [])) == where(placement.trainers[0])
            assert len(placement.trainers) == 1


def test_engines_of_their_own_have_other_gpus_and_stay_on_one_host_each(hosts: Hosts) -> None:
    with placed(actor_num_gpus_per_node=2, rollout_num_gpus=8, rollout_num_gpus_per_engine=2) as placement:
        everything = where(placement.trainers[0]) + where(sum(placement.engines, []))
        assert len(everything) == len(set(everything)) == 10
        assert len(placement.engines) == 4
        assert all(len({slot.node for slot in engine}) == 1 for engine in placement.engines)
        assert len({slot.node for slot in placement.trainers[0]}) == 1
        assert placement.several_hosts


def test_processes_run_on_the_host_of_their_slot_and_see_its_device_alone(hosts: Hosts) -> None:
    with placed(actor_num_nodes=3, actor_num_gpus_per_node=2, debug_train_only=True) as placement:
        slots = placement.trainers[0]
        seen = seen_by_processes(slots)
        assert [(node, gpu) for node, gpu, _ in seen] == where(slots)
        assert Counter(slot.node for slot in slots) == {hosts.driver: 2, hosts.second: 2, hosts.small: 2}
        devices = {node: [slot.gpu for slot in slots if slot.node == node] for node in (hosts.driver, hosts.small)}
        assert set(devices[hosts.driver]) < set(SUBSET.split(","))
        assert devices[hosts.small] == NAMED.split(",")
        addresses = {node: address for node, _, address in seen}
        assert addresses[hosts.small] == "127.0.0.2"
        assert addresses[hosts.driver] == addresses[hosts.second] != "127.0.0.2"


def test_each_training_host_gets_as_many_ranks_as_its_flag_says(hosts: Hosts) -> None:
    """Four GPUs would fit on one host; consecutive ranks (a tensor-parallel group) share theirs."""
    for per_node in (1, 2, 4):
        with placed(actor_num_nodes=2, actor_num_gpus_per_node=per_node, colocate=True) as placement:
            nodes = [slot.node for slot in placement.trainers[0]]
            assert len(set(nodes)) == 2
            assert all(len(set(nodes[i : i + per_node])) == 1 for i in (0, per_node))
            numbers = [int(slot.gpu) for slot in placement.trainers[0] if slot.gpu and slot.gpu.isdigit()]
            firsts = numbers[:per_node]
            assert firsts == sorted(firsts)


def test_a_critic_has_gpus_of_its_own(hosts: Hosts) -> None:
    critic = {"advantage_estimator": "ppo", "critic_num_nodes": 2, "critic_num_gpus_per_node": 2}
    with placed(actor_num_gpus_per_node=4, colocate=True, **critic) as placement:
        assert len({slot.node for slot in placement.trainers[1]}) == 2
        assert len(set(where(placement.trainers[1]) + where(placement.trainers[0]))) == 8


def test_an_evaluation_reserves_no_gpus_for_training(hosts: Hosts) -> None:
    with placed(debug_rollout_only=True, rollout_num_gpus=10, rollout_num_gpus_per_engine=2) as placement:
        assert placement.trainers == [] and len(placement.engines) == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 4},
            "needs 12 GPUs (4 for the actor, 8 for engines) but the cluster has 10",
        ),
        (
            {"actor_num_gpus_per_node": 8, "colocate": True},
            "needs 1 host(s) of at least 8 GPUs, the cluster's hosts have 4 and 4 and 2",
        ),
        (
            {"actor_num_nodes": 3, "actor_num_gpus_per_node": 3, "colocate": True},
            "needs 3 host(s) of at least 3 GPUs",
        ),
        (
            {"rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 8},
            "--rollout-num-gpus-per-engine 8 would span hosts, which have 4 and 4 and 2 GPUs; use at most 4",
        ),
    ],
)  # fmt: skip
def test_what_no_free_cluster_could_hold_is_refused_at_once(hosts: Hosts, values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        place(config_of(**values))


def test_a_cluster_without_a_gpu_is_answered_with_the_device_that_there_is() -> None:
    with pytest.raises(ConfigError, match="needs 3 GPUs and finds none; use --device cpu"):
        check_hosts({"all": [1]}, [2], [])


def test_gpus_that_others_hold_are_an_error_and_nothing_stays_reserved(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_module, "PLACEMENT_SECONDS", 1.0)
    others = placement_group([{"GPU": 4}])
    assert others.wait(30)
    try:
        with pytest.raises(ConfigError, match=r"no place within 1 s for 2 x 3 GPUs, .* all on different hosts"):
            place(config_of(actor_num_nodes=2, actor_num_gpus_per_node=3, rollout_num_gpus=1))
    finally:
        remove_placement_group(others)
    free = placement_group([{"GPU": 4}, {"GPU": 4}, {"GPU": 2}])
    assert free.wait(30)
    remove_placement_group(free)


def test_on_the_cpu_ranks_and_engines_go_to_the_hosts_in_turn(hosts: Hosts) -> None:
    values = {"device": "cpu", "actor_num_nodes": 2, "actor_num_gpus_per_node": 2}
    with placed(**values, rollout_num_gpus=2) as placement:
        nodes = [slot.node for slot in placement.trainers[0]]
        assert nodes == [hosts.driver] * 2 + [nodes[2]] * 2 and nodes[2] != hosts.driver
        assert [[slot.node for slot in engine] for engine in placement.engines] == [[hosts.driver], [nodes[2]]]
        assert placement.several_hosts
        assert [node for node, _, _ in seen_by_processes(placement.trainers[0])] == nodes
    with placed(**values, colocate=True) as placement:
        assert [engine[0].node for engine in placement.engines] == nodes
    with placed(device="cpu") as placement:
        assert not placement.several_hosts


def test_files_that_another_host_lacks_are_named_before_anything_starts(hosts: Hosts, tmp_path) -> None:
    values = {"actor_num_nodes": 2, "colocate": True, "hf_checkpoint": str(tmp_path), "save": str(tmp_path / "save")}
    with placed(**values) as placement:
        check_files(config_of(**values), placement)
        assert list((tmp_path / "save").iterdir()) == []
        own = f"/proc/self/task/{os.getpid()}"  # there for this process only
        with pytest.raises(ConfigError, match=rf"--ref-load: host [0-9.]+ does not see {own}"):
            check_files(config_of(**values, ref_load=own), placement)


def test_weights_through_memory_need_engines_on_the_first_ranks_host(hosts: Hosts) -> None:
    values = {"rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 4, "update_weight_transport": "disk"}
    with pytest.raises(ConfigError, match="--update-weight-disk-dir with a folder that all hosts share"):
        place(config_of(**values))
    with placed(**values, update_weight_disk_dir="/shared") as placement:
        assert len(placement.engines) == 2
