"""Device and host memory of the trainer and of an engine, part by part, in bytes.

What a rank of the trainer holds, for each parameter of its shard (mixed precision as in
https://arxiv.org/abs/1910.02054, section 3.1):

    weights     2           bf16
    gradients   4           one fp32 buffer that all micro-batches add to (2 without accumulation in fp32)
    optimizer   4 + 4 + 4   main weights and Adam's moments, fp32; of the main weights only the 16 bits that bf16 lacks
                            with the precision-aware optimizer, unless it is offloaded. Divided over data x context
                            parallel ranks (for experts, over the ranks that hold the same ones); less what is offloaded
                            to the host

With LoRA frozen parameters have weights only. Activations are those of `activations.py` for each micro-batch in flight:
under 1F1B, stage s of p has p - s of them (https://arxiv.org/abs/2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_bridge.arithmetic import GIB, LOGIT_CHUNK_BYTES
from megatron_bridge.arithmetic.cards import Card
from megatron_bridge.arithmetic.parameters import (
    all_expert_parameters,
    stage_adapters,
    stage_layers,
    stage_parameters,
    widths,
)
from megatron_bridge.model_config import ModelArgs, padded_vocab_size, query_groups, required
from slime_retool.commands.plan.activations import (
    BF16,
    FP32,
    element_bytes,
    expert_gradient_bytes,
    layer_backward_bytes,
    layer_input_bytes,
    sequence_split,
    stage_activation_bytes,
)
from slime_retool.commands.plan.workload import Workload
from slime_retool.config import Config
from slime_retool.config.config import Role
from slime_retool.engine.server import ADAPTER_SLOTS

RUNTIME_BYTES = int(2.0 * GIB)
"""CUDA context, NCCL's buffers, kernel workspaces, the allocator's unused rest: outside of what torch counts."""
ENGINE_RUNTIME_BYTES = int(3.0 * GIB)
"""The same of an SGLang worker, with its CUDA graphs. It stays when the engine gives back weights and cache."""
MEM_FRACTION = 0.85
"""What is assumed of SGLang's own choice where --sglang-mem-fraction-static is not given."""


@dataclass(slots=True)
class TrainerMemory:
    """One rank's bytes on its device, at the moment of the most."""

    weights: int
    gradients: int
    optimizer: int
    others: int
    """Weights, gradients and optimizer of further models in the same processes."""
    activations: int
    logits: int
    """What a chunk of logits takes in the backward pass, beyond what a layer's backward takes anyway."""
    host_optimizer: int = 0
    """Optimizer state in host memory, not part of the total."""
    runtime: int = RUNTIME_BYTES

    @property
    def allocated(self) -> int:
        """What torch counts: everything but the runtime."""
        return self.weights + self.gradients + self.optimizer + self.others + self.activations + self.logits

    @property
    def total(self) -> int:
        return self.allocated + self.runtime


@dataclass(slots=True)
class EngineMemory:
    """One worker's bytes."""

    weights: int
    kv_cache: int
    runtime: int
    adapters: int
    """SGLang's room for LoRA adapters, beside the weights."""
    kv_tokens: int
    """Tokens that the engine's cache holds (all its workers together hold each token once)."""

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.kv_cache + self.runtime


def fullest_micro_batch(config: Config, workload: Workload) -> float:
    """Most tokens of one micro-batch on one context-parallel rank: a sample longer than the limit goes alone."""
    if config.use_dynamic_batch_size and config.max_tokens_per_gpu is not None:
        return max(config.max_tokens_per_gpu, workload.longest / config.context_parallel_size)
    return config.micro_batch_size * workload.longest / config.context_parallel_size


