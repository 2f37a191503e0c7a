"""Megatron's TransformerConfig from model flags, parallel sizes and what the run computes with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_bridge.cpu_compat import install_cpu_compat
from megatron_bridge.layer_spec import resolve_transformer_impl
from megatron_bridge.model_config import (
    ModelArgs,
    alike_layers,
    check_expert_parallel,
    check_model,
    check_pipeline,
    check_tensor_parallel,
    head_dim,
    moe_layers,
    query_groups,
    required,
)


def transformer_config(
    model: ModelArgs,
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    decoder_first_pipeline_num_layers: int | None = None,
    decoder_last_pipeline_num_layers: int | None = None,
    transformer_impl: str = "auto",
    **overrides: Any,
) -> Any:
    """Megatron's TransformerConfig for the model and its parallel layout.

    ep, etp: expert-parallel size, and tensor-parallel size inside an expert (independent of `tp`). `overrides` are
    further TransformerConfig fields: `perform_initialization=False` leaves parameters uninitialised, for a checkpoint
    that overwrites them all. All dropouts are 0, and gradients are summed, not averaged, over micro-batches and
    replicas. Raises ValueError for a model or layout that cannot be built.
    """
    install_cpu_compat()
    from megatron.core.transformer.transformer_config import TransformerConfig

    first, last = decoder_first_pipeline_num_layers, decoder_last_pipeline_num_layers
    check_model(model)
    check_tensor_parallel(model, tp)
    check_expert_parallel(model, ep, etp)
    check_pipeline(required(model, "num_layers"), pp, first=first, last=last)
    impl = resolve_transformer_impl(transformer_impl)
    if sequence_parallel and tp == 1:
        sequence_parallel = False  # there is nothing to share out, and Megatron refuses the combination
    if model.num_experts is not None and tp > 1 and not sequence_parallel:
        raise ValueError(f"--tensor-model-parallel-size {tp} with experts needs --sequence-parallel: add it")
    on_gpu = torch.cuda.is_available()
    fields: dict[str, Any] = dict(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=query_groups(model),
        kv_channels=head_dim(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=False,
        add_qkv_bias=model.add_qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        sequence_parallel=sequence_parallel,
        variable_seq_lengths=pp > 1,  # packed micro-batches differ in length
        batch_p2p_sync=False,  # the host need not wait for what stages send; it was for races in an old torch
        moe_token_dispatcher_type="alltoall",  # the default is refused beside the line above, even without experts
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        # Token weights hold the denominator, so Megatron must sum micro-batches and replicas.
        calculate_per_token_loss=True,
        # Every tensor-parallel layout then starts from the same weights.
        use_cpu_initialization=not on_gpu,
        masked_softmax_fusion=False,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        persist_layer_norm=impl == "transformer_engine",
        gradient_accumulation_fusion=False,
    )
    if model.num_experts is not None:
        fields |= _expert_fields(model, ep=ep, etp=etp, grouped=impl == "transformer_engine")
    return TransformerConfig(**{**fields, **overrides})


def _expert_fields(model: ModelArgs, *, ep: int, etp: int, grouped: bool) -> dict[str, Any]:
    """TransformerConfig fields of a mixture of experts. Routing is the policy's own: nothing balances or drops."""
    return dict(
        num_moe_experts=model.num_experts,
        moe_router_topk=model.moe_router_topk,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        moe_layer_freq=1 if alike_layers(model) else [int(experts) for experts in moe_layers(model)],
        moe_router_pre_softmax=model.moe_router_pre_softmax,
        moe_router_score_function=model.moe_router_score_function,
        moe_router_enable_expert_bias=model.moe_router_enable_expert_bias,
        moe_router_bias_update_rate=0.0,  # the engine's bias, too, stays the checkpoint's
        moe_router_topk_scaling_factor=model.moe_router_topk_scaling_factor,
        moe_shared_expert_intermediate_size=model.moe_shared_expert_intermediate_size,
        moe_shared_expert_gate=model.moe_shared_expert_gate,
        moe_router_dtype="fp32",  # bf16 logits tie, and the engine and the trainer would choose other experts
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_grouped_gemm=grouped,
        moe_permute_fusion=grouped,  # Transformer Engine's kernels as well
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
