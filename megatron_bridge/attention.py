"""Core attention with packed sequences, and RMSNorm, for Megatron's local (plain PyTorch) layer spec.

Megatron's own local modules refuse packed sequences and sequence parallelism; these take their places in the
spec. T = packed tokens on this rank, s = sequence, b = batch, h = query heads, g = key/value heads (both of this
tensor-parallel rank), d = head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megatron_bridge.zigzag import ChunkLayout


@dataclass
class ZigzagSeqParams(PackedSeqParams):
    """Packed sequences that are split over context-parallel ranks; lengths are those of the whole sequences."""

    chunks: ChunkLayout | None = None


class PackedCoreAttention(torch.nn.Module):
    """Causal grouped-query attention: `varlen_attn` in half precision on CUDA, else SDPA per sequence."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        self.context_parallel = config.context_parallel_size > 1
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> Tensor:
        """Attention within each sequence.

        Under context parallelism keys and values of all ranks are gathered (in backward, their gradients are summed
        and scattered), and each chunk of this rank attends to its sequence up to itself.

        Packed (`packed_seq_params.qkv_format == "thd"`): query [T, h, d], key and value [T, g, d] -> [T, h * d].
        Otherwise: query [s, b, h, d], key and value [s, b, g, d] -> [s, b, h * d]; `attention_mask` is not read,
        because the mask is always causal.
        """
        assert attention_bias is None
        if packed_seq_params is None:
            assert not self.context_parallel, "sequences that are not packed are not split over ranks"
            out = self._sdpa(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3))
            return out.permute(2, 0, 1, 3).flatten(2)
        assert packed_seq_params.qkv_format == "thd"
        if self.context_parallel:
            assert isinstance(packed_seq_params, ZigzagSeqParams) and packed_seq_params.chunks is not None
            chunks = packed_seq_params.chunks
            both = gather_from_sequence_parallel_region(
                torch.stack([key, value], dim=1), group=parallel_state.get_context_parallel_group()
            )
            key, value = both.index_select(0, chunks.kv_rows).unbind(1)
            cu_seqlens, cu_seqlens_k = chunks.cu_seqlens_q, chunks.cu_seqlens_k
            longest, longest_k = max(chunks.lengths_q), max(chunks.lengths_k)
        else:
            cu_seqlens = cu_seqlens_k = packed_seq_params.cu_seqlens_q
            longest = longest_k = int(packed_seq_params.max_seqlen_q)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            # Causal within each sequence, the last query aligned with the last key.
            out = varlen_attn(
                query, key.contiguous(), value.contiguous(), cu_seqlens, cu_seqlens_k, longest, longest_k,
                scale=self.scale, window_size=(-1, 0),
            )  # fmt: skip
            assert isinstance(out, Tensor)
            return out.flatten(1)
        lengths, lengths_k = (ends.diff().tolist() for ends in (cu_seqlens, cu_seqlens_k))
        parts = [
            self._sdpa(q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None])[0].transpose(0, 1)
            for q, k, v in zip(query.split(lengths), key.split(lengths_k), value.split(lengths_k), strict=True)
            if len(q)
        ]
        return torch.cat(parts).flatten(1)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[b, h, s, d], [b, g, S, d], [b, g, S, d] -> [b, h, s, d], the queries being the last s of S positions."""
        few, many = query.shape[2], key.shape[2]
        mask = None
        if few != many:
            mask = torch.ones(few, many, dtype=torch.bool, device=query.device).tril(many - few)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of the last dimension, https://arxiv.org/abs/1910.07467.

    Its weight is replicated over tensor-parallel ranks; with sequence parallelism each rank sees a part of the
    tokens, so the weight is marked for Megatron's all-reduce of such gradients (`finalize_model_grads`).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