def micro_batches(config: Config, workload: Workload) -> int:
    """Micro-batches of one optimizer step on one data-parallel rank."""
    samples = (config.global_batch_size or workload.samples) / config.data_parallel_size
    if not config.use_dynamic_batch_size or config.max_tokens_per_gpu is None:
        return max(1, -(-int(samples) // config.micro_batch_size))
    full = fullest_micro_batch(config, workload) * config.context_parallel_size
    return max(1, -int(-samples * workload.mean // full))


def layers_of_stages(config: Config) -> list[int]:
    return stage_layers(
        required(config, "num_layers"),
        config.pipeline_model_parallel_size,
        config.decoder_first_pipeline_num_layers,
        config.decoder_last_pipeline_num_layers,
    )


def trainer_memories(config: Config, workload: Workload) -> tuple[TrainerMemory, dict[str, int]]:
    """(memory of the fullest rank of the first model's processes, bytes on the fullest GPU of each model that has
    processes of its own, by name)."""
    models = config.roles
    apart = {model.name: _fullest([model], workload).total for model in models if model.separate}
    return _fullest([model for model in models if not model.separate], workload), apart


def _fullest(models: list[Role], workload: Workload) -> TrainerMemory:
    stages = range(models[0].config.pipeline_model_parallel_size)
    return max((stage_memory(models, workload, stage) for stage in stages), key=lambda memory: memory.total)


def stage_memory(models: list[Role], workload: Workload, stage: int) -> TrainerMemory:
    """Bytes on a rank of one pipeline stage, whose processes train `models`, one after the other."""
    config = models[0].config
    pp, layers = config.pipeline_model_parallel_size, layers_of_stages(config)[stage]
    tokens = fullest_micro_batch(config, workload)
    in_flight = min(pp - stage, micro_batches(config, workload))
    kept, remade = stage_activation_bytes(config, layers)
    # The embedding's (or the former stage's) output, and after the last layer the final norm's input and output.
    ends = layer_input_bytes(config) * (1 + 2 * (stage == pp - 1))
    # Experts' weight gradients come one matrix product at a time; fc1's are two thirds of them.
    backward = tokens * (remade + layer_backward_bytes(config)) + expert_gradient_bytes(config) * 2 / 3
    has_logits = models[0].has_logits and stage == pp - 1
    logits = _log_prob_bytes(config, tokens, workload.learned) if has_logits else 0.0
    first, *others = [_state_bytes(model, stage, layers) for model in models]
    weights, gradients, optimizer, on_host = first
    return TrainerMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        host_optimizer=on_host + sum(host for *_, host in others),
        others=sum(sum(on_device) for *on_device, _ in others),
        activations=int(in_flight * tokens * (kept + ends) + backward),
        logits=int(max(0.0, logits - backward)),
    )


def _state_bytes(model: Role, stage: int, layers: int) -> tuple[int, int, int, int]:
    """(weights, gradients, optimizer, optimizer on the host) of a rank of one pipeline stage with so many layers."""
    config, bf16 = model.config, model.config.in_bf16
    frozen, dense, experts = held_parameters(config, stage, layers, logits=model.has_logits)
    trained = dense + experts
    gradient = FP32 if config.accumulate_allreduce_grads_in_fp32 or not bf16 else BF16
    main = (2 if config.halves_master_weights else FP32) if bf16 else 0
    optimizer = stepped_parameters(config, dense, experts) * (2 * FP32 + main)
    on_host = round(optimizer * config.optimizer_offload_fraction) if config.optimizer_cpu_offload else 0
    return (frozen + trained) * element_bytes(config), trained * gradient, optimizer - on_host, on_host


def held_parameters(config: Config, stage: int, layers: int, *, logits: bool = True) -> tuple[int, int, int]:
    """(frozen, trained but for experts, trained experts) on a rank of one pipeline stage with so many layers."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size
    # Without logits: an output layer of its own, which is not there.
    model = config if logits else replace(config, untie_embeddings_and_output_weights=True)
    held = stage_parameters(model, stage=stage, layers=layers, tp=tp, pp=pp, ep=ep, etp=etp)
    if not logits and stage == pp - 1:
        held -= padded_vocab_size(config, tp) // tp * required(config, "hidden_size")
    if config.lora is not None:
        return held, *stage_adapters(config, config.lora, layers=layers, tp=tp, ep=ep, etp=etp)
    experts = all_expert_parameters(config) * layers // required(config, "num_layers") // (ep * etp)
    return 0, held - experts, experts


def stepped_parameters(config: Config, dense: int, experts: int) -> int:
    """Those of so many trained parameters whose optimizer state is on this rank."""
    if not config.use_distributed_optimizer:
        return dense + experts
    return dense // (config.data_parallel_size * config.context_parallel_size) + experts // expert_replicas(config)


def expert_replicas(config: Config) -> int:
    """Ranks that hold the same experts."""
    shards = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    return max(1, config.world_size // (shards * config.pipeline_model_parallel_size))


def logits_bytes(config: Config, rows: float) -> float:
    """All logits of so many learned tokens on a rank, in fp32."""
    tp = config.tensor_model_parallel_size
    return FP32 * rows * padded_vocab_size(config, tp) / tp


def kept_logits_share(config: Config, rows: float) -> float:
    """Share of the logits of a micro-batch with so many learned tokens that --keep-logits-gib keeps."""
    return min(1.0, config.keep_logits_gib * GIB / max(1.0, logits_bytes(config, rows)))


def _log_prob_bytes(config: Config, tokens: float, learned: float) -> float:
    """Bytes of `algo.log_probs` in its backward: a chunk's logits and their gradient, hidden states in four versions
    (the learned rows, masked, their gradient, that of all rows), or, once the chunks are gone, zeros for the weight;
    and all logits that are kept."""
    tp, width = config.tensor_model_parallel_size, element_bytes(config)
    columns, hidden = padded_vocab_size(config, tp) // tp, required(config, "hidden_size")
    rows = min(tokens * learned, LOGIT_CHUNK_BYTES / (FP32 * columns))
    chunk = rows * columns * (FP32 + (width if width != FP32 else 0))
    gathered = tokens * hidden * width if sequence_split(config) > 1 else 0.0
    zeros = 0 if config.lora is not None else columns * hidden * width
    kept = kept_logits_share(config, tokens * learned) * logits_bytes(config, tokens * learned)
    return kept + max(chunk, zeros) + tokens * hidden * width * (3 * learned + 1) + gathered


def kv_bytes_per_token(model: ModelArgs) -> int:
    """Keys and values of all layers, bf16."""
    return 2 * BF16 * required(model, "num_layers") * widths(model).keys


def engine_memory(config: Config, card: Card) -> EngineMemory:
    """SGLang takes --sglang-mem-fraction-static of the GPU's memory for weights and cache."""
    workers = config.rollout_num_gpus_per_engine
    fraction = config.sglang_mem_fraction_static or MEM_FRACTION
    weights = BF16 * stage_parameters(
        config, stage=0, layers=required(config, "num_layers"), tp=workers, pp=1, etp=workers
    )
    adapters = ADAPTER_SLOTS * adapter_bytes(config) if config.serves_adapters else 0
    cache = max(0, int(card.memory_bytes * fraction) - weights - adapters)
    copies = max(1, workers // query_groups(config))  # fewer key heads than workers are copied
    of_token = kv_bytes_per_token(config)
    tokens = cache * workers // copies // of_token
    if config.sglang_max_total_tokens is not None and config.sglang_max_total_tokens < tokens:
        tokens = config.sglang_max_total_tokens
        cache = tokens * of_token * copies // workers
    return EngineMemory(
        weights=weights, adapters=adapters, kv_cache=cache, runtime=ENGINE_RUNTIME_BYTES, kv_tokens=tokens
    )


def adapter_bytes(config: Config) -> int:
    """Bytes of the policy's adapters on one worker of an engine, as many as they have in an update.

    Projections that Megatron holds as one layer have an A each. Rows of B, and columns of A where those of the weight
    are split, are split over the workers. SGLang takes this for each of `ADAPTER_SLOTS`, used or not.
    """
    lora, w, workers = config.lora, widths(config), config.rollout_num_gpus_per_engine
    assert lora is not None
    elements = {
        "linear_qkv": 3 * w.hidden + (w.queries + 2 * w.keys) // workers,
        "linear_proj": w.queries // workers + w.hidden,
        "linear_fc1": 2 * w.hidden + 2 * w.ffn // workers,
        "linear_fc2": w.ffn // workers + w.hidden,
    }
    return BF16 * lora.rank * required(config, "num_layers") * sum(elements[target] for target in lora.targets)


def host_memory(config: Config, trainer: TrainerMemory) -> int:
    """Page-locked bytes of one host: the reference model, the policy's weights while the reference is in their place,
    what leaves the device while engines generate, the optimizer state that --optimizer-cpu-offload keeps there, and the
    copy that a checkpoint is written from."""
    held = trainer.host_optimizer
    if config.offloads_train:
        held += trainer.weights + trainer.optimizer + trainer.others
    if config.needs_reference and config.lora is None:
        held += 2 * trainer.weights
    return held * config.actor_num_gpus_per_node + _copy_to_save(config)


def _copy_to_save(config: Config) -> int:
    """On the first host, which has most: of data-parallel copies the first one is written."""
    if config.save is None or config.no_async_save:
        return 0
    tensor, stages = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    first_ranks = range(0, config.world_size, config.world_size // stages)  # of each stage
    writers = sum(max(0, min(tensor, config.actor_num_gpus_per_node - rank)) for rank in first_ranks)
    return config.bytes_of_a_save * writers // (tensor * stages)
