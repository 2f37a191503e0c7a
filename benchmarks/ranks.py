"""Run a benchmark's case in processes of its own, one a rank, with a time limit: a failing case costs no other."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_retool.cluster.environment import trainer_environment

if TYPE_CHECKING:
    from slime_retool.config import Config
    from slime_retool.trainer.core import Trainer


NO_GPU = ("",)
"""`devices` of ranks on the CPU."""
RANKS_PER_GPU = 4
"""That share one, where they may."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parallel sizes of a case."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def size_flags(self) -> list[str]:
        """For slime_retool.train."""
        return [
            "--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp),
            "--context-parallel-size", str(self.cp), "--expert-model-parallel-size", str(self.ep),
            "--actor-num-gpus-per-node", str(self.world_size),
        ]  # fmt: skip


def make_trainer(config: Config, args: argparse.Namespace) -> Trainer:
    """The trainer of this rank, in a process that `run_ranks` started."""
    from slime_retool.trainer.core import Trainer

    return Trainer(config, rank=args.rank, world_size=config.world_size, local_rank=0, init_method=args.init_method)


def add_rank_options(parser: argparse.ArgumentParser, *more: str) -> None:
    """What `run_ranks` adds to a command, `--worker` for the case that it is to run, and `more` of the script's own;
    none of them for users."""
    for name in ("--worker", "--init-method", "--result", *more):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)


def add_share_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--share-gpu", action="store_true",
        help="run all ranks of a case on one GPU: the same computation with everything sent through NCCL's sockets, "
        "so that layouts can be checked where there are fewer GPUs than ranks; its times mean nothing",
    )  # fmt: skip


def run_ranks(command: Sequence[str], world_size: int, timeout: float, devices: Sequence[str]) -> dict[str, Any]:
    """Run `command --rank R --init-method URL --result FILE` for every rank; rank 0 writes JSON to FILE, which is
    returned.

    The ranks meet in a file: a port would have to be chosen before one of them can bind it.
    Each rank sees its one of `devices` (values of CUDA_VISIBLE_DEVICES, the same one for ranks that share a GPU; NO_GPU
    for all on the CPU) as its only GPU.
    {"error": why, with the log's end} when a rank fails or the time is up; no process is left either way.
    """
    env = {**os.environ, **trainer_environment(colocate=False, kernel_cache_dir=None)}
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        result = Path(scratch) / "result.json"
        meeting = f"file://{scratch}/rendezvous"
        logs = [Path(scratch) / f"{rank}.log" for rank in range(world_size)]
        children: list[subprocess.Popen[bytes]] = []
        late = False
        try:
            for rank, log in enumerate(logs):
                options = ["--rank", str(rank), "--init-method", meeting, "--result", str(result)]
                own = rank_environment(rank, world_size, devices)
                with log.open("w") as file:
                    children.append(subprocess.Popen([*command, *options], stdout=file, stderr=file, env=env | own))
            deadline = time.monotonic() + timeout
            while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
                if time.monotonic() > deadline:
                    late = True
                    break
                time.sleep(0.1)
            if any(child.poll() for child in children):
                time.sleep(0.5)  # the rank that failed first may not be the one that ended first
        finally:
            failed = {rank: child.poll() for rank, child in enumerate(children) if child.poll()}
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()
        if late:
            return {"error": f"not done after {timeout:.0f} s; rank 0 last said:\n{tail(logs[0])}"}
        if failed:
            # Ranks that only lost their peer say so in torch.distributed's words; prefer one that says something else.
            rank = min(failed, key=lambda r: ("Connection closed by peer" in tail(logs[r]), r))
            return {"error": f"rank {rank} ended with {failed[rank]}:\n{tail(logs[rank])}"}
        if not result.is_file():
            return {"error": f"rank 0 left no result:\n{tail(logs[0])}"}
        return json.loads(result.read_text())


def rank_environment(rank: int, world_size: int, devices: Sequence[str]) -> dict[str, str]:
    """What one rank's environment adds."""
    own = {"CUDA_VISIBLE_DEVICES": devices[rank % len(devices)]}
    if tuple(devices) == NO_GPU:
        return own | {"OMP_NUM_THREADS": "1"}  # several such processes run at once, of models with nothing to share out
    if len(set(devices)) < world_size:
        # NCCL refuses two ranks on one GPU of a host. As ranks of different hosts they talk through sockets instead.
        own |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
    return own


def visible_devices() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES would name them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def places(share_gpu: bool) -> list[str]:
    """The visible GPUs, each as often as it takes ranks."""
    return visible_devices() * (RANKS_PER_GPU if share_gpu else 1)


def too_few(needed: int, devices: Sequence[str]) -> str | None:
    """Why a case of so many ranks cannot run on these devices; None where it can."""
    return f"needs {needed} GPUs, {len(devices)} are visible" if needed > len(devices) else None


def side_by_side(
    sizes: Mapping[str, int], devices: Sequence[str], run: Callable[[str, list[str]], None]
) -> dict[str, str]:
    """`run(name, its devices)` for every case of so many devices, in order, at once as far as the devices go.

    Returns why for each case that needs more devices than there are; it is not run. What `run` raises is raised.
    """
    free = list(devices)
    changed = threading.Condition()

    def one(name: str, mine: list[str]) -> None:
        try:
            run(name, mine)
        finally:
            with changed:
                free.extend(mine)
                changed.notify()

    refused = {name: why for name, size in sizes.items() if (why := too_few(size, devices))}
    with ThreadPoolExecutor(max(1, len(devices))) as pool:
        running = []
        for name, size in sizes.items():
            if name in refused:
                continue
            with changed:
                changed.wait_for(lambda size=size: len(free) >= size)
                mine = [free.pop(0) for _ in range(size)]
            running.append(pool.submit(one, name, mine))
        for future in running:
            future.result()
    return refused


def tail(log: Path) -> str:
    return "\n".join("    " + line[:300] for line in log.read_text(errors="replace").splitlines()[-12:])
