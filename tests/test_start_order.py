"""What starts beside what, where compiled kernels are kept, and how the parts of a start are timed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_utils import engine_config

from slime_retool import metrics
from slime_retool.cluster.cluster import Cluster
from slime_retool.cluster.environment import trainer_environment
from slime_retool.config import Config
from slime_retool.engine.kernel_cache import KEPT, LOST, kernel_cache_environment, make_kernel_cache
from slime_retool.engine.server import server_environment
from slime_retool.errors import ConfigError
from slime_retool.metrics import Laps


class Sides:
    """Stands for `Engines` and `Trainers`: remembers what is asked of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.engines = SimpleNamespace(
            launch=lambda: self.calls.append("engines launch"),
            start=lambda: self.calls.append("engines start") or ["url"],
            release=lambda *tags: self.calls.append(f"release {' '.join(tags)}"),
        )
        self.trainers = SimpleNamespace(
            launch=lambda num_rollout: self.calls.append(f"trainers launch {num_rollout}"),
            start=self.start_trainers,
        )

    def start_trainers(self, num_rollout: int, iteration: int | None, *, stay: bool) -> tuple[int, dict[str, Any]]:
        self.calls.append(f"trainers start {num_rollout} {iteration} {'stay' if stay else 'leave'}")
        return 0, {}


TURNS = ["engines launch", "trainers launch 7", "engines start", "release weights kv_cache", "trainers start 7 3 stay"]
SHARED = ["trainers launch 7", "trainers start 7 3 leave", "engines start"]
APART = ["engines launch", "trainers launch 7", "trainers start 7 3 leave", "engines start"]


@pytest.mark.parametrize(
    ("values", "calls"),
    [
        ({"device": "cuda", "colocate": True}, TURNS),
        ({"device": "cuda", "colocate": True, "offload_train": False}, SHARED),
        ({"device": "cuda", "colocate": True, "offload_rollout": False}, SHARED),
        ({"device": "cuda"}, APART),
        ({"device": "cpu", "colocate": True}, APART),
        ({"device": "cpu", "debug_rollout_only": True}, ["engines launch", "engines start"]),
        ({"device": "cpu", "debug_train_only": True}, ["trainers launch 7", "trainers start 7 3 leave"]),
    ],
    ids=["turns", "trainer stays", "engine stays", "own devices", "cpu", "no training", "no engines"],
)
def test_an_engine_starts_at_once_unless_a_trainer_takes_of_the_memory_that_it_measures(values, calls) -> None:
    config, sides = Config(**values), Sides()
    cluster = Cluster(config)
    cluster.engines, cluster.trainers = sides.engines, sides.trainers  # type: ignore[assignment]
    laps = Laps()
    cluster.launch(7)
    if not config.debug_rollout_only:
        cluster.start_trainers(7, 3, laps)
    if config.num_engines:
        assert cluster.start_engines() == ["url"] == cluster.start_engines()
    assert sides.calls == calls
    assert ("start/engines_seconds" in laps.metrics()) == (calls is TURNS)


def test_laps_add_up_to_the_whole_and_begin_with_the_process(monkeypatch) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 5000.0)
    monkeypatch.setattr(metrics, "time", clock)
    process = SimpleNamespace(create_time=lambda: 4998.0)
    monkeypatch.setattr(metrics.psutil, "Process", lambda: process)
    laps = Laps()
    for name, seconds in (("flags", 1.0), ("engines", 30.0), ("trainers", 0.0), ("engines", 4.5)):
        now[0] += seconds
        laps(name)
    assert laps.metrics() == {
        "start/flags_seconds": 3.0, "start/engines_seconds": 34.5, "start/trainers_seconds": 0.0,
        "start/total_seconds": 37.5,
    }  # fmt: skip
    assert str(laps) == "37.5 s: flags 3.0, engines 34.5, trainers 0.0"


def test_trainers_and_engines_keep_their_kernels_in_one_folder_unless_the_user_says_where(tmp_path: Path, monkeypatch):
    for name in KEPT | LOST:
        monkeypatch.delenv(name, raising=False)
    own = kernel_cache_environment(str(tmp_path))
    assert own["TRITON_CACHE_DIR"] == str(tmp_path / "triton") and own["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert len({own[name] for name in KEPT | LOST}) == len(KEPT) + len(LOST)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    trainer = trainer_environment(colocate=True, kernel_cache_dir=str(tmp_path))
    engine = server_environment(Config(device="cuda", kernel_cache_dir=str(tmp_path)), None)
    assert "TRITON_CACHE_DIR" not in trainer and engine["TRITON_CACHE_DIR"] == "/elsewhere"
    assert trainer["TVM_FFI_CACHE_DIR"] == engine["TVM_FFI_CACHE_DIR"] == str(tmp_path / "tvm-ffi")
    cpu = server_environment(engine_config(tmp_path, tmp_path, kernel_cache_dir=str(tmp_path)), None)
    assert "TVM_FFI_CACHE_DIR" not in cpu


def test_without_a_folder_kernels_that_are_kept_in_the_home_folder_stay_there(monkeypatch) -> None:
    for name in KEPT | LOST:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/people/me")
    own = kernel_cache_environment(None)
    assert own.keys() == {*LOST, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"}
    assert own["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == "/people/me/.cache/slime-retool/kernels/flash-attention"


def test_the_folder_of_kernels_is_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "kernels"
    make_kernel_cache(str(folder))
    make_kernel_cache(str(folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for mode in (0o770, 0o707, 0o702):
        folder.chmod(mode)
        with pytest.raises(ConfigError, match=f"--kernel-cache-dir {folder}: others may write"):
            make_kernel_cache(str(folder))
    folder.chmod(0o755)
    make_kernel_cache(str(folder))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        make_kernel_cache(str(tmp_path / "file" / "kernels"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigError, match="others may write"):
        make_kernel_cache(str(tmp_path))
