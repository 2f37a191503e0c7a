"""Device memory of the trainer and of an engine, part by part, in bytes.

Activations are what Transformer Engine's modules keep for the backward pass, in bf16. Per token and layer, with
h = hidden size, q and k = widths of all query and of all key heads, f = width of the MLP (Megatron's notation, see
https://arxiv.org/abs/2205.05198 for the method; the counts here are for gated MLPs and fused attention):

    norms       4 h            inputs and outputs of both             split by TP only with sequence parallelism
    attention   q + 2 k        the projection                         split by TP
                q + k          rotated queries and keys
                q              the output
    MLP         3 f            the gated product's inputs and its output
    experts     k (3 e + 2 h)  instead, for k experts per token of width e: the same, and what goes to them and back
    softmax     2 * heads      log-sums, fp32

With full recomputation only each chunk's input stays, and one chunk at a time is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bridge.model_config import ModelArgs, padded_vocab_size, query_groups, required
from slime_retool.config import Config
from slime_retool.planning.cards import Card
from slime_retool.planning.parameters import (
    adapter_parameters,
    all_expert_parameters,
    stage_layers,
    stage_parameters,
    widths,
)

GIB = 2**30
BF16, FP32 = 2, 4
RUNTIME_BYTES = int(2.0 * GIB)
"""CUDA context, NCCL's buffers, kernel workspaces, the allocator's unused rest."""
ENGINE_RUNTIME_BYTES = int(3.0 * GIB)
"""The same of an SGLang worker, with its CUDA graphs."""
LOGIT_CHUNK = 1024
"""Positions whose logits exist at a time (`algo.log_probs`)."""


@dataclass(slots=True)
class TrainerMemory:
    """One rank's bytes, at the moment of the most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.runtime


@dataclass(slots=True)
class EngineMemory:
    """One worker's bytes."""

    weights: int
    kv_cache: int
    runtime: int
    kv_tokens: int
    """Tokens that the engine's cache holds (all its workers together hold each token once)."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.runtime


def micro_batch_tokens(config: Config, mean_tokens: int) -> int:
    """Tokens of one micro-batch on one context-parallel rank."""
    if config.use_dynamic_batch_size and config.max_tokens_per_gpu is not None:
        return config.max_tokens_per_gpu
    return -(-config.micro_batch_size * mean_tokens // config.context_parallel_size)


def layer_activation_bytes(model: ModelArgs, *, tp: int, sequence_parallel: bool) -> int:
    """Of one token in one layer on one rank, without recomputation."""
    w = widths(model)
    whole = 4 * w.hidden
    if sequence_parallel:
        whole //= tp
    mlp = 3 * w.ffn
    if model.num_experts is not None:
        mlp = required(model, "moe_router_topk") * (3 * required(model, "moe_ffn_hidden_size") + 2 * w.hidden)
    split = (w.queries + 2 * w.keys) + (w.queries + w.keys) + w.queries + mlp
    return BF16 * (whole + split // tp) + 2 * FP32 * w.heads // tp


def trainer_memory(config: Config, mean_tokens: int) -> TrainerMemory:
    """Of the fullest rank. `mean_tokens`: of a sample, prompt included."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    layers = stage_layers(
        required(config, "num_layers"),
        pp,
        config.decoder_first_pipeline_num_layers,
        config.decoder_last_pipeline_num_layers,
    )
    stages = [_stage_memory(config, mean_tokens, stage, layers[stage], tp, pp) for stage in range(pp)]
    return max(stages, key=lambda memory: memory.total)


def _stage_memory(config: Config, mean_tokens: int, stage: int, layers: int, tp: int, pp: int) -> TrainerMemory:
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size
    parameters = stage_parameters(config, stage=stage, layers=layers, tp=tp, pp=pp, ep=ep, etp=etp)
    experts = all_expert_parameters(config) * layers // required(config, "num_layers") // (ep * etp)
    bf16 = config.precision != "fp32"
    gradient = FP32 if config.accumulate_allreduce_grads_in_fp32 or not bf16 else BF16
    trained = parameters
    if config.lora is not None:
        trained, experts = layers * adapter_parameters(config, config.lora, tp), 0
        parameters += trained
    # Adam's two moments and, beside bf16 weights, the fp32 master copy.
    stated = trained
    if config.use_distributed_optimizer:
        stated = (trained - experts) // (config.data_parallel_size * config.context_parallel_size)
        stated += experts // max(1, config.world_size // (ep * etp * pp))
    state = stated * FP32 * (3 if bf16 else 2)
    tokens = micro_batch_tokens(config, mean_tokens)
    hidden = required(config, "hidden_size")
    return TrainerMemory(
        weights=parameters * (BF16 if bf16 else FP32),
        gradients=trained * gradient,
        optimizer=state,
        activations=tokens * _activation_bytes(config, layers, tp) * min(pp - stage, micro_batches(config, mean_tokens))
        + 2 * tokens * hidden * BF16,
        # fp32 copies of a chunk's logits: themselves, their exponentials, their gradient.
        logits=3 * FP32 * min(tokens, LOGIT_CHUNK) * padded_vocab_size(config, tp) // tp if stage == pp - 1 else 0,
    )


def _activation_bytes(config: Config, layers: int, tp: int) -> int:
    """Of one token in all layers of a stage."""
    split = config.sequence_parallel and tp > 1
    full = layer_activation_bytes(config, tp=tp, sequence_parallel=split)
    boundary = BF16 * required(config, "hidden_size") // (tp if split else 1)
    if config.recompute_granularity != "full":
        return layers * full
    chunk = config.recompute_num_layers or 1
    if config.recompute_method == "block":
        recomputed = min(chunk, layers)
        return (layers - recomputed) * full + recomputed * boundary + full
    return -(-layers // chunk) * boundary + chunk * full


def micro_batches(config: Config, mean_tokens: int) -> int:
    """Of one optimizer step on one data-parallel rank."""
    samples = config.global_batch_size or config.samples_per_rollout
    tokens = samples * mean_tokens / config.data_parallel_size
    return max(1, round(tokens / (micro_batch_tokens(config, mean_tokens) * config.context_parallel_size)))


def kv_bytes_per_token(model: ModelArgs) -> int:
    """Keys and values of all layers, bf16."""
    return 2 * BF16 * required(model, "num_layers") * widths(model).keys


def engine_memory(config: Config, card: Card) -> EngineMemory:
    """SGLang takes --sglang-mem-fraction-static of the card for weights and cache."""
    workers = config.rollout_num_gpus_per_engine
    fraction = config.sglang_mem_fraction_static or 0.85
    weights = BF16 * stage_parameters(
        config, stage=0, layers=required(config, "num_layers"), tp=workers, pp=1, etp=workers
    )
    cache = max(0, int(card.memory_bytes * fraction) - weights)
    copies = max(1, workers // query_groups(config))  # fewer key heads than workers are copied
    tokens = cache * workers // copies // kv_bytes_per_token(config)
    return EngineMemory(weights=weights, kv_cache=cache, runtime=ENGINE_RUNTIME_BYTES, kv_tokens=tokens)
