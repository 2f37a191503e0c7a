"""Adam's state in the layout of the weights, as checkpoints hold it, without Megatron's many copies on the host.

Megatron's sharded optimizer makes this layout ("fully_reshardable") by passing every value through seven copies in
host memory, which takes 30 s for 1.5 billion parameters. Here each value goes from the GPU into its copy at once. What
a checkpoint holds is the same, so Megatron loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

FULLY_RESHARDABLE = "fully_reshardable"
OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": FULLY_RESHARDABLE, "chained_optim_avoid_prefix": True}
"""Optimizer state laid out like the weights, so that another TP, PP or DP size can read it."""


def optimizer_state(optimizer: Any, model_state: dict[str, Any], copy: Callable[[Tensor], Tensor]) -> dict[Any, Any]:
    """The sharded state dict of a Megatron optimizer over a model's sharded `model_state`. Collective.

    copy: puts a tensor where it may stay until it has been written; asked for what this rank is to write.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = optimizer.chained_optimizers
    if not all(isinstance(part, DistributedOptimizer) for part in parts):
        return optimizer.sharded_state_dict(model_state, metadata=dict(OPTIMIZER_FORMAT))
    if len(parts) == 1:
        return _part_state(parts[0], model_state, copy)
    optimizer._synchronize_steps()
    return {index: _part_state(part, model_state, copy) for index, part in enumerate(parts)}


def state_to_load(optimizer: Any, model_state: dict[str, Any]) -> dict[Any, Any]:
    """What an optimizer that has not stepped asks a checkpoint for. Collective."""
    # torch's Adam makes its state in its first step, and Megatron reads the number of steps from that state.
    for part in optimizer.chained_optimizers:
        if _is_sharded_torch_adam(part):
            part._init_optimizer_states_with_dummy_values()
    state: dict[Any, Any] = optimizer.sharded_state_dict(model_state, is_loading=True, metadata=dict(OPTIMIZER_FORMAT))
    return state


def load_optimizer_state(optimizer: Any, state: dict[Any, Any]) -> None:
    """Load what `state_to_load` asked for, read from a checkpoint, but for the options of the run that saved."""
    parts = optimizer.chained_optimizers
    states = [state] if len(parts) == 1 else [state[index] for index in range(len(parts))]
    options = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups]
    for part, saved in zip(parts, states, strict=True):
        _take_schedule(part, saved)
    if any(_is_sharded_torch_adam(part) for part in parts):
        for part, saved in zip(parts, states, strict=True):
            _load_torch_adam(part, saved)
    else:
        optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)


def _take_schedule(part: Any, state: dict[str, Any]) -> None:
    """Give saved parameter groups the learning rates and weight decays of this run's.

    megatron-core 0.19 looks for this run's groups among the saved ones by these values, too.
    """
    own = {_name_of(group): group for group in part.param_groups}
    for group in state.get("optimizer", state)["param_groups"] if own else ():
        now = own.get(_name_of(group))
        if now is not None:
            for key in ("max_lr", "min_lr", "start_wd", "end_wd"):
                group.pop(key, None)
                if key in now:
                    group[key] = now[key]


def _name_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a parameter group from another one, whatever the options of the run."""
    return tuple(group[key] for key in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"))


KINDS = {
    "sharded": "--use-distributed-optimizer on GPUs",
    "bf16": "--no-use-distributed-optimizer and --precision bf16",
    "fp32": "--no-use-distributed-optimizer (or a CPU) and --precision fp32",
}
"""What the state of an optimizer is stored as -> the flags that make it so. None goes on from another's."""


