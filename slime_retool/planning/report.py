"""Put a plan together, judge it, say what would make it fit."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megatron_bridge.model_config import check_expert_parallel, check_pipeline, check_tensor_parallel, required
from slime_retool.config import Config
from slime_retool.planning.cards import Card
from slime_retool.planning.memory import GIB, EngineMemory, TrainerMemory, engine_memory, micro_batches, trainer_memory
from slime_retool.planning.parameters import total_parameters
from slime_retool.planning.timing import StepTime, forward_flops, step_time

USABLE_SHARE = 0.95
"""Of a card's memory that a plan may fill: the allocator fragments, batches vary."""


@dataclass(slots=True)
class Plan:
    """What a run needs on one kind of card."""

    parameters: int
    gpus: int
    """Of training and generation together."""
    trainer: TrainerMemory
    engine: EngineMemory | None
    card: Card
    resident: int
    """Bytes on the fullest GPU, everything that is there at one time."""
    time: StepTime
    tokens: int
    """Of one rollout, prompts included."""
    micro_batches: int
    mfu: float
    """Of the training phase."""

    @property
    def fits(self) -> bool:
        return self.resident <= USABLE_SHARE * self.card.memory_bytes


@dataclass(frozen=True, slots=True)
class Change:
    """A change of flags that makes the run fit, or fit with less time."""

    flags: str
    resident: int
    seconds: float


def make_plan(config: Config, card: Card, *, mean_prompt: int, mean_response: int) -> Plan:
    """Raises ValueError for a layout that cannot be built."""
    check_tensor_parallel(config, config.tensor_model_parallel_size)
    check_expert_parallel(config, config.expert_model_parallel_size, config.expert_tensor_parallel_size)
    check_pipeline(
        required(config, "num_layers"),
        config.pipeline_model_parallel_size,
        first=config.decoder_first_pipeline_num_layers,
        last=config.decoder_last_pipeline_num_layers,
    )
    if config.world_size % config.model_parallel_size:
        raise ValueError(
            f"tensor x pipeline x context parallel size {config.model_parallel_size} does not divide the "
            f"{config.world_size} training GPUs; change --actor-num-nodes, --actor-num-gpus-per-node or the sizes"
        )
    mean = mean_prompt + mean_response
    trainer = trainer_memory(config, mean)
    engine = engine_memory(config, card) if config.num_engines else None
    time = step_time(config, card, mean_prompt=mean_prompt, mean_response=mean_response)
    tokens = config.samples_per_rollout * mean
    engine_gpus = config.num_engines * config.rollout_num_gpus_per_engine
    useful = 3 * forward_flops(config, mean) * tokens
    return Plan(
        parameters=total_parameters(config),
        gpus=max(config.world_size, engine_gpus) if config.colocate else config.world_size + engine_gpus,
        trainer=trainer,
        engine=engine,
        card=card,
        resident=_resident(config, trainer, engine),
        time=time,
        tokens=tokens,
        micro_batches=micro_batches(config, mean),
        mfu=useful / (time.train * config.world_size * card.peak_flops),
    )


def _resident(config: Config, trainer: TrainerMemory, engine: EngineMemory | None) -> int:
    if engine is None:
        return trainer.total
    if config.colocate:
        return trainer.total + engine.total
    return max(trainer.total, engine.total)


def changes_that_fit(
    config: Config, card: Card, *, mean_prompt: int, mean_response: int, limit: int = 3
) -> list[Change]:
    """Changes of the layout after which the plan fits, one flag group if that is enough, else two; fastest first."""

    def fitting(variants: Iterable[tuple[str, Config]]) -> list[Change]:
        found: dict[str, Change] = {}
        for flags, changed in variants:
            try:
                plan = make_plan(changed, card, mean_prompt=mean_prompt, mean_response=mean_response)
            except ValueError:
                continue
            if plan.fits:
                found[flags] = Change(flags, plan.resident, plan.time.total)
        return sorted(found.values(), key=lambda change: change.seconds)[:limit]

    single = list(_variants(config))
    pairs = ((f"{one} {two}", both) for one, changed in single for two, both in _variants(changed))
    return fitting(single) or fitting(pairs)


