"""The training loop: `python -m slime_retool.train FLAGS` (`--help` lists them).

    generate -> train -> update the engines' weights -> save -> evaluate

With --colocate trainer and engines take turns on the same devices:

    generate -> engines give back their memory, trainers take theirs -> train -> trainers keep only weights, engines
    take room for theirs -> update -> trainers leave, engines take room for their cache -> generate

With --max-staleness generation goes on beside or across all of that (rollout.stream): before an update, or before
engines give back their memory, requests are interrupted, and go on after it.

Exit codes: 0 done, 1 a failure while running, 2 a mistake in what was given (flags, data, checkpoints; one line that
says what to change), 130 interrupted: by a first Ctrl-C or SIGTERM after the step, which is saved where --save says so,
by a second one at once.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from megatron_bridge.arithmetic import GIB
from megatron_bridge.checkpoint import latest_rollout
from slime_retool.cluster.profiler import StepProfiler
from slime_retool.cluster.saves import Saves
from slime_retool.config import Config, parse_config, resolve, validate
from slime_retool.config.devices import check_devices
from slime_retool.config.printable import changed_flags, flag_values, print_command_line, wandb_settings
from slime_retool.config.require import as_config_error
from slime_retool.config.schedule import evaluates_after, warn_of_room
from slime_retool.engine.flag_check import ServerFlagCheck
from slime_retool.errors import TrainerDied, run_command
from slime_retool.health import HealthCheck
from slime_retool.interrupts import Interrupts
from slime_retool.metric_table import meaning_of
from slime_retool.metrics import (
    Laps,
    Metrics,
    Phases,
    PrometheusTracker,
    Tracker,
    generation_speed,
    headline,
    host_bytes,
    is_evaluated,
)
from slime_retool.protocols import load_function
from slime_retool.run_folder import forget_skipped_rows, resume_point, saved_extra, set_aside

if TYPE_CHECKING:
    from slime_retool.cluster.cluster import Cluster
    from slime_retool.rollout.manager import RolloutManager

logger = logging.getLogger("slime_retool")
PROG = "slime_retool.train"
ABORT_SECONDS = 0.2
"""Engines are told again so often to end what they run: a request may have been on its way."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, validate, run. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    return run_command(PROG, lambda: _train(argv), interrupted="interrupted; everything it started has been ended")


def _train(argv: Sequence[str] | None) -> int:
    laps = Laps()
    config = resolve(parse_config(argv))
    validate(config)
    if not config.dry_run:
        check_devices(config)
    with ServerFlagCheck(config) as check:
        if config.dry_run:
            rehearse(config, check)
            print_command_line(config, PROG, f"python -m {PROG}")
        else:
            try:
                laps("flags")
                run(config, check, laps)
            except KeyboardInterrupt:
                logger.info(what_is_left(config))
                raise
    return 0


def what_is_left(config: Config) -> str:
    """What an interrupted run can go on from."""
    if config.debug_rollout_only:
        return "nothing is trained, so that nothing is lost"
    try:
        saved = latest_rollout(config.save)
    except ValueError:  # the first one was being written
        saved = None
    if saved is None:
        return "no checkpoint was saved: --save DIR with --save-interval N saves one every N rollouts"
    return f"the newest checkpoint is that of rollout {saved}; --load {config.save} goes on from it"


def rehearse(config: Config, check: ServerFlagCheck) -> None:
    """What ends a start before trainers and engines: the data, row by row, hooks, SGLang's answer. Writes nothing."""
    from slime_retool.rollout.manager import RolloutManager

    with RolloutManager(config):
        check.wait()


