"""Let an unpatched megatron-core (checked: 0.16.1 and 0.19.2) run on a CPU with gloo.

Megatron-core assumes CUDA in a few ways that have nothing to do with kernels: it asks for the current CUDA
device, creates small tensors with `device="cuda"`, keeps CUDA random states, uses streams and events, and has
collectives move tensors of different sizes, which gloo cannot.
`install_cpu_compat()` answers each of them with the CPU equivalent. It does nothing where CUDA is available,
and `torch.cuda.is_available()` stays False, so that libraries which ask still get the truth.

Not covered, because it cannot be answered from outside: `clip_grad_by_total_norm_fp32` and the mixed-precision
optimizers insist on CUDA tensor types, so the CPU trains in fp32 and clips gradients itself.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_CPU = torch.device("cpu")


class CpuStream(torch.cpu.Stream):
    """A stream that is always up to date: CPU work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or CpuEvent()


class CpuEvent(torch.cpu.Event):
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class CudaMeansCpu(TorchFunctionMode):
    """Torch calls that name a CUDA device use the CPU instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def install_cpu_compat() -> None:
    """Make megatron-core usable on a CPU. Idempotent; does nothing when CUDA is available.

    Call it before anything of `megatron.core` is imported that compiles its fused functions, and once in every
    thread that runs Megatron (the device rewriting is per thread, as torch function modes are).
    """
    if torch.cuda.is_available():
        return
    if torch.cuda.Stream is not CpuStream:
        _replace_cuda_calls()
        _replace_collectives()
        _replace_megatron_parts()
    if not any(isinstance(mode, CudaMeansCpu) for mode in _get_current_function_mode_stack()):
        CudaMeansCpu().__enter__()


def _replace_cuda_calls() -> None:
    stream = CpuStream()
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "Stream": CpuStream,
        "Event": CpuEvent,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": contextlib.nullcontext,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
        "manual_seed": torch.random.default_generator.manual_seed,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state


def _replace_collectives() -> None:
    """Collectives of different sizes per rank, for Megatron's dispatcher of tokens to experts.

    These are replaced by name, because the function mode does not reach into backward passes.
    """
    all_to_all_single, all_gather, reduce_scatter = dist.all_to_all_single, dist.all_gather, dist.reduce_scatter

    def numbers_for_sizes(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The dispatcher turns sizes into numbers only where it copies them from a GPU.
        sizes = {k: v.tolist() for k, v in kwargs.items() if isinstance(v, torch.Tensor) and k.endswith("sizes")}
        return all_to_all_single(output, input, *args, **{**kwargs, **sizes})

    def gather_padded(tensor_list: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = [len(t) if t.dim() else 0 for t in tensor_list]
        if len(set(rows)) <= 1:
            return all_gather(tensor_list, tensor, *args, **kwargs)
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in rows]
        assert all_gather(gathered, padded, *args, **kwargs) is None, "not asynchronous: tensors are cut afterwards"
        for target, source in zip(tensor_list, gathered, strict=True):
            target.copy_(source[: len(target)])
        return None

    def reduce_whole(output: torch.Tensor, input_list: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        rows = [len(t) if t.dim() else 0 for t in input_list]
        if len(set(rows)) <= 1:
            return reduce_scatter(output, input_list, *args, **kwargs)
        whole = torch.cat(list(input_list))
        assert dist.all_reduce(whole, *args, **kwargs) is None, "not asynchronous: the result is cut afterwards"
        output.copy_(whole.split(rows)[dist.get_rank(kwargs.get("group"))])
        return None

    dist.all_to_all_single = numbers_for_sizes
    dist.all_gather = gather_padded
    dist.reduce_scatter = reduce_whole


def _replace_megatron_parts() -> None:
    # Where it is installed, Megatron takes Transformer Engine's Adam and more without asking for the device.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]

    # Compiling the small fused functions costs a C++ compiler and minutes; the plain ones are exact.
    from megatron.core import jit

    jit.disable_jit_fuser()

    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
