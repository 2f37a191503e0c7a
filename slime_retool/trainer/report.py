"""What a trainer says about one step's speed and memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_bridge.arithmetic import GIB
from megatron_bridge.arithmetic.cards import card_of_device
from megatron_bridge.arithmetic.flops import model_flops
from slime_retool.config import Config
from slime_retool.metrics import host_bytes
from slime_retool.trainer.batch import TrainBatch


def speed_metrics(config: Config, batch: TrainBatch, seconds: float, device: torch.device) -> dict[str, float]:
    """Tokens per second, and MFU on a GPU whose peak is known, of optimizer steps on `batch` that took `seconds`.

    MFU: operations of the model (`arithmetic.flops`, at the batch's own lengths, logits where tokens are learned) over
    those that the trainer's GPUs could make in that time at their dense bf16 peak.
    """
    rate = batch.num_tokens / seconds
    metrics = {
        "perf/train_tokens_per_second": rate,
        "perf/train_tokens_per_second_per_gpu": rate / config.world_size,
    }
    card = card_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if card is not None:
        lengths = batch.lengths.tolist()
        learned = batch.segments.num_learned
        work = model_flops(config, lengths, training=True, logit_tokens=learned, lora=config.lora)
        metrics["perf/train_mfu"] = work / (seconds * config.world_size * card.peak_flops)
    return metrics


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Largest over all ranks, in GiB; collective. The device's peak is that since the last call, and starts anew.

    `peak` is what tensors held, `reserved` what the allocator holds now, `host` the process's resident memory.
    """
    metrics = {"memory/trainer_host_gib": float(host_bytes())}
    if device.type == "cuda":
        metrics["memory/trainer_peak_gib"] = float(torch.cuda.max_memory_allocated(device))
        metrics["memory/trainer_reserved_gib"] = float(torch.cuda.memory_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)
    largest = torch.tensor(list(metrics.values()), dtype=torch.float64, device=device) / GIB
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(metrics, largest.tolist(), strict=True))
