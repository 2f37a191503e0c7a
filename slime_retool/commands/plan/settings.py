"""The settings that a plan tries: what could save memory, and what could save time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_bridge.flags import option_name
from megatron_bridge.model_config import required
from slime_retool.commands.plan.memory import MEM_FRACTION
from slime_retool.config import Config

Setting = dict[str, Any]
"""Options that change together: name -> value."""
RECOMPUTE_ALL: Setting = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip


def flags_of(setting: Setting) -> str:
    """The setting on a command line."""
    words: list[str] = []
    for name, value in setting.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [option_name(name), *(f"{each:g}" if isinstance(each, float) else str(each) for each in values)]
    return " ".join(words)


def settings_that_save_memory(config: Config) -> Iterator[list[Setting]]:
    """Groups of settings of which a change takes one each."""
    if config.recompute_granularity != "full":
        yield [RECOMPUTE_ALL | ({"recompute_modules": []} if config.recompute_modules else {})]
    tokens = config.max_tokens_per_gpu
    if config.use_dynamic_batch_size and tokens is not None:
        yield [{"max_tokens_per_gpu": tokens >> by} for by in (1, 2, 3) if tokens >> by >= 1024]
    host = config.actor_num_gpus_per_node
    split = _larger(config, "tensor_model_parallel_size", (2, 4, 8), most=host)
    yield [setting | {"sequence_parallel": True} for setting in split]
    pp = config.pipeline_model_parallel_size
    yield [setting for size in (2, 4, 8, 16) if size > pp for setting in _pipelines(config, size)]
    yield _larger(config, "context_parallel_size", (2, 4, 8))
    if config.num_experts is not None:
        yield _larger(config, "expert_model_parallel_size", (2, 4, 8, 16, 32))
    yield _larger(config, "actor_num_nodes", (2, 4, 8, 16, 32))
    if not config.optimizer_cpu_offload:
        yield [{"optimizer_cpu_offload": True}]
    if config.num_engines and not config.rollout_external_urls:
        fraction = config.sglang_mem_fraction_static or MEM_FRACTION
        fractions = [round(0.05 * step, 2) for step in range(17, 4, -1) if 0.05 * step < fraction - 0.01]
        yield [{"sglang_mem_fraction_static": fraction} for fraction in fractions]
        yield _larger(config, "rollout_num_gpus_per_engine", (2, 4, 8), most=host)


def settings_that_save_time(config: Config) -> Iterator[list[Setting]]:
    """Groups of settings of which a change takes one each, on the same GPUs."""
    yield list(_layouts(config))
    tokens = config.max_tokens_per_gpu
    if config.use_dynamic_batch_size and tokens is not None:
        yield [{"max_tokens_per_gpu": by * tokens} for by in (2, 4)]
    yield _larger(config, "keep_logits_gib", (5.0, 10.0, 20.0))
    if config.num_engines and not config.rollout_external_urls:
        workers = config.rollout_num_gpus_per_engine
        fitting = [size for size in (1, 2, 4, 8) if size != workers and config.num_engines * workers % size == 0]
        yield [{"rollout_num_gpus_per_engine": size} for size in fitting]
        fraction = config.sglang_mem_fraction_static or MEM_FRACTION
        yield [{"sglang_mem_fraction_static": more} for more in (0.5, 0.6, 0.7, 0.8, 0.85) if more > fraction]


def _larger(config: Config, name: str, values: Sequence[float], most: float = float("inf")) -> list[Setting]:
    """`name` at each value above its own, and at most `most`."""
    return [{name: value} for value in values if config.__dict__[name] < value <= most]


def _layouts(config: Config) -> Iterator[Setting]:
    """Tensor-, pipeline- and context-parallel sizes for the same processes, with every way to shorten the last stage,
    which has the output layer as well; each with what a run recomputes, and without, for which a layout makes room.
    """
    recomputing: list[Setting] = [{}]
    if config.recompute_granularity == "full":
        recomputing.append({"recompute_granularity": "none"})
    for tp, pp, cp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8)):
        if config.world_size % (tp * pp * cp) or tp > config.actor_num_gpus_per_node:
            continue
        if cp > 1 and config.attention_backend == "flash" and config.transformer_impl != "local":
            continue  # `layer_spec.resolve_attention_backend` refuses it
        tensor = {"tensor_model_parallel_size": tp} | ({"sequence_parallel": True} if tp > 1 else {})
        for stages, recompute in itertools.product(_pipelines(config, pp), recomputing):
            setting: Setting = {}
            for part in (tensor, stages, {"context_parallel_size": cp}, recompute):
                if any(config.__dict__[name] != value for name, value in part.items()):
                    setting |= part
            if setting:
                yield setting


def _pipelines(config: Config, size: int) -> list[Setting]:
    """Ways to have `size` stages, alike but for the last: no longer than the others where layers divide so."""
    layers = required(config, "num_layers")
    if size == 1:
        return [_pipeline(config, size, layers)]
    lasts = [last for last in range(1, layers - size + 2) if (layers - last) % (size - 1) == 0]
    return [_pipeline(config, size, last) for last in lasts if last * size <= layers or last == lasts[0]]


def _pipeline(config: Config, size: int, last: int) -> Setting:
    """`size` stages, the last of so many layers. Stage lengths are named where they differ, or were named before."""
    layers, first = required(config, "num_layers"), config.decoder_first_pipeline_num_layers
    setting: Setting = {"pipeline_model_parallel_size": size}
    if last * size != layers or first is not None or config.decoder_last_pipeline_num_layers is not None:
        setting["decoder_last_pipeline_num_layers"] = last
    if first is not None and size > 1:
        setting["decoder_first_pipeline_num_layers"] = (layers - last) // (size - 1)
    return setting
