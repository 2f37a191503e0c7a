"""Trainer memory given back to the engines of the same GPUs, and taken again.

What a trainer holds falls into three parts, found anew each time:

    weights   parameters and buffers of the actor          kept on the host while away
    state     fp32 main weights, moments, other models     kept on the host while away
    grads     gradient buffers                             dropped: they are zeroed before every use

Tensors stay the same objects: only their storages shrink to nothing and grow again, so that every view that Megatron
keeps (parameters are views into a buffer, main gradients into another) is right again after `reload`. Host memory is
page-locked on GPU machines, for copies at the speed of the bus, and stays allocated for the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from slime_retool.trainer.host_copies import SLAB_BYTES


class HostMemory:
    """Room on the host that grows as needed; contents are put one after the other."""

    def __init__(self, *, pinned: bool, slab_bytes: int = SLAB_BYTES) -> None:
        self._pinned, self._slab_bytes = pinned, slab_bytes
        self._slabs: list[Tensor] = []

    def pieces(self, sizes: Iterable[int]) -> Iterator[list[Tensor]]:
        """For contents of these sizes, in order, the host pieces [uint8] that hold each."""
        slab, used = 0, 0
        for size in sizes:
            parts: list[Tensor] = []
            while size > 0:
                if slab == len(self._slabs):
                    self._slabs.append(torch.empty(self._slab_bytes, dtype=torch.uint8, pin_memory=self._pinned))
                take = min(size, self._slab_bytes - used)
                parts.append(self._slabs[slab][used : used + take])
                used, size = used + take, size - take
                if used == self._slab_bytes:
                    slab, used = slab + 1, 0
            yield parts


class Offloadable:
    """The storages behind a set of tensors, which can leave their device."""

    def __init__(self, find: Callable[[], Iterable[Tensor]], host: HostMemory | None, device: torch.device) -> None:
        """`find` names the tensors at the moment of offloading; without `host` their contents are dropped."""
        self._find, self._host, self._device = find, host, device
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes on the device now."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> None:
        """Move to the host; does nothing when already there."""
        if self._away:
            return
        away = [(storage, storage.nbytes()) for storage in self._storages()]
        for part, here in self._pieces(away):
            part.copy_(here, non_blocking=True)
        self._synchronize()
        for storage, _ in away:
            storage.resize_(0)
        self._away = away

    def reload(self) -> None:
        """Back to the device; does nothing when already there. Dropped contents come back as zeros."""
        for storage, size in self._away:
            storage.resize_(size)
            if self._host is None:
                _bytes(storage).zero_()
        for part, here in self._pieces(self._away):
            here.copy_(part, non_blocking=True)
        self._synchronize()
        self._away = []

    def _pieces(self, away: list[tuple[torch.UntypedStorage, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """(host memory, the bytes on the device that it holds or shall hold); none where contents are dropped."""
        if self._host is None:
            return
        for (storage, _), parts in zip(away, self._host.pieces(size for _, size in away), strict=True):
            yield from zip(parts, _bytes(storage).split([len(part) for part in parts]), strict=True)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each storage once; what already lives elsewhere (an optimizer on the host) is left alone."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._find():
            storage = tensor.untyped_storage()
            if tensor.device == self._device and storage.nbytes():
                found.setdefault(storage.data_ptr(), storage)
        return list(found.values())


class TrainerMemory:
    """Everything a trainer keeps on its device between calls."""

    def __init__(self, trainer: Any, *, slab_bytes: int = SLAB_BYTES) -> None:
        self._trainer = trainer
        pinned = trainer.device.type == "cuda"

        def part(find: Callable[[], Iterable[Tensor]], *, keep: bool) -> Offloadable:
            host = HostMemory(pinned=pinned, slab_bytes=slab_bytes) if keep else None
            return Offloadable(find, host, trainer.device)

        self._weights = part(self._find_weights, keep=True)
        self._state = part(self._find_state, keep=True)
        self._grads = part(self._find_grads, keep=False)

    def offload(self, *, keep_weights: bool = False) -> None:
        """Leave the device, but for the weights where an update still sends them."""
        self._state.offload()
        self._grads.offload()
        if not keep_weights:
            self._weights.offload()
        if self._trainer.device.type == "cuda":  # freed memory goes from torch's cache to whoever else is on the GPU
            torch.cuda.ipc_collect()  # weights that an engine has closed since the update ended
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Take the device again."""
        for part in (self._weights, self._grads, self._state):
            part.reload()

    def report(self) -> dict[str, int]:
        """Bytes of each part on the device now."""
        return {"weights": self._weights.nbytes, "state": self._state.nbytes, "grads": self._grads.nbytes}

    def _find_weights(self) -> Iterator[Tensor]:
        module = self._trainer.module
        yield from module.parameters()
        yield from module.buffers()

    def _find_state(self) -> Iterator[Tensor]:
        # Where the optimizer works on the parameters themselves (fp32), those are weights, not state.
        weights = {tensor.untyped_storage().data_ptr() for tensor in self._find_weights()}
        for role in self._trainer.roles:
            tensors = [*_optimizer_tensors(role.optimizer), *role.module.parameters(), *role.module.buffers()]
            yield from (tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in weights)

    def _find_grads(self) -> Iterator[Tensor]:
        for role in self._trainer.roles:
            for parameter in role.module.parameters():
                if parameter.requires_grad:
                    yield parameter.main_grad
                if parameter.grad is not None:
                    yield parameter.grad
            for part in role.optimizer.chained_optimizers:
                for group in part.param_groups:
                    yield from (p.grad for p in group["params"] if p.grad is not None)


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Main weights and moments of all parts of a Megatron optimizer."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A view of the whole storage [nbytes] (uint8)."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
