"""The processes that train: one group, or several that work on a rollout together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray

from slime_retool.cluster.actors import TrainerActor
from slime_retool.cluster.environment import trainer_environment
from slime_retool.cluster.placement import Slot
from slime_retool.cluster.remote import call, end, results
from slime_retool.config import Config
from slime_retool.types import RolloutBatch, TrainSample


def _make_actors(config: Config, slots: list[Slot], roles: str, several_hosts: bool) -> list[Any]:
    """The ranks of one process group. `roles`: see `trainer.core.ROLES`."""
    assert len(slots) == config.world_size
    environment = trainer_environment(colocate=config.colocate) if config.on_cuda else {}
    shipped = ray.put(config.for_actors())
    return [
        TrainerActor.options(**slot.options(environment)).remote(  # type: ignore[attr-defined]
            shipped, rank, roles=roles, several_hosts=several_hosts
        )
        for rank, slot in enumerate(slots)
    ]


class Trainers:
    """All groups of a run. The first holds the policy; a critic with processes of its own is the second."""

    def __init__(self, config: Config, slots: list[list[Slot]], *, several_hosts: bool) -> None:
        self._config, self._slots, self._several_hosts = config, slots, several_hosts
        self._groups: list[list[Any]] = []
        """Actors of the ranks of each group."""

    def start(self, num_rollout: int) -> tuple[int, dict[str, Any]]:
        """Start every rank, with a learning-rate schedule over `num_rollout` rollouts, and load weights.

        Returns (first rollout's number, state saved with it).
        """
        groups = replace(self._config, num_rollout=num_rollout).trainer_groups
        for (roles, config), slots in zip(groups, self._slots, strict=True):
            self._groups.append(_make_actors(config, slots, roles, self._several_hosts))
        starting = []
        for actors in self._groups:
            (init_method,) = results(call(actors[:1], "rendezvous"))
            starting += call(actors, "start", init_method)
        return results(starting)[0]

    @property
    def _policy(self) -> list[Any]:
        return self._groups[0]

    def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
        """One rollout's optimizer steps on all ranks."""
        shared = ray.put(batch)  # one copy per host, however many ranks read it
        if len(self._groups) == 1:
            return results(call(self._policy, "trainer", "train", shared, rollout_id))[0]
        policy, critic = self._groups
        values = ray.put(results(call(critic, "trainer", "values", shared))[0])
        returns = ray.put(results(call(policy, "trainer", "prepare", shared, rollout_id, values))[0])
        metrics = results(
            call(policy, "trainer", "optimize", rollout_id)
            + call(critic, "trainer", "train_critic", shared, rollout_id, values, returns)
        )
        return metrics[0] | metrics[-1]

    def log_probs(self, samples: Sequence[TrainSample]) -> list[float]:
        """Log-prob of every learned token, one sample after the other; 0 for the others."""
        return results(call(self._policy, "log_probs", ray.put(list(samples))))[0]

    def save(self, rollout_id: int, extra: dict[str, Any]) -> None:
        """Write a checkpoint of all ranks, with `extra` (JSON-able) beside it, while trainers have their device."""
        # The policy's last: a checkpoint of it never lacks the critic's.
        for group in reversed(self._groups):
            results(call(group, "trainer", "save", rollout_id, extra))

    def offload(self, *, keep_weights: bool = False) -> None:
        """Leave the device, where --offload-train says so."""
        if self._config.offloads_train:
            results(call(self._policy, "offload", keep_weights=keep_weights))

    def reload(self) -> None:
        """Take the device again."""
        if self._config.offloads_train:
            results(call(self._policy, "reload"))

    def connect_engines(self, urls: list[str], version: int = 0) -> None:
        """Let the source rank know where its weights go; updates are counted from `version`."""
        results(call(self._policy, "connect_engines", urls, version))

    def update_weights(self, *, asleep: bool) -> int:
        """Send the weights into every engine; see `trainer.weight_sync`. Returns the new weight version."""
        return results(call(self._policy, "update_weights", asleep=asleep))[0]

    def weight_checksums(self) -> dict[str, str]:
        """Checksum of each tensor as the trainer holds it, by Hugging Face name."""
        return results(call(self._policy, "weight_checksums"))[0]

    def close(self) -> None:
        """End all ranks; never raises."""
        groups, self._groups = self._groups, []
        end("trainers", sum(groups, []), "shutdown")
