"""Memory of the log-prob pass (forward and backward) as tokens and vocabulary grow.

    python benchmarks/log_prob_memory.py                     # on a GPU, Qwen3-4B's output layer
    python benchmarks/log_prob_memory.py --device cpu --hidden 256 --tokens 1024 4096 --vocab 8000 32000 --chunk 256

Peak memory above the inputs (hidden states, weight, its fp32 gradient buffer): `torch.cuda.max_memory_allocated` on a
GPU, the profiler's record of allocations on a CPU, each size in a process of its own. Beside it stands the
size of all logits in fp32, which is what a pass that makes them whole needs at least once. `per token` is the slope
between the smallest and the largest number of tokens: it should stay near 2 to 3 times the hidden state's bytes,
whatever the vocabulary. On a GPU the result is also compared with float64 on the first 64 positions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]


def measure(tokens: int, vocab: int, args: argparse.Namespace) -> dict[str, float]:
    """One forward and backward in this process."""
    import torch

    from slime_retool.algo.log_probs import linear_log_probs

    on_gpu = args.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, args.hidden, device=args.device, dtype=dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(vocab, args.hidden, device=args.device, dtype=dtype) * args.hidden**-0.5)
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    targets = torch.randint(0, vocab, (tokens,), device=args.device)
    factors = torch.randn(tokens, device=args.device)

    def run(count: int) -> Any:
        log_probs, entropy = linear_log_probs(
            hidden[:count], weight, targets[:count], vocab_size=vocab, with_entropy=True, chunk_size=args.chunk
        )
        (factors[:count] * (log_probs - 0.1 * entropy)).sum().backward()
        return log_probs.detach(), entropy.detach()

    run(8)  # what is loaded or compiled on the first call is not the pass's
    weight.main_grad.zero_()
    hidden.grad = weight.grad = None
    if not on_gpu:
        begin = time.perf_counter()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            run(tokens)
        return {"peak": allocation_peak(profiler), "seconds": time.perf_counter() - begin}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    log_probs, entropy = run(tokens)
    torch.cuda.synchronize()
    out = {"peak": torch.cuda.max_memory_allocated() - before, "seconds": time.perf_counter() - begin}
    out |= errors(hidden, weight, targets, factors, log_probs, entropy)
    return out


def allocation_peak(profiler: Any) -> int:
    """Largest sum of allocations minus frees, in bytes."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def errors(hidden: Any, weight: Any, targets: Any, factors: Any, log_probs: Any, entropy: Any) -> dict[str, float]:
    """Largest differences from float64 on the first positions: log-prob, entropy, and (relative) gradient of hidden."""
    import torch

    count = min(64, len(hidden))
    exact = hidden.detach()[:count].double().requires_grad_()
    log_p = torch.log_softmax(exact @ weight.detach().double().T, -1)
    chosen = log_p.gather(1, targets[:count, None])[:, 0]
    spread = -(log_p.exp() * log_p).sum(-1)
    (factors[:count].double() * (chosen - 0.1 * spread)).sum().backward()
    assert exact.grad is not None
    gradient = (hidden.grad[:count].double() - exact.grad).abs().max() / exact.grad.abs().max()
    return {
        "log_prob_error": float((log_probs[:count] - chosen.detach()).abs().max()),
        "entropy_error": float((entropy[:count] - spread.detach()).abs().max()),
        "gradient_error": float(gradient),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 151936])
    parser.add_argument("--chunk", type=int, help="positions at a time (default: the product's choice)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of one size")
    parser.add_argument("--out-dir", type=Path, help="results folder (default on GPUs: benchmarks/results)")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(*args.worker, args)))
        return 0
    peaks: dict[tuple[int, int], float] = {}
    lines = [f"{'tokens':>8}{'vocab':>9}{'peak MiB':>10}{'all logits MiB':>16}{'seconds':>9}  errors"]
    for vocab in args.vocab:
        for tokens in args.tokens:
            command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(tokens), str(vocab)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
            if done.returncode:
                print(done.stderr[-2000:])
                return 1
            got = json.loads(done.stdout.splitlines()[-1])
            peaks[tokens, vocab] = got["peak"]
            rest = "  ".join(f"{name} {value:.1e}" for name, value in got.items() if name.endswith("_error"))
            lines.append(
                f"{tokens:>8}{vocab:>9}{got['peak'] / 2**20:>10.0f}{tokens * vocab * 4 / 2**20:>16.0f}"
                f"{got['seconds']:>9.3f}  {rest}"
            )
    few, many = min(args.tokens), max(args.tokens)
    print("\n".join(lines))
    for vocab in args.vocab:
        if few != many:
            slope = (peaks[many, vocab] - peaks[few, vocab]) / (many - few)
            print(f"vocab {vocab}: {slope / 1024:.1f} KiB per token; all logits would add {vocab * 4 / 1024:.0f} KiB")
    out_dir = args.out_dir or (ROOT / "benchmarks" / "results" if args.device == "cuda" else None)
    if out_dir is not None:
        from benchmarks.results import write_result

        write_result("logprob_memory_gib", peaks[many, max(args.vocab)] / 2**30, "GiB above inputs", out_dir=out_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
