"""The engines that generate, and the router in front of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from slime_retool.cluster.actors import EngineActor
from slime_retool.cluster.placement import Slot
from slime_retool.cluster.remote import STOP_SECONDS, call, end, first_line, quietly, results
from slime_retool.config import Config
from slime_retool.config.require import require
from slime_retool.engine.admin import EngineAdmin, MemoryTag, every_engine
from slime_retool.engine.router import RouterProcess
from slime_retool.engine.server import adapter_flags, engine_workers
from slime_retool.engine.upkeep import EngineService, Upkeep
from slime_retool.errors import ConfigError, SlimeRetoolError, WeightUpdateError

logger = logging.getLogger(__name__)

ABORT_SECONDS = 5.0
"""For an engine to take note that its requests are to end."""


QUESTION_SECONDS = 30.0
"""For an actor to say whether its engine lives."""
# Ray's worker would kill the supervisor of an engine as it ends, before that could end the engine's own processes.
KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "0"}


class _OwnEngine:
    """An `EngineHost`: an actor of this run, replaced by another one where it died or does not answer."""

    replaceable = True

    def __init__(self, make_actor: Callable[[], Any], number: int) -> None:
        self._make_actor, self.actor, self.name = make_actor, make_actor(), f"SGLang engine {number}"

    def start(self) -> str:
        return results(call([self.actor], "start"))[0]

    def ended(self) -> str | None:
        try:
            return ray.get(self.actor.ended.remote(), timeout=QUESTION_SECONDS)
        except RayError as error:
            return f"lost its owner ({type(error).__name__})"

    def stop(self) -> None:
        try:
            ray.get(self.actor.stop.remote(), timeout=STOP_SECONDS)
        except RayError as error:
            logger.warning("the owner of %s does not answer and is replaced: %s", self.name, first_line(error))
            quietly(self.name, lambda: ray.kill(self.actor))
            self.actor = self._make_actor()

    def log_tail(self) -> str:
        try:
            return ray.get(self.actor.log_tail.remote(), timeout=QUESTION_SECONDS)
        except RayError:
            return ""


class _ExternalEngine:
    """An `EngineHost`: a server that others started, and others end."""

    replaceable = False

    def __init__(self, url: str) -> None:
        self._url, self.name = url, f"the engine {url} of --rollout-external-urls"

    def start(self) -> str:
        raise AssertionError("others start it")

    def ended(self) -> str | None:
        return None

    def stop(self) -> None: ...

    def log_tail(self) -> str:
        return ""


class Engines:
    """SGLang servers of this run, or those of --rollout-external-urls, and the router in front of them."""

    def __init__(
        self,
        config: Config,
        slots: Sequence[list[Slot]] = (),
        *,
        several_hosts: bool = False,
        give_weights: Callable[[Mapping[int, str]], bool] = lambda engines: True,
    ) -> None:
        """
        Args:
            slots: places of the workers of each engine that this run starts.
            give_weights: see `engine.upkeep.Upkeep`; by default engines serve what they start with.
        """
        self._config, self._slots, self._several_hosts = config, slots, several_hosts
        self._give_weights = give_weights
        self._own: list[_OwnEngine] = []
        self._starting: list[Any] = []
        """What `launch` leaves to wait for: the URL of each engine."""
        self._urls: list[str] = []
        self._upkeep: Upkeep | None = None
        self._released: set[MemoryTag] = set()
        """What all engines have given back."""

    def launch(self) -> None:
        """Let every engine start in the background; `start` waits for them.

        An engine takes its share of the memory that it finds free (see `Cluster.launch`).
        """
        assert not self._starting
        if self._config.rollout_external_urls:
            return
        config = self._config.for_actors()
        logger.info("starting %d SGLang engine(s), whose logs are in %s/logs", config.num_engines, config.output_dir)
        for index, slots in enumerate(self._slots):
            # The first slot puts the actor on their host; the server itself is given all devices by number.
            gpus = [slot.gpu for slot in slots if slot.gpu is not None] or None
            actor = EngineActor.options(**slots[0].options(KEEP_CHILDREN))  # type: ignore[attr-defined]
            make = partial(actor.remote, config, index, gpus, several_hosts=self._several_hosts)
            self._own.append(_OwnEngine(make, index))
        self._starting = call([engine.actor for engine in self._own], "start")

    def start(self) -> list[str]:
        """Start every engine, unless `launch` has. Returns their URLs (or those of the external ones)."""
        external = [url.rstrip("/") for url in self._config.rollout_external_urls]
        if not self._starting and not external:
            self.launch()
        starting, self._starting = self._starting, []
        urls = external or results(starting)
        self._urls = urls
        if external:
            self._check_external()
        return urls

    def _check_external(self) -> None:
        """Raise ConfigError for a server of --rollout-external-urls that cannot be used."""
        config = self._config
        for engine in self._admins:
            try:
                workers = engine.tensor_parallel_size()
                returns_experts = not config.use_rollout_routing_replay or engine.returns_experts()
            except WeightUpdateError as error:
                raise ConfigError(f"--rollout-external-urls: no SGLang server answers there: {error}") from error
            if config.lora is not None and config.serves_adapters:
                rank, flags = engine.adapter_rank(), adapter_flags(config)
                wanted = " ".join(word for name, values in flags.items() for word in (name, *values))
                require(
                    rank >= config.lora.rank,
                    f"--rollout-external-urls: {engine.url} takes adapters up to rank {rank}: start it with {wanted}, "
                    "or use --lora-weight-update merged",
                )
            expected = engine_workers(config)
            counted = config.weight_transport == "broadcast" and not config.debug_rollout_only
            if workers != expected and counted:
                raise ConfigError(
                    f"--rollout-external-urls: {engine.url} has {workers} tensor-parallel workers, the flags say "
                    f"{expected}; set --rollout-num-gpus-per-engine {workers} (all external "
                    "engines alike) or --update-weight-transport disk"
                )
            if not returns_experts:
                raise ConfigError(
                    f"--use-rollout-routing-replay: {engine.url} of --rollout-external-urls returns no experts; start "
                    "it with --enable-return-routed-experts"
                )

    @property
    def _admins(self) -> list[EngineAdmin]:
        return [self._admin(url) for url in self.current().values()]

    def _admin(self, url: str) -> EngineAdmin:
        return EngineAdmin(url, timeout=self._config.distributed_timeout_minutes * 60)

    def current(self) -> dict[int, str]:
        """{number: URL} of the engines that have started, with or without the current weights."""
        return dict(enumerate(self._urls)) if self._upkeep is None else self._upkeep.engines()

    @property
    def service(self) -> Upkeep:
        """The router and the engines behind it, once the router has started."""
        assert self._upkeep is not None
        return self._upkeep

    def start_router(self, urls: list[str]) -> EngineService:
        """Start the router in front of `urls`, and watch over all from now on."""
        config = self._config
        self._upkeep = Upkeep(
            self._own or [_ExternalEngine(url) for url in urls],
            urls,
            make_router=partial(RouterProcess, config),
            give_weights=self._give_weights,
            max_restarts=config.max_engine_restarts,
            hang_seconds=config.engine_hang_timeout,
        )
        return self._upkeep

    def check(self) -> None:
        """Raise when an engine or the router has died that may not be replaced any more."""
        if self._upkeep is not None:
            self._upkeep.check()

    def others_run(self, engines: Mapping[int, str]) -> bool:
        """Whether any engine but these serves or starts."""
        return self._upkeep is not None and self._upkeep.others_run(engines)

    def hold(self, *, settle: bool = False) -> None:
        """No engine joins or starts until `let_go`. `settle`: first wait for those that start."""
        if self._upkeep is not None:
            self._upkeep.hold(settle=settle)

    def let_go(self) -> None:
        """The engines have the current weights and generate."""
        if self._upkeep is not None:
            self._upkeep.let_go()

    def drop_dead(self, *, asleep: bool, stuck: bool = True) -> bool:
        """Whether engines have died since `hold`; they are left out from now on. `asleep`: all are to be paused.

        `stuck`: those that answer nothing are left out too, where none has died.
        """
        if self._upkeep is None:
            return False
        before = self._upkeep.engines()
        dropped = self._upkeep.drop_dead(stuck=stuck)
        for number, url in self._upkeep.engines().items() if asleep else ():
            if before.get(number) != url:
                engine = self._admin(url)
                engine.pause()
                engine.settle()
                if self._released:  # SGLang takes no tag for all tags
                    engine.release_memory(sorted(self._released))
        return dropped

    def ends_stuck(self) -> AbstractContextManager[None]:
        """An engine that hangs while it is given weights is ended, see `Upkeep.ends_stuck`."""
        return nullcontext() if self._upkeep is None else self._upkeep.ends_stuck()

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

    def abort(self) -> None:
        """Tell every engine to end the requests that it runs; each comes back with what it has.

        Never raises: a request of an engine that does not answer fails by itself.
        """

        def tell(engine: EngineAdmin) -> None:
            with suppress(WeightUpdateError):
                EngineAdmin(engine.url, timeout=ABORT_SECONDS).abort()

        every_engine(self._admins, tell)

    def release(self, *tags: MemoryTag) -> None:
        """Pause, and give back memory, where --offload-rollout says so; what is given back already stays so."""
        config = self._config
        # Weights that no update sends again stay.
        kept: set[MemoryTag] = {"weights"} if config.serves_adapters else set()
        if not config.offloads_cache:
            kept.add("kv_cache")
        wanted: list[MemoryTag] = [tag for tag in tags if tag not in self._released | kept]
        if config.offloads_rollout and wanted:
            every_engine(self._admins, lambda engine: engine.pause())
            every_engine(self._admins, lambda engine: engine.settle())
            if not (config.offloads_cache or config.keeps_cache):  # its release empties it
                every_engine(self._admins, lambda engine: engine.flush_cache())
            every_engine(self._admins, lambda engine: engine.release_memory(wanted))
            self._released.update(wanted)

    def resume_memory(self, *tags: MemoryTag) -> None:
        """Take memory again, still paused."""
        wanted: list[MemoryTag] = [tag for tag in tags if tag in self._released]
        if wanted:
            every_engine(self._admins, lambda engine: engine.resume_memory(wanted))
            self._released.difference_update(wanted)

    def resume(self) -> None:
        """Go on generating."""
        if self._config.offloads_rollout:
            every_engine(self._admins, lambda engine: engine.resume())

    def weight_checksums(self, numbers: Iterable[int] | None = None) -> list[dict[str, str]]:
        """Checksum of each tensor, by Hugging Face name, of engines that this run started (default: all that live)."""
        chosen = self.current() if numbers is None else numbers
        return results(call([self._own[number].actor for number in chosen if self._own], "weight_checksums"))

    def stop_router(self) -> None:
        """End the router; never raises."""
        if self._upkeep is not None:
            quietly("the router", self._upkeep.close)

    def close(self) -> None:
        """End all engines; never raises."""
        own, self._own = self._own, []
        end("engines", [engine.actor for engine in own], "stop")
