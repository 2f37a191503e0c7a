"""Which flags would make a run fit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_bridge.model_config import required
from slime_retool.config import Config
from slime_retool.planning.cards import Card
from slime_retool.planning.memory import MEM_FRACTION
from slime_retool.planning.plan import check_layout, find_problems, make_plan, memory_of_moments
from slime_retool.planning.workload import Workload

Setting = tuple[str, dict[str, Any]]
"""(flags, what they set)"""
MOST_CHANGES = 4


@dataclass(frozen=True, slots=True)
class Change:
    """Flags to add to those given (the last of a repeated flag counts), with which the run fits."""

    flags: str
    resident: int
    seconds: float
    gpus: int


def changes_that_fit(
    config: Config, card: Card, *, mean_prompt: float, mean_response: float, limit: int = 3
) -> list[Change]:
    """The fewest settings that must change; of each choice of settings the values with least GPU time, best first."""
    workload = Workload.of_run(config, mean_prompt, mean_response)
    groups = [group for group in _settings(config) if group]
    for count in range(1, MOST_CHANGES + 1):
        found: list[Change] = []
        for chosen in itertools.combinations(groups, count):
            fitting: list[Change] = []
            for settings in itertools.product(*chosen):
                changed = copy.copy(config)
                for name, value in itertools.chain.from_iterable(fields.items() for _, fields in settings):
                    setattr(changed, name, value)
                try:
                    check_layout(changed)
                except ValueError:
                    continue
                _, engine, moments = memory_of_moments(changed, card, workload)
                if not find_problems(card, workload, engine, moments):
                    plan = make_plan(changed, card, mean_prompt=mean_prompt, mean_response=mean_response)
                    flags = " ".join(flags for flags, _ in settings)
                    fitting.append(Change(flags, plan.resident, plan.time.total, plan.gpus))
            if fitting:
                found.append(min(fitting, key=_gpu_seconds))
        if found:
            return sorted(found, key=_gpu_seconds)[:limit]
    return []


def _gpu_seconds(change: Change) -> tuple[float, str]:
    return change.seconds * change.gpus, change.flags


def _settings(config: Config) -> Iterator[list[Setting]]:
    """Groups of settings of which a change takes one each."""
    full = ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", {
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
    yield [_pipeline(config, size) for size in (2, 4, 8, 16) if size > config.pipeline_model_parallel_size]
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
    if config.num_engines:
        fraction = config.sglang_mem_fraction_static or MEM_FRACTION
        fractions = [round(0.05 * step, 2) for step in range(17, 4, -1) if 0.05 * step < fraction - 0.01]
        yield [(f"--sglang-mem-fraction-static {f}", {"sglang_mem_fraction_static": f}) for f in fractions]
        workers = config.rollout_num_gpus_per_engine
        wider = [size for size in (2, 4, 8) if workers < size <= config.actor_num_gpus_per_node]
        yield [(f"--rollout-num-gpus-per-engine {size}", {"rollout_num_gpus_per_engine": size}) for size in wider]


def _pipeline(config: Config, size: int) -> Setting:
    """Layers that do not divide leave fewer to the last stage, which has the output layer as well."""
    fields: dict[str, Any] = {
        "pipeline_model_parallel_size": size,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
    }
    flags = f"--pipeline-model-parallel-size {size}"
    layers = required(config, "num_layers")
    if layers % size:
        last = layers - (size - 1) * -(-layers // size)
        if last < 1:  # the others cannot all have one layer more
            last = layers - (size - 1) * (layers // size)
        fields["decoder_last_pipeline_num_layers"] = last
        flags += f" --decoder-last-pipeline-num-layers {last}"
    return flags, fields
