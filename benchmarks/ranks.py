"""Run a benchmark's case in processes of its own, one a rank, with a time limit: a failing case costs no other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_ranks(command: Sequence[str], world_size: int, timeout: float) -> dict[str, Any]:
    """Run `command --rank R --port P --result FILE` for every rank; rank 0 writes JSON to FILE, which is returned.

    {"error": why, with the log's end} when a rank fails or the time is up; no process is left either way.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Micro-batches differ in size, which would leave holes in memory.
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        result = Path(scratch) / "result.json"
        logs = [Path(scratch) / f"{rank}.log" for rank in range(world_size)]
        children: list[subprocess.Popen[bytes]] = []
        late = False
        try:
            for rank, log in enumerate(logs):
                options = ["--rank", str(rank), "--port", str(port), "--result", str(result)]
                with log.open("w") as file:
                    children.append(subprocess.Popen([*command, *options], stdout=file, stderr=file, env=env))
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


def tail(log: Path) -> str:
    return "\n".join("    " + line[:300] for line in log.read_text(errors="replace").splitlines()[-12:])
