"""New weights from the trainer into every running engine.

Two ways, with one interface:

- broadcast: global rank 0 and the workers of all engines form a process group of their own (gloo on the CPU, NCCL
  on GPUs) through SGLang's `/init_weights_update_group`; weights travel in buckets, each announced by
  `/update_weights_from_distributed`.
- files: with --colocate on GPUs, NCCL cannot join two processes of one card; the weights are written to memory
  (/dev/shm, else --output-dir) as safetensors and read through `/update_weights_from_disk`. Engines must be on
  this host.

Around either: engines are paused, caches flushed (they belong to the old weights), the weight version counted up.
A failed update raises WeightUpdateError on every rank, and leaves the engines paused: they hold a mixture of weights
and must not answer.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slime_retool.engine.admin import EngineAdmin
from slime_retool.engine.checksum import tensor_checksum
from slime_retool.engine.process import free_ports
from slime_retool.errors import WeightUpdateError
from slime_retool.trainer.core import Trainer
from slime_retool.trainer.gather import hf_named_tensors

BUCKET_BYTES = 512 * 2**20
Bucket = list[tuple[str, Tensor]]
R = TypeVar("R")


def buckets(tensors: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Group tensors, in order, into buckets of at most `max_bytes` (a larger tensor gets one of its own).

    Tensors are copied, so the iterator may reuse their memory.
    """
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.clone(memory_format=torch.contiguous_format)))
        size += tensor.nbytes
    if bucket:
        yield bucket


