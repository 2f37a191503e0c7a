"""Copies of tensors in host memory, made to be written to a disk while the originals change."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

SLAB_BYTES = 2**30
"""Host memory comes in pieces of this size, which hold many copies. A tensor that is larger has a piece of its own.
torch rounds page-locked allocations up to a power of two."""
ALIGNMENT = 64


class HostCopies:
    """Memory that grows as needed and stays for the next copies: page-locking it takes longer than filling it.

    `clear` comes before the first `copy` of each set of copies.
    """

    def __init__(self, *, pinned: bool, slab_bytes: int = SLAB_BYTES) -> None:
        self._pinned, self._slab_bytes = pinned, slab_bytes
        self._slabs: list[Tensor] = []
        self._large: list[Tensor] = []
        self._slab = self._used = self._large_used = 0
        self._reserving: threading.Thread | None = None

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make room for copies of so many bytes each, in this order, in the background."""
        if self._reserving is None:
            self._reserving = threading.Thread(target=self._reserve, args=(sizes,), daemon=True)
            self._reserving.start()

    def _reserve(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self._place(size)

    def _new_slab(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def clear(self) -> None:
        """Give up all copies; their memory is used again."""
        if self._reserving is not None:
            self._reserving.join()
        self._slab = self._used = self._large_used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, or itself where it is (part of) one. From a GPU it is there after a synchronization."""
        if not tensor.numel() or self._holds(tensor):
            return tensor
        copy = self._room(tensor.nbytes, tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor.detach(), non_blocking=True)

    def _holds(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(0 <= address - slab.data_ptr() < len(slab) for slab in (*self._slabs, *self._large))

    def _room(self, size: int, dtype: torch.dtype) -> Tensor:
        slab, start = self._place(size)
        # With a storage of its own size: torch saves the whole storage that a tensor is a view of.
        return torch.frombuffer(slab.numpy().data[start : start + size], dtype=dtype)

    def _place(self, size: int) -> tuple[Tensor, int]:
        """Where the next copy of so many bytes lies: the piece of memory, and the copy's start in it."""
        if size > self._slab_bytes:
            if self._large_used < len(self._large) and len(self._large[self._large_used]) < size:
                self._large[self._large_used] = self._new_slab(size)
            elif self._large_used == len(self._large):
                self._large.append(self._new_slab(size))
            self._large_used += 1
            return self._large[self._large_used - 1], 0
        if self._slab < len(self._slabs) and self._used + size > self._slab_bytes:
            self._slab, self._used = self._slab + 1, 0
        if self._slab == len(self._slabs):
            self._slabs.append(self._new_slab(self._slab_bytes))
        start = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return self._slabs[self._slab], start
