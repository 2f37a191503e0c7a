"""Experts inside an SGLang worker: where the values of each one lie, for loading and for reading them.

SGLang fuses the experts of a layer, E of them on a worker (its expert-parallel share), each split over t workers
(tensor parallelism within an expert); I = inner width, H = hidden size:

    w13_weight [E, 2 I / t, H]      rows [gate | up] of each expert, [up | gate] for its flashinfer_cutlass kernels
    w2_weight  [E, H, I / t]        both with the last two dimensions swapped for its triton_kernel kernels

Other kernels shuffle what was loaded (flashinfer_trtllm, aiter, the CPU's AMX), quantisation rounds it, and load
balancing keeps copies elsewhere: `ExpertShard.of` refuses those, with the reason.

A stack is a tensor of consecutive whole experts of one layer, as a trainer holds them: `{prefix}.gate_up_proj[a:b]` of
shape [b - a, 2 I, H], gate rows first, or `{prefix}.down_proj[a:b]` of shape [b - a, H, I]. Copying stacks into place
costs a worker some microseconds each; SGLang's own loader looks up every matrix of every expert by its name, a tenth of
a millisecond for 3 MB of a model of 128 experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""The two kinds of stacks."""
_MIXTRAL = ".block_sparse_moe.experts"
_STACK_NAME = re.compile(rf"(.+)\.({GATE_UP}|{DOWN})\[(\d+):(\d+)\]")


def matrix_names(prefix: str) -> tuple[str, str, str]:
    """Hugging Face's names of gate, up and down matrix in an expert of the module `prefix`."""
    return ("w1", "w3", "w2") if prefix.endswith(_MIXTRAL) else ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Stack:
    """Names consecutive experts' matrices; `str()` gives the name, `parse` reads it.

    prefix: module of the experts, `model.layers.3.mlp.experts`.
    """

    prefix: str
    kind: str
    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.prefix}.{self.kind}[{self.first}:{self.end}]"

    @classmethod
    def parse(cls, name: str) -> Stack | None:
        """None for the name of something else."""
        match = _STACK_NAME.fullmatch(name)
        return None if match is None else cls(match[1], match[2], int(match[3]), int(match[4]))

    def matrices(self, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, matrix) of each expert; `values` is the stack itself."""
        gate, up, down = matrix_names(self.prefix)
        for expert, value in zip(range(self.first, self.end), values, strict=True):
            parts = {down: value} if self.kind == DOWN else dict(zip((gate, up), value.chunk(2), strict=True))
            for name, part in parts.items():
                yield f"{self.prefix}.{expert}.{name}.weight", part


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """A worker's part of the experts of one layer, as views of its parameters.

    first: number of its first expert among those of the layer.
    routed: how many there are of these; a shared expert, which every worker has, may lie after them.
    part, parts: which of how many tensor-parallel parts of each expert.
    """

    first: int
    routed: int
    part: int
    parts: int
    gate: Tensor  # [E, I / parts, H]
    up: Tensor  # [E, I / parts, H]
    down: Tensor  # [E, H, I / parts]

    @classmethod
    def of(cls, layer: Any) -> ExpertShard:
        """What an SGLang FusedMoE module holds. ValueError, with the reason, where that is not as it was loaded."""
        if (reason := unreadable(layer)) is not None:
            raise ValueError(f"experts cannot be read: {reason}")
        w13, down = layer.w13_weight.data, layer.w2_weight.data
        if layer.use_triton_kernels:
            w13, down = w13.transpose(1, 2), down.transpose(1, 2)
        gate, up = w13.unflatten(1, (2, -1)).unbind(1)
        if layer.quant_method.load_up_proj_weight_first:
            gate, up = up, gate
        routed = layer.num_local_experts - layer.num_fused_shared_experts
        return cls(layer.moe_ep_rank * routed, routed, layer.moe_tp_rank, layer.moe_tp_size, gate, up, down)

    def load(self, stack: Stack, values: Tensor) -> bool:
        """Copy this worker's part of a stack; False, and nothing is done, where the widths are not those of the stack.

        (On a CPU SGLang may pad the inner width.)
        """
        width = self.down.shape[2]
        if (values.shape[2] if stack.kind == DOWN else values.shape[1] // 2) != width * self.parts:
            return False
        first, end = max(stack.first, self.first), min(stack.end, self.first + self.routed)
        if first >= end:
            return True
        values = values[first - stack.first : end - stack.first]
        mine = slice(first - self.first, end - self.first)
        columns = slice(self.part * width, (self.part + 1) * width)
        if stack.kind == DOWN:
            self.down[mine].copy_(values[:, :, columns])
        else:
            gate, up = values.chunk(2, dim=1)
            self.gate[mine].copy_(gate[:, columns])
            self.up[mine].copy_(up[:, columns])
        return True


def unreadable(layer: Any) -> str | None:
    """Why a FusedMoE module's values are not those that were loaded, at places known here; None where they are."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.utils import use_intel_amx_backend

    method, places = layer.quant_method, get_global_expert_location_metadata()
    if not isinstance(method, UnquantizedFusedMoEMethod):
        return f"{type(method).__name__} does not keep them as they are in the checkpoint; serve them unquantised"
    if method.use_flashinfer_trtllm_moe:
        return "flashinfer_trtllm shuffles them; use --sglang-moe-runner-backend triton"
    if use_intel_amx_backend(layer):
        return "the CPU's AMX kernels pack them; serve on a CPU without AMX, or on a GPU"
    if method._aiter_runner is not None:
        return "aiter shuffles them; use --sglang-moe-runner-backend triton"
    if layer.num_fused_shared_experts > 1:
        return "several shared experts lie among them; use --sglang-disable-shared-experts-fusion"
    if places is not None:
        held = places.physical_to_logical_map_cpu[layer.layer_id].tolist()
        if held != list(range(layer.num_experts - layer.num_fused_shared_experts)):
            return "they are balanced over workers; drop --sglang-enable-eplb and --sglang-ep-num-redundant-experts"
    return None
