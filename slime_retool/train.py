"""The training loop: `python -m slime_retool.train FLAGS` (`--help` lists them).

    generate -> train -> update the engines' weights -> save -> evaluate

With --colocate trainer and engines take turns on the same devices:

    generate -> engines give back their memory, trainers take theirs -> train -> trainers keep only weights, engines
    take room for theirs -> update -> trainers leave, engines take room for their cache -> generate

Exit codes: 0 done, 1 a failure while running, 2 a mistake in what was given (flags, data, checkpoints; one line that
says what to change), 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from megatron_bridge import flags
from megatron_bridge.arithmetic import GIB
from megatron_bridge.checkpoint import exists, prune
from slime_retool.config import Config, parse_config, resolve, validate
from slime_retool.engine.flag_check import ServerFlagCheck
from slime_retool.errors import SlimeRetoolError, UserError
from slime_retool.metrics import JsonlTracker, Metrics, Phases, TensorBoardTracker, Tracker, WandbTracker, host_bytes
from slime_retool.run_folder import free_bytes, set_aside

logger = logging.getLogger("slime_retool")
PROG = "slime_retool.train"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, validate, run. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    try:
        config = resolve(parse_config(argv))
        validate(config)
        with ServerFlagCheck(config) as check:
            if config.dry_run:
                check.wait()
                print(" \\\n  ".join([f"python -m {PROG}", *_flag_lines(config)]))
                for name in flags.secrets_in(config, *config.hook_args):
                    print(f"{PROG}: {flags.option_name(name)} is a secret and not printed", file=sys.stderr)
            else:
                run(config, check)
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted; everything it started has been ended", file=sys.stderr)
        return 130
    except UserError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    except SlimeRetoolError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


def _interrupt(signum: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _flag_lines(config: Config) -> list[str]:
    """The resolved configuration as flags for a shell, one option a line, without its secrets."""
    lines: list[str] = []
    for token in flags.to_flags(config, *config.hook_args):
        if token.startswith("--"):
            lines.append(token)
        else:
            lines[-1] += f" {shlex.quote(token)}"
    for name, values in config.sglang_server_flags.items():
        lines.append(shlex.join([f"--sglang-{name.removeprefix('--')}", *values]))
    return lines


def run(config: Config, check: ServerFlagCheck) -> None:
    """Run the whole loop. Whatever it starts is ended when it returns or raises.

    `check` goes on beside the start of Ray and the reading of the data; trainers and engines wait for it.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    # Imported here, so that --help and configuration errors answer at once.
    from slime_retool.cluster.cluster import Cluster
    from slime_retool.rollout.manager import RolloutManager

    os.makedirs(config.output_dir, exist_ok=True)
    with Cluster(config) as cluster:
        signal.signal(signal.SIGTERM, _interrupt)  # again: Ray's start puts its own crash handler there
        with RolloutManager(config) as rollout:
            config = rollout.config  # its data say how many rollouts --num-epoch makes
            check.wait()
            if not _resumes(config):
                set_aside(config.output_dir)
            with closing(Metrics(trackers_of(config))) as metrics:
                Loop(config, cluster, rollout, metrics).run()


def trackers_of(config: Config) -> list[Tracker]:
    """Where a run's metrics go."""
    folder = Path(config.output_dir)
    trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl")]
    if config.use_tensorboard:
        trackers.append(TensorBoardTracker(folder / "tensorboard"))
    if config.use_wandb:
        tracker = WandbTracker(
            config.wandb_key,
            project=config.wandb_project,
            group=config.wandb_group,
            name=config.wandb_name,
            mode=config.wandb_mode,
            dir=config.output_dir,
            config={
                **flags.public_values(config, *config.hook_args),
                "sglang_server_flags": config.sglang_server_flags,
            },
        )
        trackers.append(tracker)
    return trackers


def _resumes(config: Config) -> bool:
    """Whether --load holds a checkpoint, as the trainers will find it; nothing else knows of earlier rollouts."""
    return not config.debug_rollout_only and config.load is not None and exists(config.load)


