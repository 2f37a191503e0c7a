"""The engines that generate, and the router in front of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from slime_retool.cluster.actors import EngineActor
from slime_retool.cluster.placement import Slot
from slime_retool.cluster.remote import call, end, quietly, results
from slime_retool.config import Config
from slime_retool.engine.admin import EngineAdmin, MemoryTag, every_engine
from slime_retool.engine.process import ServerError
from slime_retool.engine.router import RouterProcess
from slime_retool.engine.server import engine_workers
from slime_retool.errors import ConfigError, SlimeRetoolError, WeightUpdateError

logger = logging.getLogger(__name__)


class Engines:
    """SGLang servers of this run, or those of --rollout-external-urls."""

    def __init__(self, config: Config, slots: Sequence[list[Slot]] = (), *, several_hosts: bool = False) -> None:
        """`slots`: places of the workers of each engine that this run starts."""
        self._config, self._slots, self._several_hosts = config, slots, several_hosts
        self._actors: list[Any] = []
        self._starting: list[Any] = []
        """What `launch` leaves to wait for: the URL of each engine."""
        self._admins: list[EngineAdmin] = []
        self._router: RouterProcess | None = None

    def launch(self) -> None:
        """Let every engine start in the background; `start` waits for them.

        An engine takes its share of the memory that it finds free (see `Cluster.launch`).
        """
        assert not self._starting
        if self._config.rollout_external_urls:
            return
        config = self._config.for_actors()
        logger.info("starting %d SGLang engine(s), whose logs are in %s/logs", config.num_engines, config.output_dir)
        shipped = ray.put(config)
        for index, slots in enumerate(self._slots):
            # The first slot puts the actor on their host; the server itself is given all devices by number.
            gpus = [slot.gpu for slot in slots if slot.gpu is not None] or None
            actor = EngineActor.options(**slots[0].options())  # type: ignore[attr-defined]
            self._actors.append(actor.remote(shipped, index, gpus, several_hosts=self._several_hosts))
        self._starting = call(self._actors, "start")

    def start(self) -> list[str]:
        """Start every engine, unless `launch` has. Returns their URLs (or those of the external ones)."""
        external = [url.rstrip("/") for url in self._config.rollout_external_urls]
        if not self._starting and not external:
            self.launch()
        starting, self._starting = self._starting, []
        urls = external or results(starting)
        self._admins = [EngineAdmin(url, timeout=self._config.distributed_timeout_minutes * 60) for url in urls]
        if external:
            self._check_external()
        return urls

    def _check_external(self) -> None:
        """Raise ConfigError for a server of --rollout-external-urls that cannot be used."""
        config = self._config
        for engine in self._admins:
            try:
                workers = engine.tensor_parallel_size()
            except WeightUpdateError as error:
                raise ConfigError(f"--rollout-external-urls: no SGLang server answers there: {error}") from error
            expected = engine_workers(config)
            if workers != expected and config.weight_transport == "broadcast":
                raise ConfigError(
                    f"--rollout-external-urls: {engine.url} has {workers} tensor-parallel workers, the flags say "
                    f"{expected}; set --rollout-num-gpus-per-engine {workers} (all external "
                    "engines alike) or --update-weight-transport disk"
                )

    def start_router(self, urls: list[str]) -> str:
        """Start the router in front of `urls`. Returns its URL."""
        self._router = RouterProcess(self._config, urls)
        return self._router.url

    def check(self) -> None:
        """Raise when an engine or the router has died since the last look."""
        results(call(self._actors, "check"))
        if self._router is not None and not self._router.alive:
            router = self._router
            raise ServerError(f"the router has died: it {router.ending}. The end of its log:\n{router.log_tail()}")

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Where samples failed, an engine or a router that died says more."""
        try:
            yield
        except SlimeRetoolError:
            self.check()
            raise

    def memory(self) -> dict[str, float]:
        """`memory/engine_*`: what one worker of an engine holds while it generates, the largest of all engines.

        The cache's tokens are those of the smallest cache. Empty where the engines do not say: it is only a report.
        """
        try:
            reports = [report for report in (engine.memory() for engine in self._admins) if report]
        except WeightUpdateError as error:
            logger.warning("the engines' memory is not reported: %s", error)
            return {}
        if not reports:
            return {}
        metrics = {f"memory/engine_{name}": max(report[name] for report in reports) for name in reports[0]}
        metrics["memory/engine_kv_cache_tokens"] = min(report["kv_cache_tokens"] for report in reports)
        return metrics

    def release(self, *tags: MemoryTag) -> None:
        """Pause, and give back memory, where --offload-rollout says so."""
        if self._config.offloads_rollout:
            every_engine(self._admins, lambda engine: engine.pause())
            every_engine(self._admins, lambda engine: engine.flush_cache())
            every_engine(self._admins, lambda engine: engine.release_memory(tags))

    def resume_memory(self, *tags: MemoryTag) -> None:
        """Take memory again, still paused."""
        if self._config.offloads_rollout:
            every_engine(self._admins, lambda engine: engine.resume_memory(tags))

    def resume(self) -> None:
        """Go on generating."""
        if self._config.offloads_rollout:
            every_engine(self._admins, lambda engine: engine.resume())

    def weight_checksums(self) -> list[dict[str, str]]:
        """Checksum of each tensor, by Hugging Face name, of every engine that this run started."""
        return results(call(self._actors, "weight_checksums"))

    def stop_router(self) -> None:
        """End the router; never raises."""
        if self._router is not None:
            quietly("the router", self._router.stop)
            self._router = None

    def close(self) -> None:
        """End all engines; never raises."""
        actors, self._actors = self._actors, []
        end("engines", actors, "stop")
