"""What share of the engine's own speed a run's rollouts reach: its tokens per second against those of the same engine
without tools, turns and rewards.

    python benchmarks/engine_rate.py --run OUTPUT_DIR --hf-checkpoint HF -- SGLANG FLAGS OF THE RUN ...

OUTPUT_DIR is that of a run with --dump-rollouts. Each dumped rollout (but the first `--warmup`) is sent once more, all
samples at once: for every sample one request, whose prompt is as long as the sample's prompt and observations
together, and which generates as many tokens as the sample's turns had, end of text ignored. Samples of a group begin
with the same prompt, as in the run. So the engine computes about the same number of new tokens (what all prompts have
in common is computed once in the run, and for each group here), in contexts of about the same length, with the same
longest answer.

engine_share = median over rollouts of rollout/tokens_per_second of the run over the tokens per second here, in percent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.multiturn import Load, single_turns
from benchmarks.results import write_result
from benchmarks.shapes import ROOT
from slime_retool.config import Config, parse_config, resolve
from slime_retool.dumps import dumps_in, number_of, open_dump
from slime_retool.metrics import read_metrics
from slime_retool.protocols import GenerationEngine

RATE = "rollout/tokens_per_second"


def loads_of(path: Path) -> list[Load]:
    """What each sample of a dumped rollout had the engine compute; none that wrote nothing."""
    loads = []
    with open_dump(path) as file:
        for line in file:
            row = json.loads(line)
            generated = sum(row["loss_mask"])
            if generated:
                prompt = (row["group_index"], len(row["tokens"]) - row["response_length"])
                loads.append(Load(len(row["tokens"]) - generated, generated, prompt))
    return loads


def rollouts_of(run: Path, warmup: int) -> dict[int, tuple[list[Load], float]]:
    """(samples, tokens per second in the run) of every dumped rollout from `warmup` on."""
    rates = {row["step"]: row[RATE] for row in read_metrics(run / "metrics.jsonl") if RATE in row}
    found = {int(number_of(path)): path for path in dumps_in(run / "rollouts", "rollout_*")}
    wanted = [number for number in found if number in rates and number >= warmup]
    kept = {number: (loads_of(found[number]), rates[number]) for number in wanted}
    if not kept:
        raise SystemExit(f"--run {run}: no dumped rollout from {warmup} on; a run with --dump-rollouts writes them")
    return kept


async def measure(
    engine: GenerationEngine, rollouts: dict[int, tuple[list[Load], float]], params: dict[str, Any], vocabulary: int,
    flush: Callable[[], None],
) -> dict[str, Any]:  # fmt: skip
    """The first rollout is sent twice, so that what an engine does once is not counted."""

    async def send(loads: Sequence[Load]) -> float:
        alone = single_turns(engine, loads, params, vocabulary, concurrency=len(loads), seed=len(loads))
        return (await alone).tokens_per_second

    await send(next(iter(rollouts.values()))[0])
    alone, shares = {}, {}
    for number, (loads, rate) in rollouts.items():
        await asyncio.to_thread(flush)
        alone[number] = await send(loads)
        shares[number] = 100 * rate / alone[number]
        print(f"rollout {number}: {rate:,.0f} tokens/s in the run, {alone[number]:,.0f} alone", flush=True)
    return {
        "engine_share": statistics.median(shares.values()),
        "shares": shares,
        "run_tokens_per_second": {number: rate for number, (_, rate) in rollouts.items()},
        "alone_tokens_per_second": alone,
    }


def engine_config(args: argparse.Namespace, work: Path, rollouts: dict[int, tuple[list[Load], float]]) -> Config:
    every = [loads for loads, _ in rollouts.values()]
    longest = max(load.new_prompt_tokens + load.generated for loads in every for load in loads)
    most = max(map(len, every))
    flags = ["--device", args.device, "--hf-checkpoint", str(args.hf_checkpoint), "--output-dir", str(work / "run")]
    flags += ["--rollout-max-context-len", str(longest + 64), "--rollout-max-response-len", str(longest)]
    flags += ["--sglang-server-concurrency", str(most), "--no-progress", *args.flags]
    return resolve(parse_config(flags))


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    from slime_retool.chat import load_tokenizer
    from slime_retool.engine.server import EngineProcess
    from slime_retool.rollout.engine_client import RouterClient
    from slime_retool.rollout.sampling import training_sampling_params

    rollouts = rollouts_of(args.run, args.warmup)
    config = engine_config(args, work, rollouts)
    vocabulary = len(load_tokenizer(str(args.hf_checkpoint)))

    async def all_rounds(url: str, flush: Callable[[], None]) -> dict[str, Any]:
        most = config.sglang_server_concurrency
        async with RouterClient(url, concurrency=most, timeout=args.timeout, retries=0) as client:
            rounds = measure(client, rollouts, training_sampling_params(config), vocabulary, flush)
            return await asyncio.wait_for(rounds, args.timeout)

    with EngineProcess(config) as engine:
        return asyncio.run(all_rounds(engine.url, engine.admin().flush_cache))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a run's --output-dir, with dumped rollouts")
    parser.add_argument("--hf-checkpoint", type=Path, required=True, help="a model of the run's shape")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--warmup", type=int, default=2, help="first rollouts that are left out")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of all rollouts together")
    parser.add_argument("--output", type=Path, help="also write the JSON here, and no result to --out-dir")
    parser.add_argument("--out-dir", type=Path, help="results folder (default on GPUs: benchmarks/results)")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train (SGLang's own: --sglang-*)")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="engine-rate-") as work:
        figures = run(args, Path(work))
    text = json.dumps(figures, indent=1)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")
        return
    out_dir = args.out_dir or (ROOT / "benchmarks" / "results" if args.device == "cuda" else None)
    if out_dir is not None:
        write_result("engine_share", figures["engine_share"], "%", out_dir=out_dir)


if __name__ == "__main__":
    main()
