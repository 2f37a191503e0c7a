"""Seconds of a rollout's other phases: generation, weight update, moving memory.

A decoding step reads the engine's weights (of experts those that any running request is sent to) and the cached keys
and values of all running requests, or takes as long as its operations, whichever is more; and pays a fixed time, and
two all-reduces a layer where the engine spans several GPUs. Requests run in waves of as many as concurrency and cache
allow; then those that are longer than the mean end, `TAIL_SHARE` of a wave on average.
"""

from __future__ import annotations

from megatron_bridge.arithmetic import cards
from megatron_bridge.arithmetic.cards import BANDWIDTH_SHARE, GEMM_SHARE, LINK_SHARE, Card
from megatron_bridge.arithmetic.flops import layers_matmul_parameters, output_parameters
from megatron_bridge.arithmetic.parameters import all_expert_parameters, total_parameters, widths
from megatron_bridge.model_config import moe_layers, required
from slime_retool.commands.plan.activations import BF16
from slime_retool.commands.plan.memory import TrainerMemory, adapter_bytes, engine_memory, kv_bytes_per_token
from slime_retool.commands.plan.workload import Workload
from slime_retool.config import Config

TAIL_SHARE = 0.05
"""An assumption: few responses run into the limit, but the rollout waits for them."""


def generate_seconds(config: Config, card: Card, workload: Workload) -> float:
    """Seconds until the last response of a rollout is there; tools are taken to answer at once."""
    if not config.num_engines:
        return 0.0
    workers = config.rollout_num_gpus_per_engine
    memory = engine_memory(config, card)
    requests = max(1.0, workload.samples / config.num_engines)
    context = workload.mean_prompt + workload.mean_response / 2
    running = max(1.0, min(requests, config.sglang_server_concurrency, memory.kv_tokens / max(context, 1)))
    # Each prompt of a group is computed once and then comes from the cache.
    prompts = requests / config.n_samples_per_prompt * workload.mean_prompt
    matrices = layers_matmul_parameters(config) + output_parameters(config)
    prefill = 2 * matrices * prompts / workers / (card.peak_flops * GEMM_SHARE)
    waves = requests / running
    tail = max(0.0, workload.longest - workload.mean_prompt - workload.mean_response)
    return (
        prefill
        + workload.mean_response * waves * _decode_seconds(config, card, running, context)
        + tail * _decode_seconds(config, card, max(1.0, TAIL_SHARE * running), workload.longest)
    )


def _decode_seconds(config: Config, card: Card, running: float, context: float) -> float:
    """One step of so many requests, of so many tokens each."""
    workers = config.rollout_num_gpus_per_engine
    read = _weights_read(config, running) / workers + running * context * kv_bytes_per_token(config) / workers
    attention = 4 * required(config, "num_layers") * widths(config).queries * context
    matrices = layers_matmul_parameters(config) + output_parameters(config)
    operations = running * (2 * matrices + attention) / workers
    step = max(read / (card.bandwidth * BANDWIDTH_SHARE), operations / (card.peak_flops * GEMM_SHARE))
    step += cards.DECODE_STEP_SECONDS + cards.DECODE_LAYER_SECONDS * required(config, "num_layers")
    if workers > 1:
        reduced = 2 * required(config, "num_layers") * running * required(config, "hidden_size") * BF16
        # No engine spans hosts (`cluster.placement`), whatever hosts the trainer has.
        step += 2 * reduced * (workers - 1) / workers / (card.nvlink * LINK_SHARE)
    return step


def _weights_read(config: Config, running: float) -> float:
    """Bytes of weights that a decoding step of so many requests reads, on all workers of the engine."""
    experts = all_expert_parameters(config)
    rest = total_parameters(config) - experts
    if any(moe_layers(config)):
        missed = 1 - required(config, "moe_router_topk") / required(config, "num_experts")
        experts *= 1 - missed**running
    return BF16 * (rest + experts)


def sync_seconds(config: Config, card: Card) -> float:
    """All weights in bf16, gathered and handed over; a copy of the model that spans hosts works over the network.

    Of an engine that is sent adapters alone: those.
    """
    if not config.num_engines:
        return 0.0
    if config.serves_adapters:
        # To the host, and from there to the engine's device.
        return cards.SYNC_SECONDS + 2 * adapter_bytes(config) / card.host_link
    size = total_parameters(config) * BF16
    gpus = config.actor_num_gpus_per_node
    shards = max(config.model_parallel_size, config.expert_model_parallel_size * config.pipeline_model_parallel_size)
    within = config.actor_num_nodes == 1 or (config.colocate and shards <= gpus)
    return cards.SYNC_SECONDS + size / ((card.nvlink if within else card.network) * LINK_SHARE)


def offload_seconds(config: Config, card: Card, trainer: TrainerMemory) -> float:
    """Weights and optimizer state to the host and back, all GPUs of a host at once."""
    if not config.offloads_train:
        return 0.0
    return 2 * (trainer.weights + trainer.optimizer + trainer.others) / card.host_link
