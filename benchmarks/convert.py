"""Converting a checkpoint both ways, against copying the same bytes on the same disk. Never needs a GPU.

    python benchmarks/convert.py                                # Qwen3-4B shape: 25 GB of disk
    python benchmarks/convert.py --model qwen3-0.6B --shard-bytes 400000000

A checkpoint with random bf16 weights is written in several files. Then, `--repeats` times in turns:

- copy    `cp` of its files, and fsync of the copy;
- to      `tools/convert_hf_to_torch_dist.py`, and fsync of what it wrote;
- back    `tools/convert_torch_dist_to_hf.py`, and fsync of what it wrote.

Before each the source's pages are dropped from the page cache (posix_fadvise), so that all three read from the disk,
and the time includes the start of the process (Python and torch). `convert_ratio` is the slower direction's median
over the copy's median. What `back` wrote is compared with the original, byte by byte.

Peak memory is the converting process's resident maximum (getrusage: Python, torch and mapped files included), to be
compared with 1.3 times the largest file plus one layer. A child's maximum starts at its parent's, which therefore
imports no torch while it measures.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.results import write_result
from benchmarks.shapes import ROOT, SHARD_BYTES, make_checkpoint, model_args, model_flags, tensor_shapes


def drop_cache(folder: Path) -> None:
    """Write the folder's files to the disk and forget their pages."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def timed(command: list[str], source: Path, target: Path) -> tuple[float, int]:
    """Seconds from cold source to synced target, and the process's peak resident bytes."""
    shutil.rmtree(target, ignore_errors=True)
    drop_cache(source)
    # Pages that an earlier step left to be written would be written at this one's cost.
    os.sync()
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:2])} ended with {process.returncode}:\n{said[-2000:]}")
    sync(target)
    return time.perf_counter() - begin, usage.ru_maxrss * 1024


def memory_bound(name: str, largest_file: int) -> int:
    """1.3 times the largest file plus one layer, bytes."""
    shapes = tensor_shapes(model_args(name))
    layer = sum(2 * math.prod(shape) for tensor, shape in shapes.items() if tensor.startswith("model.layers.0."))
    return int(1.3 * largest_file) + layer


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    hf, copy, torch_dist, back = (work / name for name in ("hf", "copy", "torch_dist", "back"))
    if args.checkpoint is not None:
        hf = args.checkpoint
    else:
        make_checkpoint(hf, args.model, shard_bytes=args.shard_bytes)
    tools = [sys.executable, str(ROOT / "tools" / "convert_hf_to_torch_dist.py")]
    back_tool = [sys.executable, str(ROOT / "tools" / "convert_torch_dist_to_hf.py")]
    steps: dict[str, Callable[[], tuple[float, int]]] = {
        "copy": lambda: timed(["cp", "-r", str(hf), str(copy)], hf, copy),
        "to": lambda: timed(
            [*tools, *model_flags(args.model), "--hf-checkpoint", str(hf), "--save", str(torch_dist)], hf, torch_dist
        ),
        "back": lambda: timed(
            [*back_tool, "--input-dir", str(torch_dist), "--output-dir", str(back), "--origin-hf-dir", str(hf)],
            torch_dist,
            back,
        ),
    }
    done: dict[str, list[tuple[float, int]]] = {name: [] for name in steps}
    for _ in range(args.repeats):
        for name, step in steps.items():
            done[name].append(step())
            shutil.rmtree(copy, ignore_errors=True)
    files = sorted(path for path in hf.iterdir() if path.suffix == ".safetensors")
    different = [path.name for path in files if not filecmp.cmp(path, back / path.name, shallow=False)]
    assert not different, f"there and back again changed {different}"
    seconds = {name: statistics.median(took for took, _ in runs) for name, runs in done.items()}
    peak = {name: max(memory for _, memory in done[name]) for name in ("to", "back")}
    bound = memory_bound(args.model, max(path.stat().st_size for path in files))
    return {
        "model": args.model,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "convert_ratio": max(seconds["to"], seconds["back"]) / seconds["copy"],
        **{f"{name}_seconds": [round(took, 2) for took, _ in runs] for name, runs in done.items()},
        "peak_bytes": peak,
        "peak_bound_bytes": bound,
        "peak_within_bound": max(peak.values()) <= bound,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4B", help="a file of scripts/models (a Qwen3 shape), or tiny")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="size of one file of the checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="of --model, made by benchmarks/shapes.py (default: made now)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="scratch folder on the disk to measure (default: temporary)")
    parser.add_argument("--out-dir", type=Path, help="write convert_ratio.json here")
    args = parser.parse_args()
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="convert-", dir=args.work) as work:
        figures = measure(args, Path(work))
    print(json.dumps(figures, indent=2))
    if args.out_dir is not None:
        write_result("convert_ratio", figures["convert_ratio"], "x time of a copy", out_dir=args.out_dir)
    return 0 if figures["peak_within_bound"] and figures["convert_ratio"] <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
