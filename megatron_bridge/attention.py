"""Core attention with packed sequences, rotary positions and RMSNorm, for Megatron's local (plain PyTorch) layer spec.

Megatron's own local modules refuse packed sequences and sequence parallelism; these take their places in the
spec. T = packed tokens on this rank, s = sequence, b = batch, h = query heads, g = key/value heads (both of this
tensor-parallel rank), d = head width.

Rotary positions are applied in the core attention: Megatron's own code for packed sequences reads their lengths back
from the GPU and launches kernels for each sequence, in every layer. The elementwise parts are compiled on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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


class Rotary:
    """Cosines and sines of the positions of a micro-batch, made once for all layers.

    Rotary embeddings, https://arxiv.org/abs/2104.09864, restarting in each packed sequence.
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        """`inverse_frequencies` [d_rot / 2] fp32: how fast each pair of dimensions turns, in radians per position."""
        self.inverse_frequencies = inverse_frequencies
        self._of: PackedSeqParams | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def packed(self, total: int, params: PackedSeqParams, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, d_rot / 2] fp32, for `total` = T packed tokens."""
        if self._tables is None or self._of is not params:
            index = torch.arange(total, device=device)
            ends = params.cu_seqlens_q.long()
            starts = ends[torch.searchsorted(ends, index, right=True) - 1]
            self._of, self._tables = params, self._make(index - starts)
        return self._tables

    def in_rows(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [length, 1, d_rot / 2] fp32, for batches [s, b, ...]."""
        cos, sin = self._make(torch.arange(length, device=device))
        return cos[:, None], sin[:, None]

    def _make(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.inverse_frequencies.device != positions.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions[:, None].float() * self.inverse_frequencies
        return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (i, i + d_rot / 2) of x [..., heads, d] in fp32; cos and sin [..., d_rot / 2]."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat([*turned, rest] if rest.shape[-1] else turned, dim=-1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[rows, d], [d] -> [rows, d], in fp32 inside."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def _any_length(*tensors: Tensor) -> None:
    """Every micro-batch has its own number of rows: compile once for all of them. Other sizes are few."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


class PackedCoreAttention(torch.nn.Module):
    """Causal grouped-query attention: `varlen_attn` in half precision on CUDA, else SDPA per sequence.

    `rotary` is set by whoever builds the model, where queries and keys come without positions.
    """

    rotary: Rotary | None = None

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
        if self.rotary is not None:
            if packed_seq_params is None:
                tables = self.rotary.in_rows(len(query), query.device)
            else:
                tables = self.rotary.packed(len(query), packed_seq_params, query.device)
            query, key = _with_positions(query, *tables), _with_positions(key, *tables)
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


def _with_positions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not x.is_cuda:
        return _rotate(x, cos, sin)
    _any_length(x, cos, sin)
    return _compiled(_rotate)(x, cos, sin)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of the last dimension, https://arxiv.org/abs/1910.07467.

    Its weight is replicated over tensor-parallel ranks; with sequence parallelism each rank sees a part of the
    tokens, so the weight is marked for Megatron's all-reduce of such gradients (`finalize_model_grads`).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        if not x.is_cuda:
            return super().forward(x)
        assert self.eps is not None
        rows = x.reshape(-1, x.shape[-1])
        _any_length(rows)
        return _compiled(_rms_norm)(rows, self.weight, self.eps).view(x.shape)
