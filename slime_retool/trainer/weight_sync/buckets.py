"""Weights in a few large flat buckets, filled one after the other into two buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Bucket:
    """Tensors of one dtype, their bytes one after the other in `data` [nbytes] (uint8).

    buffer: which of the buffers `data` is the beginning of.
    """

    buffer: int
    data: Tensor
    dtype: torch.dtype
    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the tensors."""
        sizes = [torch.Size(shape).numel() * self.dtype.itemsize for shape in self.shapes]
        for name, shape, part in zip(self.names, self.shapes, self.data.split(sizes), strict=True):
            yield name, part.view(self.dtype).view(shape)


def buckets(tensors: Iterable[tuple[str, Tensor]], buffers: Sequence[Tensor]) -> Iterator[Bucket]:
    """Copy tensors, in order, into buckets that live in `buffers` (uint8, of one size) by turns.

    A bucket is valid until as many further ones as there are buffers were asked for. On a GPU the copies are only
    queued: synchronize before another process reads. A tensor larger than a buffer is an error of the caller.
    """
    bucket: Bucket | None = None
    turn, used, capacity = 0, 0, len(buffers[0])
    for name, tensor in tensors:
        assert tensor.nbytes <= capacity, f"{name} has {tensor.nbytes} bytes, a bucket holds {capacity}"
        if bucket is not None and (used + tensor.nbytes > capacity or tensor.dtype != bucket.dtype):
            bucket.data = buffers[turn][:used]
            yield bucket
            bucket, used, turn = None, 0, (turn + 1) % len(buffers)
        if bucket is None:
            bucket = Bucket(turn, buffers[turn], tensor.dtype)
        place = buffers[turn][used : used + tensor.nbytes]
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        bucket.names.append(name)
        bucket.shapes.append(tuple(tensor.shape))
        used += tensor.nbytes
    if bucket is not None:
        bucket.data = buffers[turn][:used]
        yield bucket
