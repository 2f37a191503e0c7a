"""GPUs that a run asks for, held to those of this host before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_start import MAINS, Start, run, start  # noqa: F401

from slime_retool.config import Config
from slime_retool.config.devices import check_devices, gpus_shown, ray_address
from slime_retool.errors import ConfigError


def host(monkeypatch: pytest.MonkeyPatch, gpus: int, visible: str | None = None) -> None:
    """This host has so many GPUs and shows those of CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path(f"/dev/nvidia{i}") for i in range(gpus)])
    monkeypatch.setattr(os.path, "exists", lambda path, of=os.path.exists: path != "/dev/dxg" and of(path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("gpus", "visible", "shown"),
    [(0, None, 0), (0, "0,1", 0), (2, None, 2), (4, "0,2", 2), (4, "", 0), (4, "-1", 0), (4, "1,-1,2", 1),
     (1, "MIG-a,MIG-b", 2), (2, " 1", 1)],
)  # fmt: skip
def test_what_a_host_shows_is_what_cuda_would_take(gpus: int, visible: str | None, shown: int, monkeypatch):
    host(monkeypatch, gpus, visible)
    assert gpus_shown() == shown


def test_a_run_on_more_gpus_than_the_host_shows_is_refused(monkeypatch):
    config = Config(device="cuda")  # a trainer and an engine
    host(monkeypatch, 0)
    with pytest.raises(ConfigError, match="^--device cuda: the run needs 2 GPUs and finds none; use --device cpu"):
        check_devices(config)
    host(monkeypatch, 4, "3")
    with pytest.raises(ConfigError, match=r"needs 2 GPUs \(1 for the actor, 1 for engines\) but the cluster has 1; "):
        check_devices(config)
    for fits in (
        Config(device="cuda", colocate=True),
        Config(device="cuda", debug_train_only=True),
        Config(device="cuda", debug_rollout_only=True),
        Config(device="cuda", rollout_external_urls=["http://h:1"]),
        Config(device="cpu", actor_num_gpus_per_node=8),
    ):
        check_devices(fits)
    host(monkeypatch, 0)
    check_devices(Config(device="cpu"))
    check_devices(Config(device="cuda", debug_rollout_only=True, rollout_external_urls=["http://h:1"]))
    with pytest.raises(ConfigError, match="needs 1 GPUs and finds none"):
        check_devices(Config(device="cuda", colocate=True))


@pytest.mark.parametrize("address", ["flag", "environment"])
def test_the_host_that_joins_a_cluster_needs_no_gpu(address: str, monkeypatch):
    host(monkeypatch, 0)
    config = Config(device="cuda", ray_address="10.0.0.1:6379" if address == "flag" else None)
    if address == "environment":
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ray_address(config) == "10.0.0.1:6379"
    check_devices(config)


@MAINS
def test_neither_data_nor_ray_are_touched_on_a_host_without_the_gpus(main, start: Start, monkeypatch, capsys):  # noqa: F811
    host(monkeypatch, 0)
    assert run(main, start, 0, monkeypatch, device="cuda") == 2
    error = capsys.readouterr().err
    assert start.events == [] and "GPUs and finds none" in error and error.count("\n") == 1
    start.go.touch()
    assert run(main, start, 0, monkeypatch, device="cuda", dry_run=True) == 0  # of the flags for another host
