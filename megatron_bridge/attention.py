"""Modules that take the places of Megatron's in its layer specs.

T = packed tokens on this rank, s = sequence, b = batch, h = query heads, g = key/value heads (both of this
tensor-parallel rank), d = head width.

- In every spec: `PackedSelfAttention`, whose elementwise parts are one pass over memory (`fused`).
- With flash-attn-4, and in the local (plain PyTorch) spec, `PackedCoreAttention`; in the latter also `RMSNorm`:
  Megatron's own refuse packed sequences and sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megatron_bridge.fused import compiled, mark_any_length, rms_norm, split_norm_rotate
from megatron_bridge.zigzag import ChunkLayout


@dataclass
class PackedLayout(PackedSeqParams):
    """Packed sequences; their lengths are those of the whole sequences, also where ranks hold parts of each."""

    positions: Tensor | None = None
    """[T] int64: of each token of this rank in its own sequence, from 0."""
    chunks: ChunkLayout | None = None
    """Under context parallelism: which rows of this rank attend to which."""


class Rotary:
    """Cosines and sines of the positions of a micro-batch, made once for all layers.

    Rotary embeddings, https://arxiv.org/abs/2104.09864, restarting in each packed sequence.
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        """`inverse_frequencies` [d_rot / 2] fp32: how fast each pair of dimensions turns, in radians per position."""
        self.inverse_frequencies = inverse_frequencies
        self._of: PackedLayout | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def packed(self, params: PackedLayout) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, d_rot / 2] fp32."""
        assert params.positions is not None
        if self._tables is None or self._of is not params:
            self._of, self._tables = params, self._make(params.positions)
        return self._tables

    def in_rows(self, length: int, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [length * batch, d_rot / 2] fp32, for batches [s, b, ...]."""
        return self._make(torch.arange(length, device=device).repeat_interleave(batch))

    def _make(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.inverse_frequencies.device != positions.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions[:, None].float() * self.inverse_frequencies
        return angles.cos(), angles.sin()


class PackedSelfAttention(SelfAttention):
    """Megatron's self-attention, with normalisation and rotation of queries and keys in one pass (`fused`).

    Megatron's own code takes nine kernels for them, and where Transformer Engine is not used also reads the sequences'
    lengths back from the GPU in every layer.
    """

    rotary: Rotary
    """Set by whoever builds the model, one for all layers."""
    _packed: PackedLayout | None = None

    def forward(self, *args: Any, packed_seq_params: PackedLayout | None = None, **kwargs: Any) -> Any:
        """As Megatron's; `packed_seq_params` from `model.packed_seq_params`."""
        self._packed = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [s, b, H] -> query [s, b, h, d], key and value [s, b, g, d], normalised and rotated."""
        assert key_value_states is None and not output_gate and split_qkv
        mixed, _ = self.linear_qkv(hidden_states)
        length, batch = mixed.shape[:2]
        if self._packed is None:
            tables = self.rotary.in_rows(length, batch, mixed.device)
        else:
            tables = self.rotary.packed(self._packed)
        norms = (self.q_layernorm, self.k_layernorm) if self.config.qk_layernorm else ()
        q_weight, k_weight = [norm() for norm in norms] or (None, None)
        width = self.hidden_size_per_attention_head
        mixed = mixed.view(length * batch, self.num_query_groups_per_partition, -1, width)
        parts = split_norm_rotate(mixed, q_weight, k_weight, *tables, self.config.layernorm_epsilon)
        query, key, value = (part.view(length, batch, -1, width) for part in parts)
        return query, key, value


class HeadNorm(torch.nn.Module):
    """The weight of a norm that `PackedSelfAttention` applies.

    It is called for its weight, as a module: Megatron's overlapped parameter gather waits in a hook of the call.
    The weight is replicated over tensor-parallel ranks. With sequence parallelism each rank sees a part of the tokens,
    so it is marked for Megatron's all-reduce of such gradients (`finalize_model_grads`).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self) -> Tensor:
        """[d]."""
        return self.weight


class RMSNorm(HeadNorm):
    """RMSNorm of the last dimension, https://arxiv.org/abs/1910.07467."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """[..., d] -> [..., d]."""
        if not x.is_cuda:
            return rms_norm(x, self.weight, self.eps)
        rows = x.reshape(-1, x.shape[-1])
        mark_any_length(rows)
        return compiled(rms_norm)(rows, self.weight, self.eps).view(x.shape)


class PackedCoreAttention(torch.nn.Module):
    """Causal grouped-query attention: a packed kernel in half precision on CUDA, else SDPA per sequence."""

    with_flash_attn_4 = False
    """Set by whoever builds the model; else the packed kernel is torch's `varlen_attn`."""

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
            assert isinstance(packed_seq_params, PackedLayout) and packed_seq_params.chunks is not None
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
            key, value = key.contiguous(), value.contiguous()
            out = packed_attention(
                query, key, value, cu_seqlens, cu_seqlens_k, longest, longest_k, self.scale,
                with_flash_attn_4=self.with_flash_attn_4,
            )  # fmt: skip
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


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, ends_k: Tensor, longest: int, longest_k: int,
    scale: float | None, *, with_flash_attn_4: bool,
) -> Tensor:  # fmt: skip
    """Causal within each sequence, the last query aligned with the last key: query [T, h, d] -> [T, h, d]."""
    if not with_flash_attn_4:
        out = varlen_attn(query, key, value, ends, ends_k, longest, longest_k, scale=scale, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out
    from flash_attn.cute import flash_attn_varlen_func

    out, _ = flash_attn_varlen_func(
        query, key, value, cu_seqlens_q=ends, cu_seqlens_k=ends_k, max_seqlen_q=longest, max_seqlen_k=longest_k,
        softmax_scale=scale, causal=True,
    )  # fmt: skip
    return out
