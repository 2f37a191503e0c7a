"""Colocated engines open the trainer's memory: nothing is copied between GPUs or through the host.

Trainer rank r shares its GPU with worker r % workers of engine r // workers (`cluster.placement`). Every rank gathers
all weights into two buffers on its own GPU, bucket by bucket; the first rank of each engine posts the handles of all
its engine's GPUs to `/update_weights_from_tensor`, and while the engine loads one bucket the next is gathered. A worker
takes its part of whole weights, and of experts in stacks (`engine.bucket_loader`), so each rank gathers all of them,
though never more than a chunk and two buckets at a time.

Every bucket has handles of its own, although it lies in one of two buffers: torch counts who still uses shared memory,
by one for each handle made, and the worker gives back one for each time that it opens a handle. A handle opened twice
takes the unsigned count below zero, and the memory is then never freed.

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

from slime_retool.engine.bucket_loader import BUCKET_LOADER, header
from slime_retool.errors import WeightUpdateError
from slime_retool.trainer.gather import hf_named_tensors
from slime_retool.trainer.weight_sync.buckets import Bucket, buckets
from slime_retool.trainer.weight_sync.transport import Peers, Transport, together

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


def export(data: Tensor) -> Handle:
    """A new handle of the bytes, which exactly one process of this host opens exactly once.

    RuntimeError for memory that cannot be shared.
    """
    return _cuda_handle(data) if data.device.type == "cuda" else _host_handle(data)


def _cuda_handle(data: Tensor) -> Handle:
    rebuild, args = reductions.reduce_tensor(data)
    # Both processes number the GPU by what they see; SGLang looks it up by its unique id instead.
    uuid = str(torch.cuda.get_device_properties(data.device).uuid)
    return Handle(rebuild, (*args[:CUDA_DEVICE_ARG], uuid, *args[CUDA_DEVICE_ARG + 1 :]))


def _host_handle(data: Tensor) -> Handle:
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # the other one needs a socket between both processes
    try:
        rebuild, args = reductions.reduce_storage(data.untyped_storage())
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    storage = Handle(reductions.rebuild_typed_storage, (Handle(rebuild, args), torch.uint8))
    return Handle(reductions.rebuild_tensor, (torch.Tensor, storage, (0, data.size(), data.stride(), False)))


def bucket_payload(handle: Handle, bucket: Bucket) -> str:
    """What SGLang unpickles and gives to `engine.bucket_loader`: the buffer, and which bytes of it are which tensor."""
    content = header(bucket.names, bucket.shapes, str(bucket.dtype).removeprefix("torch."))
    return base64.b64encode(pickle.dumps([(content, _Opened(handle))])).decode()


def payload(handle: Handle, bucket: Bucket) -> str:
    """The same in SGLang's own format, a flattened bucket, for endpoints that take no loader."""
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


class IpcTransport(Transport):
    """`Transport` for engines on the trainer's own GPUs."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        rank, workers, world_size = peers.trainer.rank, peers.workers, dist.get_world_size()
        self._number, self._worker = divmod(rank, workers)
        self._group: dist.ProcessGroup | None = None
        """The ranks that share an engine's GPUs with this one, where they are several."""
        if workers > 1:
            chunks = [list(range(i, min(i + workers, world_size))) for i in range(0, world_size, workers)]
            groups = [dist.new_group(chunk, backend="gloo") for chunk in chunks]
            self._group = groups[self._number]

    def send(self) -> None:
        trainer = self._peers.trainer
        shared = self._buffers()
        try:
            self._send_buckets(shared)
        finally:
            del shared
            if trainer.config.on_cuda:
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()  # the engine needs the room

    def _buffers(self) -> list[Tensor]:
        """This rank's buffers, once every rank has its own."""
        size, device = self._peers.bucket_bytes, self._peers.trainer.device

        def make() -> list[Tensor]:
            try:
                return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
            except RuntimeError as error:
                raise WeightUpdateError(
                    f"rank {self._peers.trainer.rank} has no room for {NUM_BUFFERS} x {size} bytes of weights: {error}"
                ) from error

        return together(make)

    def _handles(self, buffer: Tensor) -> list[Handle]:
        """The buffer's new handles on each GPU of this rank's engine; collective over the ranks that share it."""
        mine: Handle | str
        try:
            mine = export(buffer)
        except RuntimeError as error:
            mine = f"rank {self._peers.trainer.rank} cannot share memory with its engine: {error}"
        everyone: list[Any] = [mine]
        if self._group is not None:
            everyone = [None] * self._group.size()
            dist.all_gather_object(everyone, mine, group=self._group)
        problem = next((one for one in everyone if isinstance(one, str)), None)
        if problem is not None:
            raise WeightUpdateError(problem)
        return everyone

    def _send_buckets(self, shared: list[Tensor]) -> None:
        peers, trainer = self._peers, self._peers.trainer
        engine = peers.engine(self._number)

        def post(bucket: Bucket, handles: list[Handle]) -> None:
            assert engine is not None
            payloads = [bucket_payload(handle, bucket) for handle in handles]
            engine.update_weights_from_tensor(payloads, load_format=BUCKET_LOADER)

        tensors = hf_named_tensors(
            trainer.module, trainer.config, everywhere=True, stacked=True, chunk_bytes=peers.chunk_bytes
        )
        loading: Future[None] | None = None
        problem: WeightUpdateError | None = None

        def failed() -> bool:
            return problem is not None or (loading is not None and loading.exception() is not None)

        with ThreadPoolExecutor(1, thread_name_prefix="weight-sync") as pool:
            for bucket in buckets(tensors, shared):
                torch.cuda.current_stream().synchronize()
                # After this every rank has filled this bucket, and no engine reads the one before any more.
                if self._anyone(failed()):
                    break
                if engine is None:
                    continue
                try:
                    handles = self._handles(shared[bucket.buffer])
                except WeightUpdateError as error:
                    problem = error
                    continue
                loading = pool.submit(post, bucket, handles) if self._worker == 0 else None
            # Another rank's engine may still read this rank's memory, until its post has returned.
            self._anyone(failed())
        if problem is not None:
            raise problem
        if loading is not None:
            loading.result()

    def _anyone(self, truth: bool) -> bool:
        flag = torch.tensor(int(truth), dtype=torch.int32, device=self._peers.trainer.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
