"""What a run needs on one kind of GPU: memory of each GPU at its fullest moments, and seconds of each phase."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bridge.arithmetic import GIB
from megatron_bridge.arithmetic.cards import Card
from megatron_bridge.arithmetic.flops import model_flops
from megatron_bridge.arithmetic.parameters import active_parameters, total_parameters
from slime_retool.commands.plan.generation import generate_seconds, offload_seconds, sync_seconds
from slime_retool.commands.plan.memory import (
    ENGINE_RUNTIME_BYTES,
    EngineMemory,
    TrainerMemory,
    engine_memory,
    host_memory,
    micro_batches,
    trainer_memories,
)
from slime_retool.commands.plan.timing import forward_seconds, train_seconds
from slime_retool.commands.plan.workload import Workload
from slime_retool.config import Config
from slime_retool.config.algorithm import check_groups
from slime_retool.config.engines import check_engines
from slime_retool.config.lora import check_served_adapters
from slime_retool.config.parallel import check_parallel
from slime_retool.config.validate import check_batches, check_precision

USABLE_SHARE = 0.95
"""Share of a GPU's memory that a plan may fill: the allocator fragments, batches vary."""


@dataclass(slots=True)
class StepTime:
    """Seconds of each phase of one rollout."""

    generate: float
    log_probs: float
    train: float
    """The first model's; `others` is the time that further ones add."""
    others: float
    sync: float
    offload: float

    @property
    def total(self) -> float:
        return self.generate + self.log_probs + self.train + self.others + self.sync + self.offload


@dataclass(slots=True)
class Plan:
    """What a run needs on one kind of GPU."""

    parameters: int
    active_parameters: int
    """Those that one token meets (all of them without experts)."""
    gpus: int
    """GPUs of training and generation together."""
    card: Card
    trainer: TrainerMemory
    engine: EngineMemory | None
    moments: dict[str, int]
    """Bytes on the fullest GPU while training (each group of processes), generating, updating the engines."""
    host: int
    """Page-locked bytes on each training host."""
    disk: int
    """Bytes of one checkpoint of all models."""
    time: StepTime
    workload: Workload
    micro_batches: int
    mfu: float
    """The training phase's, counted as `perf/train_mfu` is."""
    problems: list[str]
    """Why it does not fit; empty when it does."""

    @property
    def resident(self) -> int:
        """Bytes on the fullest GPU at the fullest moment."""
        return max(self.moments.values())

    @property
    def fits(self) -> bool:
        return not self.problems


def make_plan(config: Config, card: Card, workload: Workload) -> Plan:
    """The plan of a run that `check_layout` accepts."""
    trainer, engine, moments = memory_of_moments(config, card, workload)
    time = _step_time(config, card, workload, trainer)
    trainer_gpus = config.world_size + sum(model.config.world_size for model in config.roles if model.separate)
    engine_gpus = config.num_engines * config.rollout_num_gpus_per_engine
    length = workload.attended
    of_sequence = model_flops(config, [length], training=True, logit_tokens=length * workload.learned, lora=config.lora)
    useful = of_sequence / length * workload.tokens
    return Plan(
        parameters=total_parameters(config),
        active_parameters=active_parameters(config),
        gpus=trainer_gpus + (0 if config.colocate else engine_gpus),
        card=card,
        trainer=trainer,
        engine=engine,
        moments=moments,
        host=host_memory(config, trainer),
        disk=config.bytes_of_a_save,
        time=time,
        workload=workload,
        micro_batches=micro_batches(config, workload),
        mfu=useful / (time.train * config.world_size * card.peak_flops),
        problems=find_problems(card, workload, engine, moments),
    )


def check_layout(config: Config) -> None:
    """Refuse (ConfigError) what a run would be refused for: sizes that divide neither the model, the GPUs nor the
    batch, and options that do not go together."""
    check_parallel(config)
    check_batches(config)
    check_groups(config)
    check_precision(config)
    check_engines(config)
    check_served_adapters(config)


def memory_of_moments(
    config: Config, card: Card, workload: Workload
) -> tuple[TrainerMemory, EngineMemory | None, dict[str, int]]:
    """(trainer, engine, bytes on the fullest GPU at each moment)."""
    trainer, apart = trainer_memories(config, workload)
    engine = engine_memory(config, card) if config.num_engines else None
    moments = {"training": trainer.total}
    if engine is not None:
        moments["generating"] = engine.total
    if engine is not None and config.colocate:
        state = trainer.weights + trainer.gradients + trainer.optimizer + trainer.others
        cache = 0 if config.offloads_cache else engine.kv_cache
        # An engine that is sent adapters alone keeps its weights.
        asleep = ENGINE_RUNTIME_BYTES + cache + (engine.weights + engine.adapters if config.serves_adapters else 0)
        moments["training"] += asleep if config.offloads_rollout else engine.total
        moments["generating"] += trainer.runtime + (0 if config.offloads_train else state)
        if config.offloads_train and config.offloads_rollout:
            # After training only weights stay; engines take room for theirs, and for their cache when it has left.
            buckets = 2 * config.update_weight_buffer_size
            held = engine.weights + engine.adapters + engine.runtime + cache
            moments["updating"] = trainer.weights + trainer.runtime + held + buckets
    moments |= {f"training the {name}": held for name, held in apart.items()}
    return trainer, engine, moments


def find_problems(card: Card, workload: Workload, engine: EngineMemory | None, moments: dict[str, int]) -> list[str]:
    """Why it does not fit, in words; none when it does."""
    room = USABLE_SHARE * card.memory_bytes
    found = [
        f"{moment} takes {bytes_ / GIB:.1f} GiB of a GPU's {room / GIB:.1f} usable"
        for moment, bytes_ in moments.items()
        if bytes_ > room
    ]
    if engine is not None and engine.kv_tokens < workload.longest:
        found.append(
            f"an engine's cache holds {engine.kv_tokens:,} tokens beside {engine.weights / GIB:.1f} GiB of weights on "
            f"each of its GPUs, one sample takes {workload.longest:,.0f}"
        )
    return found


def _step_time(config: Config, card: Card, workload: Workload, trainer: TrainerMemory) -> StepTime:
    passes = int(config.recomputes_log_probs) + int(config.needs_reference)
    train, others = train_seconds(config, card, workload), 0.0
    for model in config.roles[1:]:
        trained = train_seconds(model.config, card, workload, logits=model.has_logits)
        if model.separate:  # it trains while the first one does
            trained = max(0.0, trained - train)
        others += forward_seconds(model.config, card, workload, logits=model.has_logits) + trained
    return StepTime(
        generate=generate_seconds(config, card, workload),
        log_probs=passes * forward_seconds(config, card, workload) if passes else 0.0,
        train=train,
        others=others,
        sync=sync_seconds(config, card),
        offload=offload_seconds(config, card, trainer),
    )
