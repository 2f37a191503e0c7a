"""Disk space of a run's checkpoints."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from megatron_bridge.model_config import required
from slime_retool.planning.parameters import adapter_parameters, total_parameters

if TYPE_CHECKING:
    from slime_retool.config import Config

MOMENTS = 8
"""Adam's bytes of an element: two in fp32, which is what a checkpoint holds."""


def checkpoint_bytes(config: Config, *, bf16: bool, critic: bool = False) -> int:
    """Of one checkpoint of the actor, or of the critic, trained in bf16 or in fp32.

    Weights (with LoRA the adapters alone; a critic has no adapters, and one row in place of an output layer), and
    without `--no-save-optim` Adam's moments and the fp32 copy of bf16 weights. Little is left out: the vocabulary's
    padding and what describes the tensors.
    """
    if config.lora is not None and not critic:
        count = required(config, "num_layers") * adapter_parameters(config, config.lora)
    else:
        count = total_parameters(config)
        if critic and config.untie_embeddings_and_output_weights:
            count -= (required(config, "vocab_size") - 1) * required(config, "hidden_size")
    weight = 2 if bf16 else 4
    return count * (weight if config.no_save_optim else 4 + MOMENTS + (weight if bf16 else 0))


def all_checkpoint_bytes(config: Config, *, bf16: bool) -> int:
    """Of what is written at one save: the actor's checkpoint, and the critic's where there is one."""
    total = checkpoint_bytes(config, bf16=bf16)
    return total + checkpoint_bytes(config, bf16=bf16, critic=True) if config.uses_critic else total


def free_bytes(folder: str) -> int:
    """Free for this user on the disk that `folder` is on, or will be."""
    return shutil.disk_usage(nearest_existing(folder)).free


def nearest_existing(path: str) -> str:
    """`path`, absolute, or the nearest part of it that exists."""
    nearest = os.path.abspath(path)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    return nearest
