"""The GPUs that a run asks for, against those that there are."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

from slime_retool.config.config import Config
from slime_retool.errors import ConfigError

OWN_CLUSTER = "local"


def ray_address(config: Config) -> str:
    """The Ray cluster to join, `OWN_CLUSTER` for a private one of this host.

    `ray job submit` says by RAY_ADDRESS in which cluster its command runs.
    """
    return config.ray_address or os.environ.get("RAY_ADDRESS") or OWN_CLUSTER


def gpus_shown() -> int:
    """NVIDIA devices that this host has and does not hide.

    `CUDA_VISIBLE_DEVICES` names those to use, up to the first that is empty or -1.
    """
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not present or visible is None:
        return present
    return len(list(takewhile(lambda name: name.strip() not in ("", "-1"), visible.split(","))))


def check_devices(config: Config) -> None:
    """Refuse (ConfigError) a run on more GPUs than this host shows, before anything starts.

    Where a Ray cluster is there already, its hosts are asked instead (`cluster.placement`): this one need not be a GPU
    host. So it is where the devices are hidden from view (WSL).
    """
    if config.on_cuda and ray_address(config) == OWN_CLUSTER and not os.path.exists("/dev/dxg"):
        trainers, engines = gpus_asked(config)
        check_hosts(trainers, engines, [count] if (count := gpus_shown()) else [])


def gpus_asked(config: Config) -> tuple[dict[str, list[int]], list[int]]:
    """(GPUs on each host, by the roles of a group of trainers; GPUs of each engine with some of its own)."""
    groups = config.trainer_groups
    if config.debug_rollout_only:  # colocated engines still take the first one's
        groups = groups[:1] if config.colocate else []
    trainers = {roles: [group.actor_num_gpus_per_node] * group.actor_num_nodes for roles, group in groups}
    own_engines = 0 if config.rollout_external_urls or config.colocate else config.num_engines
    return trainers, [config.rollout_num_gpus_per_engine] * own_engines


def check_hosts(trainers: dict[str, list[int]], engines: list[int], hosts: list[int]) -> None:
    """Refuse what `hosts` (their GPUs, most first) could not hold even if all of them were free.

    `trainers`: GPUs on each host, by the roles of a group.
    """
    names = {roles: "actor" if roles == "all" else roles for roles in trainers}
    shares = [(sum(sizes), f"for the {names[roles]}") for roles, sizes in trainers.items()]
    total, present = sum(map(sum, (*trainers.values(), engines))), sum(hosts)
    if present == 0 < total:
        raise ConfigError(
            f"--device cuda: the run needs {total} GPUs and finds none; use --device cpu, or make CUDA_VISIBLE_DEVICES "
            "show them"
        )
    if present < total:
        parts = ", ".join(f"{gpus} {what}" for gpus, what in (*shares, (sum(engines), "for engines")))
        raise ConfigError(
            f"the run needs {total} GPUs ({parts}) but the cluster has {present}; lower --actor-num-gpus-per-node or "
            "--rollout-num-gpus, or add --colocate"
        )
    shown = " and ".join(map(str, hosts))
    for roles, bundles in trainers.items():
        name = names[roles]
        if sum(gpus >= bundles[0] for gpus in hosts) < len(bundles):
            raise ConfigError(
                f"--{name}-num-nodes {len(bundles)} x --{name}-num-gpus-per-node {bundles[0]} needs {len(bundles)} "
                f"host(s) of at least {bundles[0]} GPUs, the cluster's hosts have {shown}; set both to what there is"
            )
    if engines and engines[0] > hosts[0]:
        raise ConfigError(
            f"an engine of --rollout-num-gpus-per-engine {engines[0]} would span hosts, which have {shown} GPUs; "
            f"use at most {hosts[0]}"
        )
