"""The Ray actors: thin shells around one trainer rank and one engine, so that both also run without Ray."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
import ray

from slime_retool.config import Config
from slime_retool.engine.adapter_checksum import ADAPTERS_LOADER
from slime_retool.engine.checksum import REPORT_LOADER
from slime_retool.engine.kernel_cache import make_kernel_cache
from slime_retool.trace import RankSpans
from slime_retool.trainer.rendezvous import Rendezvous
from slime_retool.types import TrainSample


def _address(several_hosts: bool) -> str:
    """Where other processes of the run reach this one: never beyond the host when the run has only one."""
    return ray.util.get_node_ip_address() if several_hosts else "127.0.0.1"


@ray.remote(num_cpus=0)
class TrainerActor:
    """One rank of the trainer. It sees its own GPU only, as device 0."""

    def __init__(self, config: Config, rank: int, *, roles: str, several_hosts: bool) -> None:
        self._config, self._rank, self._roles = config, rank, roles
        self._host = _address(several_hosts)
        for interface, parts in psutil.net_if_addrs().items() if several_hosts else ():
            if any(part.address == self._host for part in parts):
                # Gloo would take the address of the host's name, which is often a loopback one.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._rendezvous: Rendezvous | None = None
        self._trainer: Any = None
        self._sync: Any = None
        self._memory: Any = None

    def rendezvous(self) -> str:
        """The `init_method` of all ranks. Called on rank 0, which listens there from now on."""
        self._rendezvous = Rendezvous(self._host)
        return self._rendezvous.init_method

    def prepare(self) -> None:
        """Import what `start` and the first steps need, which takes seconds and no device."""
        if self._config.on_cuda:
            make_kernel_cache(self._config.kernel_cache_dir)
        from slime_retool.trainer import imports  # noqa: F401

    def start(
        self, init_method: str, iteration: int | None = None, *, stay: bool = False
    ) -> tuple[int, dict[str, Any]]:
        """Join the group, build the model, load a checkpoint: that of rollout `iteration`, or the newest.

        Returns the first rollout's number and, on rank 0, the saved state.
        """
        from slime_retool.trainer.core import Trainer

        if self._rendezvous is not None:
            self._rendezvous.serve()
        self._trainer = Trainer(
            self._config,
            rank=self._rank,
            world_size=self._config.world_size,
            local_rank=0,
            init_method=init_method,
            roles=self._roles,
        )
        first, state = self._trainer.load(iteration)
        if self._config.offloads_train:
            from slime_retool.trainer.offload import TrainerMemory

            self._memory = TrainerMemory(self._trainer)
            if not stay:
                self._memory.offload()
        return first, state if self._rank == 0 else {}

    def offload(self, *, keep_weights: bool = False) -> None:
        """Leave the device; with --offload-train only."""
        with self._trainer.timeline.span("offload"):
            self._memory.offload(keep_weights=keep_weights)

    def reload(self) -> None:
        """Take the device again."""
        with self._trainer.timeline.span("reload"):
            self._memory.reload()

    def clock(self) -> float:
        """This host's Unix time."""
        return time.time()

    def record(self) -> None:
        """Keep what this rank does from now on, for `take_spans`."""
        self._trainer.timeline.record()

    def take_spans(self) -> RankSpans:
        """What it did, by this host's clock."""
        return self._trainer.timeline.take()

    def trainer(self, method: str, *arguments: Any) -> Any:
        """Call a method of `trainer.core.Trainer`. Tensors are [N] on the CPU."""
        return getattr(self._trainer, method)(*arguments)

    def save(self, rollout_id: int, extra: dict[str, Any], *, background: bool) -> None:
        with self._trainer.timeline.span("save"):
            self._trainer.save(rollout_id, extra, background=background)

    def log_probs(self, samples: list[TrainSample]) -> list[float]:
        return self._trainer.log_probs(samples).tolist()

    def connect_engines(self, urls: list[str], version: int) -> None:
        from slime_retool.trainer.weight_sync import WeightSync

        self._sync = WeightSync(self._trainer, urls, host=self._host, version=version)

    def update_weights(self, engines: dict[int, str], *, asleep: bool = False) -> int:
        with self._trainer.timeline.span("weight update"):
            self._sync.set_engines(engines)
            return self._sync.update(asleep=asleep)

    def give_weights(self, engines: dict[int, str], *, asleep: bool = False) -> None:
        self._sync.set_engines(engines)
        self._sync.repeat(asleep=asleep)

    def weight_checksums(self) -> dict[str, str]:
        return self._sync.weight_checksums()

    def shutdown(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        if self._trainer is not None:
            self._trainer.shutdown()
            self._trainer = None


@ray.remote(num_cpus=0, max_concurrency=2)  # type: ignore[call-overload]  # of classes only
class EngineActor:
    """Owns one SGLang server on the host its GPUs are on. Two calls at once: `stop` does not wait for `start`."""

    def __init__(self, config: Config, rank: int, gpus: list[str] | None, *, several_hosts: bool) -> None:
        self._config, self._rank, self._gpus = config, rank, gpus
        self._host = _address(several_hosts)
        self._engine: Any = None

    def start(self) -> str:
        """Start the server, anew if there was one, and wait until it is healthy. Returns its URL."""
        from slime_retool.engine.server import EngineProcess

        self.stop()
        self._engine = EngineProcess(self._config, rank=self._rank, devices=self._gpus, host=self._host)
        return self._engine.url

    def ended(self) -> str | None:
        """How the server ended, in words; None while it lives."""
        engine = self._engine
        if engine is None:
            return "is gone: its owner was started again"
        return None if engine.alive else engine.ending

    def log_tail(self) -> str:
        """The last lines that the server wrote."""
        return "" if self._engine is None else self._engine.log_tail()

    def weight_checksums(self) -> dict[str, str]:
        """Checksum of each tensor as the engine holds it, by Hugging Face name."""
        admin = self._engine.admin(timeout=self._config.distributed_timeout_minutes * 60)
        return admin.weight_checksums(loader=ADAPTERS_LOADER if self._config.serves_adapters else REPORT_LOADER)

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()
