"""Build Megatron's GPTModel from model flags.

Shapes. T = tokens of the micro-batch, V = padded vocabulary, H = hidden size, tp = tensor-parallel size.

    model(input_ids [1, T], position_ids [1, T], attention_mask=None, packed_seq_params=packed)

- last pipeline stage: logits [1, T, V/tp], this rank's slice of the vocabulary, in `params_dtype`. Columns of the
  padding are `PADDED_LOGIT`, so that a softmax over all V columns is the softmax over the real vocabulary.
- with `output="hidden"`, the last stage returns the hidden states after the final norm instead, [1, T, H] ([1, T/tp,
  H] with sequence parallelism), for a caller that makes log-probs from them and `output_weight(model)` in chunks.
- other stages: hidden states [T, 1, H] ([T/tp, 1, H] with sequence parallelism), for the next stage.
- `packed` from `packed_seq_params(lengths)`; the lengths must sum to T, so padding is a sequence of its own. T must
  be a multiple of tp with sequence parallelism. Rotary positions restart in every sequence; `position_ids` are not
  read.
- with context parallelism, T counts this rank's tokens (`zigzag.py`), and only packed sequences are taken.
- without `packed_seq_params`: input_ids [b, s] -> logits [b, s, V/tp], causal in each row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from megatron_bridge.cpu_compat import install_cpu_compat
from megatron_bridge.host import send
from megatron_bridge.layer_spec import resolve_attention_backend, resolve_transformer_impl
from megatron_bridge.model_config import ModelArgs, head_dim, moe_layers, padded_vocab_size, required
from megatron_bridge.names import EXPERT_BIAS

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

PADDED_LOGIT = -1e9
"""Logit of a vocabulary entry that only exists as padding: its probability is exactly 0 in fp32."""


def build_gpt_model(
    model: ModelArgs,
    config: Any,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    transformer_impl: str = "auto",
    attention_backend: str = "auto",
    output: str = "logits",
    gradient_accumulation_fusion: bool = False,
) -> Any:
    """This rank's part of the model (`parallel_state` must be initialised).

    `config` comes from `transformer_config`. `pre_process` and `post_process` say whether this pipeline stage
    holds the embedding and the output layer.
    `output` is what the last stage returns: `logits` or `hidden` (see the module's docstring).
    `gradient_accumulation_fusion`: Transformer Engine's layers add weight gradients to the parameters' `main_grad`
    themselves (Megatron's DistributedDataParallel provides it); no effect on local layers.
    On a GPU the parameters are created there. Build under `torch.device("meta")`, with a config that has
    `use_cpu_initialization=True, perform_initialization=False`, to get shapes without memory.
    """
    install_cpu_compat()
    from megatron.core.models.gpt import GPTModel

    from megatron_bridge.layer_spec import block_spec

    tp = config.tensor_model_parallel_size
    impl = resolve_transformer_impl(transformer_impl)
    attention = resolve_attention_backend(
        attention_backend, impl=impl, head_dim=head_dim(model), cp=config.context_parallel_size,
        dtype=config.params_dtype,
    )  # fmt: skip
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(
            config, with_experts=moe_layers(model), transformer_impl=impl, attention_backend=attention
        ),
        vocab_size=padded_vocab_size(model, tp),
        max_sequence_length=model.max_position_embeddings or 4096,  # only read for learned positions
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type="none",  # the layers rotate, see `attention.PackedSelfAttention`
    )
    _set_rotary(gpt, model, config)
    _set_activation(gpt)
    if impl == "transformer_engine":
        _join_experts(gpt)
    if attention == "flash":
        for layer in gpt.decoder.layers:
            layer.self_attention.core_attention.with_flash_attn_4 = True
    if gradient_accumulation_fusion and impl == "transformer_engine":
        _fuse_gradient_accumulation(gpt)
    assert output in ("logits", "hidden")
    if post_process and output == "hidden":
        _return_hidden_states(gpt)
    elif post_process:
        _mask_padded_vocabulary(gpt, model, tp)
    _mark_experts(gpt)
    return gpt


def _mark_experts(gpt: Any) -> None:
    """Have gradients of experts reduced over the expert-data-parallel group.

    Megatron itself only says so when ep > 1: at tp > etp the copies of an expert on several tensor-parallel ranks see
    other tokens, too.
    """
    for name, parameter in gpt.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False


def _set_rotary(gpt: Any, model: ModelArgs, config: Any) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_bridge.attention import Rotary

    megatrons = RotaryEmbedding(
        head_dim(model),
        model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        use_cpu_initialization=config.use_cpu_initialization,
    )
    rotary = Rotary(megatrons.inv_freq)
    for layer in gpt.decoder.layers:
        layer.self_attention.rotary = rotary


def _set_activation(gpt: Any) -> None:
    """Our SwiGLU in dense layers and shared experts.

    By the switch that makes Megatron call an activation on both halves. On the built layers: in the config it would
    also change routed experts, whose activation weighs tokens.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_bridge.fused import swiglu

    for layer in gpt.decoder.layers:
        mlp = layer.mlp.shared_experts if isinstance(layer.mlp, MoELayer) else layer.mlp
        if mlp is not None:
            mlp.config = copy.copy(mlp.config)
            mlp.config.use_te_activation_func, mlp.config.bias_activation_fusion = True, False
            mlp.activation_func = swiglu


def _join_experts(gpt: Any) -> None:
    """All experts of a layer in one product, where the GPU has a kernel for that."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_bridge.grouped_experts import takes_one_product, use_one_product

    for layer in gpt.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            for linear in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2):
                if takes_one_product(linear.weight0):
                    use_one_product(linear)


def _fuse_gradient_accumulation(gpt: Any) -> None:
    """Set it on the built layers: in the config it would make Megatron's output layer ask for apex."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    for module in gpt.modules():
        if isinstance(module, TransformerEngineBaseModule):
            module.fuse_wgrad_accumulation = True


def named_weights(gpt: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in this rank's modules, tensor) of what a checkpoint holds: all parameters, then the experts' biases."""
    yield from gpt.named_parameters()
    yield from ((name, buffer) for name, buffer in gpt.named_buffers() if name.endswith(EXPERT_BIAS))


def output_weight(gpt: Any) -> torch.nn.Parameter:
    """This rank's rows of the output layer [V/tp, H], on the last pipeline stage; with tied embeddings, those."""
    if gpt.share_embeddings_and_output_weights:
        return gpt.shared_embedding_or_output_weight()
    return gpt.output_layer.weight


def _return_hidden_states(gpt: Any) -> None:
    """Let the output layer hand through what it gets.

    It is still called as a module: Megatron's overlapped parameter gather waits for its weight in a hook of the call.
    """

    def forward(hidden: torch.Tensor, weight: torch.Tensor | None = None, **unused: Any) -> tuple[torch.Tensor, None]:
        return hidden, None

    gpt.output_layer.forward = forward


def _mask_padded_vocabulary(gpt: Any, model: ModelArgs, tp: int) -> None:
    from megatron.core import parallel_state

    width = padded_vocab_size(model, tp) // tp
    start = width * parallel_state.get_tensor_model_parallel_rank()
    valid = min(max(required(model, "vocab_size") - start, 0), width)
    if valid == width:
        return

    def mask(module: torch.nn.Module, args: Any, output: Any) -> Any:
        logits, bias = output
        return F.pad(logits[..., :valid], (0, width - valid), value=PADDED_LOGIT), bias

    gpt.output_layer.register_forward_hook(mask)


def packed_seq_params(
    lengths: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    cp: int = 1,
    cp_rank: int = 0,
    positions: torch.Tensor | None = None,
) -> PackedSeqParams:
    """Megatron's PackedSeqParams (format `thd`) for sequences of these lengths, one after the other.

    With cp > 1 the lengths are still those of the whole sequences (multiples of 2 * cp); the model is then given the
    tokens `zigzag.zigzag_rows(lengths, cp, cp_rank)`. `positions` [T] are those of the given tokens in their sequences,
    on `device`, where the caller has them already.
    """
    from megatron_bridge.attention import PackedLayout
    from megatron_bridge.zigzag import chunk_layout, zigzag_rows

    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if positions is None:
        of_whole = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(torch.tensor(lengths))
        positions = send(of_whole[zigzag_rows(lengths, cp, cp_rank)] if cp > 1 else of_whole, device)
    ends, longest = send(starts, device), max(lengths)
    return PackedLayout(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=positions,
        chunks=chunk_layout(lengths, cp, cp_rank, device) if cp > 1 else None,
    )
