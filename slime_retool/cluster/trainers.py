"""The processes that train: one group, or several that work on a rollout together."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from slime_retool.cluster.actors import TrainerActor
from slime_retool.cluster.environment import trainer_environment
from slime_retool.cluster.placement import Slot
from slime_retool.cluster.remote import STOP_SECONDS, call, death_of, end, quietly, results
from slime_retool.config import Config
from slime_retool.errors import TrainerDied
from slime_retool.trace import RankSpans
from slime_retool.types import RolloutBatch, TrainSample

CLOCK_EXCHANGES = 5
"""With each trainer, to see how far apart the clocks are."""
SAVE_POLL_SECONDS = 0.1
"""Between two looks at a save that is waited for."""


def _make_actors(config: Config, slots: list[Slot], roles: str, several_hosts: bool) -> list[Any]:
    """The ranks of one process group. `roles`: see `trainer.core.ROLES`."""
    assert len(slots) == config.world_size
    environment: dict[str, str] = {}
    if config.on_cuda:
        environment = trainer_environment(colocate=config.colocate, kernel_cache_dir=config.kernel_cache_dir)
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
        self._writing: list[Any] = []
        """Actors whose share of the last save may not be written yet."""
        self._save_seconds = 0.0
        """The longest time that a rank took for the last save, of those that have written it."""
        self._turn = threading.Lock()
        """Ranks must be called in one order: every call is collective."""
        self._moved_on = True
        """Whether the weights are others than those of the last update."""
        self.weight_version = 0
        """Of the last update."""

    def launch(self, num_rollout: int, *, saved: bool = False) -> None:
        """Let every rank import what it needs, in the background, with a schedule over `num_rollout` rollouts.

        No device is touched before `start`. saved: see there.
        """
        config = replace(self._config, num_rollout=num_rollout)
        if saved:
            config = config.going_on
        groups = config.trainer_groups
        for (roles, config), slots in zip(groups, self._slots, strict=True):
            self._groups.append(_make_actors(config, slots, roles, self._several_hosts))
        call(sum(self._groups, []), "prepare")  # what fails here fails again in `start`

    def start(
        self, num_rollout: int, iteration: int | None = None, *, saved: bool = False, stay: bool = False
    ) -> tuple[int, dict[str, Any]]:
        """Start every rank, unless `launch` has, and load weights.

        iteration: the checkpoint to go on from, by its rollout; None: the newest, if there is one.
        saved: it is one that this run saved, in --save instead of --load.
        stay: keep the device, where --offload-train would make ranks leave it until it is their turn.
        Returns (first rollout's number, state saved with it).
        """
        if not self._groups:
            self.launch(num_rollout, saved=saved)
        starting = []
        for actors in self._groups:
            (init_method,) = self._results(call(actors[:1], "rendezvous"))
            starting += call(actors, "start", init_method, iteration, stay=stay)
        return self._results(starting)[0]

    @property
    def _policy(self) -> list[Any]:
        if not self._groups:
            raise TrainerDied("the trainers were ended, and start again")
        return self._groups[0]

    def train(self, batch: RolloutBatch, rollout_id: int) -> dict[str, float]:
        """One rollout's optimizer steps on all ranks."""
        shared = ray.put(batch)  # one copy per host, however many ranks read it
        with self._turn:
            self._moved_on = True
            if len(self._groups) == 1:
                return self._results(call(self._policy, "trainer", "train", shared, rollout_id))[0]
            policy, critic = self._groups
            values = ray.put(self._results(call(critic, "trainer", "values", shared))[0])
            returns = ray.put(self._results(call(policy, "trainer", "prepare", shared, rollout_id, values))[0])
            metrics = self._results(
                call(policy, "trainer", "optimize", rollout_id)
                + call(critic, "trainer", "train_critic", shared, rollout_id, values, returns)
            )
            # The policy's processes wait for the values, so their seconds add to those of its own passes.
            passes = metrics[0]["perf/log_probs_seconds"] + metrics[-1]["perf/log_probs_seconds"]
            return metrics[0] | metrics[-1] | {"perf/log_probs_seconds": passes}

    def log_probs(self, samples: Sequence[TrainSample]) -> list[float]:
        """Log-prob of every learned token, one sample after the other; 0 for the others."""
        return self._call("log_probs", ray.put(list(samples)))

    def save(self, rollout_id: int, extra: dict[str, Any], *, background: bool) -> None:
        """Write a checkpoint of all ranks, with `extra` (JSON-able) beside it, while trainers have their device.

        With `background` it returns when it has been copied; `finish_save` comes before the next one.
        """
        self._writing, self._save_seconds = sum(self._groups, []) if background else [], 0.0
        with self._turn:
            # The policy's last: a checkpoint of it never lacks the critic's.
            for group in reversed(self._groups):
                # Rank 0 writes `extra`, which unfinished conversations may be in.
                first = call(group[:1], "save", rollout_id, extra, background=background)
                self._results(first + call(group[1:], "save", rollout_id, {}, background=background))

    def finish_save(self, *, wait: bool) -> float | None:
        """Seconds that writing the last save took, once it is complete on all ranks; None while it goes on.

        Raises SaveError as soon as any rank failed.
        """
        with self._turn:
            # No rank is waited for while another one may have failed: the policy's thread waits for the critic's
            # folder, which never comes when the critic could not write it.
            while self._writing:
                try:
                    answers = self._results(call(self._writing, "trainer", "finish_save", False))
                except Exception:
                    self._writing = []  # it will not be whole, so nothing is left to settle
                    raise
                self._save_seconds = max([self._save_seconds, *(each for each in answers if each is not None)])
                self._writing = [each for each, seconds in zip(self._writing, answers, strict=True) if seconds is None]
                if self._writing and not wait:
                    return None
                if self._writing:
                    time.sleep(SAVE_POLL_SECONDS)
            return self._save_seconds

    def settle_save(self) -> None:
        """Where the run fails: give a save that goes on the time to be complete; never raises."""
        if self._writing:
            waiting = call(self._writing, "trainer", "finish_save", True)
            quietly("a save", lambda: ray.get(waiting, timeout=STOP_SECONDS))

    def offload(self, *, keep_weights: bool = False) -> None:
        """Leave the device, where --offload-train says so."""
        if self._config.offloads_train:
            self._call("offload", keep_weights=keep_weights)

    def reload(self) -> None:
        """Take the device again."""
        if self._config.offloads_train:
            self._call("reload")

    def connect_engines(self, urls: list[str], version: int = 0) -> None:
        """Let the source rank know where its weights go; updates are counted from `version`."""
        self.weight_version = version
        self._call("connect_engines", urls, version)

    def update_weights(self, engines: Mapping[int, str], *, asleep: bool) -> int:
        """Send the weights into these engines ({number: URL}); see `trainer.weight_sync`.

        Returns the new weight version.
        """
        self.weight_version = self._call("update_weights", dict(engines), asleep=asleep)
        self._moved_on = False
        return self.weight_version

    def give_weights(self, engines: Mapping[int, str], *, asleep: bool) -> dict[str, str] | None:
        """Send the weights of the last update into these engines, which missed it.

        Returns `weight_checksums`; None, without doing anything, where they are trained on already or just now.
        """
        if not self._turn.acquire(blocking=False):
            return None
        try:
            if self._moved_on:
                return None
            self._results(call(self._policy, "give_weights", dict(engines), asleep=asleep))
            return self._results(call(self._policy, "weight_checksums"))[0]
        finally:
            self._turn.release()

    def record(self) -> None:
        """Keep what every rank does from now on, for `take_spans`."""
        with self._turn:
            self._results(call(sum(self._groups, []), "record"))

    def take_spans(self) -> list[tuple[str, RankSpans]]:
        """(name, spans by this host's clock) of every rank since `record`."""
        with self._turn:
            taken = []
            for (roles, _), actors in zip(self._config.trainer_groups, self._groups, strict=True):
                kind = "critic" if roles == "critic" else "trainer"
                for rank, spans in enumerate(self._results(call(actors, "take_spans"))):
                    taken.append((f"{kind} rank {rank}", spans.moved(-self._clock_ahead(actors[rank]))))
            return taken

    def _clock_ahead(self, actor: Any) -> float:
        """Seconds that the clock of the actor's host is ahead of this one's; 0 for less than can be measured.

        An answer was made between its question and its arrival: the fastest of a few exchanges says most.
        """
        exchanges = []
        for _ in range(CLOCK_EXCHANGES):
            asked = time.time()
            (answer,) = self._results(call([actor], "clock"))
            exchanges.append((time.time() - asked, answer - asked))
        trip, ahead = min(exchanges)
        return ahead - trip / 2 if not 0 <= ahead <= trip else 0.0

    def weight_checksums(self) -> dict[str, str]:
        """Checksum of each tensor as the trainer holds it, by Hugging Face name."""
        return self._call("weight_checksums")

    def _results(self, refs: list[Any]) -> list[Any]:
        """Results of calls. Raises TrainerDied also where a rank that lives only sees that another one does not."""
        try:
            return results(refs, died=TrainerDied)
        except TrainerDied:
            raise
        except Exception as error:
            if (death := death_of(sum(self._groups, []))) is not None:
                raise TrainerDied(f"a process of the run ended, or its host: {death}") from error
            raise

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What the policy's first rank answers."""
        with self._turn:
            return self._results(call(self._policy, method, *arguments, **options))[0]

    def kill(self) -> None:
        """End all ranks at once, wherever they are; `start` starts others."""
        groups, self._groups = self._groups, []
        self._moved_on, self._writing = True, []
        for actor in sum(groups, []):
            quietly("trainers", partial(ray.kill, actor))

    def close(self) -> None:
        """End all ranks; never raises."""
        groups, self._groups = self._groups, []
        end("trainers", sum(groups, []), "shutdown")
