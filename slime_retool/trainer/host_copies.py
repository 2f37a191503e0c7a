"""Copies of tensors in host memory, made to be written to a disk while the originals change."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

SLAB_BYTES = 2**30
"""Host memory comes in pieces of this size, or for copies of a tensor that is larger: torch rounds page-locked
allocations up to a power of two."""
ALIGNMENT = 64


class HostCopies:
    """Memory that grows as needed and stays for the next copies: page-locking it takes longer than filling it.

    `clear` comes before the first `copy` of each set of copies.
    """

    def __init__(self, *, pinned: bool, slab_bytes: int = SLAB_BYTES) -> None:
        self._pinned, self._slab_bytes = pinned, slab_bytes
        self._slabs: list[Tensor] = []
        self._slab = self._used = 0
        self._reserving: threading.Thread | None = None

    def reserve(self, size: int) -> None:
        """Make room for so many bytes, in the background."""
        if self._reserving is None:
            self._reserving = threading.Thread(target=self._reserve, args=(size,), daemon=True)
            self._reserving.start()

    def _reserve(self, size: int) -> None:
        for _ in range(-(-size // self._slab_bytes)):
            self._slabs.append(self._new_slab(self._slab_bytes))

    def _new_slab(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def clear(self) -> None:
        """Give up all copies; their memory is used again."""
        if self._reserving is not None:
            self._reserving.join()
        self._slab = self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, or itself where it is (part of) one. From a GPU it is there after a synchronization."""
        if not tensor.numel() or self._holds(tensor):
            return tensor
        copy = self._room(tensor.nbytes, tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor.detach(), non_blocking=True)

    def _holds(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(0 <= address - slab.data_ptr() < len(slab) for slab in self._slabs)

    def _room(self, size: int, dtype: torch.dtype) -> Tensor:
        while self._slab < len(self._slabs) and self._used + size > len(self._slabs[self._slab]):
            self._slab, self._used = self._slab + 1, 0
        if self._slab == len(self._slabs):
            self._slabs.append(self._new_slab(max(self._slab_bytes, size)))
        # With a storage of its own size: torch saves the whole storage that a tensor is a view of.
        memory = self._slabs[self._slab].numpy().data[self._used : self._used + size]
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return torch.frombuffer(memory, dtype=dtype)
