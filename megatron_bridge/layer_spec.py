"""Which modules a transformer layer is built of: Transformer Engine's, or Megatron's local ones with our attention."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch

from megatron_bridge.model_config import ATTENTION_BACKENDS, TRANSFORMER_IMPLS


def resolve_transformer_impl(transformer_impl: str) -> str:
    """`auto` -> `transformer_engine` where CUDA and Transformer Engine are there, else `local`.

    Raises ValueError for an unknown name, or for `transformer_engine` where it cannot run.
    """
    if transformer_impl not in TRANSFORMER_IMPLS:
        known = ", ".join(TRANSFORMER_IMPLS)
        raise ValueError(f"--transformer-impl {transformer_impl} is unknown: choose one of {known}")
    usable = torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    if transformer_impl == "auto":
        return "transformer_engine" if usable else "local"
    if transformer_impl == "transformer_engine" and not usable:
        raise ValueError(
            "--transformer-impl transformer_engine needs a CUDA device and the transformer-engine package: "
            "use --transformer-impl auto, or local"
        )
    return transformer_impl


def resolve_attention_backend(backend: str, *, impl: str, head_dim: int, cp: int, dtype: torch.dtype) -> str:
    """`auto` -> `flash` (flash-attn-4) where it is installed and takes the model, else `fused`.

    flash-attn-4 comes with SGLang. On a Hopper GPU it is 1.2 to 1.4 times as fast as cuDNN's kernels for packed
    sequences, which Transformer Engine calls, and twice as fast as torch's `varlen_attn` (docs/performance.md).
    The CPU has one kernel, whatever the name. Raises ValueError for an unknown name, or for `flash` on a GPU where it
    cannot run.
    """
    if backend not in ATTENTION_BACKENDS:
        raise ValueError(f"--attention-backend {backend} is unknown: choose one of {', '.join(ATTENTION_BACKENDS)}")
    if backend == "fused" or not torch.cuda.is_available():
        return "fused"
    if torch.cuda.get_device_capability() < (9, 0):
        missing = "a Hopper or Blackwell GPU"
    elif importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        missing = "the flash-attn-4 package"
    elif dtype not in (torch.bfloat16, torch.float16):
        missing = "--precision bf16"
    elif head_dim % 8 or head_dim > 128:
        missing = f"heads of at most 128 dimensions, a multiple of 8 (the model has {head_dim})"
    elif cp > 1 and impl == "transformer_engine":
        missing = "--context-parallel-size 1 or --transformer-impl local"
    else:
        return "flash"
    if backend == "flash":
        raise ValueError(f"--attention-backend flash needs {missing}: use auto or fused")
    return "fused"


def block_spec(config: Any, *, with_experts: Sequence[bool], transformer_impl: str, attention_backend: str) -> Any:
    """Megatron's `TransformerBlockSubmodules` for this pipeline stage (`parallel_state` must be initialised).

    `config` is a TransformerConfig; `with_experts` says of every layer of the whole model whether its MLP is a mixture
    of experts; `transformer_impl` is `local` or `transformer_engine`, `attention_backend` `flash` or `fused`.
    """
    # Megatron warns about every optional package that is not there; the choice made here is deliberate.
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megatron_bridge.attention import HeadNorm, PackedCoreAttention, PackedSelfAttention, RMSNorm

    local = transformer_impl == "local"
    offset = get_transformer_layer_offset(config)
    experts = with_experts[offset : offset + get_num_layers_to_build(config)]
    if any(experts):
        from megatron.core.transformer.moe import moe_utils

        # 0.16.1 reads this name although it is only imported with Transformer Engine; None means "not there".
        moe_utils.__dict__.setdefault("te_general_gemm", None)
    specs = {kind: (_local_layer if local else _te_layer)(config, kind) for kind in set(experts)}
    for spec in specs.values():
        attention = spec.submodules.self_attention
        attention.module = PackedSelfAttention
        if local or attention_backend == "flash":
            attention.submodules.core_attention = PackedCoreAttention
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = (
            HeadNorm if config.qk_layernorm else IdentityOp
        )
    norm: Any = RMSNorm
    if not local:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in experts], layer_norm=norm)


def _te_layer(config: Any, experts: bool) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=config.qk_layernorm,
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=experts and config.moe_grouped_gemm,
    )


def _local_layer(config: Any, experts: bool) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron_bridge.attention import RMSNorm

    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        num_experts=config.num_moe_experts if experts else None,
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if experts:
        # As Transformer Engine's layers do: this norm is part of no linear layer.
        del layer.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return spec