class WeightSync:
    """Sends the trainer's weights to engines. One object per training process; methods are collective."""

    def __init__(
        self,
        trainer: Trainer,
        engine_urls: Sequence[str],
        *,
        host: str = "127.0.0.1",
        gpus_per_engine: int = 1,
        group_name: str = "slime_retool",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float | None = None,
        weight_version: int = 0,
    ) -> None:
        """
        Args:
            host: address of global rank 0 as the engines reach it.
            gpus_per_engine: workers (tensor-parallel size) of each engine.
            timeout: seconds any one step may take; default --distributed-timeout-minutes.
            weight_version: what the engines hold now.
        """
        self.trainer = trainer
        self.host = host
        self.gpus_per_engine = gpus_per_engine
        self.group_name = group_name
        self.bucket_bytes = bucket_bytes
        self.timeout = timeout or trainer.config.distributed_timeout_minutes * 60
        self.weight_version = weight_version
        self.through_files = trainer.config.colocate and trainer.config.on_cuda
        self._group: dist.ProcessGroup | None = None
        self._aborted: list[dist.ProcessGroup] = []
        self._engines: list[EngineAdmin] = []
        self.set_engines(engine_urls)

    def set_engines(self, engine_urls: Sequence[str]) -> None:
        """Take another set of engines (after a restart); the group is formed anew at the next update.

        The old group is forgotten, not left together: a dead engine could not take part in that.
        """
        self._engines = [EngineAdmin(url, timeout=self.timeout) for url in engine_urls]
        self._forget_group(abort=True)

    def update(self) -> int:
        """Send all weights to all engines; returns the new weight version. Collective.

        Raises WeightUpdateError on every rank when any engine refused or a step took too long.
        """
        version = self.weight_version + 1
        tensors = hf_named_tensors(self.trainer.module, self.trainer.config)
        problem: list[str | None] = [None]
        if self.trainer.rank == 0:
            try:
                self._send(tensors, version)
            except Exception as error:  # told to every rank below
                problem = [str(error) if isinstance(error, WeightUpdateError) else f"{type(error).__name__}: {error}"]
        for _ in tensors:  # the other ranks' part; on rank 0 after a failure, what they still send
            pass
        dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            self._forget_group(abort=True)
            raise WeightUpdateError(f"weight update {version} failed: {problem[0]}")
        self.weight_version = version
        return version

    def weight_checksums(self) -> dict[str, str]:
        """{HF name: SHA-256} of the trainer's weights on global rank 0, {} elsewhere. Collective.

        Comparable with `EngineAdmin.weight_checksums` when the engine holds the trainer's dtype.
        """
        tensors = hf_named_tensors(self.trainer.module, self.trainer.config)
        return {name: tensor_checksum(tensor) for name, tensor in tensors}

    def close(self) -> None:
        """Leave the update group, as do all engines. Errors are ignored: engines may be gone already."""
        if self._group is None:
            return
        for engine in self._engines:
            try:
                engine.destroy_weights_update_group(self.group_name)
            except WeightUpdateError:
                continue
        self._forget_group()

    # Global rank 0

    def _send(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        if not self._engines:
            raise WeightUpdateError("there is no engine to send weights to")
        self._every_engine(lambda engine: engine.pause())
        self._every_engine(lambda engine: engine.flush_cache())
        if self.through_files:
            self._send_files(tensors, version)
        else:
            self._join()
            pending: Bucket | None = None
            for bucket in buckets(tensors, self.bucket_bytes):
                if pending is not None:
                    self._broadcast(pending, None)
                pending = bucket
            assert pending is not None
            self._broadcast(pending, version)  # the version belongs to the last bucket: then all weights are new
        self._every_engine(lambda engine: engine.flush_cache())
        self._every_engine(lambda engine: engine.resume())

    def _every_engine(self, call: Callable[[EngineAdmin], None], meanwhile: Callable[..., None] | None = None) -> None:
        """Call all engines at once, and `meanwhile(futures)` on this thread; raises the first engine's error."""
        pool = ThreadPoolExecutor(len(self._engines), thread_name_prefix="weight-sync")
        futures = [pool.submit(call, engine) for engine in self._engines]
        try:
            if meanwhile is not None:
                try:
                    meanwhile(futures)
                except Exception:
                    # An engine's own words say more than the broken connection that follows from them.
                    wait_futures(futures, timeout=5)
                    _raise_first(futures)
                    raise
            for future in futures:
                future.result()
        finally:
            pool.shutdown(wait=False)

    def _join(self) -> None:
        """Form the update group: rank 0 is this process, engine i has ranks 1 + i * gpus_per_engine and following."""
        if self._group is not None:
            return
        world_size = 1 + len(self._engines) * self.gpus_per_engine
        backend = "nccl" if self.trainer.config.on_cuda else "gloo"
        port = free_ports(1, self.host)[0]
        offsets = {engine.url: 1 + i * self.gpus_per_engine for i, engine in enumerate(self._engines)}

        def engine_joins(engine: EngineAdmin) -> None:
            engine.init_weights_update_group(self.host, port, offsets[engine.url], world_size, self.group_name, backend)

        def trainer_joins(futures: list[Future[None]]) -> None:
            address = f"tcp://{_bracketed(self.host)}:{port}"

            def make() -> dist.ProcessGroup:
                return _process_group(backend, address, world_size, self.group_name, self.timeout)

            self._group = _unless_refused(make, futures)

        self._every_engine(engine_joins, trainer_joins)

    def _broadcast(self, bucket: Bucket, version: int | None) -> None:
        names = [name for name, _ in bucket]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]

        def receive(engine: EngineAdmin) -> None:
            engine.update_weights_from_distributed(names, dtypes, shapes, self.group_name, version)

        def send(futures: list[Future[None]]) -> None:
            def broadcast() -> list[dist.Work]:
                return [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for _, tensor in bucket]

            # NCCL connects inside the first broadcast, and would wait there for an engine that has given up.
            works = _unless_refused(broadcast, futures)
            deadline = time.monotonic() + self.timeout
            while not all(work.is_completed() for work in works):
                _raise_first(futures)  # an engine that refused will never take part in the broadcast
                if time.monotonic() > deadline:
                    raise WeightUpdateError(f"the engines did not take a bucket of weights within {self.timeout:g} s")
                time.sleep(0.001)
            for work in works:
                work.wait()

        self._every_engine(receive, send)

    def _send_files(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        from safetensors.torch import save_file

        folder = Path(tempfile.mkdtemp(prefix="slime-retool-weights-", dir=self._file_root()))
        try:
            weight_map: dict[str, str] = {}
            for number, bucket in enumerate(buckets(tensors, self.bucket_bytes)):
                file = f"model-{number:05d}.safetensors"
                save_file({name: tensor.cpu() for name, tensor in bucket}, folder / file, metadata={"format": "pt"})
                weight_map |= {name: file for name, _ in bucket}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
            if self.trainer.config.hf_checkpoint is not None:
                shutil.copy(Path(self.trainer.config.hf_checkpoint) / "config.json", folder)
            self._every_engine(lambda engine: engine.update_weights_from_disk(str(folder), version))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _file_root(self) -> str:
        """Memory where the weights fit there (with as much to spare), else the run's own folder."""
        needed = sum(p.nbytes for p in self.trainer.module.parameters()) * self.trainer.config.model_parallel_size
        memory = Path("/dev/shm")
        if memory.is_dir() and shutil.disk_usage(memory).free > 2 * needed:
            return str(memory)
        Path(self.trainer.config.output_dir).mkdir(parents=True, exist_ok=True)
        return self.trainer.config.output_dir

    def _forget_group(self, *, abort: bool = False) -> None:
        """Leave the group; `abort` first ends broadcasts that nobody will receive, instead of waiting for them."""
        if self._group is None:
            return
        if abort:
            self._group._get_backend(self.trainer.device).abort()
            # Freeing gloo's group would join the threads that still wait for the other side, until its timeout.
            self._aborted.append(self._group)
        dist.destroy_process_group(self._group)
        self._group = None


def _unless_refused(call: Callable[[], R], futures: Sequence[Future[None]]) -> R:
    """The result of `call`, or the first engine's error as soon as there is one.

    `call` runs in a daemon thread: once an engine has refused, nothing but its own timeout would end it.
    """
    result: Future[R] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread starts on device 0
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weight-sync").start()
    while not result.done():
        _raise_first(futures)
        time.sleep(0.001)
    return result.result()


def _raise_first(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        if future.done():
            future.result()


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
        size, rank, [], Backend(backend), PrefixStore(group_name, store), group_name=group_name, timeout=limit
    )
    assert isinstance(group, dist.ProcessGroup)
    _world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
