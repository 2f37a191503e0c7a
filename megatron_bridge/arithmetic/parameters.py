"""Parameter counts, of the whole model and of one rank's part."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bridge.lora_spec import EXPERT_TARGETS, LoraSpec
from megatron_bridge.model_config import ModelArgs, head_dim, moe_layers, padded_vocab_size, query_groups, required


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths of one layer's tensors, in elements of one token."""

    hidden: int
    queries: int
    keys: int
    """Width of the keys; values are as wide."""
    ffn: int
    heads: int
    shared: int
    """Width of the expert that every token of a mixture goes through; 0: none."""


def widths(model: ModelArgs) -> Widths:
    return Widths(
        hidden=required(model, "hidden_size"),
        queries=required(model, "num_attention_heads") * head_dim(model),
        keys=query_groups(model) * head_dim(model),
        ffn=required(model, "ffn_hidden_size"),
        heads=required(model, "num_attention_heads"),
        shared=model.moe_shared_expert_intermediate_size or 0,
    )


def layer_parameters(model: ModelArgs, tp: int = 1, *, experts: int = 0, etp: int = 1) -> int:
    """Those of a layer on one of `tp` tensor-parallel ranks; `experts` > 0: a mixture of which so many are counted."""
    w = widths(model)
    attention = w.hidden * (2 * w.queries + 2 * w.keys)
    if model.add_qkv_bias:
        attention += w.queries + 2 * w.keys
    norms = 2 * w.hidden + (2 * head_dim(model) if model.qk_layernorm else 0)
    if not experts:
        return (attention + 3 * w.hidden * w.ffn) // tp + norms
    split = attention + 3 * w.hidden * w.shared
    return split // tp + norms + router_parameters(model) + experts * expert_parameters(model) // etp


def router_parameters(model: ModelArgs) -> int:
    """Of one layer: a row for each expert, and one for the gate of the shared expert. A bias is no parameter."""
    rows = required(model, "num_experts") + (1 if model.moe_shared_expert_gate else 0)
    return rows * required(model, "hidden_size")


def expert_parameters(model: ModelArgs) -> int:
    """Parameters of one expert of one layer."""
    return 3 * required(model, "hidden_size") * required(model, "moe_ffn_hidden_size")


def all_expert_parameters(model: ModelArgs) -> int:
    """Parameters of all experts of all layers."""
    layers = sum(moe_layers(model))
    return layers * required(model, "num_experts") * expert_parameters(model) if layers else 0


def adapter_parameters(model: ModelArgs, lora: LoraSpec, tp: int = 1, *, experts: int = 0, etp: int = 1) -> int:
    """Parameters of one layer's LoRA adapters on one of `tp` tensor-parallel ranks (see `megatron_bridge.lora`).

    `experts` > 0: a mixture of which so many are counted, each on `etp` expert-tensor-parallel ranks.
    """
    w = widths(model)
    whole_and_split = {  # inputs of A and outputs of B
        "linear_qkv": (w.hidden, w.queries + 2 * w.keys),
        "linear_proj": (w.hidden, w.queries),
        "linear_fc1": (w.hidden, 2 * w.ffn),
        "linear_fc2": (w.hidden, w.ffn),
    }
    targets = [target for target in lora.targets if not experts or target not in EXPERT_TARGETS]
    dense = lora.rank * sum(whole + split // tp for whole, split in map(whole_and_split.__getitem__, targets))
    return dense + (experts * expert_adapter_parameters(model, lora, etp) if experts else 0)


def expert_adapter_parameters(model: ModelArgs, lora: LoraSpec, etp: int = 1) -> int:
    """Parameters of one expert's adapters on one of `etp` ranks that share it."""
    hidden, ffn = required(model, "hidden_size"), required(model, "moe_ffn_hidden_size")
    split = {"linear_fc1": 2 * ffn, "linear_fc2": ffn}
    return lora.rank * sum(hidden + split[target] // etp for target in lora.targets if target in EXPERT_TARGETS)


def all_adapter_parameters(model: ModelArgs, lora: LoraSpec, *, active: bool = False) -> int:
    """Adapters of all layers; `active`: of experts only those that one token is sent to."""
    experts = (required(model, "moe_router_topk") if active else model.num_experts) if model.num_experts else 0
    return sum(
        adapter_parameters(model, lora, experts=(experts or 0) if mixture else 0) for mixture in moe_layers(model)
    )


def stage_adapters(
    model: ModelArgs, lora: LoraSpec, *, layers: int, tp: int, ep: int = 1, etp: int = 1
) -> tuple[int, int]:
    """Adapter parameters on one rank of a pipeline stage with so many layers: (those but for experts, experts')."""
    mixtures = round(layers * sum(moe_layers(model)) / required(model, "num_layers"))
    experts = (model.num_experts or 0) // ep
    dense = (layers - mixtures) * adapter_parameters(model, lora, tp)
    if not mixtures:
        return dense, 0
    of_experts = experts * expert_adapter_parameters(model, lora, etp)
    mixture = adapter_parameters(model, lora, tp, experts=experts, etp=etp) - of_experts
    return dense + mixtures * mixture, mixtures * of_experts


def total_parameters(model: ModelArgs) -> int:
    """Parameters of the checkpoint: without vocabulary padding, a tied output layer counted once."""
    matrices = 2 if model.untie_embeddings_and_output_weights else 1
    vocabulary = matrices * required(model, "vocab_size") * required(model, "hidden_size")
    experts = model.num_experts or 0
    layers = sum(layer_parameters(model, experts=experts if mixture else 0) for mixture in moe_layers(model))
    return layers + vocabulary + required(model, "hidden_size")


def active_parameters(model: ModelArgs) -> int:
    """Parameters of the checkpoint, with only those experts that one token is sent to."""
    if model.num_experts is None:
        return total_parameters(model)
    idle = model.num_experts - required(model, "moe_router_topk")
    return total_parameters(model) - sum(moe_layers(model)) * idle * expert_parameters(model)


def stage_layers(num_layers: int, pp: int, first: int | None = None, last: int | None = None) -> list[int]:
    """Layers of each pipeline stage; `model_config.check_pipeline` has said that they fit."""
    given = {index: count for index, count in ((0, first), (pp - 1, last)) if count is not None}
    others = [index for index in range(pp) if index not in given]
    share = (num_layers - sum(given.values())) // max(len(others), 1)
    return [given.get(index, share) for index in range(pp)]


def stage_parameters(model: ModelArgs, *, stage: int, layers: int, tp: int, pp: int, ep: int = 1, etp: int = 1) -> int:
    """On one rank of a pipeline stage. Where only some layers have experts, stages count as having the mean share."""
    matrix = padded_vocab_size(model, tp) // tp * required(model, "hidden_size")
    mixtures = round(layers * sum(moe_layers(model)) / required(model, "num_layers"))
    count = (layers - mixtures) * layer_parameters(model, tp)
    count += mixtures * layer_parameters(model, tp, experts=(model.num_experts or 0) // ep, etp=etp)
    if stage == 0:
        count += matrix
    if stage == pp - 1:
        count += required(model, "hidden_size")  # the last norm
        # A tied output layer is the embedding itself, or a copy of it on another stage.
        count += matrix if model.untie_embeddings_and_output_weights or pp > 1 else 0
    return count
