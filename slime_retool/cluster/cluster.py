"""Everything a run starts, owned in one place and ended whichever way the run ends.

with Cluster(config) as cluster:
    start, state = cluster.start_trainers()
    urls = cluster.start_engines()
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from slime_retool.cluster.actors import EngineActor, TrainerActor
from slime_retool.cluster.connection import connect
from slime_retool.cluster.environment import trainer_environment
from slime_retool.cluster.files import check_files
from slime_retool.cluster.placement import Placement, Slot, place
from slime_retool.config import Config
from slime_retool.engine.admin import EngineAdmin, MemoryTag, every_engine
from slime_retool.engine.process import ServerError
from slime_retool.engine.router import RouterProcess
from slime_retool.errors import ConfigError, WeightUpdateError
from slime_retool.types import RolloutBatch, TrainSample

logger = logging.getLogger(__name__)
STOP_SECONDS = 60.0


class Cluster:
    """Ray, trainer actors, engine actors and the router of one run."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._placement: Placement | None = None
        self._trainers: list[Any] = []
        self._critics: list[Any] = []
        """Trainers of a critic that has processes of its own."""
        self._engines: list[Any] = []
        self._starting: list[Any] = []
        """What `launch_engines` waits for: the URL of each engine."""
        self._admins: list[EngineAdmin] = []
        self._router: RouterProcess | None = None
        self._owns_ray = False

    def __enter__(self) -> Cluster:
        try:
            connect(self._config)
            self._owns_ray = True
            self._placement = place(self._config)
            check_files(self._config, self._placement)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start_trainers(self, num_rollout: int) -> tuple[int, dict[str, Any]]:
        """Start every trainer rank, with a learning-rate schedule over `num_rollout` rollouts, and load weights.

        Returns (first rollout's number, state saved with it).
        """
        assert self._placement is not None
        config = replace(self._config, num_rollout=num_rollout)
        apart = config.critic_world_size > 0
        roles = "actor" if apart else "all"
        self._trainers = self._make_trainers(config, self._placement.trainers, roles)
        if apart:
            own = config.of_critic_apart()
            self._critics = self._make_trainers(own, self._placement.critics, "critic")
        starting = []
        for group in (self._trainers, self._critics):
            if group:
                init_method = _get(group[0].rendezvous.remote())
                starting += [actor.start.remote(init_method) for actor in group]
        return _get(starting)[0]

    def _make_trainers(self, config: Config, slots: list[Slot], roles: str) -> list[Any]:
        assert len(slots) == config.world_size
        environment = trainer_environment(colocate=config.colocate) if config.on_cuda else {}
        shipped = ray.put(config.for_actors())
        return [
            TrainerActor.options(**slot.options(environment)).remote(
                shipped, rank, roles=roles, several_hosts=self._several_hosts
            )
            for rank, slot in enumerate(slots)
        ]

    @property
    def _several_hosts(self) -> bool:
        """Whether processes of this run must be reached from other hosts."""
        assert self._placement is not None
        return self._placement.several_hosts or self._config.engines_elsewhere

    def launch_engines(self) -> None:
        """Let every engine start in the background; `start_engines` waits for them.

        Only where trainers have other devices (no --colocate): an engine takes its share of what it finds free.
        """
        assert self._placement is not None and not self._starting
        if self._config.rollout_external_urls:
            return
        config = self._config.for_actors()
        logger.info("starting %d SGLang engine(s), whose logs are in %s/logs", config.num_engines, config.output_dir)
        shipped = ray.put(config)
        for index, slots in enumerate(self._placement.engines):
            # The first slot puts the actor on their host; the server itself is given all devices by number.
            gpus = [slot.gpu for slot in slots if slot.gpu is not None] or None
            actor = EngineActor.options(**slots[0].options())
            self._engines.append(actor.remote(shipped, index, gpus, several_hosts=self._several_hosts))
        self._starting = [actor.start.remote() for actor in self._engines]

    def start_engines(self) -> list[str]:
        """Start every engine, unless `launch_engines` has. Returns their URLs (or those of the external ones)."""
        if self._config.rollout_external_urls:
            return self._know_external()
        if not self._starting:
            self.launch_engines()
        urls = _get(self._starting)
        self._starting = []
        return self._know(urls)

    def _know(self, urls: Sequence[str]) -> list[str]:
        self._admins = [EngineAdmin(url, timeout=self._config.distributed_timeout_minutes * 60) for url in urls]
        return list(urls)

    def _know_external(self) -> list[str]:
        """The servers of --rollout-external-urls. Raises ConfigError for one that cannot be used."""
        config = self._config
        urls = self._know([url.rstrip("/") for url in config.rollout_external_urls])
        for engine in self._admins:
            try:
                workers = engine.tensor_parallel_size()
            except WeightUpdateError as error:
                raise ConfigError(f"--rollout-external-urls: no SGLang server answers there: {error}") from error
            expected = config.rollout_num_gpus_per_engine if config.on_cuda else 1
            if workers != expected and config.weight_transport == "broadcast":
                raise ConfigError(
                    f"--rollout-external-urls: {engine.url} has {workers} tensor-parallel workers, the flags say "
                    f"{expected}; set --rollout-num-gpus-per-engine {workers} (all external "
                    "engines alike) or --update-weight-transport disk"
                )
        return urls

    def start_router(self, urls: list[str]) -> str:
        """Start the router in front of `urls`. Returns its URL."""
        self._router = RouterProcess(self._config, urls)
        return self._router.url

    def engine_memory(self) -> dict[str, float]:
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
        figures = {f"memory/engine_{name}": max(report[name] for report in reports) for name in reports[0]}
        figures["memory/engine_kv_cache_tokens"] = min(report["kv_cache_tokens"] for report in reports)
        return figures

    def check(self) -> None:
        """Raise when an engine or the router has died since the last look."""
        _get([actor.check.remote() for actor in self._engines])
        if self._router is not None and not self._router.alive:
            raise ServerError(f"the router has died. The end of its log:\n{self._router.log_tail()}")

    def connect_engines(self, urls: list[str]) -> None:
        """Let the trainer's source rank know where its weights go."""
        _get([actor.connect_engines.remote(urls) for actor in self._trainers])

    # One set of GPUs, in turns: begin_training, train, save, begin_update, update_weights, begin_generation. Without
    # --offload-train and --offload-rollout nothing leaves the device.

    def begin_training(self) -> None:
        """Engines give back their memory, trainers take theirs."""
        self._release_engines("weights", "kv_cache")
        if self._config.offloads_train:
            _get([actor.reload.remote() for actor in self._trainers])

    def begin_update(self) -> None:
        """Trainers keep only their weights, engines take room for theirs."""
        if self._config.offloads_train:
            _get([actor.offload.remote(keep_weights=True) for actor in self._trainers])
        self._resume_engines("weights")

    def update_weights(self) -> int:
        """Send the trainer's weights into every engine. Returns the new weight version.

        With --offload-rollout the engines stay paused until `begin_generation`.
        """
        asleep = self._config.offloads_rollout
        version = _get([actor.update_weights.remote(asleep=asleep) for actor in self._trainers])[0]
        if self._config.check_weight_update_equal:
            self._compare_weights(version)
        return version

    def _compare_weights(self, version: int) -> None:
        """Raise WeightUpdateError when any tensor of any engine differs from the trainer's."""
        expected = self.weight_checksums()
        for rank, found in enumerate(self.engine_checksums()):
            differing = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
            if differing:
                raise WeightUpdateError(
                    f"after weight update {version} engine {rank} holds other values than the trainer in "
                    f"{len(differing)} of {len(expected)} tensors, among them {', '.join(sorted(differing)[:3])}"
                )
        logger.info("weight update %d: %d tensors are equal in every engine", version, len(expected))

    def begin_generation(self) -> None:
        """Trainers leave, engines take room for their cache and go on."""
        if self._config.offloads_train:
            _get([actor.offload.remote() for actor in self._trainers])
        self._resume_engines("kv_cache")
        if self._config.offloads_rollout:
            every_engine(self._admins, lambda engine: engine.resume())

    def _release_engines(self, *tags: MemoryTag) -> None:
        if self._config.offloads_rollout:
            every_engine(self._admins, lambda engine: engine.pause())
            every_engine(self._admins, lambda engine: engine.flush_cache())
            every_engine(self._admins, lambda engine: engine.release_memory(tags))

    def _resume_engines(self, *tags: MemoryTag) -> None:
        if self._config.offloads_rollout:
            every_engine(self._admins, lambda engine: engine.resume_memory(tags))

    def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
        """One rollout's optimizer steps on all ranks."""
        shared = ray.put(batch)  # one copy per host, however many ranks read it
        if not self._critics:
            return _get([actor.train.remote(shared, rollout_id) for actor in self._trainers])[0]
        values = ray.put(_get([critic.values.remote(shared) for critic in self._critics])[0])
        prepared = _get([actor.prepare.remote(shared, rollout_id, values) for actor in self._trainers])
        returns = ray.put(prepared[0])
        metrics = _get(
            [actor.optimize.remote(rollout_id) for actor in self._trainers]
            + [critic.train_critic.remote(shared, rollout_id, values, returns) for critic in self._critics]
        )
        return metrics[0] | metrics[-1]

    def log_probs(self, samples: Sequence[TrainSample]) -> list[float]:
        """Log-prob of every learned token, one sample after the other; 0 for the others."""
        shared = ray.put(list(samples))
        return _get([actor.log_probs.remote(shared) for actor in self._trainers])[0]

    def weight_checksums(self) -> dict[str, str]:
        """Checksum of each tensor as the trainer holds it, by Hugging Face name."""
        return _get([actor.weight_checksums.remote() for actor in self._trainers])[0]

    def engine_checksums(self) -> list[dict[str, str]]:
        """The same of every engine that this object started."""
        return _get([actor.weight_checksums.remote() for actor in self._engines])

    def save(self, rollout_id: int, extra: dict[str, Any]) -> None:
        """Write a checkpoint of all ranks, with `extra` (JSON-able) beside it, while trainers have their device."""
        # A checkpoint of the actor never lacks the critic's.
        _get([critic.save.remote(rollout_id, extra) for critic in self._critics])
        _get([actor.save.remote(rollout_id, extra) for actor in self._trainers])

    def close(self) -> None:
        """End everything this object started; never raises, so that the error which led here is the one seen."""
        if self._router is not None:
            _quietly("the router", self._router.stop)
            self._router = None
        if ray.is_initialized():
            # Trainers first: they leave the weight-update group while the engines can still answer.
            _quietly("trainers", lambda: _stop([a.shutdown.remote() for a in [*self._trainers, *self._critics]]))
            _quietly("engines", lambda: _stop([a.stop.remote() for a in self._engines]))
            for actor in [*self._engines, *self._trainers, *self._critics]:
                _quietly("an actor", lambda actor=actor: ray.kill(actor))
            if self._placement is not None:
                _quietly("the placement group", self._placement.release)
        self._engines, self._trainers, self._critics, self._placement = [], [], [], None
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()


def _get(refs: Any) -> Any:
    """`ray.get`, raising the actor's own exception instead of Ray's wrapper around it.

    Waits for the first failure, not for all: when one rank fails, the others sit in a collective.
    """
    single = not isinstance(refs, list)
    pending = [refs] if single else list(refs)
    try:
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            ray.get(done)
        return ray.get(refs)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception):
            raise cause from error
        raise
    except RayActorError as error:
        raise ServerError(f"a process of the run ended, or its host: {error}") from error


def _stop(refs: list[Any]) -> None:
    ray.get(refs, timeout=STOP_SECONDS)


def _quietly(what: str, action: Any) -> None:
    try:
        action()
    except (RayError, OSError, RuntimeError, ValueError) as error:
        logger.warning("while ending %s: %s", what, error)
