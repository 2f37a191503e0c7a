"""A Ray cluster of several pretend hosts on this machine, with pretend GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import ray
from ray.cluster_utils import Cluster


@dataclass(frozen=True)
class Host:
    """num_gpus: pretend ones. address: None for this machine's own. visible: its CUDA_VISIBLE_DEVICES."""

    num_gpus: int = 0
    address: str | None = None
    visible: str | None = None


@contextmanager
def pretend_hosts(*hosts: Host) -> Iterator[tuple[str, list[str]]]:
    """(the cluster's address, node id of each host); the first one is where a driver that connects here is."""
    cluster = Cluster()
    try:
        nodes = []
        for host in hosts:
            options = {"num_gpus": host.num_gpus, "include_dashboard": False}
            if host.address is not None:
                options["node_ip_address"] = host.address
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
                patch.setenv(
                    "PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
                )
                if host.visible is not None:
                    patch.setenv("CUDA_VISIBLE_DEVICES", host.visible)
                nodes.append(cluster.add_node(**options).node_id)
        yield cluster.address, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()
