"""LoRA adapters inside Megatron's parallel linear layers, local or Transformer Engine's.

tp = tensor-parallel size, r = rank, T = tokens. What a rank holds, and what travels (r numbers per token, no more):

    column parallel (linear_qkv, linear_fc1)   A [r, in] whole          B [out / tp, r]
        the low-rank activations A x are the same on every rank: their gradient is summed over the group. With
        sequence parallelism each rank has those of its positions: they are gathered, their gradient reduce-scattered.
    row parallel (linear_proj, linear_fc2)     A [r, in / tp]           B [out, r] whole
        each rank has a part of the sum A x: it is reduced (reduce-scattered with sequence parallelism) before B.

B of a gated linear_fc1 is [2, F / tp, r]: gate and up part. So every adapter is split along one of its dimensions.
A parameter that is whole on every rank while each sees its own positions carries Megatron's mark `sequence_parallel`:
its gradient is then summed over the group. Adapters are made within the layers that they adapt (`lora_a`, `lora_b`
beside `weight`), so that no other parameter changes its name.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_bridge.lora_spec import LORA_A, LORA_B, TARGET_MODULES, LoraSpec


class LoraLinear(torch.nn.Module):
    """Mixed into a parallel linear layer that exists already (`add_adapters`)."""

    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter
    lora_scale: float
    lora_enabled: bool
    lora_axes: dict[str, int | None]
    """The dimension of each adapter that tensor parallelism splits."""
    weight: torch.nn.Parameter
    config: Any

    def _low_rank(self, x: Tensor) -> Tensor:
        """A x [positions of the output, 1, r]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """As the layer's own: (output, bias left to the caller)."""
        out, bias = super().forward(x)
        if isinstance(out, tuple):  # a fused norm: the linear layer's input comes as well
            out, x = out
        if self.lora_enabled:
            out = out.add(F.linear(self._low_rank(x), self.lora_b.flatten(0, -2)), alpha=self.lora_scale)
        return out, bias

    def merged_weight(self) -> Tensor:
        """This rank's shard of W + scale B A, in the weight's shape and dtype."""
        return merge_adapter(self.weight.detach(), self.lora_a.detach(), self.lora_b.detach(), self.lora_scale)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The layer's own, with the adapters split where they are."""
        from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]  # of the layer
        for name, axis in self.lora_axes.items():
            if axis is not None:
                state[prefix + name] = make_tp_sharded_tensor_for_checkpoint(
                    self._parameters[name], prefix + name, axis, prepend_offsets=sharded_offsets
                )
        return state


class _Column(LoraLinear):
    def _low_rank(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            gather_from_sequence_parallel_region,
        )

        low = F.linear(x, self.lora_a)
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(low)


class _Row(LoraLinear):
    def _low_rank(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import (
            reduce_from_tensor_model_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )

        low = F.linear(x, self.lora_a)
        if self.config.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low)
        return reduce_from_tensor_model_parallel_region(low)


def merge_adapter(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale B A, computed in fp32 and rounded once to the weight's dtype. [out, in], [r, in], [..., r]."""
    product = b.flatten(0, -2).float() @ a.float()
    return (weight.float() + scale * product).to(weight.dtype)


def initial_a(name: str, rank: int, width: int, seed: int) -> Tensor:
    """A whole A [r, in] in fp32, uniform in +-1 / sqrt(in); depends on nothing but the arguments.

    `name` is the layer's module with its global number.
    """
    generator = torch.Generator().manual_seed((seed + zlib.crc32(name.encode())) % 2**63)
    bound = 1 / math.sqrt(width)
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)


def add_adapters(gpt: Any, spec: LoraSpec, *, seed: int) -> None:
    """Freeze the model and adapt the target modules of its layers. B is 0: the model computes what it did before.

    Megatron's parallel groups must exist. ValueError where layers lack a target (experts have no such module).
    """
    gpt.requires_grad_(False)
    for layer in gpt.decoder.layers:
        for target in spec.targets:
            path = TARGET_MODULES[target]
            try:
                linear = layer.get_submodule(path)
            except AttributeError:
                raise ValueError(
                    f"--lora-target-modules {target}: layer {layer.layer_number - 1} has no {path}; leave it out"
                ) from None
            _adapt(linear, f"{layer.layer_number - 1}.{path}", target, spec, seed)
    if gpt.pre_process and gpt.config.recompute_granularity is not None:
        # Recomputation only keeps a graph for inputs with a gradient, and a frozen embedding's output has none.
        gpt.embedding.register_forward_hook(_want_gradient)


def _want_gradient(module: Any, args: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _adapt(linear: Any, name: str, target: str, spec: LoraSpec, seed: int) -> None:
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    weight = linear.weight
    rows, columns = weight.shape
    column = target in ("linear_qkv", "linear_fc1")
    gated = target == "linear_fc1" and linear.config.gated_linear_unit
    whole = initial_a(name, spec.rank, columns if column else columns * tp, seed)
    a = whole if column else whole.chunk(tp, dim=1)[rank]
    shape = (2, rows // 2, spec.rank) if gated else (rows, spec.rank)
    parameters = {
        LORA_A: torch.nn.Parameter(a.to(weight).contiguous()),
        LORA_B: torch.nn.Parameter(weight.new_zeros(shape)),
    }
    linear.lora_axes = {LORA_A: None, LORA_B: len(shape) - 2} if column else {LORA_A: 1, LORA_B: None}
    for key, parameter in parameters.items():
        linear.register_parameter(key, parameter)
        # What Megatron's gradient reduction and the gradient norm look at.
        if (axis := linear.lora_axes[key]) is not None:
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
        else:
            parameter.sequence_parallel = linear.config.sequence_parallel  # type: ignore[attr-defined]
    linear.lora_scale, linear.lora_enabled = spec.scale, True
    if "layer_norm_weight" in linear._parameters:  # a fused norm
        linear.return_layernorm_output = True
    cls: type = type(linear)
    linear.__class__ = _with_adapter(cls, column)


@functools.cache
def _with_adapter(cls: type, column: bool) -> type:
    return type(f"Lora{cls.__name__}", (_Column if column else _Row, cls), {})


def adapted_layers(module: Any) -> dict[str, LoraLinear]:
    """{name of the weight: its layer} of all adapted layers."""
    return {f"{name}.weight": layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


@contextlib.contextmanager
def adapters_off(module: Any) -> Iterator[None]:
    """Inside, the model is the base."""
    layers = adapted_layers(module).values()
    for layer in layers:
        layer.lora_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_enabled = True
