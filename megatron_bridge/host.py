"""Between the host and a device."""

from __future__ import annotations

import torch


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A CPU tensor on `device`, without waiting for what runs there.

    A copy from pageable memory would first wait for everything queued before it, and the GPU would then wait for the
    host at every micro-batch.
    """
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
