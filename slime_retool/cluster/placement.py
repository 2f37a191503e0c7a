"""Which device runs which trainer rank and which engine.

One bundle of a Ray placement group per GPU, sorted by host and device number, so that consecutive ranks (a
tensor-parallel group) share a host. Trainers take the first `world_size` bundles. Engines take the next ones, or,
with --colocate, the same ones from the start. A critic with GPUs of its own takes the last ones. On the CPU nothing
is reserved: every process is a plain one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_retool.config import Config
from slime_retool.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slot:
    """One GPU: its bundle in the placement group, its host and its number there."""

    bundle: int
    host: str
    gpu: int


@dataclass(slots=True)
class Placement:
    """Slots of trainer ranks, of engines and of the critic's own ranks; empty on the CPU."""

    group: Any | None
    trainers: list[Slot]
    engines: list[list[Slot]]
    critics: list[Slot]

    def strategy(self, slot: Slot) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=slot.bundle)

    def release(self) -> None:
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None


@ray.remote(num_cpus=0, max_calls=1)
def _where_am_i() -> tuple[str, int]:
    return ray.util.get_node_ip_address(), int(ray.get_gpu_ids()[0])


def place(config: Config) -> Placement:
    """Reserve the GPUs of a run.

    Raises:
        ConfigError: the cluster has too few GPUs, or an engine would span hosts.
    """
    per_engine = config.rollout_num_gpus_per_engine
    own_engines = 0 if config.rollout_external_urls else config.num_engines
    if not config.on_cuda:
        return Placement(None, [], [[] for _ in range(own_engines)], [])
    shared, engine_gpus = config.colocate, own_engines * per_engine
    critic_gpus = config.critic_world_size
    wanted = (max(config.world_size, engine_gpus) if shared else config.world_size + engine_gpus) + critic_gpus
    present = int(ray.cluster_resources().get("GPU", 0))
    if present < wanted:
        raise ConfigError(
            f"the run needs {wanted} GPUs ({config.world_size} for training, {own_engines} engines of {per_engine}"
            f"{', colocated' if shared else ''}{f', {critic_gpus} for the critic' if critic_gpus else ''}) but the "
            f"cluster has {present}; lower --actor-num-gpus-per-node or --rollout-num-gpus, or add --colocate"
        )
    group = placement_group([{"GPU": 1} for _ in range(wanted)], strategy="PACK")
    if not group.wait(timeout_seconds=120):
        remove_placement_group(group)
        raise ConfigError(f"{wanted} GPUs did not become free within 120 s: another job of this Ray cluster holds them")
    found = ray.get(
        [
            _where_am_i.options(
                num_gpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            ).remote()
            for i in range(wanted)
        ]
    )
    slots = sorted((Slot(bundle, host, gpu) for bundle, (host, gpu) in enumerate(found)), key=lambda s: (s.host, s.gpu))
    first = 0 if shared else config.world_size
    engines = [slots[first + i * per_engine : first + (i + 1) * per_engine] for i in range(own_engines)]
    for engine in engines:
        hosts = {slot.host for slot in engine}
        if len(hosts) > 1:
            remove_placement_group(group)
            raise ConfigError(
                f"an engine of --rollout-num-gpus-per-engine {per_engine} would span hosts {sorted(hosts)}; "
                "use a size that divides the GPUs of one host"
            )
    return Placement(group, slots[: config.world_size], engines, slots[wanted - critic_gpus :])
