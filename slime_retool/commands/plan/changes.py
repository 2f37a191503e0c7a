"""Which flags would make a run fit, and which would make one that fits faster."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_bridge.arithmetic.cards import Card
from megatron_bridge.model_config import required
from slime_retool.commands.plan.memory import MEM_FRACTION, engine_memory
from slime_retool.commands.plan.plan import check_layout, find_problems, make_plan, memory_of_moments
from slime_retool.commands.plan.workload import Workload
from slime_retool.config import Config
from slime_retool.errors import ConfigError

Setting = tuple[str, dict[str, Any]]
"""(flags, what they set)"""
MOST_CHANGES = 4
FASTER = 0.03
"""Share of a rollout's seconds that a change must save to be named; less is within the plan's error."""


@dataclass(frozen=True, slots=True)
class Change:
    """Flags to add to those given (the last of a repeated flag counts), and what the run is with them."""

    flags: str
    resident: int
    seconds: float
    gpus: int


def changes_that_fit(
    config: Config, card: Card, *, mean_prompt: float, mean_response: float, limit: int = 3
) -> list[Change]:
    """The fewest settings that must change; of each choice of settings the values with least GPU time, best first."""
    lengths = {"mean_prompt": mean_prompt, "mean_response": mean_response}
    groups = [group for group in _settings_that_save_memory(config) if group]
    for count in range(1, MOST_CHANGES + 1):
        found: list[Change] = []
        for chosen in itertools.combinations(groups, count):
            fitting = [
                change
                for settings in itertools.product(*chosen)
                if (change := _with(config, card, settings, **lengths)) is not None
            ]
            if fitting:
                found.append(min(fitting, key=_gpu_seconds))
        if found:
            return sorted(found, key=_gpu_seconds)[:limit]
    return []


def changes_that_speed_up(
    config: Config, card: Card, seconds: float, *, mean_prompt: float, mean_response: float
) -> list[Change]:
    """The setting that saves most of a rollout's `seconds` on the same GPUs, then the one that saves most beside it,
    and so on; each change includes those before it. Only what leaves the training the same but for rounding.
    """
    groups = [group for group in _settings_that_save_time(config) if group]
    chosen: tuple[Setting, ...] = ()
    changes: list[Change] = []
    while groups:
        best: tuple[Change, tuple[Setting, ...], list[Setting]] | None = None
        for group in groups:
            for setting in group:
                settings = (*chosen, setting)
                change = _with(config, card, settings, mean_prompt=mean_prompt, mean_response=mean_response)
                if change is not None and (best is None or change.seconds < best[0].seconds):
                    best = change, settings, group
        if best is None or best[0].seconds > (1 - FASTER) * seconds:
            break
        change, chosen, group = best
        changes.append(change)
        groups.remove(group)
        seconds = change.seconds
    return changes


def _with(
    config: Config, card: Card, settings: Sequence[Setting], *, mean_prompt: float, mean_response: float
) -> Change | None:
    """The run with these settings; None where it cannot be built or does not fit."""
    # `dataclasses.replace`, thirty times as fast: a plan of a large model tries hundreds of thousands.
    changed = copy.copy(config)
    for _, fields in settings:
        vars(changed).update(fields)
    workload = Workload.of_run(changed, mean_prompt, mean_response)
    # What is quick and refuses most comes first: some runs have hundreds of thousands of candidates.
    if changed.num_engines and engine_memory(changed, card).kv_tokens < workload.longest:
        return None
    try:
        check_layout(changed)
    except ConfigError:
        return None
    _, engine, moments = memory_of_moments(changed, card, workload)
    if find_problems(card, workload, engine, moments):
        return None
    plan = make_plan(changed, card, mean_prompt=mean_prompt, mean_response=mean_response)
    return Change(" ".join(flags for flags, _ in settings), plan.resident, plan.time.total, plan.gpus)


def _gpu_seconds(change: Change) -> tuple[float, str]:
    return change.seconds * change.gpus, change.flags


def _settings_that_save_memory(config: Config) -> Iterator[list[Setting]]:
    """Groups of settings of which a change takes one each."""
    uniform = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    full = (uniform + " --recompute-modules" * bool(config.recompute_modules), {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
        "recompute_modules": [],
    })  # fmt: skip
    yield [] if config.recompute_granularity == "full" else [full]
    tokens = config.max_tokens_per_gpu
    if config.use_dynamic_batch_size and tokens is not None:
        halves = [tokens >> by for by in (1, 2, 3) if tokens >> by >= 1024]
        yield [(f"--max-tokens-per-gpu {half}", {"max_tokens_per_gpu": half}) for half in halves]
    tp = config.tensor_model_parallel_size
    yield [
        (
            f"--tensor-model-parallel-size {size} --sequence-parallel",
            {"tensor_model_parallel_size": size, "sequence_parallel": True},
        )
        for size in (2, 4, 8)
        if tp < size <= config.actor_num_gpus_per_node
    ]
    pp = config.pipeline_model_parallel_size
    yield [setting for size in (2, 4, 8, 16) if size > pp for setting in _pipelines(config, size)]
    yield [
        (f"--context-parallel-size {size}", {"context_parallel_size": size})
        for size in (2, 4, 8)
        if size > config.context_parallel_size
    ]
    if config.num_experts is not None:
        yield [
            (f"--expert-model-parallel-size {size}", {"expert_model_parallel_size": size})
            for size in (2, 4, 8, 16, 32)
            if size > config.expert_model_parallel_size
        ]
    yield [
        (f"--actor-num-nodes {nodes}", {"actor_num_nodes": nodes})
        for nodes in (2, 4, 8, 16, 32)
        if nodes > config.actor_num_nodes
    ]
    if not config.optimizer_cpu_offload:
        yield [("--optimizer-cpu-offload", {"optimizer_cpu_offload": True})]
    if config.num_engines and not config.rollout_external_urls:
        fraction = config.sglang_mem_fraction_static or MEM_FRACTION
        fractions = [round(0.05 * step, 2) for step in range(17, 4, -1) if 0.05 * step < fraction - 0.01]
        yield [(f"--sglang-mem-fraction-static {f}", {"sglang_mem_fraction_static": f}) for f in fractions]
        workers = config.rollout_num_gpus_per_engine
        wider = [size for size in (2, 4, 8) if workers < size <= config.actor_num_gpus_per_node]
        yield [(f"--rollout-num-gpus-per-engine {size}", {"rollout_num_gpus_per_engine": size}) for size in wider]


def _settings_that_save_time(config: Config) -> Iterator[list[Setting]]:
    """Groups of settings of which a change takes one each."""
    yield list(_layouts(config))
    tokens = config.max_tokens_per_gpu
    if config.use_dynamic_batch_size and tokens is not None:
        yield [(f"--max-tokens-per-gpu {by * tokens}", {"max_tokens_per_gpu": by * tokens}) for by in (2, 4)]
    yield [
        (f"--keep-logits-gib {gib}", {"keep_logits_gib": float(gib)})
        for gib in (5, 10, 20)
        if gib > config.keep_logits_gib
    ]
    if config.num_engines and not config.rollout_external_urls:
        engine_gpus = config.num_engines * config.rollout_num_gpus_per_engine
        yield [
            (f"--rollout-num-gpus-per-engine {size}", {"rollout_num_gpus_per_engine": size})
            for size in (1, 2, 4, 8)
            if size != config.rollout_num_gpus_per_engine and engine_gpus % size == 0
        ]
        fraction = config.sglang_mem_fraction_static or MEM_FRACTION
        yield [
            (f"--sglang-mem-fraction-static {more}", {"sglang_mem_fraction_static": more})
            for more in (0.5, 0.6, 0.7, 0.8, 0.85)
            if more > fraction
        ]


def _layouts(config: Config) -> Iterator[Setting]:
    """Tensor-, pipeline- and context-parallel sizes for the same processes, with every way to shorten the last stage,
    which has the output layer as well; each with what a run recomputes, and without, for which a layout makes room.
    """
    recomputing: list[Setting] = [("", {})]
    if config.recompute_granularity == "full":
        recomputing.append(("--recompute-granularity none", {"recompute_granularity": "none"}))
    for tp, pp, cp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if config.world_size % (tp * pp * cp) or tp > config.actor_num_gpus_per_node:
            continue
        if cp > 1 and config.attention_backend == "flash" and config.transformer_impl != "local":
            continue  # `layer_spec.resolve_attention_backend` refuses it
        tensor: Setting = (
            f"--tensor-model-parallel-size {tp}" + " --sequence-parallel" * (tp > 1),
            {"tensor_model_parallel_size": tp, "sequence_parallel": config.sequence_parallel or tp > 1},
        )
        context: Setting = (f"--context-parallel-size {cp}", {"context_parallel_size": cp})
        for stages, recompute in itertools.product(_pipelines(config, pp), recomputing):
            parts = [part for part in (tensor, stages, context, recompute) if _changes(config, part)]
            if parts:
                yield " ".join(flags for flags, _ in parts), dict(itertools.chain(*(p.items() for _, p in parts)))


def _changes(config: Config, setting: Setting) -> bool:
    return any(config.__dict__[name] != value for name, value in setting[1].items())


def _pipelines(config: Config, size: int) -> list[Setting]:
    """So many stages, which are alike but for the last: no longer than the others where layers divide so."""
    layers = required(config, "num_layers")
    if size == 1:
        return [_pipeline(config, size, layers)]
    lasts = [last for last in range(1, layers - size + 2) if (layers - last) % (size - 1) == 0]
    return [_pipeline(config, size, last) for last in lasts if last * size <= layers or last == lasts[0]]


def _pipeline(config: Config, size: int, last: int) -> Setting:
    layers = required(config, "num_layers")
    even = last * size == layers
    unset = config.decoder_first_pipeline_num_layers is None and config.decoder_last_pipeline_num_layers is None
    fields: dict[str, Any] = {"pipeline_model_parallel_size": size}
    flags = f"--pipeline-model-parallel-size {size}"
    if not (even and unset):
        fields["decoder_last_pipeline_num_layers"] = last
        flags += f" --decoder-last-pipeline-num-layers {last}"
    if config.decoder_first_pipeline_num_layers is not None and size > 1:
        fields["decoder_first_pipeline_num_layers"] = first = (layers - last) // (size - 1)
        flags += f" --decoder-first-pipeline-num-layers {first}"
    return flags, fields
