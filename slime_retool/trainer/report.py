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


def speed_figures(config: Config, batch: TrainBatch, seconds: float, device: torch.device) -> dict[str, float]:
    """Tokens per second, and MFU on a card whose peak is known, of optimizer steps on `batch` that took `seconds`.

    MFU: operations of the model (`arithmetic.flops`, at the batch's own lengths, logits where tokens are learned) over
    those that the trainer's cards could make in that time at their dense bf16 peak.
    """
    rate = batch.num_tokens / seconds
    figures = {
        "perf/train_tokens_per_second": rate,
        "perf/train_tokens_per_second_per_gpu": rate / config.world_size,
    }
    card = card_of_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if card is not None:
        lengths = batch.lengths.tolist()
        learned = batch.segments.num_learned
        work = model_flops(config, lengths, training=True, logit_tokens=learned, lora=config.lora)
        figures["perf/train_mfu"] = work / (seconds * config.world_size * card.peak_flops)
    return figures


def memory_figures(device: torch.device) -> dict[str, float]:
    """Largest over all ranks, in GiB; collective. The device's peak is that since the last call, and starts anew.

    `peak` is what tensors held, `reserved` what the allocator holds now, `host` the process's resident memory.
    """
    figures = {"memory/trainer_host_gib": float(host_bytes())}
    if device.type == "cuda":
        figures["memory/trainer_peak_gib"] = float(torch.cuda.max_memory_allocated(device))
        figures["memory/trainer_reserved_gib"] = float(torch.cuda.memory_reserved(device))
        torch.cuda.reset_peak_memory_stats(device)
    largest = torch.tensor(list(figures.values()), dtype=torch.float64, device=device) / GIB
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(figures, largest.tolist(), strict=True))
