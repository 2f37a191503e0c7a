"""The description of a decoder-only transformer, as flags. Pure Python: no torch, no megatron.

Names and meanings are Megatron's own (`--num-layers`, `--rotary-base`, ...), so that the arrays in
`scripts/models/*.sh` read like any Megatron launch script. `check_against_hf` (in `hf_config.py`)
compares every one of them with a checkpoint's `config.json`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from functools import cache

from megatron_bridge.flags import changed, flag, option_name

TRANSFORMER_IMPLS = ("auto", "transformer_engine", "local")
ATTENTION_BACKENDS = ("auto", "flash", "fused")


@dataclass(frozen=True)
class ModelArgs:
    """Model architecture (compared with the checkpoint's config.json)."""

    num_layers: int | None = flag(None, min=1, help="Number of transformer layers.")
    hidden_size: int | None = flag(None, min=1, help="Width of the residual stream.")
    ffn_hidden_size: int | None = flag(None, min=1, help="Width of the MLP's inner layer.")
    num_attention_heads: int | None = flag(None, min=1, help="Number of query heads.")
    group_query_attention: bool = flag(False, help="Share each key/value head among several query heads.")
    num_query_groups: int | None = flag(None, min=1, help="Number of key/value heads (with --group-query-attention).")
    kv_channels: int | None = flag(None, min=1, help="Width of one head; hidden size / heads when not given.")
    vocab_size: int | None = flag(None, min=1, help="Vocabulary size in the checkpoint, before padding.")
    make_vocab_size_divisible_by: int = flag(
        128, min=1, help="The vocabulary is padded to a multiple of this times the tensor-parallel size."
    )
    max_position_embeddings: int | None = flag(None, min=1, help="Longest context; config.json's value when not given.")
    swiglu: bool = flag(False, help="Gated MLP with SiLU.")
    disable_bias_linear: bool = flag(False, help="No biases in linear layers.")
    add_qkv_bias: bool = flag(False, help="Biases in the query/key/value projection only (Qwen2, Qwen2.5).")
    qk_layernorm: bool = flag(False, help="RMSNorm of each query and key head (Qwen3).")
    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"), help="Kind of normalisation.")
    norm_epsilon: float = flag(1e-5, above=0, help="Epsilon of the normalisation layers.")
    use_rotary_position_embeddings: bool = flag(False, help="Rotary position embeddings.")
    rotary_base: int = flag(10000, min=1, help="Base period of the rotary embeddings (rope_theta).")
    rotary_percent: float = flag(1.0, above=0, help="Share of each head that is rotated.")
    use_rope_scaling: bool = flag(False, help="Llama 3 frequency scaling of the rotary embeddings.")
    rope_scaling_factor: float = flag(
        8.0, above=0, aliases=("--rotary-scaling-factor",), help="Factor of the Llama 3 rotary scaling."
    )
    untie_embeddings_and_output_weights: bool = flag(
        False, help="The output layer has a matrix of its own (tie_word_embeddings is false)."
    )
    num_experts: int | None = flag(None, help="Experts of a mixture-of-experts layer; without it all MLPs are dense.")
    moe_router_topk: int | None = flag(None, help="Experts that each token is sent to.")
    moe_ffn_hidden_size: int | None = flag(None, min=1, help="Width of an expert's inner layer.")
    moe_router_pre_softmax: bool = flag(
        False, help="Weight experts by the softmax over all of them, not over the chosen (norm_topk_prob is false)."
    )
    moe_router_score_function: str = flag(
        "softmax", choices=("softmax", "sigmoid"), help="What makes experts' scores of the router's logits."
    )
    moe_router_enable_expert_bias: bool = flag(
        False, help="Experts are chosen by score plus a bias (GLM-4.5), which stays as it is in the checkpoint."
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None, above=0, help="What the chosen experts' weights are multiplied with (routed_scaling_factor)."
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None, min=1, help="Width of the expert that every token goes through, beside those it is sent to."
    )
    moe_shared_expert_gate: bool = flag(
        False, help="The shared expert's output is weighed by a sigmoid of its own (Qwen2-MoE)."
    )
    moe_layer_freq: str = flag(
        "1", help="Layers with experts: N for layers 0, N, 2N, ..., or a list of 0 and 1 such as [0]*3+[1]*45."
    )


def moe_layers(model: ModelArgs) -> tuple[bool, ...]:
    """For each layer whether its MLP is a mixture of experts. ValueError for a --moe-layer-freq that says nothing."""
    layers = required(model, "num_layers")
    return (False,) * layers if model.num_experts is None else _moe_layers(layers, model.moe_layer_freq)


@cache  # a plan asks hundreds of thousands of times
def _moe_layers(layers: int, freq: str) -> tuple[bool, ...]:
    pattern = freq.replace(" ", "").strip("()")
    if pattern.isdigit() and int(pattern) > 0:
        return tuple(layer % int(pattern) == 0 for layer in range(layers))
    out: list[bool] = []
    for term in pattern.split("+"):
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", term)
        if match is None:
            raise ValueError(f"--moe-layer-freq {freq}: give a number, or a list such as [0]*3+[1]*45")
        out += [bit == "1" for bit in match.group(1).split(",")] * int(match.group(2) or 1)
    if len(out) != layers:
        raise ValueError(f"--moe-layer-freq {freq} speaks of {len(out)} layers, --num-layers {layers}")
    return tuple(out)


def alike_layers(model: ModelArgs) -> bool:
    """Whether all layers have the same parameters."""
    return len(set(moe_layers(model))) == 1


def padded_vocab_size(model: ModelArgs, tp: int = 1) -> int:
    """The vocabulary rounded up to a multiple of `make_vocab_size_divisible_by` * tp."""
    multiple = model.make_vocab_size_divisible_by * tp
    return -(-required(model, "vocab_size") // multiple) * multiple


def required(model: ModelArgs, field: str) -> int:
    """The field's value; ValueError when the flag was not given."""
    value = model.__dict__[field]
    if value is None:
        raise ValueError(f"{option_name(field)} is missing: source a file of scripts/models/")
    return value


def head_dim(model: ModelArgs) -> int:
    """Width of one attention head."""
    if model.kv_channels is not None:
        return model.kv_channels
    return required(model, "hidden_size") // required(model, "num_attention_heads")


def query_groups(model: ModelArgs) -> int:
    """Number of key/value heads."""
    if model.group_query_attention:
        return required(model, "num_query_groups")
    return required(model, "num_attention_heads")


def check_model(model: ModelArgs) -> None:
    """Refuse (ValueError) what no supported family has: only RMSNorm + SwiGLU + rotary, without other biases."""
    wanted = {
        "--swiglu": model.swiglu,
        "--normalization RMSNorm": model.normalization == "RMSNorm",
        "--use-rotary-position-embeddings": model.use_rotary_position_embeddings,
        "--disable-bias-linear": model.disable_bias_linear,
    }
    for name, given in wanted.items():
        if not given:
            raise ValueError(f"{name} is missing: all supported models have it")
    heads, groups = required(model, "num_attention_heads"), query_groups(model)
    if model.num_query_groups is not None and not model.group_query_attention:
        raise ValueError(f"--num-query-groups {model.num_query_groups} needs --group-query-attention")
    if heads % groups:
        raise ValueError(f"--num-query-groups {groups} must divide --num-attention-heads {heads}")
    for field in ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size"):
        required(model, field)
    if model.kv_channels is None and required(model, "hidden_size") % heads:
        raise ValueError(f"--hidden-size {model.hidden_size} is no multiple of --num-attention-heads {heads}")
    _check_experts(model)


def _check_experts(model: ModelArgs) -> None:
    if model.num_experts is None:
        names = [field.name for field in fields(ModelArgs) if field.name.startswith("moe_")]
        if given := changed(model, names):
            raise ValueError(f"{option_name(given[0])} needs --num-experts: the model has no experts without it")
        return
    topk = required(model, "moe_router_topk")
    if model.num_experts < 2 or not 1 <= topk <= model.num_experts:
        raise ValueError(
            f"--num-experts {model.num_experts} with --moe-router-topk {topk}: at least 2 experts, and at most as many "
            "per token as there are"
        )
    required(model, "moe_ffn_hidden_size")
    _check_router(model)
    if not any(moe_layers(model)):
        raise ValueError(f"--moe-layer-freq {model.moe_layer_freq} gives no layer experts: leave --num-experts out")


def _check_router(model: ModelArgs) -> None:
    sigmoid = model.moe_router_score_function == "sigmoid"
    if model.moe_router_enable_expert_bias and not sigmoid:
        raise ValueError("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid: add it")
    if model.moe_router_pre_softmax and sigmoid:
        raise ValueError("--moe-router-pre-softmax has no effect on --moe-router-score-function sigmoid: leave it out")
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None:
        raise ValueError("--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size: add it")


def nearest_divisor(total: int, wanted: int) -> int:
    """The divisor of `total` closest to `wanted` (the larger of two equally close)."""
    return min((d for d in range(1, total + 1) if total % d == 0), key=lambda d: (abs(d - wanted), -d))


def check_tensor_parallel(model: ModelArgs, tp: int) -> None:
    """Refuse (ValueError, naming the nearest size) what does not divide the key/value heads and the dense MLPs."""
    divided = {"key/value heads": query_groups(model)}
    if not all(moe_layers(model)):
        divided["ffn hidden size"] = required(model, "ffn_hidden_size")
    if model.moe_shared_expert_intermediate_size is not None:
        divided["shared expert's width"] = model.moe_shared_expert_intermediate_size
    for name, value in divided.items():
        if value % tp:
            nearest = nearest_divisor(math.gcd(*divided.values()), tp)
            raise ValueError(
                f"--tensor-model-parallel-size {tp} must divide the model's {name} ({value}); use {nearest}"
            )


def check_expert_parallel(model: ModelArgs, ep: int, etp: int) -> None:
    """Refuse (ValueError, naming the nearest size) what does not divide the experts, or there are none."""
    if model.num_experts is None:
        for name, size in (("model", ep), ("tensor", etp)):
            if size != 1:
                raise ValueError(f"--expert-{name}-parallel-size {size}: the model has no experts; use 1")
        return
    ffn = required(model, "moe_ffn_hidden_size")
    divided = (
        ("model", ep, model.num_experts, f"the model's {model.num_experts} experts"),
        ("tensor", etp, ffn, f"the experts' inner width ({ffn})"),
    )
    for name, size, total, what in divided:
        if total % size:
            raise ValueError(
                f"--expert-{name}-parallel-size {size} must divide {what}; use {nearest_divisor(total, size)}"
            )


def check_pipeline(num_layers: int, pp: int, *, first: int | None = None, last: int | None = None) -> None:
    """Refuse (ValueError, naming the nearest valid choice) layers that cannot be laid out over the stages.

    `first` and `last` are the layers of the first and the last stage; the others share the rest evenly.
    """
    ends = (first, last)
    if pp == 1:
        if ends != (None, None):
            raise ValueError("--decoder-first/last-pipeline-num-layers need --pipeline-model-parallel-size above 1")
        return
    if pp > num_layers:
        raise ValueError(
            f"--pipeline-model-parallel-size {pp} is more than the model's {num_layers} layers: "
            f"use at most {num_layers}"
        )
    rest = num_layers - sum(n for n in ends if n is not None)
    stages = pp - sum(n is not None for n in ends)
    fits = rest == 0 if stages == 0 else rest > 0 and rest % stages == 0
    if fits and all(n is None or n > 0 for n in ends):
        return
    per_stage = -(-num_layers // pp)
    if num_layers - per_stage * (pp - 1) < 1:
        per_stage = num_layers // pp
    nearest = num_layers - per_stage * (pp - 1)
    flags = {"--decoder-first-pipeline-num-layers": first, "--decoder-last-pipeline-num-layers": last}
    given = "".join(f", {name} {n}" for name, n in flags.items() if n is not None)
    raise ValueError(
        f"{num_layers} layers do not fit --pipeline-model-parallel-size {pp}{given}: "
        + (
            f"use --decoder-last-pipeline-num-layers {nearest} ({per_stage} layers in each other stage)"
            if nearest != per_stage
            else f"leave the uneven layout out ({per_stage} layers in each stage)"
        )
    )
