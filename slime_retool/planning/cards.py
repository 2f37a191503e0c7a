"""The GPUs a plan can be made for. Figures are the vendors' datasheets', memory is what the driver shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 2**20


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
    """To other hosts, bytes per second and GPU."""
    host_link: float
    """Pinned host memory to the device, bytes per second in one direction."""


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
