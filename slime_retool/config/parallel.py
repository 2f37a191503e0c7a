"""Parallel sizes that fit the model and the processes at hand, or one line that names the nearest sizes that do."""

from __future__ import annotations

import itertools

from megatron_bridge.model_config import (
    check_expert_parallel,
    check_pipeline,
    check_tensor_parallel,
    query_groups,
    required,
)
from slime_retool.config.config import Config
from slime_retool.config.require import as_config_error
from slime_retool.errors import ConfigError

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"


def check_parallel(config: Config) -> None:
    """Refuse (ConfigError) what does not divide the model or the run's training processes."""
    processes = f"({config.actor_num_nodes} nodes x {config.actor_num_gpus_per_node})"
    check_world_size(config, config.world_size, f"{config.world_size} training processes {processes}")
    tp = config.tensor_model_parallel_size
    with as_config_error():
        check_tensor_parallel(config, tp)
        check_expert_parallel(config, config.expert_model_parallel_size, config.expert_tensor_parallel_size)
        check_pipeline(
            required(config, "num_layers"),
            config.pipeline_model_parallel_size,
            first=config.decoder_first_pipeline_num_layers,
            last=config.decoder_last_pipeline_num_layers,
        )
    if config.num_experts is not None and tp > 1 and not config.sequence_parallel:
        raise ConfigError(f"{TP} {tp} with experts needs --sequence-parallel: add it")


def check_world_size(config: Config, world: int, processes: str | None = None) -> None:
    """Refuse (ConfigError) sizes whose products do not divide `world` processes.

    Dense parts: tensor x pipeline x context. Experts: expert-tensor x expert x pipeline.
    """
    processes = processes or f"{world} processes"
    for flag, size in _sizes(config).items():
        if size > world:
            raise ConfigError(f"{flag} {size} is more than the {processes}; use at most {world}")
    tp, pp, cp, ep, etp = _sizes(config).values()
    if world % (tp * pp * cp):
        names = {"tensor": tp, "pipeline": pp, "context": cp}
        shown = {name: size for name, size in names.items() if size > 1 or name != "context"}
        raise ConfigError(
            f"{' x '.join(shown)} parallel size {' x '.join(map(str, shown.values()))} = {tp * pp * cp} does not "
            f"divide the {processes}; the nearest that does is {_nearest_layout(config, world)}"
        )
    if world % (etp * ep * pp):
        experts = config.num_experts or 1
        fitting = [size for size in _divisors(experts) if world % (etp * size * pp) == 0]
        nearest = min(fitting, key=lambda size: (abs(size - ep), -size), default=None)
        advice = f"{ETP} 1 {EP} 1" if nearest is None else f"{EP} {nearest}"
        raise ConfigError(
            f"expert-tensor x expert x pipeline parallel size {etp} x {ep} x {pp} = {etp * ep * pp} does not divide "
            f"the {processes}; the nearest that does is {advice}"
        )


def _sizes(config: Config) -> dict[str, int]:
    return {
        TP: config.tensor_model_parallel_size,
        PP: config.pipeline_model_parallel_size,
        CP: config.context_parallel_size,
        EP: config.expert_model_parallel_size,
        ETP: config.expert_tensor_parallel_size,
    }


def _nearest_layout(config: Config, world: int) -> str:
    """The flags of the layout that fits and changes fewest sizes, by the smallest factor, context before tensor."""
    wanted = tuple(_sizes(config).values())[:3]
    layers, even = required(config, "num_layers"), config.decoder_first_pipeline_num_layers is None
    even = even and config.decoder_last_pipeline_num_layers is None

    def fits(layout: tuple[int, ...]) -> bool:
        tp, pp, cp = layout
        return (
            world % (tp * pp * cp) == 0
            and query_groups(config) % tp == 0
            and (pp == wanted[1] or (even and layers % pp == 0))
        )

    def distance(layout: tuple[int, ...]) -> tuple[int, float, list[bool], int]:
        changed = [new != old for new, old in zip(layout, wanted, strict=True)]
        factor = max(max(new / old, old / new) for new, old in zip(layout, wanted, strict=True))
        return sum(changed), factor, changed, -sum(layout)

    layouts = [layout for layout in itertools.product(_divisors(world), repeat=3) if fits(layout)]
    best = min(layouts or [(1, 1, 1)], key=distance)
    changed = [f"{flag} {size}" for flag, size, old in zip((TP, PP, CP), best, wanted, strict=True) if size != old]
    return " ".join(changed)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
