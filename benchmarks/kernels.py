"""The trainer's own GPU kernels against float32 references, and how fast they are.

    python benchmarks/kernels.py                       # one GPU, bf16
    python benchmarks/kernels.py --device cpu          # that the script works: the CPU's plain versions, small sizes

CI has no GPU, so this is where the kernels meet one: `megatron_bridge.fused` (QKV split with norm and rotation,
SwiGLU) and every attention kernel that can be chosen (`megatron_bridge.attention`, and Transformer Engine's where
it is installed). Each row is one kernel on one input:

- `error`: largest relative error ||x - reference|| / ||reference|| of its outputs and of its gradients. Rounding to
  bf16 alone gives 1 to 3e-3; more than `--tolerance`, or a value that is not finite, fails the run (exit code 1).
- forward and backward in ms (medians by CUDA events), and TB/s of the least memory traffic, or TFLOP/s with half of the
  attention square counted and a backward of 2.5 forwards.

Attention is checked on lengths at the edges of its tiles, one token included, and timed on the packed mix of
benchmarks/train_step.py.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.train_step import draw_lengths
from megatron_bridge import fused

EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 300)
Function = Callable[..., "tuple[Tensor, ...]"]


@dataclass(frozen=True)
class Row:
    kernel: str
    what: str
    error: float
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    rate: str = ""


def relative_errors(function: Function, reference: Function, inputs: Sequence[Tensor]) -> float:
    """The largest of outputs and gradients; the reference gets the inputs in float32. NaN counts as infinite.

    A gradient that is zero (of a single token's query and key) is measured by the inputs.
    """
    scale = max(x.float().norm() for x in inputs)

    def results(of: Function, values: Sequence[Tensor]) -> list[Tensor]:
        values = [value.detach().clone().requires_grad_() for value in values]
        out = of(*values)
        torch.manual_seed(1)
        grads = [torch.randn(part.shape, device=part.device) for part in out]
        torch.autograd.backward(out, [grad.to(part.dtype) for part, grad in zip(out, grads, strict=True)])
        return [part.detach() for part in out] + [value.grad for value in values if value.grad is not None]

    def error(got: Tensor, want: Tensor) -> float:
        if not torch.isfinite(got).all():
            return float("inf")
        return float((got.float() - want).norm() / (want.norm() or scale))

    pairs = zip(results(function, inputs), results(reference, [x.float() for x in inputs]), strict=True)
    return max(error(got, want) for got, want in pairs)


def milliseconds(work: Callable[[Any], Any], repeats: int, prepare: Callable[[], Any] = lambda: None) -> float:
    """Median time on the device of work(prepare()), without prepare; 0 on the CPU, whose time says nothing here."""
    if not torch.cuda.is_available():
        return 0.0
    # Behind a millisecond of other work the host has time to queue what is timed: its own speed does not count.
    filler = torch.ones(6144, 6144, device="cuda", dtype=torch.bfloat16)
    taken = []
    for index in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        prepared = prepare()
        filler @ filler
        begin.record()
        work(prepared)
        end.record()
        torch.cuda.synchronize()
        if index >= 3:
            taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def timed(function: Function, inputs: Sequence[Tensor], repeats: int) -> tuple[float, float]:
    """(forward, backward) in ms."""
    with torch.no_grad():
        forward = milliseconds(lambda _: function(*inputs), repeats)
    values = [value.detach().clone().requires_grad_() for value in inputs]
    grads = [torch.randn_like(part) for part in function(*values)]
    # A forward of its own for each: Transformer Engine's functions go back only once.
    return forward, milliseconds(
        lambda out: torch.autograd.grad(out, values, grads), repeats, prepare=lambda: function(*values)
    )


def elementwise(args: argparse.Namespace) -> list[Row]:
    """QKV and SwiGLU at the 4B shape (a thirty-second of it on the CPU)."""
    small = 32 if args.device == "cpu" else 1
    tokens, groups, ratio, width, ffn = 15_889 // small, 8, 4, 128, 9_728 // small
    make = dict(device=args.device, dtype=args.dtype)
    angles = 6 * torch.rand(tokens, width // 2, device=args.device)
    tables = (angles.cos(), angles.sin(), 1e-6)
    mixed = torch.randn(tokens, groups, ratio + 2, width, **make)
    weights = [1 + 0.1 * torch.randn(width, **make) for _ in range(2)]
    x = torch.randn(tokens, 1, 2 * ffn, **make)
    cases: list[tuple[str, Function, Function, list[Tensor], tuple[int, int]]] = [
        (
            "QKV split, norm, rotation",
            lambda *given: fused.split_norm_rotate(*given, *tables),
            lambda *given: fused._split_norm_rotate(*given, *tables),
            [mixed, *weights],
            (2 * mixed.nbytes + 2 * angles.nbytes, 3 * mixed.nbytes + 2 * angles.nbytes),
        ),
        (
            "SwiGLU",
            lambda given: (fused.swiglu(given),),
            lambda given: (torch.nn.functional.silu(given[..., :ffn]) * given[..., ffn:],),
            [x],
            (x.nbytes * 3 // 2, x.nbytes * 5 // 2),
        ),
    ]
    rows = []
    for name, function, reference, inputs, traffic in cases:
        error = relative_errors(function, reference, inputs)
        times = timed(function, inputs, args.repeats)
        rates = [f"{moved / ms / 1e9:.2f}" for moved, ms in zip(traffic, times, strict=True) if ms]
        rows.append(Row(name, f"{tokens} tokens", error, *times, " ".join([*rates, "TB/s"] if rates else [])))
    return rows


def attention_kernels(args: argparse.Namespace) -> dict[str, Callable[..., Tensor]]:
    """Kernels of (query, key, value, ends, longest); those that this host cannot run are left out."""
    from megatron_bridge.attention import packed_attention

    if args.device == "cpu":
        return {"SDPA for each sequence": reference_attention}

    def packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, *, flash: bool = False) -> Tensor:
        return packed_attention(q, k, v, ends, ends, longest, longest, None, with_flash_attn_4=flash)

    kernels: dict[str, Callable[..., Tensor]] = {"varlen_attn": packed}
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
        kernels["flash-attn-4"] = functools.partial(packed, flash=True)
    if importlib.util.find_spec("transformer_engine"):
        from transformer_engine.pytorch import DotProductAttention

        made: dict[tuple[int, int], Any] = {}

        def engine(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
            heads, groups = q.shape[1], k.shape[1]
            module = made.get((heads, groups)) or DotProductAttention(
                heads, q.shape[2], num_gqa_groups=groups, attention_dropout=0.0, qkv_format="thd",
                attn_mask_type="padding_causal",
            )  # fmt: skip
            made[heads, groups] = module
            return module(
                q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
            ).view_as(q)

        kernels["Transformer Engine"] = engine
    return kernels


def reference_attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
    """[T, h, d], [T, g, d], [T, g, d] -> [T, h, d], one sequence after the other."""
    lengths = ends.diff().tolist()
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in part), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            for part in parts
        ]
    )


def attention(args: argparse.Namespace) -> list[Row]:
    """Errors on lengths at the edges of tiles, times on the packed mix, with the heads of 4B and of 1.7B."""
    rows = []
    for name, kernel in attention_kernels(args).items():
        for heads, total in ((32, 16_384), (16, 32_768)):
            mixes = {"edges": list(EDGES), "a single token": [1]}
            if args.device == "cuda":
                mixes["mix"] = draw_lengths(int(0.97 * total), 8192, random.Random(7))
            for what, lengths in mixes.items():
                rows.append(attention_row(args, name, kernel, heads, what, lengths))
    return rows


def attention_row(
    args: argparse.Namespace, name: str, kernel: Callable[..., Tensor], heads: int, what: str, lengths: list[int]
) -> Row:
    width, groups, tokens, longest = 128, 8, sum(lengths), max(lengths)
    torch.manual_seed(0)
    shapes = ((tokens, heads, width), (tokens, groups, width), (tokens, groups, width))
    inputs = [torch.randn(shape, device=args.device, dtype=args.dtype) for shape in shapes]
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=args.device).cumsum(0, dtype=torch.int32)

    def run(*given: Tensor) -> tuple[Tensor]:
        return (kernel(*given, ends, longest),)

    def reference(*given: Tensor) -> tuple[Tensor]:
        return (reference_attention(*given, ends, longest),)

    what = f"{heads} heads, {what} ({tokens:,} tokens)"
    error = relative_errors(run, reference, inputs)
    if tokens < 10_000:
        return Row(name, what, error)
    forward, backward = timed(run, inputs, args.repeats)
    operations = 2 * heads * width * sum(length * length for length in lengths)
    rates = f"{operations / forward / 1e9:.0f} {2.5 * operations / backward / 1e9:.0f} TFLOP/s"
    return Row(name, what, error, forward, backward, rates)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of each kernel")
    parser.add_argument("--tolerance", type=float, default=6e-3, help="largest relative error that passes")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    rows = [*elementwise(args), *attention(args)]
    print(f"{'kernel':<26}{'input':<42}{'error':>9}{'forward':>10}{'backward':>10}")
    for row in rows:
        times = f"{row.forward_ms:>10.3f}{row.backward_ms:>10.3f}  {row.rate}" if row.rate else ""
        print(f"{row.kernel:<26}{row.what:<42}{row.error:>9.1e}{times}")
    wrong = [row for row in rows if not row.error <= args.tolerance]
    for row in wrong:
        print(f"failed: {row.kernel}, {row.what}: error {row.error:.1e} is above {args.tolerance:.1e}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
