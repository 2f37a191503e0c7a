"""The GPUs a plan can be made for, and what of their peaks a training step reaches.

Figures of cards are the vendors' datasheets' (NVIDIA A100, H100 SXM, H200, DGX B200), memory is what the driver shows.
Every share below is used by the plan; each says where it is from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_bridge.arithmetic import MIB


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU and the host it usually sits in."""

    name: str
    memory_bytes: int
    peak_flops: float
    """Dense bf16, per second: the denominator of MFU."""
    bandwidth: float
    """Device memory, bytes per second."""
    nvlink: float
    """To the other GPUs of the host, bytes per second in one direction."""
    network: float
    """To other hosts, bytes per second and GPU: one 200 Gbit/s (A100) or 400 Gbit/s adapter for each."""
    host_link: float
    """Page-locked host memory to the device, bytes per second in one direction: PCIe 4 (A100) or 5, x16."""

    @property
    def has_flash_attn_4(self) -> bool:
        """Its kernels are for Hopper and later."""
        return not self.name.startswith("A100")


CARDS = {
    "a100": Card("A100 80GB SXM", 81_920 * MIB, 312e12, 2.0e12, 300e9, 25e9, 22e9),
    "h100": Card("H100 80GB SXM", 81_559 * MIB, 989e12, 3.35e12, 450e9, 50e9, 45e9),
    "h200": Card("H200 141GB SXM", 143_771 * MIB, 989e12, 4.8e12, 450e9, 50e9, 45e9),
    "b200": Card("B200 180GB SXM", 183_359 * MIB, 2250e12, 7.7e12, 900e9, 50e9, 55e9),
}
OTHER_VARIANTS = ("PCIE", "NVL", "MIG")
"""Slower cards, and parts of cards, with the name of one above."""


def card_of_device(name: str) -> Card | None:
    """The card with this name in CUDA ("NVIDIA H100 80GB HBM3"); None for one that is not in the table."""
    words = re.split(r"[ -]", name.upper())
    if any(variant in words for variant in OTHER_VARIANTS):
        return None
    return next((card for key, card in CARDS.items() if key.upper() in words), None)


GEMM_SHARE = 0.68
"""Share of the peak in the matrix products of a train step with real values: 670 to 790 TFLOP/s were measured alone at
the 4B shapes on an H200, less within a step, where the card draws its full power; chosen on the 4B row of
docs/performance.md and checked on the others."""
EXPERT_GEMM_SHARE = 0.5
"""The same of grouped products over many experts: alone on an H200 0.71 where all get as many tokens, 0.52 where they
get from none to twice as many. Chosen on the mixtures of docs/performance.md, routing and launches with it."""
ATTENTION_SHARES = {"flash_attn_4": (0.57, 0.39), "transformer_engine": (0.49, 0.30), "local": (0.28, 0.19)}
"""Share of the peak in causal attention over packed sequences, forward and backward, counting half of the square and
for the backward twice the forward: flash-attn-4, cuDNN (Transformer Engine) and torch's varlen_attn, about the mean
measured on an H200 over the length mix of benchmarks/train_step.py in 16k and 32k tokens, with 32 and 16 heads."""
LOCAL_SHARE = 0.85
"""Share of the rate with Transformer Engine, layers without it, attention apart: chosen on the 0.6B row of
docs/performance.md."""
BANDWIDTH_SHARE = 0.8
"""Share of the datasheet's device-memory bandwidth in long copies and elementwise kernels (a usual STREAM figure)."""
LINK_SHARE = 0.7
"""Share of NVLink's and the network's rate that large collectives reach: nccl-tests shows 320 to 370 of 450 GB/s."""
HOST_ADAM_BANDWIDTH = 25e9
"""Bytes per second and GPU of an optimizer on the host: half of about 400 GB/s of two sockets, for 8 GPUs. An
assumption."""
PIPELINE_SEND_SECONDS = 0.2e-3
"""Fixed time of passing one micro-batch to the next stage. An assumption."""
STEP_SECONDS = 20e-3
"""Fixed time of an optimizer step: packing on the host, gradient norm, metrics read back."""
DECODE_STEP_SECONDS, DECODE_LAYER_SECONDS = 3.0e-3, 0.06e-3
"""Scheduling of one decoding step, and its kernels' fixed time per layer: fitted to SGLang on one H200."""
SYNC_SECONDS = 0.05
"""Fixed time of a weight update: requests to the engines (docs/performance.md)."""
