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

An expert's linear layers are split alike over the expert-tensor-parallel group. The token dispatcher gives all its
ranks the same tokens and adds up what they return, so no activation travels: only the gradient of the parameter that is
whole on each rank is summed. Transformer Engine holds the experts of a rank in one layer (`weight0`, `weight1`, ...);
their adapters are stacked: A [experts, r, in], B [experts, ..., r].
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_bridge.grouped_experts import group_ends, is_aligned
from megatron_bridge.lora_spec import EXPERT_TARGETS, LORA_A, LORA_B, TARGET_MODULES, LoraSpec, expert_module


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

    def _low_rank_update(self, x: Tensor, *splits: Any) -> Tensor:
        """B A x, in the shape of the layer's output. `splits`: what a layer of several experts is given beside x."""
        raise NotImplementedError

    def forward(self, x: Tensor, *splits: Any) -> tuple[Tensor, Tensor | None]:
        """As the layer's own: (output, bias left to the caller)."""
        out, bias = super().forward(x, *splits)
        if isinstance(out, tuple):  # a fused norm: the linear layer's input comes as well
            out, x = out
        if self.lora_enabled:
            out = out.add(self._low_rank_update(x, *splits), alpha=self.lora_scale)
        return out, bias

    def merged_weight(self) -> Tensor:
        """This rank's shard of W + scale B A, in the weight's shape and dtype; with adapters off of W."""
        if not self.lora_enabled:
            return self.weight.detach()
        return merge_adapter(self.weight.detach(), self.lora_a.detach(), self.lora_b.detach(), self.lora_scale)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The layer's own, with the adapters split where they are."""
        from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]  # of the layer
        for name, axis in self.lora_axes.items():
            if axis is not None:
                state[prefix + name] = make_tp_sharded_tensor_for_checkpoint(
                    self._parameters[name], prefix + name, axis, prepend_offsets=sharded_offsets,
                    **self._checkpoint_groups(metadata),
                )  # fmt: skip
        return state

    def _checkpoint_groups(self, metadata: Any) -> dict[str, Any]:
        """Groups that the layer is split over, and copied over, where they are not Megatron's default ones."""
        return {}


class _Dense(LoraLinear):
    def _low_rank(self, x: Tensor) -> Tensor:
        """A x [positions of the output, 1, r]."""
        raise NotImplementedError

    def _low_rank_update(self, x: Tensor, *splits: Any) -> Tensor:
        return F.linear(self._low_rank(x), self.lora_b.flatten(0, -2))


class _Column(_Dense):
    def _low_rank(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            gather_from_sequence_parallel_region,
        )

        low = F.linear(x, self.lora_a)
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(low)


class _Row(_Dense):
    def _low_rank(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import (
            reduce_from_tensor_model_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )

        low = F.linear(x, self.lora_a)
        if self.config.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low)
        return reduce_from_tensor_model_parallel_region(low)


class _Expert(LoraLinear):
    """A layer of one expert, split either way."""

    def _whole(self, name: str) -> Tensor:
        """An adapter's part here; where every rank has all of it, its gradient is summed over them."""
        from megatron.core import parallel_state as mpu
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        parameter = self._parameters[name]
        assert parameter is not None
        if self.lora_axes[name] is not None:
            return parameter
        return copy_to_tensor_model_parallel_region(parameter, group=mpu.get_expert_tensor_parallel_group())

    def _low_rank_update(self, x: Tensor, *splits: Any) -> Tensor:
        return F.linear(F.linear(x, self._whole(LORA_A)), self._whole(LORA_B).flatten(0, -2))

    def _checkpoint_groups(self, metadata: Any) -> dict[str, Any]:
        from megatron.core import parallel_state as mpu

        return {"tp_group": mpu.get_expert_tensor_parallel_group(), "dp_cp_group": metadata["dp_cp_group"]}


class _GroupedExperts(_Expert):
    """One layer of all experts of a rank, whose tokens come one expert after the other."""

    def _low_rank_update(self, x: Tensor, *splits: Any) -> Tensor:
        (tokens_per_expert,) = splits
        low = grouped_linear(x, self._whole(LORA_A), tokens_per_expert)
        return grouped_linear(low, self._whole(LORA_B).flatten(1, -2), tokens_per_expert)

    def merged_weight(self) -> Tensor:
        raise AssertionError("each expert has a weight of its own, see `adapted_layers`")

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The layer's own, with the adapters under the keys and in the global shapes of single experts' ones."""
        from megatron.core import parallel_state as mpu
        from megatron.core.dist_checkpointing import ShardedTensor

        state = super(LoraLinear, self).sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        tp = (mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size())
        ep = (mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size())
        stacked = len(sharded_offsets)
        for name, axis in self.lora_axes.items():
            split = [] if axis is None else [(stacked + 1 + axis, *tp)]
            state[prefix + name] = ShardedTensor.from_rank_offsets(
                prefix + name, self._parameters[name], *sharded_offsets, (stacked, *ep), *split,
                replica_id=(0, tp[0] if axis is None else 0, mpu.get_expert_data_parallel_rank()),
                prepend_axis_num=stacked,
            )  # fmt: skip
        return state


@dataclass(frozen=True)
class _OneOfMany:
    """The adapted weight of one expert in a layer of several."""

    layer: LoraLinear
    index: int

    def merged_weight(self) -> Tensor:
        weight = self.layer._parameters[f"weight{self.index}"]
        assert weight is not None
        if not self.layer.lora_enabled:
            return weight.detach()
        a, b = (parameter.detach()[self.index] for parameter in (self.layer.lora_a, self.layer.lora_b))
        return merge_adapter(weight.detach(), a, b, self.layer.lora_scale)


def grouped_linear(x: Tensor, weights: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
    """Every expert's matrix on its own rows: [T, in], [experts, out, in], tokens of each -> [T, out]."""
    if is_aligned(weights):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=group_ends(tokens_per_expert, x.device))
    parts = x.split(list(tokens_per_expert))
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])


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

    Megatron's parallel groups must exist.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    gpt.requires_grad_(False)
    for layer in gpt.decoder.layers:
        for target in spec.targets:
            if target in EXPERT_TARGETS and isinstance(layer.mlp, MoELayer):
                _adapt_experts(layer.mlp.experts, layer.layer_number - 1, target, spec, seed)
            else:
                path = TARGET_MODULES[target]
                _adapt(layer.get_submodule(path), [f"{layer.layer_number - 1}.{path}"], target, spec, seed, None)
    if gpt.pre_process and gpt.config.recompute_granularity is not None:
        # Recomputation only keeps a graph for inputs with a gradient, and a frozen embedding's output has none.
        gpt.embedding.register_forward_hook(_want_gradient)


