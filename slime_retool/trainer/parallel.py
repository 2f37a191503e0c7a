"""torch.distributed, Megatron's parallel groups, seeds."""

from __future__ import annotations

import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron_bridge.cpu_compat import install_cpu_compat
from slime_retool.config import Config
from slime_retool.config.parallel import check_world_size


def init_distributed(config: Config, *, rank: int, world_size: int, local_rank: int, init_method: str) -> bool:
    """Join the default process group (gloo on the CPU, NCCL on GPUs); False when this process already has one."""
    install_cpu_compat()
    if config.on_cuda:
        torch.cuda.set_device(local_rank)
    if dist.is_initialized():
        return False
    dist.init_process_group(
        "nccl" if config.on_cuda else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=config.distributed_timeout_minutes),
    )
    return True


def init_parallel_groups(config: Config) -> None:
    """Megatron's TP, CP, DP, PP and expert groups over the default group. ConfigError when sizes do not fit it."""
    from megatron.core import parallel_state

    check_world_size(config, dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(config.distributed_timeout_minutes)),
    )


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch alike on every rank, and Megatron's own generators (different per model shard)."""
    from megatron.core import tensor_parallel

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy(own_default_group: bool) -> None:
    """Leave Megatron's groups and, where `init_distributed` made it, the default group."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if own_default_group and dist.is_initialized():
        dist.destroy_process_group()