class Loop:
    """The loop's state: where it is, and the parts it drives."""

    def __init__(self, config: Config, cluster: Any, rollout: Any, metrics: Metrics) -> None:
        self._config, self._cluster, self._rollout, self._metrics = config, cluster, rollout, metrics
        self._engine_memory: dict[str, float] = {}

    def run(self) -> None:
        config = self._config
        assert config.num_rollout is not None
        first = self._start()
        if first >= config.num_rollout > 0:
            logger.info("the checkpoint is at rollout %d of %d: nothing left to do", first, config.num_rollout)
        if (
            config.eval_interval is not None
            and not config.skip_eval_before_train
            and (first < config.num_rollout or config.num_rollout == 0)
        ):
            self._evaluate(first - 1)
        self._warn_of_room(first)
        bar = tqdm(
            range(first, config.num_rollout),
            initial=first,
            total=config.num_rollout,
            desc="training" if config.debug_train_only else "rollouts",
            disable=config.no_progress,
        )
        for rollout_id in bar:
            figures = self._step(rollout_id)
            bar.set_postfix(_headline(figures))
        # After a run with nothing left to do the last checkpoint is the one it was to go on from.
        source = config.save if first < config.num_rollout else config.load if first > 0 else None
        if config.save_hf is not None and source is not None and not config.debug_rollout_only:
            self._export(source)

    def _start(self) -> int:
        """Start trainers and engines, restore the saved state. Returns the first rollout's number."""
        config, cluster = self._config, self._cluster
        assert config.num_rollout is not None
        first = 0
        if config.num_engines and not config.colocate:
            cluster.engines.launch()
        if not config.debug_rollout_only:
            logger.info("starting %d trainer process(es) on %s", config.world_size, config.device)
            first, state = cluster.trainers.start(config.num_rollout)
            if "data" in state:
                self._rollout.load_state_dict(state["data"])
        if config.num_engines:
            urls = cluster.engines.start()
            self._engine_memory = cluster.engines.memory()
            self._rollout.connect(cluster.engines.start_router(urls))
            if not config.debug_rollout_only:
                cluster.trainers.connect_engines(urls)
                cluster.begin_training()
                self._hand_over(Phases())
        return first

    def _step(self, rollout_id: int) -> dict[str, float]:
        config, cluster = self._config, self._cluster
        assert config.num_rollout is not None
        phases = Phases()
        with phases("generate"):
            with self._blaming_engines():
                batch = self._rollout.generate(rollout_id)
        cluster.engines.check()
        figures = dict(batch.metrics)
        last = rollout_id + 1 == config.num_rollout
        if not config.debug_rollout_only:
            with phases("offload"):
                cluster.begin_training()
            figures |= cluster.trainers.train(batch, rollout_id)
        # Before the checkpoint: a run that is killed while it is written repeats the step, and loses none of these.
        self._metrics.log(rollout_id, figures)
        timing: dict[str, float] = {}
        if not config.debug_rollout_only:
            if self._saves_at(rollout_id):
                # Now, while the trainer has its device: it leaves when the engines get its weights.
                timing["perf/save_seconds"] = self._save(rollout_id)
                phases.leave_out(timing["perf/save_seconds"])
            if config.num_engines:
                timing["rollout/weight_version"] = float(self._hand_over(phases))
        timing |= phases.figures(figures)
        timing |= self._generation_speed(figures | timing) | self._engine_memory
        timing["memory/driver_host_gib"] = host_bytes() / GIB
        self._metrics.log(rollout_id, timing)
        if self._due(config.eval_interval, rollout_id) or (last and config.eval_interval is not None):
            self._evaluate(rollout_id)
        return figures | timing

    def _saves_at(self, rollout_id: int) -> bool:
        config = self._config
        assert config.num_rollout is not None
        return config.save is not None and (
            rollout_id + 1 == config.num_rollout or self._due(config.save_interval, rollout_id)
        )

    def _save(self, rollout_id: int) -> float:
        """Write a checkpoint, and delete old ones once those of actor and critic are complete: one goes on with the
        other. Returns the seconds it took."""
        config, begin = self._config, time.monotonic()
        self._cluster.trainers.save(rollout_id, {"data": self._rollout.state_dict()})
        if config.save_keep is not None:
            for folder in config.save_folders.values():
                prune(folder, config.save_keep)
        return time.monotonic() - begin

    def _warn_of_room(self, first: int) -> None:
        config = self._config
        assert config.num_rollout is not None
        if config.save is None or config.save_keep is not None or config.debug_rollout_only:
            return
        count = sum(map(self._saves_at, range(first, config.num_rollout)))
        each = config.bytes_of_a_save
        free = free_bytes(config.save)
        if count * each > free:
            logger.warning(
                "--save %s: %d checkpoints of %.1f GiB are to come, %.1f GiB are free; --save-keep N deletes old ones",
                config.save, count, each / GIB, free / GIB,
            )  # fmt: skip

    def _generation_speed(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Tokens that the model wrote per second of the generation phase and GPU (CPU: process) of the engines."""
        gpus = self._config.num_engines * self._config.rollout_num_gpus_per_engine
        if not gpus or "rollout/model_tokens" not in figures:
            return {}
        rate = figures["rollout/model_tokens"] / max(figures["perf/generate_seconds"], 1e-9)
        return {"perf/generate_tokens_per_second_per_gpu": rate / gpus}

    def _hand_over(self, phases: Phases) -> int:
        """The trainer's weights into the engines, and the devices with them. Returns the weight version."""
        cluster = self._cluster
        cluster.engines.check()
        with phases("offload"):
            cluster.begin_update()
        with phases("sync"):
            version = cluster.update_weights()
        with phases("offload"):
            cluster.begin_generation()
        return version

    @contextmanager
    def _blaming_engines(self) -> Iterator[None]:
        """Where samples failed, an engine or a router that died says more."""
        try:
            yield
        except SlimeRetoolError:
            self._cluster.engines.check()
            raise

    @staticmethod
    def _due(interval: int | None, rollout_id: int) -> bool:
        return interval is not None and (rollout_id + 1) % interval == 0

    def _evaluate(self, rollout_id: int) -> None:
        """Evaluate the weights after `rollout_id` (-1: before any training)."""
        started = time.monotonic()
        with self._blaming_engines():
            figures = self._validate() if self._config.loss_type == "sft_loss" else self._rollout.evaluate(rollout_id)
        figures["perf/eval_seconds"] = time.monotonic() - started
        self._metrics.log(rollout_id, figures)
        headline = {name: value for name, value in figures.items() if name.endswith(("/accuracy", "/loss"))}
        logger.info("rollout %d: %s", rollout_id, ", ".join(f"{name} {value:.3f}" for name, value in headline.items()))

    def _validate(self) -> dict[str, float]:
        """SFT: the loss on held-out conversations."""
        from slime_retool.rollout.held_out import held_out_figures

        figures: dict[str, float] = {}
        for name, samples in self._rollout.held_out().items():
            figures |= held_out_figures(name, samples, self._cluster.trainers.log_probs(samples))
        return figures

    def _export(self, source: str) -> None:
        from megatron_bridge.convert import convert_torch_dist_to_hf

        config = self._config
        assert config.save_hf is not None and config.hf_checkpoint is not None
        convert_torch_dist_to_hf(source, config.save_hf, config.hf_checkpoint, progress=not config.no_progress)
        logger.info("wrote the Hugging Face checkpoint %s", config.save_hf)


def _headline(figures: dict[str, float]) -> dict[str, str]:
    """The few figures worth a place beside the progress bar."""
    wanted = {
        "train/loss": "loss",
        "rollout/reward_mean": "reward",
        "rollout/tool_call_rate": "tools",
        "train/logprob_abs_diff": "|dlogp|",
    }
    return {short: f"{figures[name]:.4g}" for name, short in wanted.items() if name in figures}


if __name__ == "__main__":
    sys.exit(main())
