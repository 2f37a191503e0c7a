"""Seconds of one rollout's phases, from operation and byte counts and the shares of `cards.py`.

A training step is the sum of parts that do not overlap; per token, layer and rank, h, q, k, f, n, e as in
`activations.py`:

    matrices    2 operations per parameter in forward, 4 in backward (2 for frozen weights: no weight gradient), and
                the bytes of their operands: (inputs + outputs) each time
    attention   2 q s operations in forward (half of the square; s = length of the sequence), 4 q s in backward
    elementwise 10 h + 2 (q + 2 k) + 3 f elements read or written in forward, 12 h + 3 (q + 2 k) + 5 f in backward:
                norms and residuals, `megatron_bridge.fused` for heads and SwiGLU
    logits      for learned tokens only: 2 operations per parameter in forward, 6 in backward (made again), and 22
                bytes per column of chunks written and read in fp32 and bf16
    TP          4 times the residual's (tp - 1) / tp in forward, 6 in backward with sequence parallelism (inputs are
                gathered again), 4 without
    CP          keys and values of all other ranks in forward; in backward those and their gradients
    EP          each token to its experts and back, in forward and in backward
    experts     their weight gradients, once for a micro-batch: written and added to the fp32 sums
    PP          1F1B: one micro-batch through all stages, then the slowest stage for each other micro-batch
                (https://arxiv.org/abs/2104.04473, section 2.2: a bubble of (p - 1) / m where stages are equal)

Full recomputation is one more forward of the layers. Then once per step: reduce-scatter of gradients and all-gather of
weights over data-parallel ranks, and Adam. A group that is wider than a host works at the network's rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bridge.arithmetic import cards
from megatron_bridge.arithmetic.cards import BANDWIDTH_SHARE, GEMM_SHARE, Card
from megatron_bridge.arithmetic.parameters import adapter_parameters, all_adapter_parameters, widths
from megatron_bridge.model_config import moe_layers, padded_vocab_size, required
from slime_retool.commands.plan.activations import (
    BF16,
    FP32,
    expert_gradient_bytes,
    expert_imbalance,
    mean_over_layers,
    sequence_split,
)
from slime_retool.commands.plan.memory import (
    expert_replicas,
    held_parameters,
    kept_logits_share,
    layers_of_stages,
    micro_batches,
    stepped_parameters,
)
from slime_retool.commands.plan.workload import Workload
from slime_retool.config import Config


@dataclass(slots=True)
class Pass:
    """Seconds of one micro-batch's forward and backward."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def times(self, count: float) -> Pass:
        return Pass(self.forward * count, self.backward * count)


def train_seconds(config: Config, card: Card, workload: Workload, *, logits: bool = True) -> float:
    """All optimizer steps of one rollout, of a model that predicts words or (without logits) one value a token."""
    count = micro_batches(config, workload)
    stages = stage_passes(config, card, workload, count, logits=logits)
    each = [stage.forward + stage.backward for stage in stages]
    step = sum(each) + (count - 1) * max(each)
    step += _reduce_seconds(config, card, stages[-1].backward) + _adam_seconds(config, card) + cards.STEP_SECONDS
    return config_steps(config, workload) * step


def forward_seconds(config: Config, card: Card, workload: Workload, *, logits: bool = True) -> float:
    """One pass over the rollout's samples without a backward."""
    count = micro_batches(config, workload)
    each = [stage.forward for stage in stage_passes(config, card, workload, count, logits=logits)]
    return config_steps(config, workload) * (sum(each) + (count - 1) * max(each))


def config_steps(config: Config, workload: Workload) -> float:
    """Optimizer steps of a rollout."""
    return 1.0 if config.global_batch_size is None else workload.samples / config.global_batch_size


def stage_passes(config: Config, card: Card, workload: Workload, count: int, *, logits: bool = True) -> list[Pass]:
    """A mean micro-batch in each pipeline stage, one of `count` in a step."""
    pp = config.pipeline_model_parallel_size
    per_step = workload.tokens / config_steps(config, workload)
    tokens = per_step / (count * config.data_parallel_size * config.context_parallel_size)
    layer = layer_pass(config, card, workload.attended).times(tokens)
    if config.recompute_granularity == "full":
        share = 1.0
        if config.recompute_method == "block":
            share = min(1.0, (config.recompute_num_layers or 1) * pp / required(config, "num_layers"))
        layer.backward += share * layer.forward
    layer.backward += _expert_gradients(config, card)
    stages = [layer.times(layers) for layers in layers_of_stages(config)]
    if logits:
        stages[-1] += output_pass(config, card, tokens * workload.learned)
    if pp > 1:
        sent = tokens * BF16 * required(config, "hidden_size") / sequence_split(config)
        send = cards.PIPELINE_SEND_SECONDS + sent / _link(config, card, config.world_size)
        stages = [stage + Pass(send, send) for stage in stages]
    return stages


