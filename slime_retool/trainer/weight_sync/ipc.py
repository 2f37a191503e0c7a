"""Colocated engines open the trainer's memory: nothing is copied between cards or through the host.

Trainer rank r shares its GPU with worker r % workers of engine r // workers (`cluster.placement`). Every rank gathers
all weights into two buffers on its own card, bucket by bucket; the first rank of each engine posts the handles of all
its engine's cards to `/update_weights_from_tensor`, and while the engine loads one bucket the next is gathered.

A handle is made once per buffer and update: torch nests a new reference count around the memory with every sharing, so
that handles made per bucket would pile up for as long as the buffer lives.

The payload is an ordinary pickle of calls to torch's own `rebuild_*` functions. A tensor pickled in the usual way would
name torch's storage loader, which megatron-core (0.19) replaces by a function that SGLang refuses to load.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.multiprocessing import reductions

from slime_retool.errors import WeightUpdateError
from slime_retool.trainer.gather import hf_named_tensors
from slime_retool.trainer.weight_sync.buckets import Bucket, buckets
from slime_retool.trainer.weight_sync.transport import FLATTENED, Peers

NUM_BUFFERS = 2
CUDA_DEVICE_ARG = 6
"""Position of the device number among the arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A call that gives another process the same memory."""

    rebuild: Callable[..., Any]
    args: tuple[Any, ...]


class _Opened:
    """Pickles as the handle's call, so that unpickling opens the memory."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        args = tuple(_Opened(arg) if isinstance(arg, Handle) else arg for arg in self._handle.args)
        return self._handle.rebuild, args


class SharedBuffer:
    """Bytes that another process of this host can open."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.handle = _cuda_handle(self.data) if device.type == "cuda" else _host_handle(self.data)

    def before_opening(self) -> None:
        """Call once for every time that the handle is opened."""
        if self.data.device.type == "cpu":
            # Whoever opens shared host memory gives up one reference in exchange.
            self.data.untyped_storage()._shared_incref()


def _cuda_handle(data: Tensor) -> Handle:
    rebuild, args = reductions.reduce_tensor(data)
    # Both processes number the card by what they see; SGLang looks it up by its unique id instead.
    uuid = str(torch.cuda.get_device_properties(data.device).uuid)
    return Handle(rebuild, (*args[:CUDA_DEVICE_ARG], uuid, *args[CUDA_DEVICE_ARG + 1 :]))


def _host_handle(data: Tensor) -> Handle:
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # the other one needs a socket between both processes
    try:
        rebuild, args = reductions.reduce_storage(data.untyped_storage())
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    data.untyped_storage()._shared_decref()  # the reference that `before_opening` takes anew each time
    storage = Handle(reductions.rebuild_typed_storage, (Handle(rebuild, args), torch.uint8))
    return Handle(reductions.rebuild_tensor, (torch.Tensor, storage, (0, data.size(), data.stride(), False)))


def payload(handle: Handle, bucket: Bucket) -> str:
    """What SGLang unpickles: the buffer, and which bytes of it are which tensor."""
    metadata, begin = [], 0
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        nbytes = torch.Size(shape).numel() * bucket.dtype.itemsize
        metadata.append(
            SimpleNamespace(
                name=name, shape=shape, dtype=bucket.dtype, start_idx=begin, end_idx=begin + nbytes, numel=nbytes
            )
        )
        begin += nbytes
    return base64.b64encode(pickle.dumps({"flattened_tensor": _Opened(handle), "metadata": metadata})).decode()


class IpcTransport:
    """`Transport` for engines on the trainer's own GPUs."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def send(self) -> None:
        trainer = self._peers.trainer
        shared, handles = self._share()
        try:
            self._send_buckets(shared, handles)
        finally:
            del shared, handles
            if trainer.config.on_cuda:
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()  # the engine needs the room

    def reset(self) -> None:
        """There are no connections: handles live for one update."""

    def close(self) -> None:
        """There are no connections."""

    def _share(self) -> tuple[list[SharedBuffer], list[list[Handle]]]:
        """This rank's buffers, and the handles of each worker's card of this rank's engine [workers][buffers]."""
        peers, rank = self._peers, self._peers.trainer.rank
        mine: list[Handle] | str
        shared: list[SharedBuffer] = []
        try:
            shared = [SharedBuffer(peers.bucket_bytes, peers.trainer.device) for _ in range(NUM_BUFFERS)]
            mine = [buffer.handle for buffer in shared]
        except RuntimeError as error:  # out of memory, or memory that cannot be shared
            mine = f"rank {rank} cannot share {NUM_BUFFERS} x {peers.bucket_bytes} bytes with its engine: {error}"
        if peers.workers == 1:  # nobody needs another rank's handles, only to know that they exist
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine if isinstance(mine, str) else None)
            everyone = [mine if i == rank else other for i, other in enumerate(everyone)]
        else:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        problem = next((one for one in everyone if isinstance(one, str)), None)
        if problem is not None:
            raise WeightUpdateError(problem)
        begin = rank // peers.workers * peers.workers
        return shared, everyone[begin : begin + peers.workers]

    def _send_buckets(self, shared: list[SharedBuffer], handles: list[list[Handle]]) -> None:
        peers, trainer = self._peers, self._peers.trainer
        number, worker = divmod(trainer.rank, peers.workers)
        engine = peers.engines[number] if worker == 0 and number < len(peers.engines) else None

        def post(bucket: Bucket) -> None:
            assert engine is not None
            shared[bucket.buffer].before_opening()
            payloads = [payload(of_worker[bucket.buffer], bucket) for of_worker in handles]
            engine.update_weights_from_tensor(payloads, load_format=FLATTENED)

        tensors = hf_named_tensors(trainer.module, trainer.config, everywhere=True)
        loading: Future[None] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="weight-sync") as pool:
            for bucket in buckets(tensors, [buffer.data for buffer in shared]):
                torch.cuda.current_stream().synchronize()
                # After this every rank has filled this bucket, and no engine reads the one before any more.
                if self._anyone(loading is not None and loading.exception() is not None):
                    break
                loading = pool.submit(post, bucket) if engine is not None else None
            # Another rank's engine may still read this rank's memory, until its post has returned.
            self._anyone(loading is not None and loading.exception() is not None)
        if loading is not None:
            loading.result()

    def _anyone(self, truth: bool) -> bool:
        flag = torch.tensor(int(truth), dtype=torch.int32, device=self._peers.trainer.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
