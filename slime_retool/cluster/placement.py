"""Which host and which device runs which trainer rank and which engine.

What has to share a host is one bundle of a Ray placement group: the --actor-num-gpus-per-node ranks of a training host,
and the GPUs of one engine. Bundles of training hosts go to as many hosts as --actor-num-nodes says; engines are packed.
With --colocate engines take the trainer's GPUs, from the first rank's on. Every further group of trainers
(`Config.trainer_groups`) has bundles like the first's.

The bundle reserves its GPUs; each process is started on the bundle's host and shown its device by number
(CUDA_VISIBLE_DEVICES), so that a trainer and the engine on its GPU agree about which one that is. Hosts are told
apart by Ray's node id: several may share an address.

On the CPU nothing is reserved: --actor-num-gpus-per-node ranks go to each host of the cluster in turn, beginning with
this one, and engines to the hosts likewise, or beside their ranks with --colocate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slime_retool.config import Config
from slime_retool.config.devices import check_hosts, gpus_asked
from slime_retool.errors import ConfigError

PLACEMENT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one process.

    node: Ray's id of the host.
    gpu: the device as CUDA_VISIBLE_DEVICES names it there; None on the CPU.
    strategy: puts an actor there.
    """

    node: str
    gpu: str | None
    strategy: Any

    def options(self, environment: dict[str, str] | None = None) -> dict[str, Any]:
        """Options of an actor that runs here and sees this device alone."""
        # The bundle holds the GPU; what Ray does for an actor that asks for none has changed with its versions.
        own = {"CUDA_VISIBLE_DEVICES": self.gpu or "", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        variables = {**(environment or {}), **own}
        return {"num_gpus": 0, "scheduling_strategy": self.strategy, "runtime_env": {"env_vars": variables}}


@dataclass(slots=True)
class Placement:
    """Slots of the ranks of each trainer group, and of each engine's workers (one on the CPU)."""

    trainers: list[list[Slot]]
    engines: list[list[Slot]]
    driver: str
    """Node id of the host with the training loop, the router and the rollout's tools."""
    groups: list[Any] = field(default_factory=list)

    @property
    def several_hosts(self) -> bool:
        """Whether processes of the run must reach each other beyond one host."""
        return any(slot.node != self.driver for slots in (*self.trainers, *self.engines) for slot in slots)

    def release(self) -> None:
        """Free the GPUs; where Ray has ended they are free."""
        for group in self.groups if ray.is_initialized() else ():
            remove_placement_group(group)
        self.groups = []


def place(config: Config) -> Placement:
    """Reserve the GPUs of a run.

    Raises ConfigError where the cluster has too few GPUs, they are on other hosts than the flags ask for, or they did
    not become free within PLACEMENT_SECONDS.
    """
    placement = Placement([], [], driver=ray.get_runtime_context().get_node_id())
    try:
        (_place_on_gpus if config.on_cuda else _place_on_cpus)(config, placement)
        _check_disk_transport(config, placement)
    except BaseException:
        placement.release()
        raise
    return placement


def _place_on_gpus(config: Config, placement: Placement) -> None:
    per_engine = config.rollout_num_gpus_per_engine
    own_engines = 0 if config.rollout_external_urls else config.num_engines
    trainers, engines = gpus_asked(config)
    check_hosts(trainers, engines, sorted((gpus for gpus in _gpus_by_node().values() if gpus), reverse=True))
    wanted = {name: sizes for name, sizes in (*trainers.items(), ("engines", engines)) if sizes}
    found: dict[str, list[list[Slot]]] = {}
    # The largest first: what is left over is then more likely to hold the small ones.
    for name in sorted(wanted, key=lambda name: -max(wanted[name])):
        found[name] = _reserve(placement, wanted[name], spread=name != "engines")
    placement.trainers = [sum(found[roles], []) for roles in trainers]
    placement.engines = found.get("engines", [])
    if config.colocate:
        slots = placement.trainers[0]
        placement.engines = [slots[i * per_engine : (i + 1) * per_engine] for i in range(own_engines)]
        assert all(len({slot.node for slot in engine}) == 1 for engine in placement.engines), "checked by `validate`"


def _reserve(placement: Placement, sizes: list[int], *, spread: bool) -> list[list[Slot]]:
    """One bundle of that many GPUs for each of `sizes`, on different hosts if `spread`; the slots of each, in order."""
    group = placement_group([{"GPU": size} for size in sizes], strategy="STRICT_SPREAD" if spread else "PACK")
    placement.groups.append(group)
    if not group.wait(timeout_seconds=PLACEMENT_SECONDS):
        raise ConfigError(
            f"no place within {PLACEMENT_SECONDS:g} s for {len(sizes)} x {sizes[0]} GPUs, each {sizes[0]} on one host"
            f"{', all on different hosts' if spread and len(sizes) > 1 else ''}: other jobs of this Ray cluster hold "
            "them, or what is free is scattered; free some, or ask for fewer"
        )
    strategies = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(len(sizes))]
    asked = [
        _where_am_i.options(num_gpus=size, scheduling_strategy=strategy).remote()
        for size, strategy in zip(sizes, strategies, strict=True)
    ]
    bundles = []
    for (address, node, gpus), strategy in zip(ray.get(asked), strategies, strict=True):
        gpus.sort(key=_by_number)
        bundles.append(((address, node, _by_number(gpus[0])), [Slot(node, gpu, strategy) for gpu in gpus]))
    return [slots for _, slots in sorted(bundles, key=lambda bundle: bundle[0])]


@ray.remote(num_cpus=0, max_calls=1)
def _where_am_i() -> tuple[str, str, list[str]]:
    """Address, node id and devices (numbers, or the names that CUDA_VISIBLE_DEVICES gives them)."""
    context = ray.get_runtime_context()
    return ray.util.get_node_ip_address(), context.get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]


def _by_number(gpu: str) -> tuple[int, str]:
    return len(gpu), gpu


def _gpus_by_node() -> dict[str, int]:
    """GPUs of every living host of the cluster, by Ray's node id."""
    return {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}


def _place_on_cpus(config: Config, placement: Placement) -> None:
    others = sorted(node for node in _gpus_by_node() if node != placement.driver)
    hosts = [Slot(node, None, NodeAffinitySchedulingStrategy(node, soft=False)) for node in (placement.driver, *others)]

    def ranks(count: int, per_node: int) -> list[Slot]:
        return [hosts[rank // per_node % len(hosts)] for rank in range(count)]

    placement.trainers = [ranks(group.world_size, group.actor_num_gpus_per_node) for _, group in config.trainer_groups]
    own_engines = 0 if config.rollout_external_urls else config.num_engines
    engines = (placement.trainers[0] if config.colocate else ranks(own_engines, 1))[:own_engines]
    placement.engines = [[slot] for slot in engines]


def _check_disk_transport(config: Config, placement: Placement) -> None:
    if config.debug_rollout_only or config.weight_transport != "disk" or config.update_weight_disk_dir is not None:
        return
    writer = placement.trainers[0][0].node
    if any(slot.node != writer for engine in placement.engines for slot in engine):
        raise ConfigError(
            "--update-weight-transport disk: engines on other hosts than the first trainer rank cannot read its "
            "memory or disk; add --update-weight-disk-dir with a folder that all hosts share"
        )