def _variants(config: Config) -> Iterator[tuple[str, Config]]:
    def variant(**fields: Any) -> Config:
        changed = copy.copy(config)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed

    if config.recompute_granularity != "full":
        yield (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            variant(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        )
    tokens = config.max_tokens_per_gpu
    while config.use_dynamic_batch_size and tokens is not None and tokens > 1024:
        tokens //= 2
        yield f"--max-tokens-per-gpu {tokens}", variant(max_tokens_per_gpu=tokens)
    for factor in (2, 4, 8):
        tp = config.tensor_model_parallel_size * factor
        if tp <= config.actor_num_gpus_per_node:
            yield (
                f"--tensor-model-parallel-size {tp} --sequence-parallel",
                variant(tensor_model_parallel_size=tp, sequence_parallel=True),
            )
        pp = config.pipeline_model_parallel_size * factor
        yield f"--pipeline-model-parallel-size {pp}", variant(pipeline_model_parallel_size=pp)
    for factor in (2, 4, 8):
        nodes = config.actor_num_nodes * factor
        yield f"--actor-num-nodes {nodes}", variant(actor_num_nodes=nodes)
    fraction = config.sglang_mem_fraction_static or 0.85
    while config.colocate and fraction > 0.25:
        fraction = round(fraction - 0.1, 2)
        yield f"--sglang-mem-fraction-static {fraction}", variant(sglang_mem_fraction_static=fraction)


def as_dict(plan: Plan, changes: list[Change]) -> dict[str, Any]:
    """For --json."""
    return {
        **asdict(plan),
        "fits": plan.fits,
        "trainer_total": plan.trainer.total,
        "engine_total": plan.engine.total if plan.engine else None,
        "step_seconds": plan.time.total,
        "changes": [asdict(change) for change in changes],
    }


def as_text(plan: Plan, changes: list[Change]) -> str:
    """A page for the terminal."""

    def gib(value: int) -> str:
        return f"{value / GIB:8.1f} GiB"

    t, lines = plan.trainer, []
    lines.append(f"{plan.parameters / 1e9:.2f}B parameters on {plan.gpus} x {plan.card.name}")
    lines.append("\ntrainer, on the fullest GPU")
    for name, value in (
        ("weights", t.weights), ("gradients", t.gradients), ("optimizer", t.optimizer),
        ("activations", t.activations), ("logits", t.logits), ("runtime", t.runtime), ("together", t.total),
    ):  # fmt: skip
        lines.append(f"  {name:<12}{gib(value)}")
    if plan.engine is not None:
        e = plan.engine
        lines.append("\nengine, on each of its GPUs")
        for name, value in (
            ("weights", e.weights),
            ("KV cache", e.kv_cache),
            ("runtime", e.runtime),
            ("together", e.total),
        ):
            lines.append(f"  {name:<12}{gib(value)}")
        lines.append(f"  the cache holds {e.kv_tokens:,} tokens")
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines.append(f"\n{verdict}: {gib(plan.resident).strip()} of {gib(plan.card.memory_bytes).strip()}")
    s = plan.time
    lines.append(
        f"\none rollout: {plan.tokens:,} tokens, {plan.micro_batches} micro-batch(es) per optimizer step and rank"
    )
    for name, seconds in (
        ("generate", s.generate), ("log-probs", s.log_probs), ("train", s.train), ("sync", s.sync),
        ("offload", s.offload), ("together", s.total),
    ):  # fmt: skip
        lines.append(f"  {name:<12}{seconds:8.1f} s")
    lines.append(f"  training at {100 * plan.mfu:.0f} % MFU")
    if not plan.fits:
        lines.append("\nwhat would make it fit" if changes else "\nno two changes make it fit: use more or larger GPUs")
    for change in changes:
        lines.append(f"  {change.flags}   ({gib(change.resident).strip()}, {change.seconds:.0f} s a rollout)")
    return "\n".join(lines)
