"""Converting a checkpoint both ways, against copying the same bytes on the same disk. Never needs a GPU.

    python benchmarks/convert.py                                # Qwen3-4B shape: 33 GB of disk
    python benchmarks/convert.py --model qwen3-0.6B --shard-bytes 400000000

A checkpoint with random bf16 weights is written in several files, and copied once, which is not counted: the first use
of a disk is often its slowest. Then, `--repeats` times in turns:

- cp      `cp` of its files, and fsync of the copy;
- dd      `dd` of its files past the page cache (O_DIRECT both ways, 16 MiB blocks), and fsync of the copy;
- to      `tools/convert_hf_to_torch_dist.py`, and fsync of what it wrote;
- back    `tools/convert_torch_dist_to_hf.py`, and fsync of what it wrote.

Before each the source's pages are dropped from the page cache (posix_fadvise), so that all read from the disk, and the
time includes the start of the process (Python and torch). `convert_ratio` is the slower direction's median over the
median of the faster way to copy. What `back` wrote is compared with the original, byte by byte.

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
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.results import write_result
from benchmarks.shapes import ROOT, SHARD_BYTES, make_checkpoint, model_args, model_flags, tensor_shapes

DIRECT_COPY = """
mkdir "$2"
for file in "$1"/*; do
    dd if="$file" of="$2/${file##*/}" bs=16M iflag=direct oflag=direct status=none
done
"""


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
    to_tool, back_tool = (
        [sys.executable, str(ROOT / "tools" / name)]
        for name in ("convert_hf_to_torch_dist.py", "convert_torch_dist_to_hf.py")
    )
    to = [*to_tool, *model_flags(args.model), "--hf-checkpoint", str(hf), "--save", str(torch_dist)]
    from_torch_dist = ["--input-dir", str(torch_dist), "--output-dir", str(back), "--origin-hf-dir", str(hf)]
    steps: dict[str, tuple[list[str], Path, Path]] = {
        "cp": (["cp", "-r", str(hf), str(copy)], hf, copy),
        "dd": (["bash", "-ec", DIRECT_COPY, "bash", str(hf), str(copy)], hf, copy),
        "to": (to, hf, torch_dist),
        "back": ([*back_tool, *from_torch_dist], torch_dist, back),
    }
    timed(*steps["cp"])
    done: dict[str, list[tuple[float, int]]] = {name: [] for name in steps}
    for _ in range(args.repeats):
        for target in (torch_dist, back):
            shutil.rmtree(target, ignore_errors=True)
        for name, step in steps.items():
            done[name].append(timed(*step))
            print(f"{name}: {done[name][-1][0]:.2f} s", file=sys.stderr)
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
        "convert_ratio": max(seconds["to"], seconds["back"]) / min(seconds["cp"], seconds["dd"]),
        "ratios": {
            f"{way}/{copied}": seconds[way] / seconds[copied] for way in ("to", "back") for copied in ("cp", "dd")
        },
        **{f"{name}_seconds": [round(took, 2) for took, _ in runs] for name, runs in done.items()},
        "peak_bytes": peak,
        "peak_bound_bytes": bound,
        "peak_within_bound": max(peak.values()) <= bound,
    }


def machine(folder: Path) -> str:
    """Processor and disk, as in "2 x Intel(R) Xeon(R) Processor, disk vda (ext4)"."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    command = ["findmnt", "--noheadings", "--output", "SOURCE,FSTYPE", "--target", str(folder)]
    source, kind = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return f"{os.cpu_count()} x {cpu.group(1) if cpu else 'CPU'}, disk {Path(source).name} ({kind})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4B", help="a file of scripts/models (a Qwen3 shape), or tiny")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="size of one file of the checkpoint")
    parser.add_argument("--checkpoint", type=Path, help="of --model, made by benchmarks/shapes.py (default: made now)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, help="scratch folder on the disk to measure (default: temporary)")
    parser.add_argument("--out-dir", type=Path, help="write convert_ratio.json here")
    args = parser.parse_args()
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="convert-", dir=args.work) as work:
        figures = {"machine": machine(Path(work)), **measure(args, Path(work))}
    print(json.dumps(figures, indent=2))
    if args.out_dir is not None:
        ratio, unit = round(figures["convert_ratio"], 3), "x time of the faster copy"
        write_result("convert_ratio", ratio, unit, out_dir=args.out_dir, card=figures["machine"])
    return 0 if figures["peak_within_bound"] and figures["convert_ratio"] <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
