"""Seconds of a weight update and of the change between training and generating, for a model shape with random weights.

    python benchmarks/weight_sync.py --model qwen3-4B [--measure ipc nccl] [-- FLAGS OF slime_retool.train]
    python benchmarks/weight_sync.py --device cpu              # a tiny model: does the script work?

One trainer process and, for each measurement, one SGLang engine:

- ipc (one GPU, shared): sync_ipc_s, an update by CUDA IPC; offload_cycle_s, everything else between the last token of
  one rollout and the first of the next but training: engine memory released, trainer reloaded, its optimizer and
  gradients dropped again, engine weights resumed, trainer offloaded, engine cache resumed.
- nccl (the engine on a second GPU; left out where there is none): sync_nccl_s.

With --lora-rank R the update is one of LoRA adapters alone (--lora-weight-update adapters) and the figure lora_sync_s;
`lora_first_request_s` is a request of 4 tokens right after it, for which the engine copies them to its device. The
engine keeps its weights while the trainer works; what a mixture's experts have is not adapted.

Pause, flush and resume of the engine are part of an update, on one GPU of the cycle. The first round of each
(page-locked memory, connections) is reported apart; figures are medians of the others. A figure counts, and its file
(`results.py`) is written, once every weight's checksum was equal on both sides. Prints one JSON object at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples" / "quickstart")]

GPU_FLAGS = """--sglang-attention-backend triton --sglang-sampling-backend pytorch --sglang-cuda-graph-max-bs 16
--sglang-cuda-graph-backend-prefill disabled --sglang-mem-fraction-static 0.6""".split()
CYCLE = ("release", "reload", "drop_state", "resume_weights", "offload", "resume_cache")


class Stopwatch:
    """Seconds by name, one entry a round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds.setdefault(name, []).append(time.monotonic() - begin)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name][1:])

    def first(self, name: str) -> float:
        return self.seconds[name][0]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def free_gib(device: Any) -> float:
    """Free memory of the card, whoever holds the rest."""
    import torch

    return torch.cuda.mem_get_info(device)[0] / 2**30 if device.type == "cuda" else 0.0


def make_config(args: argparse.Namespace, flags: list[str]) -> Any:
    from slime_retool.config import parse_config

    cuda = args.device == "cuda"
    adapters = ["--lora-rank", args.lora_rank, "--lora-weight-update", "adapters"] if args.lora_rank else []
    if args.lora_rank and "--num-experts" in flags:
        adapters += ["--lora-target-modules", "linear_qkv", "linear_proj"]
    words = [
        *flags, *adapters, "--device", args.device, "--colocate", "--hf-checkpoint", args.work / "hf",
        "--output-dir", args.work, "--max-position-embeddings", 4096, "--rollout-batch-size", 2,
        "--n-samples-per-prompt", 2, "--lr", 1e-6,
        "--rollout-max-response-len", 64, "--rollout-max-context-len", 512, "--use-dynamic-batch-size",
        "--max-tokens-per-gpu", 1024, "--no-progress", "--offload-train", "--offload-rollout",
        "--distributed-timeout-minutes", 3, *(GPU_FLAGS if cuda else []), *args.flags,
    ]  # fmt: skip
    return parse_config([str(word) for word in words])


def build_trainer(config: Any) -> Any:
    """A trainer with random weights that has taken one small step, so that Adam has its state."""
    from slime_retool.trainer.core import Trainer
    from slime_retool.types import RolloutBatch, TrainSample

    trainer = Trainer(config, rank=0, world_size=1, local_rank=0, init_method="tcp://127.0.0.1:0")
    samples = [
        TrainSample(
            tokens=[(7 * i + n) % 256 for i in range(128)], loss_mask=[0] * 8 + [1] * 120,
            rollout_log_probs=[0.0] * 8 + [-5.0] * 120, reward=float(n % 2), index=n,
        )
        for n in range(4)
    ]  # fmt: skip
    trainer.train(RolloutBatch(samples), 0)
    return trainer