def run(config: Config, check: ServerFlagCheck, laps: Laps) -> None:
    """Run the whole loop. Whatever it starts is ended when it returns or raises.

    `check` goes on beside the reading of the data, the start of Ray, and that of trainers and engines, none of which
    takes a step before it has ended. Ray starts beside the reading of the data.
    """
    # Imported here, so that --help and configuration errors answer at once.
    from slime_retool.cluster.connection import RayStart
    from slime_retool.rollout.manager import RolloutManager

    os.makedirs(config.output_dir, exist_ok=True)
    with ExitStack() as stack:
        ray_start = stack.enter_context(RayStart(config))
        # A row that cannot be used ends the start before anything but Ray has begun.
        rollout = stack.enter_context(RolloutManager(config))
        laps("data")
        from slime_retool.cluster.cluster import Cluster

        cluster = stack.enter_context(Cluster(config, ray_start))
        config = rollout.config  # its data say how many rollouts --num-epoch makes
        first = first_rollout(config)
        laps("ray")
        assert config.num_rollout is not None
        cluster.launch(config.num_rollout)
        check.wait()
        laps("sglang_flags")
        if first == 0:
            set_aside(config.output_dir)
        if not rollout.rows_skipped:
            forget_skipped_rows(config.output_dir)
        with closing(trackers_of(config, first)) as metrics:
            try:
                Loop(config, cluster, rollout, metrics, first, laps).run()
            finally:
                rollout.stop_generating()


def first_rollout(config: Config) -> int:
    """The rollout to begin with: that after the newest whole checkpoint in --load, else 0."""
    if config.debug_rollout_only:
        return 0
    with as_config_error():
        saved = resume_point(config.load, config.critic_places)
    return 0 if saved is None else saved + 1


def trackers_of(config: Config, first: int = 0) -> Metrics:
    """metrics.jsonl, and what the flags ask for beside it; `first`: the rollout that the run begins with."""
    path = config.custom_tracker_path
    own: list[Tracker] = [] if path is None else [load_function(path, "--custom-tracker-path")(config)]
    if config.prometheus_port is not None:
        own.append(PrometheusTracker(config.prometheus_port, meaning_of))
    saved = saved_extra(config.load, first - 1).get("trackers") if config.load is not None and first > 0 else None
    return Metrics(
        Path(config.output_dir), *own, tensorboard=config.use_tensorboard, wandb=wandb_settings(config),
        wandb_key=config.wandb_key, first=first, saved=saved,
    )  # fmt: skip


