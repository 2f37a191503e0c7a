"""What one layer keeps for its backward pass, in bytes of one token on one rank, and what its backward needs beside.

Counted from the modules' own `save_for_backward`, in bf16, with h = hidden size, q and k = widths of all query and of
all key heads, f = width of the MLP, e = width of an expert, n = experts of a token (the method of
https://arxiv.org/abs/2205.05198, for gated MLPs and fused attention):

    norms       4 h            both norms' inputs and outputs         split by TP only with sequence parallelism
    attention   q + 2 k        the projection                         split by TP
                q + 2 k        rotated queries and keys, and the values, as attention takes them
                q              the output
    MLP         3 f            both parts of fc1's output, and their gated product
    experts     n (h + 3 e)    instead: what reaches the experts, and the same of each; with etp > 1 n (etp h + 3 e)
                3 s            and the shared expert's, of width s: split by TP
    softmax     heads          log-sums, fp32

Layers without Transformer Engine keep the same: norms save their input, and both kinds share `megatron_bridge.fused`.

Expert-parallel ranks get tokens as the router likes (nothing balances it): the fullest rank is taken to get
`EXPERT_IMBALANCE` times its share.
"""

from __future__ import annotations

from megatron_bridge.arithmetic.parameters import expert_parameters, widths
from megatron_bridge.model_config import ModelArgs, moe_layers, required
from slime_retool.config import Config

BF16, FP32 = 2, 4
EXPERT_IMBALANCE = 1.2
"""An assumption, not a measurement."""


def element_bytes(config: Config) -> int:
    """Bytes of an element of activations and weights."""
    return BF16 if config.in_bf16 else FP32


def sequence_split(config: Config) -> int:
    """Tensor-parallel ranks over which norms and residuals are split."""
    return config.tensor_model_parallel_size if config.sequence_parallel else 1


def expert_imbalance(config: Config) -> float:
    return EXPERT_IMBALANCE if config.expert_model_parallel_size > 1 else 1.0


def mean_over_layers(model: ModelArgs, dense: float, mixture: float) -> float:
    """A layer's figure, where only some layers have experts."""
    share = sum(moe_layers(model)) / required(model, "num_layers")
    return dense * (1 - share) + mixture * share


def layer_input_bytes(config: Config) -> float:
    """The residual stream: what recomputation keeps of a layer, and what a pipeline stage sends on."""
    return element_bytes(config) * required(config, "hidden_size") / sequence_split(config)


def layer_bytes(config: Config) -> float:
    """Bytes of one token in a mean layer, nothing recomputed."""
    w, tp = widths(config), config.tensor_model_parallel_size
    attention = 2 * (w.queries + 2 * w.keys) + w.queries
    width = element_bytes(config)
    mlp = mean_over_layers(config, width * 3 * w.ffn / tp, width * _expert_width(config))
    return 4 * layer_input_bytes(config) + width * attention / tp + FP32 * w.heads / tp + mlp


def layer_backward_bytes(config: Config) -> float:
    """The gradients that live at once inside one layer's backward: of the MLP's inner tensors and of the residual."""
    w, width = widths(config), element_bytes(config)
    inner = mean_over_layers(config, 3 * w.ffn / config.tensor_model_parallel_size, _expert_width(config))
    return width * inner + 2 * width * w.hidden


def expert_gradient_bytes(config: Config) -> float:
    """Weight gradients of a layer's experts on a rank, which `megatron_bridge.grouped_experts` makes in bf16 before it
    adds them to their sums; 0 where they are frozen."""
    if config.num_experts is None or config.lora is not None:
        return 0.0
    ranks = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    return BF16 * config.num_experts / ranks * expert_parameters(config)


def _expert_width(config: Config) -> float:
    """Elements kept inside the experts, the shared one included, for one token of this rank."""
    if config.num_experts is None:
        return 0.0
    routed = required(config, "moe_router_topk") * expert_imbalance(config)
    of_each = config.expert_tensor_parallel_size * required(config, "hidden_size")
    of_each += 3 * required(config, "moe_ffn_hidden_size")
    return (routed * of_each + 3 * widths(config).shared) / config.tensor_model_parallel_size


def stage_activation_bytes(config: Config, layers: int) -> tuple[float, float]:
    """(kept from forward to backward by each micro-batch in flight, made again while one is in its backward).

    Of one token in the layers of a pipeline stage, after --recompute-granularity.
    """
    full, kept = layer_bytes(config), layer_input_bytes(config)
    if config.recompute_granularity == "selective":
        return layers * (full - _selected_bytes(config)), _selected_bytes(config)
    if config.recompute_granularity != "full":
        return layers * full, 0.0
    chunk = config.recompute_num_layers or 1
    if config.recompute_method == "block":
        recomputed = min(chunk, layers)
        return (layers - recomputed) * full + recomputed * kept, full if recomputed else 0.0
    return -(-layers // chunk) * kept, min(chunk, layers) * full


def _selected_bytes(config: Config) -> float:
    """What --recompute-granularity selective drops of a layer. The attention kernels keep no scores, so core_attn
    drops the output and its log-sums only."""
    w, tp = widths(config), config.tensor_model_parallel_size
    width = element_bytes(config)
    parts = {
        "core_attn": FP32 * w.heads / tp,  # the output stays: it is the projection's input
        "layernorm": 2 * layer_input_bytes(config),
        "mlp": mean_over_layers(config, width * 3 * w.ffn / tp, 0.0),
        "moe": mean_over_layers(config, 0.0, width * _expert_width(config)),
        "moe_act": mean_over_layers(config, 0.0, width * _expert_width(config) / 6),
    }
    return sum(parts.get(name, 0.0) for name in config.recompute_modules or ["core_attn"])