def cycle(trainer: Any, memory: Any, sync: Any, engine: Any, watch: Stopwatch, notes: dict[str, float]) -> None:
    """One turn of the devices, as `cluster.Cluster` does it, without training in the middle."""
    whole = ["weights"] if not trainer.config.serves_adapters else []
    with watch("release"):
        engine.pause()
        engine.flush_cache()
        engine.release_memory([*whole, "kv_cache"])
    notes["free_gib_engine_asleep"] = free_gib(trainer.device)
    with watch("reload"):
        memory.reload()
    notes["free_gib_training"] = free_gib(trainer.device)
    with watch("drop_state"):
        memory.offload(keep_weights=True)
    with watch("resume_weights"):
        if whole:
            engine.resume_memory(whole)
    notes["free_gib_updating"] = free_gib(trainer.device)
    with watch("sync_ipc"):
        sync.update(asleep=True)
    with watch("offload"):
        memory.offload()
    with watch("resume_cache"):
        engine.resume_memory(["kv_cache"])
        engine.resume()
    notes["free_gib_generating"] = free_gib(trainer.device)


def generates(engine: Any, config: Any) -> bool:
    """Whether the engine answers a request."""
    from slime_retool.engine.admin import ADAPTER

    body = {"input_ids": list(range(1, 9)), "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    if config.serves_adapters:
        body |= {"lora_path": ADAPTER}
    return len(json.loads(engine._request("/generate", body))["output_ids"]) == 4


def same_weights(sync: Any, engine: Any, config: Any) -> bool:
    from slime_retool.engine.adapter_checksum import ADAPTERS_LOADER
    from slime_retool.engine.checksum import REPORT_LOADER

    loader = ADAPTERS_LOADER if config.serves_adapters else REPORT_LOADER
    return sync.weight_checksums() == engine.weight_checksums(loader=loader)


def keep(args: argparse.Namespace, result: dict[str, Any], *names: str) -> None:
    """Write figures as soon as they are there: what comes later may fail."""
    from benchmarks.results import write_result

    suffix = "" if args.model == "qwen3-4B" else f"_{args.model}"
    for name in names:
        write_result(name + suffix, round(result[name], 4), "s", out_dir=args.results)


def measure(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    from slime_retool.cluster.environment import trainer_environment

    os.environ.update(trainer_environment(colocate=True, kernel_cache_dir=None))
    import torch

    from benchmarks.shapes import make_checkpoint
    from slime_retool.engine.server import EngineProcess
    from slime_retool.trainer.offload import TrainerMemory
    from slime_retool.trainer.weight_sync import WeightSync

    cuda = args.device == "cuda"
    wanted = [name for name in args.measure if name == "ipc" or not cuda or torch.cuda.device_count() > 1]
    args.work.mkdir(parents=True, exist_ok=True)
    say("writing the checkpoint")
    make_checkpoint(args.work / "hf", args.model)
    if cuda:
        torch.cuda.empty_cache()
    config = make_config(args, flags)
    apart = dataclasses.replace(config, colocate=False, offload_train=False, offload_rollout=False)
    say("building the trainer")
    trainer = build_trainer(config)
    memory = TrainerMemory(trainer)
    parts = memory.report()
    watch = Stopwatch()
    with watch("first_offload"):
        memory.offload()
    result: dict[str, Any] = {"model": args.model, "measured": wanted, "rounds": args.rounds, "bytes": parts}
    result["first_offload_s"] = watch.first("first_offload")
    notes: dict[str, float] = {"free_gib_trainer_asleep": free_gib(trainer.device)}
    say(f"starting {len(wanted)} engine(s); the trainer left {notes['free_gib_trainer_asleep']:.1f} GiB free")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starts: dict[str, Callable[[], Any]] = {
            "ipc": lambda: EngineProcess(config, rank=0, devices=[0] if cuda else None),
            "nccl": lambda: EngineProcess(apart, rank=1, devices=[1] if cuda else None),
        }
        futures = {name: pool.submit(starts[name]) for name in wanted}
        engines, errors = {}, []
        for name, future in futures.items():
            try:
                engines[name] = stack.enter_context(future.result()).admin(timeout=120)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        if "ipc" in wanted:
            sync = WeightSync(trainer, [engines["ipc"].url], transport="ipc")
            held: list[int] = []
            for number in range(args.rounds + 1):
                cycle(trainer, memory, sync, engines["ipc"], watch, notes)
                with watch("first_request"):
                    assert generates(engines["ipc"], config), "the engine does not generate after the cycle"
                held.append(torch.cuda.memory_allocated() if cuda else 0)
                say(f"cycle {number}: " + ", ".join(f"{k} {v[-1]:.3f}" for k, v in watch.seconds.items()))
            grown = held[-1] - held[0]
            assert grown < 2**20, f"updates by IPC left {grown} bytes behind in the trainer: {held}"
            figure = "lora_sync_s" if args.lora_rank else "sync_ipc_s"
            result |= {figure: watch.median("sync_ipc"), "sync_ipc_first_s": watch.first("sync_ipc")}
            if args.lora_rank:
                result["lora_first_request_s"] = watch.median("first_request")
            result["offload_cycle_s"] = sum(watch.median(name) for name in CYCLE)
            result["offload_cycle_first_s"] = sum(watch.first(name) for name in CYCLE)
            result["offload_parts_s"] = {name: watch.median(name) for name in CYCLE}
            # The whole trainer and the whole engine do not fit side by side: its weights are enough to compare.
            engines["ipc"].pause()
            engines["ipc"].flush_cache()
            engines["ipc"].release_memory(["kv_cache"])
            memory.reload()
            assert same_weights(sync, engines["ipc"], config), "the engine's weights differ from the trainer's"
            keep(args, result, figure, *([] if args.lora_rank else ["offload_cycle_s"]))
            sync.close()
        memory.reload()
        if "nccl" in wanted:
            sync = WeightSync(trainer, [engines["nccl"].url], transport="broadcast")
            for number in range(args.rounds + 1):
                with watch("sync_nccl"):
                    sync.update()
                say(f"broadcast {number}: {watch.seconds['sync_nccl'][-1]:.3f}")
            result |= {"sync_nccl_s": watch.median("sync_nccl"), "sync_nccl_first_s": watch.first("sync_nccl")}
            assert generates(engines["nccl"], config), "the engine does not generate after the update"
            assert same_weights(sync, engines["nccl"], config), "the engine's weights differ from the trainer's"
            keep(args, result, *([] if args.lora_rank else ["sync_nccl_s"]))
            sync.close()
        result["memory"] = notes
        result["seconds"] = {name: [round(s, 4) for s in values] for name, values in watch.seconds.items()}
    trainer.shutdown()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4B", help="a file of scripts/models (a Qwen3 shape)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--measure", nargs="+", choices=("ipc", "nccl"), default=["ipc", "nccl"])
    parser.add_argument("--lora-rank", type=int, default=0, help="send LoRA adapters of this rank alone")
    parser.add_argument("--rounds", type=int, default=4, help="rounds after the first")
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_weight_sync"), help="scratch folder")
    parser.add_argument("--results", type=Path, help="folder of the result files (default on GPUs: benchmarks/results)")
    parser.add_argument("--timeout", type=int, default=540, help="seconds after which everything is ended")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.results = args.results or (ROOT / "benchmarks" / "results" if args.device == "cuda" else args.work / "results")

    def out_of_time(signum: int, frame: Any) -> None:
        raise TimeoutError(f"not done after {args.timeout} s")

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(args.timeout)
    faulthandler.dump_traceback_later(args.timeout + 20, exit=True)  # stuck where no signal is heard
    from benchmarks.shapes import model_flags

    if args.device == "cpu" and not args.model.startswith("tiny"):
        args.model = "tiny"
    result = measure(args, model_flags(args.model))
    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
