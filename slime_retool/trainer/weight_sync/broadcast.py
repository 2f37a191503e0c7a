"""Engines on GPUs of their own: one broadcast per bucket from global rank 0.

Rank 0 and the workers of all engines form a group through SGLang's `/init_weights_update_group`. Every bucket is
announced by `/update_weights_from_distributed` and broadcast as one tensor; while the engines load it, the next one is
gathered from the trainer's other ranks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from slime_retool.engine.admin import EngineAdmin, every_engine, raise_first
from slime_retool.errors import WeightUpdateError
from slime_retool.trainer.rendezvous import Rendezvous
from slime_retool.trainer.weight_sync.buckets import Bucket, buckets
from slime_retool.trainer.weight_sync.transport import FLATTENED, FromRankZero, Peers, unless_refused

NUM_BUFFERS = 2


class BroadcastTransport(FromRankZero):
    """`Transport` over a process group (NCCL on GPUs, gloo on the CPU)."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._aborted: list[dist.ProcessGroup] = []

    def _send(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._join()
        size, device = self._peers.bucket_bytes, self._peers.trainer.device
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        loading: Future[None] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="weight-sync") as pool:
            for bucket in buckets(tensors, buffers):
                torch.cuda.current_stream().synchronize()
                if loading is not None:
                    loading.result()
                loading = pool.submit(self._broadcast, bucket)
            if loading is not None:
                loading.result()

    def reset(self) -> None:
        """Forget the group; it is not left together, in which a dead engine could not take part."""
        self._forget(abort=True)

    def close(self) -> None:
        if self._group is None:
            return
        for engine in self._peers.engines:
            try:
                engine.destroy_weights_update_group(self._name)
            except WeightUpdateError:
                continue
        self._forget()

    def _join(self) -> None:
        """Form the group: rank 0 is this process, engine i has ranks 1 + i * workers and following."""
        if self._group is not None:
            return
        peers = self._peers
        world_size = 1 + len(peers.engines) * peers.workers
        backend = "nccl" if peers.trainer.config.on_cuda else "gloo"
        meeting = Rendezvous(peers.host)
        meeting.serve()
        offsets = {engine.url: 1 + i * peers.workers for i, engine in enumerate(peers.engines)}
        # An engine that was in a group before, of this run or one that was killed, may still hold that.
        self._name = name = f"slime_retool_{secrets.token_hex(4)}"

        def engine_joins(engine: EngineAdmin) -> None:
            engine.init_weights_update_group(meeting.host, meeting.port, offsets[engine.url], world_size, name, backend)

        def trainer_joins(futures: list[Future[None]]) -> None:
            self._group = unless_refused(
                lambda: _process_group(backend, meeting.init_method, world_size, name, peers.timeout), futures
            )

        every_engine(peers.engines, engine_joins, trainer_joins)

    def _broadcast(self, bucket: Bucket) -> None:
        """Announce one bucket and send it; returns when every engine has loaded it."""
        peers = self._peers
        dtypes = [str(bucket.dtype).removeprefix("torch.")] * len(bucket.names)
        shapes = [list(shape) for shape in bucket.shapes]

        def receive(engine: EngineAdmin) -> None:
            engine.update_weights_from_distributed(bucket.names, dtypes, shapes, self._name, load_format=FLATTENED)

        def transmit(futures: list[Future[None]]) -> None:
            # NCCL connects inside the first broadcast, and would wait there for an engine that has given up.
            work = unless_refused(lambda: dist.broadcast(bucket.data, src=0, group=self._group, async_op=True), futures)
            deadline = time.monotonic() + peers.timeout
            while not work.is_completed():
                raise_first(futures)  # an engine that refused will never take part in the broadcast
                if time.monotonic() > deadline:
                    raise WeightUpdateError(f"the engines did not take a bucket of weights within {peers.timeout:g} s")
                time.sleep(0.0005)
            work.wait()

        every_engine(peers.engines, receive, transmit)

    def _forget(self, *, abort: bool = False) -> None:
        """Leave the group; `abort` first ends broadcasts that nobody will receive, instead of waiting for them."""
        if self._group is None:
            return
        if abort:
            self._group._get_backend(self._peers.trainer.device).abort()
            # Freeing gloo's group would join the threads that still wait for the other side, until its timeout.
            self._aborted.append(self._group)
        dist.destroy_process_group(self._group)
        self._group = None


def _process_group(
    backend: str, init_method: str, world_size: int, group_name: str, timeout: float
) -> dist.ProcessGroup:
    """A group beside the default one, in which this process is rank 0.

    The other members are SGLang workers, which make theirs from a store at `init_method` with the group's name as
    prefix; both sides therefore agree on the store's keys only if the group is made by the same torch helper.
    """
    from torch.distributed.distributed_c10d import (
        Backend,
        PrefixStore,
        _new_process_group_helper,
        _world,
        rendezvous,
    )

    limit = timedelta(seconds=timeout)
    store, rank, size = next(rendezvous(init_method, 0, world_size, timeout=limit))
    store.set_timeout(limit)
    group, _ = _new_process_group_helper(
        size, rank, [], Backend(backend), PrefixStore(group_name, store), timeout=limit,
        group_name=group_name,  # type: ignore[arg-type]  # a str with a name of its own in newer versions
    )  # fmt: skip
    assert isinstance(group, dist.ProcessGroup)
    _world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group
