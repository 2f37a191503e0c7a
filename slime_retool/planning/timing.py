"""Seconds of one rollout's phases, from operation and byte counts and a few measured efficiencies.

Operations are counted by `planning.flops`; training takes as many as three forward passes, full recomputation one more.
What a card reaches of its peak depends on the width of its matrices:

    efficiency(width) = E * width / (width + W)        width = hidden size, divided by sqrt(tp) under tensor parallelism

with E and W fitted to measurements of 0.6B, 1.7B and 4B shapes on an H200 (docs/performance.md).

Generation reads all weights and the cached keys and values for each token of a batch, and pays a fixed time per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_bridge.model_config import ModelArgs, required
from slime_retool.config import Config
from slime_retool.planning.cards import Card
from slime_retool.planning.flops import model_flops
from slime_retool.planning.memory import BF16, FP32, engine_memory, kv_bytes_per_token, micro_batches
from slime_retool.planning.parameters import all_expert_parameters, total_parameters

EFFICIENCY, EFFICIENCY_WIDTH = 0.69, 750.0
BANDWIDTH_SHARE = 0.8
"""Of the datasheet's device-memory bandwidth that long copies reach."""
LINK_SHARE = 0.6
"""Of NVLink's and the network's rate that collectives reach."""
DECODE_STEP_SECONDS, DECODE_LAYER_SECONDS = 3.0e-3, 0.06e-3
"""Scheduling of one decoding step, and its kernels' fixed time per layer."""
LONGEST_TO_MEAN = 2.0
"""The longest response of a batch over the mean one: the engine runs half empty until it ends."""


@dataclass(slots=True)
class StepTime:
    """Seconds of each phase of one rollout."""

    generate: float
    log_probs: float
    train: float
    sync: float
    offload: float

    @property
    def total(self) -> float:
        return self.generate + self.log_probs + self.train + self.sync + self.offload


def efficiency(model: ModelArgs, tp: int = 1) -> float:
    width = required(model, "hidden_size") / math.sqrt(tp)
    return EFFICIENCY * width / (width + EFFICIENCY_WIDTH)


def forward_flops(model: ModelArgs, mean_tokens: float) -> float:
    """Of one token of a sequence of `mean_tokens`."""
    return model_flops(model, [mean_tokens], training=False) / mean_tokens


def step_time(config: Config, card: Card, *, mean_prompt: int, mean_response: int) -> StepTime:
    """One rollout and its training. Means are tokens of one sample."""
    mean = mean_prompt + mean_response
    tokens = config.samples_per_rollout * mean
    forward = _forward_seconds(config, card, tokens, mean)
    recompute = 1.0 if config.recompute_granularity == "full" else 0.0
    passes = float(config.steps_per_rollout > 1 and not config.use_rollout_logprobs) + float(config.use_kl_loss)
    steps = config.steps_per_rollout
    return StepTime(
        generate=_generate_seconds(config, card, mean_prompt, mean_response) if config.num_engines else 0.0,
        log_probs=passes * forward,
        train=(3.0 + recompute) * forward + steps * _optimizer_seconds(config, card),
        sync=_sync_seconds(config, card),
        offload=0.0,
    )


def _forward_seconds(config: Config, card: Card, tokens: float, mean: float) -> float:
    """One forward over all samples, with the tensor-parallel traffic and the pipeline's bubble."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    per_gpu = tokens / config.world_size
    compute = per_gpu * forward_flops(config, mean) / (card.peak_flops * efficiency(config, tp))
    # Each layer gathers and reduces the residual stream twice.
    local = tokens / (config.data_parallel_size * config.context_parallel_size)
    traffic = 4 * local * required(config, "num_layers") / pp * required(config, "hidden_size") * BF16 * (tp - 1) / tp
    communication = traffic / (card.nvlink * LINK_SHARE)
    count = micro_batches(config, round(mean))
    return (compute + communication) * (count + pp - 1) / count


def _optimizer_seconds(config: Config, card: Card) -> float:
    """Reduce gradients, update, gather weights."""
    pp, experts = config.pipeline_model_parallel_size, all_expert_parameters(config)
    parameters = (total_parameters(config) - experts) / (config.tensor_model_parallel_size * pp)
    parameters += experts / (config.expert_model_parallel_size * config.expert_tensor_parallel_size * pp)
    replicas = config.data_parallel_size * config.context_parallel_size
    link = card.nvlink if config.actor_num_nodes == 1 else card.network
    moved = parameters * (FP32 + BF16) * (replicas - 1) / replicas / (link * LINK_SHARE)
    # Read gradient, master weight and both moments, write all but the gradient, zero the buffer.
    updated = parameters / replicas * 8 * FP32 / (card.bandwidth * BANDWIDTH_SHARE)
    return moved + updated


def _generate_seconds(config: Config, card: Card, mean_prompt: int, mean_response: int) -> float:
    workers = config.rollout_num_gpus_per_engine
    memory = engine_memory(config, card)
    requests = max(1.0, config.samples_per_rollout / config.num_engines)
    context = mean_prompt + mean_response / 2
    running = max(1.0, min(requests, config.sglang_server_concurrency, memory.kv_tokens / max(context, 1)))
    read = memory.weights + running * context * kv_bytes_per_token(config) / workers
    compute = running * forward_flops(config, context) / workers / (card.peak_flops * efficiency(config, workers))
    fixed = DECODE_STEP_SECONDS + DECODE_LAYER_SECONDS * required(config, "num_layers")
    step = fixed + max(read / (card.bandwidth * BANDWIDTH_SHARE), compute)
    waves = requests / running
    # Full waves at the full batch, then the last one until its longest response ends.
    return step * mean_response * (waves - 1 + LONGEST_TO_MEAN)


def _sync_seconds(config: Config, card: Card) -> float:
    """All weights in bf16, gathered and handed over."""
    if not config.num_engines:
        return 0.0
    size = total_parameters(config) * BF16
    link = card.nvlink if config.actor_num_nodes == 1 else card.network
    return 0.05 + size / (link * LINK_SHARE)