def layer_pass(config: Config, card: Card, attended: float) -> Pass:
    """One token of this rank's micro-batch in a mean layer."""
    w, tp, frozen = widths(config), config.tensor_model_parallel_size, config.lora is not None
    attention = _matrices(card, [(w.hidden, (w.queries + 2 * w.keys) / tp), (w.queries / tp, w.hidden)], frozen=frozen)
    dense = _matrices(card, [(w.hidden, 2 * w.ffn / tp), (w.ffn / tp, w.hidden)], frozen=frozen)
    mixture = _experts(config, card, frozen=frozen) if any(moe_layers(config)) else Pass()
    if w.shared:
        mixture += _matrices(card, [(w.hidden, 2 * w.shared / tp), (w.shared / tp, w.hidden)], frozen=frozen)
    mlp = Pass(
        mean_over_layers(config, dense.forward, mixture.forward),
        mean_over_layers(config, dense.backward, mixture.backward),
    )
    scores = 2 * w.queries / tp * attended / card.peak_flops
    forward_share, backward_share = cards.ATTENTION_SHARES[_attention_kernel(config, card)]
    total = attention + mlp + _elementwise(config, card)
    if config.transformer_impl == "local":
        total = total.times(1 / cards.LOCAL_SHARE)
    total += Pass(scores / forward_share, 2 * scores / backward_share)
    total += _layer_traffic(config, card)
    if config.lora is not None:
        total += _adapters(config, card)
    return total


def _attention_kernel(config: Config, card: Card) -> str:
    """What `layer_spec.resolve_attention_backend` takes where all packages are installed; a key of ATTENTION_SHARES."""
    impl = "local" if config.transformer_impl == "local" else "transformer_engine"
    ring = config.context_parallel_size > 1 and impl == "transformer_engine"
    if config.attention_backend == "fused" or ring or not card.has_flash_attn_4:
        return impl
    return "flash_attn_4"


def _matrices(card: Card, shapes: list[tuple[float, float]], *, frozen: bool, share: float = GEMM_SHARE) -> Pass:
    """Products with matrices of these inputs and outputs, for one token."""
    operations = sum(2 * inputs * outputs for inputs, outputs in shapes) / (card.peak_flops * share)
    moved = sum(BF16 * (inputs + outputs) for inputs, outputs in shapes) / (card.bandwidth * BANDWIDTH_SHARE)
    return Pass(operations + moved, (1 if frozen else 2) * (operations + moved))


def _experts(config: Config, card: Card, *, frozen: bool) -> Pass:
    """The experts of one token of this rank, and the way to them and back."""
    h, e = required(config, "hidden_size"), required(config, "moe_ffn_hidden_size")
    tp = config.tensor_model_parallel_size
    ranks = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    routed = required(config, "moe_router_topk") * expert_imbalance(config)
    products = _matrices(card, [(h, 2 * e), (e, h)], frozen=frozen, share=cards.EXPERT_GEMM_SHARE).times(routed / tp)
    # Permuting and un-permuting read and write each copy of the token.
    permuted = 4 * BF16 * routed * h / tp / (card.bandwidth * BANDWIDTH_SHARE)
    sent = 2 * BF16 * routed * h / tp * (ranks - 1) / ranks / _link(config, card, ranks)
    return products + Pass(permuted + sent, permuted + sent)


def _expert_gradients(config: Config, card: Card) -> float:
    """Seconds of a micro-batch in a mean layer to write the experts' weight gradients and add them to their sums."""
    moved = expert_gradient_bytes(config) / BF16 * (2 * BF16 + 2 * FP32)
    return mean_over_layers(config, 0.0, moved / (card.bandwidth * BANDWIDTH_SHARE))


