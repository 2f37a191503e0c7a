"""Adam, its learning-rate schedule, and gradient clipping across tensor, pipeline and data parallel ranks.

Learning rate of optimizer step k = 0, 1, ..., with W warm-up steps and D steps in all (`config.schedule`):

    k <= W   lr * (k + 1) / (W + 1)          no step is spent at learning rate 0
    k > W    constant: lr
             linear:   min_lr + (lr - min_lr) * (D - k) / (D - W)
             cosine:   min_lr + (lr - min_lr) * (1 + cos(pi * (k - W) / (D - W))) / 2
    k > D    min_lr, unless constant
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_retool.config import Config
from slime_retool.config.schedule import schedule_steps

CONSTANT_STEPS = 2**40
"""Length of a constant schedule, which never ends."""


def build_optimizer(config: Config, model: Any, dtype: torch.dtype) -> Any:
    """Megatron's Adam (decoupled weight decay, none on one-dimensional parameters) over a DDP-wrapped model."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    optimizer_config = OptimizerConfig(
        optimizer=config.optimizer,
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=model.ddp_config.use_distributed_optimizer,
        overlap_param_gather=model.ddp_config.overlap_param_gather,
        use_precision_aware_optimizer=config.use_precision_aware_optimizer or config.optimizer_cpu_offload,
        optimizer_cpu_offload=config.optimizer_cpu_offload,
        optimizer_offload_fraction=config.optimizer_offload_fraction if config.optimizer_cpu_offload else 0.0,
        overlap_cpu_optimizer_d2h_h2d=config.optimizer_cpu_offload,
    )
    return get_megatron_optimizer(optimizer_config, [model])


def build_scheduler(config: Config, optimizer: Any) -> Any:
    """Megatron's scheduler, set to step 0."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    warmup, total = schedule_steps(config)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr / (warmup + 1),
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=CONSTANT_STEPS if total is None else total,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


def grad_norm(optimizer: Any) -> float:
    """L2 norm of the whole gradient, after `optimizer.prepare_grads()`; the same on every rank.

    A tied output layer on another pipeline stage than the embedding, and parameters that every tensor-parallel rank
    holds, count once; data-parallel copies are not in the reduction group, shards of them are.
    """
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    total = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
    for part in optimizer.chained_optimizers:
        grads = [
            grad
            for parameter, grad in _gradients(part)
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
        ]
        squared = torch.stack(torch._foreach_norm(grads)).float().square().sum() if grads else torch.zeros_like(total)
        dist.all_reduce(squared, group=part.get_grad_stats_parallel_group())
        total = total + squared
    return float(total.sqrt())


def _gradients(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, gradient) that this optimizer will read; the precision-aware one keeps it under a name of its own."""
    precision_aware = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    for parameter in part.get_parameters():
        if precision_aware:
            grad = parameter.decoupled_grad if hasattr(parameter, "decoupled_grad") else None
        else:
            grad = parameter.grad
        if grad is not None:
            yield parameter, grad


@torch.no_grad()
def clip_gradients(optimizer: Any, max_norm: float, norm: float) -> None:
    """Scale all gradients by max_norm / norm when the norm is larger; `max_norm` 0 leaves them alone."""
    if max_norm <= 0 or norm <= max_norm:
        return
    grads = [grad for part in optimizer.chained_optimizers for _, grad in _gradients(part)]
    if grads:
        torch._foreach_mul_(grads, max_norm / norm)


def optimizer_step(optimizer: Any, scheduler: Any, max_norm: float) -> tuple[float, bool]:
    """Clip and step. Returns (gradient norm before clipping, whether the weights were updated).

    A gradient that is not finite updates nothing: one bad batch must not ruin the weights. The learning rate moves
    on in either case, so that the schedule depends only on the number of steps.
    """
    found_inf = optimizer.prepare_grads()
    norm = grad_norm(optimizer)
    update = not found_inf and math.isfinite(norm)
    if update:
        clip_gradients(optimizer, max_norm, norm)
        optimizer.step_with_ready_grads()
    scheduler.step(1)
    return norm, update
