"""Spawn a group of gloo processes for a test.

    run_distributed(check, 2, "argument")       # calls check(rank, world_size, "argument") in two processes

`fn` must be importable by name (a function of a module, not a closure), because it goes to other processes.
What it returns must be picklable; `run_distributed` gives back the list of results, by rank.

Every call has new processes, forked from one server that has imported torch, Megatron and transformers (`rank_imports`)
and done nothing else: importing them in each rank would take seconds of every rank.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime_retool.engine.checksum import Gather

T = TypeVar("T")


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600.0, threads: int = 1
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` in `world_size` new processes joined by a gloo group.

    Returns every rank's result. The first failing rank's traceback is raised as RuntimeError; after `timeout`
    seconds every child is killed by its own id and TimeoutError is raised. No child outlives the call.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["rank_imports"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="gloo-") as scratch:
        rendezvous = Path(scratch) / "rendezvous"
        children = [
            context.Process(
                target=_child,
                args=(fn, rank, world_size, str(rendezvous), scratch, list(sys.path), environment, threads, args),
            )
            for rank in range(world_size)
        ]
        try:
            for child in children:
                child.start()
            _wait(children, Path(scratch), timeout)
        finally:
            _kill(children)
        return [torch.load(Path(scratch) / f"result{rank}.pt", weights_only=False) for rank in range(world_size)]


def _wait(children: list[Any], scratch: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(child.is_alive() for child in children):
        if any(child.exitcode not in (None, 0) for child in children):
            time.sleep(0.5)  # ranks that fail for the same reason may still be writing their tracebacks
            break
        if time.monotonic() > deadline:
            alive = [rank for rank, child in enumerate(children) if child.is_alive()]
            raise TimeoutError(f"ranks {alive} still ran after {timeout:.0f} s")
        time.sleep(0.05)
    # The other ranks fail because the first one did: theirs are only broken connections.
    tracebacks = sorted(scratch.glob("error*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if tracebacks:
        rank = tracebacks[0].stem.removeprefix("error")
        raise RuntimeError(f"rank {rank} failed:\n{tracebacks[0].read_text()}")
    for rank, child in enumerate(children):
        if child.exitcode not in (None, 0):
            raise RuntimeError(f"rank {rank} died with exit code {child.exitcode}")


def _kill(children: list[Any]) -> None:
    for child in children:
        if child.pid is not None and child.is_alive():
            child.kill()
    for child in children:
        if child.pid is not None:
            child.join(10)


def _child(
    fn: Callable[..., Any], rank: int, world_size: int, rendezvous: str, scratch: str, path: list[str],
    environment: dict[str, str], threads: int, args: tuple[Any, ...],
) -> None:  # fmt: skip
    sys.path[:] = path
    os.environ.clear()
    try:
        torch.set_num_threads(threads)
        os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
        )
        result = fn(rank, world_size, *args)
        torch.save(result, Path(scratch) / f"result{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(scratch, f"error{rank}.txt").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def in_threads(workers: int, run: Callable[[int, Gather], T]) -> list[T]:
    """What `run(worker, gather)` returns in a thread for each worker, in order; `gather` is a collective of theirs."""
    met = threading.Barrier(workers, timeout=120)
    offered: list[Any] = [None] * workers

    def start(worker: int) -> T:
        def gather(tensor: Any) -> list[Any]:
            offered[worker] = tensor
            met.wait()
            shares = list(offered)
            met.wait()
            return shares

        return run(worker, gather)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(start, range(workers)))
