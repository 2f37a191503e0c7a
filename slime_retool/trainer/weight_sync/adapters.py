"""LoRA adapters into engines that hold the frozen weights and apply them beside those.

An engine gets the frozen weights once, by the transport of whole weights; from then on an update is the adapters
alone. SGLang takes them from one flat tensor, copies them to host memory and from there to its device when a request
first names them. Colocated engines map a file of /dev/shm, which any number of workers can; to others the bytes go in
the request.

The name stays the same: an update takes the old adapter out, while generation is paused and nothing uses it, and puts
the new one in. SGLang gives each a number of its own and keeps cached prefixes by it, so that none is ever read with
another version's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.lora import adapters_off
from megatron_bridge.peft_format import engine_config, layer_adapter
from slime_retool.engine.admin import ADAPTER, EngineAdmin, every_engine
from slime_retool.errors import WeightUpdateError
from slime_retool.trainer.adapter_gather import in_pairs, whole_adapters
from slime_retool.trainer.core import Trainer
from slime_retool.trainer.gather import flatten
from slime_retool.trainer.weight_sync.buckets import Bucket
from slime_retool.trainer.weight_sync.ipc import Handle, payload
from slime_retool.trainer.weight_sync.transport import FLATTENED, Peers, Transport, together

SHARED_MEMORY = "/dev/shm"


class AdapterTransport(Transport):
    """`Transport` of adapters; `whole` sends the frozen weights."""

    def __init__(self, peers: Peers, whole: Transport, *, colocated: bool) -> None:
        super().__init__(peers)
        self._whole, self._colocated = whole, colocated
        self._have_base: set[str] = set()
        """URLs of engines that this has sent the frozen weights to."""

    def send(self) -> None:
        trainer = self._peers.trainer
        if self._anyone_lacks_base():
            with adapters_off(trainer.module):
                self._whole.send()
            together(self._forget_prefixes)
        bucket = flat_adapters(trainer)
        together(lambda: self._post(bucket))
        self._have_base |= {engine.url for engine in self._peers.engines}

    def reset(self) -> None:
        self._whole.reset()

    def close(self) -> None:
        self._whole.close()

    def _anyone_lacks_base(self) -> bool:
        """Whether any engine has not had the frozen weights, or is another one at the same address. Collective."""

        def look() -> bool:
            if self._peers.trainer.rank != 0:
                return False
            return any(e.url not in self._have_base or ADAPTER not in e.adapters() for e in self._peers.engines)

        flag = torch.tensor(int(together(look)), dtype=torch.int32, device=self._peers.trainer.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _forget_prefixes(self) -> None:
        """What an engine has read without an adapter, and keeps over updates, was read with other frozen weights."""
        if self._peers.trainer.rank == 0 and self._peers.trainer.config.keeps_cache:
            every_engine(self._peers.engines, lambda engine: engine.flush_cache())

    def _post(self, bucket: Bucket) -> None:
        """Give the engines that this rank serves the new adapters: the whole run's, or the one on its devices."""
        peers, rank = self._peers, self._peers.trainer.rank
        if self._colocated:
            number, worker = divmod(rank, peers.workers)
            engine = peers.engine(number)
            if worker == 0 and engine is not None:
                with _in_shared_memory(bucket) as handle:
                    self._replace(engine, payload(handle, bucket))
        elif rank == 0:
            text = payload(_as_bytes(bucket), bucket)
            every_engine(peers.engines, lambda engine: self._replace(engine, text))

    def _replace(self, engine: EngineAdmin, content: str) -> None:
        config = self._peers.trainer.config
        assert config.lora is not None
        if ADAPTER in engine.adapters():
            engine.unload_adapter(ADAPTER)
        engine.load_adapter(ADAPTER, engine_config(config.lora, config), content, load_format=FLATTENED)


def peft_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """{PEFT's name: tensor} of all adapters, on every rank. Collective."""
    adapters = whole_adapters(trainer.module, trainer.config)
    return {
        name: tensor
        for layer, a, b in in_pairs(adapters)
        for name, tensor in layer_adapter(layer, a, b, trainer.config).items()
    }


def flat_adapters(trainer: Trainer) -> Bucket:
    """All adapters under PEFT's names in one tensor on every rank's device. Collective."""
    tensors = peft_tensors(trainer)
    flat = flatten(list(tensors.values()))
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    return Bucket(0, flat, dtype, list(tensors), [tuple(tensor.shape) for tensor in tensors.values()])


def _as_bytes(bucket: Bucket) -> Handle:
    """A handle that holds the bytes themselves."""
    return Handle(partial(torch.frombuffer, dtype=torch.uint8), (bytearray(bucket.data.cpu().numpy()),))


@contextmanager
def _in_shared_memory(bucket: Bucket) -> Iterator[Handle]:
    """A handle that processes of this host open the bytes by, inside the block; what they opened stays theirs."""
    file, path = tempfile.mkstemp(prefix="slime-retool-adapters-", dir=SHARED_MEMORY)
    try:
        size = bucket.data.numel()
        try:
            os.posix_fallocate(file, 0, size)  # a write into memory that is not there would end the process
        except OSError as error:
            raise WeightUpdateError(
                f"{SHARED_MEMORY} has no room for {size} bytes of adapters ({error.strerror}): make it larger, or use "
                "--lora-weight-update merged"
            ) from error
        torch.from_file(path, shared=True, size=size, dtype=torch.uint8).copy_(bucket.data)
        yield Handle(partial(torch.from_file, dtype=torch.uint8), (path, True, size))
    finally:
        os.close(file)
        os.unlink(path)