class Loop:
    """The loop's state: where it is, and the parts it drives."""

    def __init__(
        self, config: Config, cluster: Cluster, rollout: RolloutManager, metrics: Metrics, first: int = 0,
        laps: Laps | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            first: the rollout to begin with, after the checkpoint that trainers resume (0: they find out).
            laps: what the start has taken so far.
        """
        assert config.num_rollout is not None
        self._num_rollout = config.num_rollout
        self._config, self._cluster, self._rollout, self._metrics = config, cluster, rollout, metrics
        self._resumed = first - 1 if first > 0 else None
        self._laps = laps or Laps()
        self._saves = Saves(config, cluster.trainers)
        self._interrupts = Interrupts(defers=config.save is not None and not config.debug_rollout_only)
        self._engine_memory: dict[str, float] = {}
        self._restarts = 0
        self._evaluating: int | None = None
        """With --max-staleness: the rollout after which an evaluation goes on beside the next generation."""
        self._first_data: dict[str, Any] = {}
        """The position in the data that the run began with."""
        self._health = HealthCheck()
        self._bar: tqdm[NoReturn] | None = None

    def run(self) -> None:
        with self._interrupts:
            try:
                self._run()
            except Exception:  # of a hook too, or a full disk: the checkpoint that is being written is whole first
                self._cluster.trainers.settle_save()
                raise

    def _run(self) -> None:
        config, end = self._config, self._num_rollout
        first = self._start()
        if first >= end > 0:
            logger.info("the checkpoint is at rollout %d of %d: nothing left to train", first, end)
        # The last one may have been cut short.
        is_due = first > 0 and evaluates_after(config, first - 1)
        before = not config.skip_eval_before_train and (first < end or end == 0)
        if config.eval_interval is not None and (before or is_due):
            sets = [name for name, _ in config.eval_sets]
            if first > 0 and is_evaluated(Path(config.output_dir) / "metrics.jsonl", first - 1, sets):
                logger.info("the evaluation after rollout %d is there already", first - 1)
            else:
                self._evaluate(first - 1)
            self._laps("evaluation")
        with self._interrupts.deferred():
            self._train(first, end)
        # After a run with nothing left to do the last checkpoint is the one it was to go on from.
        source = config.save if first < end else config.load if first > 0 else None
        if config.save_hf is not None and source is not None and not config.debug_rollout_only:
            self._export(source)

    def _train(self, first: int, end: int) -> None:
        """Every step from the rollout `first` on, and the last checkpoint to its end."""
        config = self._config
        if first < end:
            self._metrics.log(first, self._laps.metrics())
            logger.info("started in %s", self._laps)
        warn_of_room(config, first)
        only_at_end = config.save_interval is None and config.save_seconds is None
        if first < end and config.save is not None and only_at_end and not config.debug_rollout_only:
            logger.info("--save without --save-interval: the one checkpoint is written after the last rollout")
        self._bar = bar = tqdm(
            initial=first,
            total=end,
            desc="training" if config.debug_train_only else "rollouts",
            disable=config.no_progress or None,  # None: where stderr is no terminal
        )
        with bar:
            rollout_id = first
            while rollout_id < end or self._saves.writing:
                try:
                    if rollout_id < end:
                        self._round(bar, rollout_id)
                        rollout_id += 1
                    else:
                        self._metrics.log(end - 1, self._saves.look(wait=True))
                except TrainerDied as error:
                    rollout_id = self._restart_trainers(rollout_id, error)
                bar.update(rollout_id - bar.n)
        if self._interrupts.asked:  # while the last checkpoint was written
            if first < end:
                self._save_at_once(end - 1)
            raise KeyboardInterrupt

    def _round(self, bar: tqdm[NoReturn], rollout_id: int) -> None:
        """One step, and the evaluation after it."""
        config, cluster = self._config, self._cluster
        with ExitStack() as stack:
            profiler: StepProfiler | None = None
            if rollout_id in config.profile_rollout:
                profiler = StepProfiler(config, rollout_id, self._rollout, cluster.trainers, cluster.engines)
                stack.enter_context(closing(profiler))
            phases = Phases(self._show_phase, critic=config.uses_critic and len(config.trainer_groups) == 1)
            metrics = self._step(rollout_id, phases)
            self._show(bar, rollout_id, metrics)
            try:
                with self._interrupts.ending():
                    if evaluates_after(config, rollout_id):
                        if config.max_staleness and rollout_id + 1 < self._num_rollout:
                            self._rollout.begin_evaluation(rollout_id)
                            self._evaluating = rollout_id
                        else:
                            with phases.aside("evaluation"):
                                self._evaluate(rollout_id)
                    if profiler is not None:
                        profiler.write(phases.spans, metrics)
            except KeyboardInterrupt:
                self._save_at_once(rollout_id)
                raise

    def _show_phase(self, name: str) -> None:
        """What the loop does now, before the bar."""
        if self._bar is not None:
            self._bar.set_description(name.replace("_", " "))

    def _show(self, bar: tqdm[NoReturn], rollout_id: int, metrics: dict[str, float]) -> None:
        """A few of a rollout's metrics beside the bar, or in a line of their own."""
        shown = headline(metrics)
        bar.set_postfix(shown)
        if bar.disable:
            words = [f"{name} {value}" for name, value in shown.items()]
            words.append(f"{metrics['perf/step_seconds']:.1f} s")
            logger.info("rollout %d of %d: %s", rollout_id, self._num_rollout, ", ".join(words))

    def _restart_trainers(self, rollout_id: int, error: TrainerDied) -> int:
        """Go back to the last complete checkpoint, with other trainers. Returns the next rollout's number.

        Without any checkpoint that is where the run began. Raises `error` where --max-restarts allows no more.
        """
        config, cluster = self._config, self._cluster
        while True:
            cluster.trainers.kill()  # nothing is being written any more
            saved = self._saves.newest_whole()
            where = "the run's beginning" if saved is None else f"the checkpoint of rollout {saved} in {config.save}"
            if self._restarts >= config.max_restarts:
                raise TrainerDied(
                    f"{error}; in rollout {rollout_id}, and --max-restarts {config.max_restarts} allows no further "
                    f"start from {where}"
                ) from error
            self._restarts += 1
            logger.warning(
                "%s; in rollout %d. Trainers start again from %s (%d of %d)",
                error, rollout_id, where, self._restarts, config.max_restarts,
            )  # fmt: skip
            self._rollout.stop_generating()
            try:
                iteration = self._resumed if saved is None else saved
                first, state = cluster.restart_trainers(self._num_rollout, iteration, saved=saved is not None)
                self._rollout.load_state_dict(state.get("data", self._first_data))
                self._evaluating = None  # of weights that are gone
                if config.num_engines:
                    self._hand_over(Phases(), draws=first < self._num_rollout)
                return first
            except TrainerDied as again:
                error = again

    def _start(self) -> int:
        """Start trainers and engines, restore the saved state. Returns the first rollout's number."""
        config, cluster = self._config, self._cluster
        first = 0
        if not config.debug_rollout_only:
            logger.info("starting %d trainer process(es) on %s", config.world_size, config.device)
            first, state = cluster.start_trainers(self._num_rollout, self._resumed, self._laps)
            self._laps("trainers")
            if "data" in state:
                self._rollout.load_state_dict(state["data"])
            if first > 0:
                logger.info("resumed at rollout %d from %s", first, config.load)
                if changes := changed_flags(config, state.get("flags", {})):
                    logger.info("flags that differ from the run that saved it: %s", ", ".join(changes))
        self._first_data = self._rollout.state_dict()
        if config.num_engines:
            urls = cluster.start_engines()
            self._laps("engines")
            self._engine_memory = cluster.engines.memory()
            self._rollout.connect(cluster.engines.start_router(urls))
            if not config.debug_rollout_only:
                cluster.trainers.connect_engines(urls, first)
                cluster.begin_training()
                self._hand_over(Phases(), draws=first < self._num_rollout)
            self._laps("router_and_weights")
        return first

    def _step(self, rollout_id: int, phases: Phases) -> dict[str, float]:
        """Generate, train, save, update the engines. Returns the step's metrics."""
        config, cluster = self._config, self._cluster
        with phases("generate"), cluster.engines.checked():
            batch = self._rollout.generate(rollout_id)
        if self._evaluating is not None:  # it began with these weights
            evaluated, self._evaluating = self._evaluating, None
            with phases.aside("evaluation") as waited:
                self._evaluate(evaluated)
            phases.leave_out(waited["seconds"])
        cluster.engines.check()
        self._metrics.log_samples(rollout_id, batch.shown)
        metrics = batch.metrics | self._saves.look()
        if not config.debug_rollout_only:
            with phases("offload"):
                if config.offloads_rollout:
                    self._interrupt()
                cluster.begin_training()
            with phases.aside("trainers"):
                metrics |= cluster.trainers.train(batch, rollout_id)
        # Before the checkpoint: a run that is killed while it is written repeats the step, and loses none of these.
        self._metrics.log(rollout_id, metrics)
        self._health.look_at(rollout_id, metrics)
        timing: dict[str, float] = {}
        if not config.debug_rollout_only:
            if self._saves.due(rollout_id) or self._interrupts.asked:
                # Now, while the trainer has its device: it leaves when the engines get its weights.
                with phases.aside("save"):
                    timing |= self._save(rollout_id)
                phases.leave_out(timing["perf/save_stall_seconds"])
                if self._interrupts.asked:  # the engines need no weights any more
                    self._metrics.log(rollout_id, timing)
                    return metrics | timing | phases.metrics(metrics)
            if config.num_engines:
                is_last = rollout_id + 1 == self._num_rollout
                timing["rollout/weight_version"] = float(self._hand_over(phases, draws=not is_last))
        timing |= phases.metrics(metrics)
        if not config.max_staleness:  # else generation has no phase of its own
            timing |= generation_speed(metrics | timing, config.num_engines * config.rollout_num_gpus_per_engine)
        timing |= self._engine_memory | {"memory/driver_host_gib": host_bytes() / GIB}
        self._metrics.log(rollout_id, timing)
        return metrics | timing

    def _save(self, rollout_id: int) -> dict[str, float]:
        """Begin a checkpoint, see `Saves`."""
        data, trackers = self._rollout.state_dict(), self._metrics.state_dict()
        return self._saves.save(rollout_id, {"data": data, "flags": flag_values(self._config), "trackers": trackers})

    def _save_at_once(self, rollout_id: int) -> None:
        """Interrupted: let the checkpoint of the last step be complete, if there is to be one."""
        if self._config.save is None or self._config.debug_rollout_only:
            return
        if self._saves.last != rollout_id:
            if self._config.offloads_rollout:
                self._interrupt()
            self._cluster.begin_training()  # after a step trainers have left their devices
            self._save(rollout_id)
        self._saves.look(wait=True)
        logger.info("saved after rollout %d in %s", rollout_id, self._config.save)

    def _hand_over(self, phases: Phases, *, draws: bool = True) -> int:
        """The trainer's weights into the engines, and the devices with them. Returns the weight version.

        `draws`: with --max-staleness, generation of a rollout that is to come begins at once.
        """
        cluster = self._cluster
        cluster.engines.check()
        with phases("sync"):
            self._interrupt()
        with phases("offload"):
            cluster.begin_update()
        with phases("sync"):
            version = cluster.update_weights()
        with phases("offload"):
            cluster.begin_generation()
        if self._config.max_staleness:
            self._rollout.go_on(version, draws=draws)
        return version

    def _interrupt(self) -> None:
        """With --max-staleness: unfinished conversations leave the engines, and go on after the update."""
        if self._config.max_staleness:
            self._rollout.hold()
            while not self._rollout.drained(0):
                self._cluster.engines.abort()
                self._rollout.drained(ABORT_SECONDS)

    def _evaluate(self, rollout_id: int) -> None:
        """Evaluate the weights after `rollout_id` (-1: before any training)."""
        begin = time.monotonic()
        with self._cluster.engines.checked():
            metrics = self._validate() if self._config.loss.supervised else self._rollout.evaluate(rollout_id)
        seconds = time.monotonic() - begin
        self._metrics.log(rollout_id, metrics | {"perf/eval_seconds": seconds})
        wanted = ("/accuracy", "/reward", "/loss")
        shown = [f"{name} {value:.3f}" for name, value in metrics.items() if name.endswith(wanted)]
        when = "before training" if rollout_id < 0 else f"after rollout {rollout_id}"
        logger.info("evaluation %s: %s", when, ", ".join(shown))

    def _validate(self) -> dict[str, float]:
        """SFT: the loss on held-out conversations."""
        from slime_retool.rollout.held_out import held_out_metrics

        metrics: dict[str, float] = {}
        for name, samples in self._rollout.held_out().items():
            metrics |= held_out_metrics(name, samples, self._cluster.trainers.log_probs(samples))
        return metrics

    def _export(self, source: str) -> None:
        from megatron_bridge.convert import convert_torch_dist_to_hf

        config = self._config
        assert config.save_hf is not None and config.hf_checkpoint is not None
        convert_torch_dist_to_hf(source, config.save_hf, config.hf_checkpoint, progress=not config.no_progress)
        logger.info("wrote the Hugging Face checkpoint %s", config.save_hf)


if __name__ == "__main__":
    sys.exit(main())
