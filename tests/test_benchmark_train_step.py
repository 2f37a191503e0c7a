"""benchmarks/train_step.py: its arithmetic, and a run on the CPU."""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from trainer_utils import tiny_config

from slime_retool.types import TrainSample

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from benchmarks import train_step  # noqa: E402


def test_lengths_fill_the_budget_and_are_log_uniform() -> None:
    lengths = train_step.draw_lengths(4_000_000, 8192, random.Random(0))
    assert min(lengths) >= 200 and max(lengths) <= 8192 and 4_000_000 - 8192 < sum(lengths) <= 4_000_000
    assert statistics.median(lengths) == pytest.approx((200 * 8192) ** 0.5, rel=0.1)


def test_model_flops_count_every_matrix_product_and_half_of_the_attention_square() -> None:
    config = tiny_config()
    samples = [TrainSample([1] * n, [0] + [1] * learned + [0] * (n - 1 - learned)) for n, learned in ((10, 4), (7, 6))]
    width, heads, groups, d, ffn = 32, 4, 2, 8, 48
    by_token = 2 * (width * heads * d + 2 * width * groups * d + heads * d * width + 3 * width * ffn)
    attention = sum(
        2 * 2 * heads * d * sum(range(n)) + 2 * heads * d * n for n in (10, 7)
    )  # q k and p v, half diagonal
    want = 2 * (17 * by_token + attention)
    output = 2 * width * 67
    assert train_step.flops_of(config, samples, training=False, strict=False) == want + 17 * output
    assert train_step.flops_of(config, samples, training=True, strict=True) == 3 * (want + 10 * output)


def test_a_case_runs_on_the_cpu_through_the_trainer_and_a_failing_one_is_reported() -> None:
    command = [
        sys.executable, str(ROOT / "benchmarks" / "train_step.py"), "--device", "cpu", "--model", "tiny",
        "--max-tokens-per-gpu", "256", "--micro-batches", "1", "--warmup", "0", "--steps", "1",
    ]  # fmt: skip
    good = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert good.returncode == 0, good.stdout + good.stderr
    assert good.stdout.splitlines()[-1].startswith("custom ") and " failed: " not in good.stdout
    bad = subprocess.run([*command, "--", "--precision", "bf16"], capture_output=True, text=True, timeout=600)
    assert bad.returncode == 1 and "--precision bf16 needs a GPU" in bad.stdout


def test_a_profile_counts_the_cards_kernels_once_and_tells_work_from_waiting() -> None:
    def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CUDA, mark: bool = False) -> object:
        found = FunctionEvent(id=0, name=name, thread=0, start_us=start, end_us=end, device_type=device)
        found.is_user_annotation = mark
        return found

    events = [
        event("matmul", 0, 300_000),
        event("matmul", 200_000, 500_000),  # on another stream
        event("ncclDevKernel_SendRecv", 600_000, 1_000_000),
        event("nccl:coalesced", 600_000, 1_000_000, mark=True),
        event("aten::mm", 0, 900_000, DeviceType.CPU),
    ]
    assert train_step.kernel_shares(events, 2.0) == [
        "  45.0% of 2.00 s are busy, 25.0% without NCCL's kernels",
        "  30.0%      2 x matmul",
        "  20.0%      1 x ncclDevKernel_SendRecv",
    ]