def optimizer_kind(optimizer: Any) -> str:
    """One of `KINDS`."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer

    if any(isinstance(part, DistributedOptimizer) for part in optimizer.chained_optimizers):
        return "sharded"
    return "fp32" if all(isinstance(part, FP32Optimizer) for part in optimizer.chained_optimizers) else "bf16"


def halves_master_weights(optimizer: Any) -> bool:
    """Whether master weights are bits beside the bf16 weights; the optimizer on the host has whole ones."""
    configs = [part.config for part in optimizer.chained_optimizers]
    return any(config.use_precision_aware_optimizer and not config.optimizer_cpu_offload for config in configs)


def _is_sharded_torch_adam(part: Any) -> bool:
    """Whether Megatron's sharded optimizer steps with torch's Adam: Transformer Engine and Apex are missing."""
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

    return isinstance(part, DistributedOptimizer) and not HAVE_APEX_OR_TE


def _load_torch_adam(part: Any, state: dict[str, Any]) -> None:
    """Megatron's `load_state_dict`, with a `step` of its own for each parameter.

    Megatron looks for `step` among the tensors laid out like the weights, where it is not, and gives all parameters the
    same tensor, which every parameter's update would count up.
    """
    part.load_state_dict({key: value for key, value in state.items() if not key.startswith("param_state")})
    own = part.optimizer.state
    steps = {parameter: states.pop("step") for parameter, states in own.items()}
    part.load_parameter_state_from_fully_reshardable(state["param_state"])
    for parameter, step in steps.items():
        own[parameter]["step"] = step.clone()


class _ZerosOnMeta(TorchFunctionMode):
    """`torch.zeros` takes no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.zeros:
            kwargs = {**(kwargs or {}), "device": "meta"}
        return func(*args, **(kwargs or {}))


def _part_state(part: Any, model_state: dict[str, Any], copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    # What Megatron makes to load into: keys, shapes and shards of every state, with zeros for values.
    with _ZerosOnMeta():
        layout = part.sharded_param_state_fully_reshardable(model_state, True, dict(OPTIMIZER_FORMAT))
    parameters = [parameter for buffer in part.buffers for parameter in buffer.param_index_map]
    assert len(parameters) == len(layout), (len(parameters), len(layout))
    shards = dict(zip(parameters, layout.values(), strict=True))
    names = list(layout[0]) if layout else []
    for parameter, values in _whole_states(part, names):
        for name, shard in shards[parameter].items():
            if is_main_replica(shard.replica_id):
                shard.data = copy(values[name].view(shard.data.shape))
    left = [
        shard.key
        for states in layout.values()
        for shard in states.values()
        if is_main_replica(shard.replica_id) and shard.data.is_meta
    ]
    assert not left, left
    state = part.state_dict()
    for group in state["optimizer"]["param_groups"]:
        # The optimizer on the host keeps classes in its groups, which Megatron refuses to read; loading leaves its own.
        for key in [key for key, value in group.items() if isinstance(value, type)]:
            del group[key]
    return {**state, "param_state": layout, "param_state_sharding_type": FULLY_RESHARDABLE}


def _whole_states(part: Any, names: list[str]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """(model parameter, its states by name, each flat fp32) on the first data-parallel rank; nothing on the others."""
    group = part.data_parallel_group
    for buffer, all_ranges in zip(part.buffers, part.gbuf_ranges, strict=True):
        if group.size() == 1:
            for parameter in buffer.param_index_map:
                states = part._get_main_param_and_optimizer_states(parameter)
                yield parameter, {name: states[name].float() for name in names}
            continue
        (ranges,) = all_ranges.values()
        for bucket, found in zip(buffer.buckets, ranges, strict=True):
            whole = _gathered(part, names, bucket.grad_data, found["param_map"])
            if group.rank() != 0:
                continue
            for parameter in bucket.params_list:
                start, end, _ = buffer.param_index_map[parameter]
                inside = slice(start - bucket.offset, end - bucket.offset)
                yield parameter, {name: whole[name][inside] for name in names}


def _gathered(part: Any, names: list[str], like: Tensor, ranges: dict[Any, Any]) -> dict[str, Tensor]:
    """States of one bucket of gradients `like` [n], flat [n] fp32 each, on the group's first rank.

    ranges: for each parameter that this rank updates something of, where that lies in its share of the bucket.
    """
    group, device = part.data_parallel_group, like.device
    own = {name: torch.zeros(like.numel() // group.size(), dtype=torch.float32, device=device) for name in names}
    for parameter, places in ranges.items():
        states = part._get_main_param_and_optimizer_states(parameter)
        place = places["gbuf_local"]
        for name in names:
            own[name][place.start : place.end].copy_(states[name].detach().view(-1))
    whole: dict[str, Tensor] = {}
    for name in names:
        parts = None
        if group.rank() == 0:
            whole[name] = torch.empty(like.numel(), dtype=torch.float32, device=device)
            parts = list(whole[name].chunk(group.size()))
        dist.gather(own.pop(name), parts, dst=dist.get_global_rank(group, 0), group=group)
    return whole