def _want_gradient(module: Any, args: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _adapt_experts(experts: Any, layer: int, target: str, spec: LoraSpec, seed: int) -> None:
    """Adapt one linear layer of every expert on this rank."""
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.moe.experts import SequentialMLP

    count = experts.num_local_experts
    first = mpu.get_expert_model_parallel_rank() * count
    names = [f"{layer}.{expert_module(first + expert, target)}" for expert in range(count)]
    if isinstance(experts, SequentialMLP):
        for name, expert in zip(names, experts.local_experts, strict=True):
            _adapt(expert.get_submodule(target), [name], target, spec, seed, _Expert)
    else:
        _adapt(experts.get_submodule(target), names, target, spec, seed, _GroupedExperts)


def _adapt(
    linear: Any, names: list[str], target: str, spec: LoraSpec, seed: int, of_experts: type[LoraLinear] | None
) -> None:
    """Adapt one layer. `names`: what the beginning of each A depends on, several for a layer of several experts."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    if of_experts is None:
        tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    else:
        tp, rank = mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
    grouped = of_experts is _GroupedExperts
    weight = linear.weight0 if grouped else linear.weight
    rows, columns = weight.shape
    column = target in ("linear_qkv", "linear_fc1")
    gated = target == "linear_fc1" and linear.config.gated_linear_unit
    stack = [initial_a(name, spec.rank, columns if column else columns * tp, seed) for name in names]
    whole = torch.stack(stack) if grouped else stack[0]
    a = whole if column else whole.chunk(tp, dim=-1)[rank]
    shape = (2, rows // 2, spec.rank) if gated else (rows, spec.rank)
    parameters = {
        LORA_A: torch.nn.Parameter(a.to(weight).contiguous()),
        LORA_B: torch.nn.Parameter(weight.new_zeros((len(names), *shape) if grouped else shape)),
    }
    linear.lora_axes = {LORA_A: None, LORA_B: len(shape) - 2} if column else {LORA_A: 1, LORA_B: None}
    for key, parameter in parameters.items():
        linear.register_parameter(key, parameter)
        # What Megatron's gradient reduction and the gradient norm look at.
        axis: int | None = linear.lora_axes[key]
        if of_experts is not None:
            # Ranks hold other experts, or parts of one; where all hold the same the first one's counts.
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.shared = axis is None and rank > 0  # type: ignore[attr-defined]
            set_tensor_model_parallel_attributes(parameter, True, axis or 0, 1)
        elif axis is not None:
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
        else:
            parameter.sequence_parallel = linear.config.sequence_parallel  # type: ignore[attr-defined]
    linear.lora_scale, linear.lora_enabled = spec.scale, True
    if "layer_norm_weight" in linear._parameters:  # a fused norm
        linear.return_layernorm_output = True
    cls: type = type(linear)
    adapter: type = of_experts or (_Column if column else _Row)
    linear.__class__ = _with_adapter(cls, adapter)


@functools.cache
def _with_adapter(cls: type, adapter: type) -> type:
    return type(f"Lora{cls.__name__}", (adapter, cls), {})


def adapted_layers(module: Any) -> dict[str, LoraLinear | _OneOfMany]:
    """{name of the weight: what merges its adapter into it} of all adapted weights."""
    found: dict[str, LoraLinear | _OneOfMany] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, _GroupedExperts):
            found |= {f"{name}.weight{index}": _OneOfMany(layer, index) for index in range(len(layer.lora_a))}
        elif isinstance(layer, LoraLinear):
            found[f"{name}.weight"] = layer
    return found


def adapter_shards(module: Any) -> Iterator[tuple[str, int | None, Tensor]]:
    """(name, dimension that is split, this rank's part) of every adapter here; experts are numbered within the rank."""
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLinear):
            experts, _, target = name.rpartition(".")
            for part, axis in layer.lora_axes.items():
                values = layer._parameters[part]
                assert values is not None
                if isinstance(layer, _GroupedExperts):
                    for index, value in enumerate(values.detach()):
                        yield f"{experts}.local_experts.{index}.{target}.{part}", axis, value
                else:
                    yield f"{name}.{part}", axis, values.detach()


@contextlib.contextmanager
def adapters_off(module: Any) -> Iterator[None]:
    """Inside, the model is the base."""
    layers = [layer for layer in module.modules() if isinstance(layer, LoraLinear)]
    for layer in layers:
        layer.lora_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_enabled = True