def _adapters(config: Config, card: Card) -> Pass:
    """LoRA's own products: small in operations, but each reads and writes as much as the layer's."""
    assert config.lora is not None
    tp, w = config.tensor_model_parallel_size, widths(config)
    attention, mlp, routed = w.hidden * 2 + w.queries * 2 + 2 * w.keys, w.hidden * 2 + 3 * w.ffn, 0.0
    if any(moe_layers(config)):
        copies = required(config, "moe_router_topk") * expert_imbalance(config)
        routed = copies * (w.hidden * 2 + 3 * required(config, "moe_ffn_hidden_size"))
        operations = 2 * all_adapter_parameters(config, config.lora, active=True) / required(config, "num_layers") / tp
    else:
        operations = 2.0 * adapter_parameters(config, config.lora, tp)
    moved = 3 * BF16 * (attention + mean_over_layers(config, mlp, routed)) / tp
    once = operations / (card.peak_flops * GEMM_SHARE) + moved / (card.bandwidth * BANDWIDTH_SHARE)
    return Pass(once, 2 * once)


def _elementwise(config: Config, card: Card) -> Pass:
    w, tp, split = widths(config), config.tensor_model_parallel_size, sequence_split(config)
    inner = w.ffn
    if config.num_experts is not None:
        routed = required(config, "moe_router_topk") * required(config, "moe_ffn_hidden_size")
        inner = round(mean_over_layers(config, w.ffn, routed * expert_imbalance(config) + w.shared))
    rate = card.bandwidth * BANDWIDTH_SHARE / BF16
    heads = (w.queries + 2 * w.keys) / tp
    return Pass(
        (10 * w.hidden / split + 2 * heads + 3 * inner / tp) / rate,
        (12 * w.hidden / split + 3 * heads + 5 * inner / tp) / rate,
    )


def _layer_traffic(config: Config, card: Card) -> Pass:
    """Tensor- and context-parallel collectives of one token in one layer."""
    w, tp, cp = widths(config), config.tensor_model_parallel_size, config.context_parallel_size
    residual = BF16 * w.hidden * (tp - 1) / tp / _link(config, card, tp)
    tensor = Pass(4 * residual, (6 if sequence_split(config) > 1 else 4) * residual)
    keys = BF16 * 2 * w.keys / tp * (cp - 1) / _link(config, card, tp * cp)
    return tensor + Pass(keys, 2 * keys)


def output_pass(config: Config, card: Card, rows: float) -> Pass:
    """The output layer and its softmax for the learned tokens of a micro-batch."""
    tp = config.tensor_model_parallel_size
    columns = padded_vocab_size(config, tp) / tp
    product = 2 * required(config, "hidden_size") * columns / (card.peak_flops * GEMM_SHARE)
    moved = columns / (card.bandwidth * BANDWIDTH_SHARE)
    again = 1 - kept_logits_share(config, rows)
    backward = (again + (1 if config.lora is not None else 2)) * product + 14 * moved
    return Pass(product + 8 * moved, backward).times(rows)


def _reduce_seconds(config: Config, card: Card, last_backward: float) -> float:
    """Gradients and weights over data-parallel ranks, as far as no computation hides them."""
    replicas = config.data_parallel_size * config.context_parallel_size
    _, dense, experts = held_parameters(config, 0, max(layers_of_stages(config)))
    link = _link(config, card, config.world_size // config.pipeline_model_parallel_size)
    holders = expert_replicas(config)
    moved = dense * (replicas - 1) / replicas + experts * (holders - 1) / holders
    gradients = moved * (FP32 if config.accumulate_allreduce_grads_in_fp32 else BF16) / link
    weights = moved * BF16 / link
    if config.overlap_grad_reduce:
        # Only the last micro-batch's backward has anything to hide, and the last bucket waits for its end.
        gradients = max(0.1 * gradients, gradients - last_backward)
    if config.overlap_param_gather:
        weights = max(0.1 * weights, weights - last_backward / 2)
    return gradients + weights


def _adam_seconds(config: Config, card: Card) -> float:
    """Zero the gradients (4 bytes); of a shard: their norm (4), clip (8), Adam reads 16 and writes 12, bf16 weights 2.

    On the host the 28 bytes are its memory's, and gradients go there and weights come back (6).
    """
    _, dense, experts = held_parameters(config, 0, max(layers_of_stages(config)))
    shard = stepped_parameters(config, dense, experts)
    away = config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0
    on_device = 4 * (dense + experts) + 14 * shard + 28 * shard * (1 - away)
    on_host = 28 * shard * away / cards.HOST_ADAM_BANDWIDTH + 6 * shard * away / card.host_link
    return on_device / (card.bandwidth * BANDWIDTH_SHARE) + on_host


def _link(config: Config, card: Card, extent: int) -> float:
    """Bytes per second that collectives reach in a group whose ranks span `extent` consecutive GPUs."""
    return cards.LINK_SHARE * (card.nvlink if extent <= config.actor_num_gpus_per_node else card.network)
