"""Floating-point operations that a model's own arithmetic takes: the numerator of MFU, and the basis of plans.

A multiplication and an addition each count as one. A matrix W [out, in] takes 2 * out * in of each token forward, as
many for its input's gradient and as many for its own. Causal attention over a sequence of s tokens takes, per layer,
2 * q * s^2 forward (q: width of all query heads; scores and values at 2 * q * s^2 each, of which the mask leaves half)
and twice that backward. The output layer is a matrix like the others, the input embedding none. Norms, softmax, rotary
embeddings and recomputation count nothing. (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, appendix, with
grouped queries and a mask.)
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_bridge.arithmetic.parameters import all_adapter_parameters, expert_parameters, router_parameters, widths
from megatron_bridge.lora_spec import LoraSpec
from megatron_bridge.model_config import ModelArgs, moe_layers, required


def model_flops(
    model: ModelArgs,
    lengths: Iterable[float],
    *,
    training: bool,
    logit_tokens: float | None = None,
    lora: LoraSpec | None = None,
) -> float:
    """Operations of one pass over sequences of these lengths: forward, or forward and backward with `training`.

    Of a mixture of experts the router, the shared expert and the experts that a token is sent to count. `logit_tokens`
    are those whose logits are computed (None: all). With `lora` frozen matrices have no gradient of their own: only
    their input's.
    """
    tokens = squares = 0.0
    for length in lengths:
        tokens += length
        squares += length * length
    layers = layers_matmul_parameters(model) * tokens
    layers += output_parameters(model) * (tokens if logit_tokens is None else logit_tokens)
    attention = 2.0 * required(model, "num_layers") * widths(model).queries * squares
    if lora is None:
        return (3.0 if training else 1.0) * (2.0 * layers + attention)
    adapters = all_adapter_parameters(model, lora, active=True) * tokens
    frozen, whole = (2.0, 3.0) if training else (1.0, 1.0)
    return frozen * 2.0 * layers + whole * (2.0 * adapters + attention)


def layers_matmul_parameters(model: ModelArgs) -> int:
    """Elements of the matrices that a token is multiplied with in all layers."""
    w, mixtures = widths(model), sum(moe_layers(model))
    count = required(model, "num_layers") * w.hidden * (2 * w.queries + 2 * w.keys)
    count += (required(model, "num_layers") - mixtures) * 3 * w.hidden * w.ffn
    if mixtures:
        used = required(model, "moe_router_topk") * expert_parameters(model)
        count += mixtures * (router_parameters(model) + 3 * w.hidden * w.shared + used)
    return count


def output_parameters(model: ModelArgs) -> int:
    """Elements of the output layer, without vocabulary padding."""
    return required(model, "vocab_size") * required(model, "hidden_size")
