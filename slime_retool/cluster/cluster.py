"""Everything a run starts, owned in one place and ended whichever way the run ends.

with Cluster(config) as cluster:
    start, state = cluster.trainers.start(num_rollout)
    urls = cluster.engines.start()
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from slime_retool.cluster.connection import RayStart
from slime_retool.cluster.engines import Engines
from slime_retool.cluster.files import check_files
from slime_retool.cluster.placement import place
from slime_retool.cluster.remote import quietly
from slime_retool.cluster.trainers import Trainers
from slime_retool.config import Config
from slime_retool.config.engines import EXPERT_PLACEMENT
from slime_retool.errors import WeightUpdateError
from slime_retool.metrics import Laps

logger = logging.getLogger(__name__)


class Cluster:
    """Ray, the trainers and the engines of one run, and the turns they take on one set of GPUs."""

    trainers: Trainers
    engines: Engines

    def __init__(self, config: Config, ray_start: RayStart | None = None) -> None:
        """`ray_start`: where Ray is started already; whoever did so also ends it."""
        self._config, self._ray_start = config, ray_start
        self._urls: list[str] | None = None

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            (self._ray_start or stack.enter_context(RayStart(self._config))).wait()
            placement = place(self._config)
            stack.callback(quietly, "the placement group", placement.release)
            check_files(self._config, placement)
            several_hosts = placement.several_hosts or self._config.engines_elsewhere
            self.trainers = Trainers(self._config, placement.trainers, several_hosts=several_hosts)
            self.engines = Engines(
                self._config, placement.engines, several_hosts=several_hosts, give_weights=self._give_weights
            )
            stack.callback(self.engines.close)
            # Before the engines: trainers leave the weight-update group while these can still answer.
            stack.callback(self.trainers.close)
            stack.callback(self.engines.stop_router)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def _takes_turns(self) -> bool:
        """Whether a GPU has engines or trainers, never both: each can then have all of it at its start."""
        return self._config.offloads_train and self._config.offloads_rollout

    def launch(self, num_rollout: int) -> None:
        """Let engines and trainers start in the background, side by side: `start_trainers` and `engines.start` wait.

        An engine takes its share of the memory that it finds free. On a GPU that it shares with a trainer it starts
        here only where they take turns: the trainer then waits for it, with all imports done.
        """
        config = self._config
        if config.num_engines and (self._takes_turns or not (config.colocate and config.on_cuda)):
            self.engines.launch()
        if not config.debug_rollout_only:
            self.trainers.launch(num_rollout)

    def start_trainers(self, num_rollout: int, iteration: int | None, laps: Laps) -> tuple[int, dict[str, Any]]:
        """See `Trainers.start`. Where GPUs are used in turns engines have started before, and given theirs back."""
        if self._takes_turns:
            self.start_engines()
            laps("engines")
            self.engines.release("weights", "kv_cache")
        return self.trainers.start(num_rollout, iteration, stay=self._takes_turns)

    def start_engines(self) -> list[str]:
        """Start every engine, unless that has been done. Returns their URLs."""
        if self._urls is None:
            self._urls = self.engines.start()
        return self._urls

    # One set of GPUs, in turns: begin_training, train, save, begin_update, update_weights, begin_generation. Without
    # --offload-train and --offload-rollout nothing leaves the device.

    def begin_training(self) -> None:
        """Engines give back their memory, trainers take theirs."""
        if self._config.offloads_rollout or self._config.offloads_train:
            # An engine takes its share of what it finds free, so none may start beside a trainer.
            self.engines.hold(settle=True)
        self.engines.release("weights", "kv_cache")
        self.trainers.reload()

    def restart_trainers(
        self, num_rollout: int, iteration: int | None, *, saved: bool
    ) -> tuple[int, dict[str, Any]]:
        """Start all trainers anew after one of them died, and let them have their devices; see `Trainers.start`."""
        self.engines.hold()
        self.trainers.kill()
        if self._config.num_engines:
            # One may wait for weights that will never come.
            self.engines.drop_dead(asleep=self._config.offloads_rollout)
            self.engines.release("weights", "kv_cache")
        state = self.trainers.start(num_rollout, iteration, saved=saved)
        if self._config.num_engines:
            self.trainers.connect_engines(list(self.engines.current().values()), state[0])
            self.trainers.reload()
        return state

    def begin_update(self) -> None:
        """Trainers keep only their weights, engines take room for theirs."""
        self.engines.hold()
        self.trainers.offload(keep_weights=True)
        if self._config.offloads_rollout:  # nobody looked while trainers had the devices
            self.engines.drop_dead(asleep=True, stuck=False)
        self.engines.resume_memory("weights")

    def update_weights(self) -> int:
        """Send the trainer's weights into every engine. Returns the new weight version.

        An engine that dies meanwhile is left out, and all others get the weights from the beginning. With
        --offload-rollout the engines stay paused until `begin_generation`.
        """
        asleep = self._config.offloads_rollout
        while True:
            try:
                with self.engines.ends_stuck():
                    version = self.trainers.update_weights(self.engines.current(), asleep=asleep)
                break
            except WeightUpdateError as error:
                if not self.engines.drop_dead(asleep=asleep):
                    raise
                logger.warning("%s; once more with the engines that are left", error)
        if self._config.check_weight_update_equal:
            self.compare_weights(version)
        return version

    def compare_weights(self, version: int) -> None:
        """Raise WeightUpdateError when any tensor of any engine differs from the trainer's."""
        expected = self.trainers.weight_checksums()
        self._compare(expected, self.engines.current(), version)
        logger.info("weight update %d: %d tensors are equal in every engine", version, len(expected))

    def _compare(self, expected: Mapping[str, str], engines: Mapping[int, str], version: int) -> None:
        for rank, found in zip(engines, self.engines.weight_checksums(engines), strict=False):  # none of external ones
            differing = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
            if differing:
                raise WeightUpdateError(
                    f"after weight update {version} engine {rank} holds other values than the trainer in "
                    f"{len(differing)} of {len(expected)} tensors, among them {', '.join(sorted(differing)[:3])}"
                )

    def begin_generation(self) -> None:
        """Trainers leave, engines take room for their cache and go on."""
        self.trainers.offload()
        self.engines.resume_memory("kv_cache")
        self.engines.resume()
        self.engines.let_go()

    def _give_weights(self, engines: Mapping[int, str]) -> bool:
        """Put the weights of the last update into engines that started since, where the trainers can send them now."""
        config = self._config
        if config.debug_rollout_only:
            return True
        takes_turns = config.offloads_train or config.offloads_rollout
        if takes_turns and self.engines.others_run(engines):
            return False  # they have the devices, until the next update
        if takes_turns:
            self.engines.release("weights", "kv_cache")
            self.trainers.reload()
            self.trainers.offload(keep_weights=True)
            self.engines.resume_memory("weights")
        expected = self.trainers.give_weights(engines, asleep=config.offloads_rollout)
        if takes_turns:
            self.trainers.offload()
            self.engines.resume_memory("kv_cache")
            self.engines.resume()
        if expected is None:
            return False
        # In other formats than the trainer's, and of experts at places of their own, an engine cannot tell.
        if not {"--quantization", "--dtype", *EXPERT_PLACEMENT} & config.sglang_server_flags.keys():
            self._compare(expected, engines, self.trainers.weight_version)
        return True
