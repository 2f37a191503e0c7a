"""Token throughput of multi-turn tool rollouts against single-turn requests of the same token counts.

    python benchmarks/multiturn.py --model qwen3-4B -- --sglang-attention-backend triton ...
    python benchmarks/multiturn.py --device cpu --model tiny --samples 8 --concurrency 4 --prompt 40 --turn 12

One SGLang engine behind the router, random weights, two kinds of load in turns (a b a b ...), after a short round of
each (`--concurrency` samples) that is not counted; the engine's cache is emptied before every round.

a) Conversations: the product's tool loop with a scripted tool that answers at once (see scripted_turns.py). `--turns`
   turns of `--turn` tokens each, observations of `--observation` tokens, prompts of `--prompt` tokens, all lengths
   between half and one and a half of that, no two prompts alike.
b) For each conversation one request: a prompt as long as the conversation's prompt and observations together, and as
   many generated tokens. So both kinds compute the same number of new prompt tokens and of generated tokens, in
   contexts of about the same length, `--concurrency` samples at once through the same client.

multiturn_efficiency = generated tokens per second of a) over those of b), in percent (medians).

prefix_cache_hit = cached tokens of turn 2 and later over prompt tokens of turn 2 and later (the engine's own figures),
in percent. An observation is new to the engine and cannot come from the cache, so this depends on its length: with the
default lengths nothing above `possible_cache_hit` is possible. `reused` is the share of what could be reused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.results import write_result
from benchmarks.scripted_turns import ScriptedFormat, TurnCounts, around, run_scripted, turn_lengths
from benchmarks.shapes import ROOT, prepare
from slime_retool.config import Config, parse_config, resolve
from slime_retool.protocols import GenerationEngine
from slime_retool.rollout.sampling import training_sampling_params
from slime_retool.tool_use import Tool, ToolCall, ToolRegistry
from slime_retool.types import Sample

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@dataclass(frozen=True)
class Load:
    """What one conversation was: the plan of a single-turn request."""

    new_prompt_tokens: int
    """Prompt and observations."""
    generated: int
    prompt: tuple[int, int] | None = None
    """(number of its prompt, the prompt's tokens), where samples share one: those are the first of them all."""


@dataclass
class Round:
    seconds: float
    generated: int

    @property
    def tokens_per_second(self) -> float:
        return self.generated / self.seconds


def digits(count: int, rng: random.Random) -> str:
    """Text of `count` tokens: in the quickstart's tokenizer every digit is one."""
    return "".join(rng.choices("0123456789", k=count))


async def at_once(concurrency: int, count: int, work: Callable[[int], Awaitable[None]]) -> float:
    """Seconds of `work(0)` ... `work(count - 1)`, `concurrency` of them running."""
    waiting = iter(range(count))

    async def worker() -> None:
        for index in waiting:
            await work(index)

    begin = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return time.perf_counter() - begin


async def single_turns(
    engine: GenerationEngine, loads: Sequence[Load], params: dict[str, Any], vocabulary: int, *, concurrency: int,
    seed: int,
) -> Round:  # fmt: skip
    """Each load as one request of random tokens, end of text ignored."""
    rng = random.Random(seed)
    shared = {load.prompt: rng.choices(range(10, vocabulary), k=load.prompt[1]) for load in loads if load.prompt}
    prompts = []
    for load in loads:
        begin = shared[load.prompt] if load.prompt else []
        prompts.append(begin + rng.choices(range(10, vocabulary), k=load.new_prompt_tokens - len(begin)))
    generated = 0

    async def one(index: int) -> None:
        nonlocal generated
        wanted = {**params, "max_new_tokens": loads[index].generated, "ignore_eos": True}
        completion = await engine.generate(prompts[index], wanted, session=str(index))
        generated += len(completion.ids)

    seconds = await at_once(concurrency, len(loads), one)
    assert generated == sum(load.generated for load in loads)
    return Round(seconds, generated)


class Bench:
    """Both kinds of load on one engine."""

    def __init__(self, args: argparse.Namespace, engine: GenerationEngine, tokenizer: Any, params: dict[str, Any]):
        self.args, self.engine, self.tokenizer, self.params = args, engine, tokenizer, params
        self._rng = random.Random(0)
        self.registry = ToolRegistry([Tool("lookup", "Looks up.", PARAMETERS, self._tool)])
        schemas = self.registry.schemas()
        self.format = ScriptedFormat(tokenizer, schemas, lambda: ToolCall("lookup", {"n": 1}))

    async def _tool(self, arguments: dict[str, Any]) -> str:
        return digits(around(self.args.observation, self._rng), self._rng)

    async def conversations(self, count: int, seed: int) -> tuple[Round, list[TurnCounts], list[Load]]:
        args = self.args
        counts: list[TurnCounts] = []
        loads: list[Load] = []
        rng = random.Random(seed)
        prompts = [digits(around(args.prompt, rng), rng) for _ in range(count)]

        async def one(index: int) -> None:
            sample = Sample(prompt=prompts[index], index=index)
            lengths = turn_lengths(index, args.turns, args.turn, seed)
            counts.extend(
                await run_scripted(
                    self.engine,
                    self.format,
                    self.registry,
                    sample,
                    self.params,
                    lengths,
                    max_observation_tokens=2 * args.observation,
                )  # fmt: skip
            )
            assert sample.num_turns == args.turns, f"sample {index} ended after {sample.num_turns} turns"
            generated = sum(sample.loss_mask)
            loads.append(Load(len(sample.tokens) - generated, generated))

        seconds = await at_once(args.concurrency, count, one)
        return Round(seconds, sum(load.generated for load in loads)), counts, loads

    async def single_turns(self, loads: Sequence[Load], seed: int) -> Round:
        return await single_turns(
            self.engine, loads, self.params, len(self.tokenizer), concurrency=self.args.concurrency, seed=-seed
        )


def cache_figures(counts: Sequence[TurnCounts]) -> dict[str, float]:
    """See the module's docstring, in percent. The turns of a conversation stand in order."""
    later = prompt = cached = possible = 0
    held = 0
    for turn in counts:
        if turn.turn:
            later += 1
            prompt += turn.prompt
            cached += turn.cached
            possible += held
        # The last generated token was never an input: its keys and values do not exist yet.
        held = turn.prompt + turn.generated - 1
    assert later, "no conversation had a second turn"
    return {
        "prefix_cache_hit": 100 * cached / prompt,
        "possible_cache_hit": 100 * possible / prompt,
        "reused": 100 * cached / possible,
    }


async def measure(bench: Bench, flush: Callable[[], None], repeats: int) -> dict[str, Any]:
    counts: list[TurnCounts] = []
    many: list[float] = []
    single: list[float] = []
    for number in range(repeats + 1):
        await asyncio.to_thread(flush)
        count = bench.args.samples if number else bench.args.concurrency
        multi, turns, loads = await bench.conversations(count, seed=number + 1)
        await asyncio.to_thread(flush)
        alone = await bench.single_turns(loads, seed=number + 1)
        print(f"round {number}: {multi.tokens_per_second:,.0f} and {alone.tokens_per_second:,.0f} tokens/s", flush=True)
        if number:  # the first one warms up
            counts += turns
            many.append(multi.tokens_per_second)
            single.append(alone.tokens_per_second)
    later = [turn for turn in counts if turn.turn]
    return {
        "multiturn_efficiency": 100 * statistics.median(many) / statistics.median(single),
        **cache_figures(counts),
        "multiturn_tokens_per_second": [round(value) for value in many],
        "single_turn_tokens_per_second": [round(value) for value in single],
        "prompt_tokens_of_later_turns": statistics.fmean(turn.prompt for turn in later),
        "generated_tokens_per_turn": statistics.fmean(turn.generated for turn in counts),
    }


def engine_config(args: argparse.Namespace, work: Path, checkpoint: Path) -> Config:
    frame = 400  # the turns' own markers and rounding
    longest = 2 * (args.prompt + args.turns * (args.turn + args.observation)) + frame
    flags = ["--device", args.device, "--hf-checkpoint", str(checkpoint), "--output-dir", str(work / "run")]
    flags += ["--rollout-max-context-len", str(longest), "--rollout-max-response-len", str(longest)]
    flags += ["--sglang-server-concurrency", str(args.concurrency), "--no-progress", *args.flags]
    if args.device == "cpu" and "--sglang-max-total-tokens" not in args.flags:
        flags += ["--sglang-max-total-tokens", str(args.concurrency * longest)]
    return resolve(parse_config(flags))


def run(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    from slime_retool.chat import ChatTemplate, load_tokenizer
    from slime_retool.engine.router import RouterProcess
    from slime_retool.engine.server import EngineProcess
    from slime_retool.rollout.engine_client import RouterClient

    checkpoint = prepare(args.weights or work, args.model, converted=False) / "hf"
    config = engine_config(args, work, checkpoint)
    tokenizer = load_tokenizer(str(checkpoint))
    params = training_sampling_params(config, ChatTemplate(tokenizer))

    async def all_rounds(url: str, flush: Callable[[], None]) -> dict[str, Any]:
        retries = config.rollout_request_retries
        async with RouterClient(url, concurrency=args.concurrency, timeout=args.timeout, retries=retries) as client:
            rounds = measure(Bench(args, client, tokenizer, params), flush, args.repeats)
            return await asyncio.wait_for(rounds, args.timeout)

    with EngineProcess(config) as engine, RouterProcess(config, [engine.url]) as router:
        figures = asyncio.run(all_rounds(router.url, engine.admin().flush_cache))
    names = ("samples", "concurrency", "turns", "prompt", "turn", "observation", "repeats")
    return {"model": args.model, **figures, **{name: vars(args)[name] for name in names}}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4B", help="a file of scripts/models (a Qwen3 shape), or tiny")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--samples", type=int, default=256, help="conversations of one round")
    parser.add_argument("--concurrency", type=int, default=128, help="conversations at once")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=500, help="mean tokens of a prompt")
    parser.add_argument("--turn", type=int, default=300, help="mean tokens of one turn")
    parser.add_argument("--observation", type=int, default=20, help="mean tokens of one observation's text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--weights", type=Path, help="folder of the random checkpoint, kept for later runs")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of all rounds together")
    parser.add_argument("--out-dir", type=Path, help="results folder (default on GPUs: benchmarks/results)")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train (SGLang's own: --sglang-*)")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="multiturn-") as work:
        figures = run(args, Path(work))
    print(json.dumps(figures, indent=2))
    out_dir = args.out_dir or (ROOT / "benchmarks" / "results" if args.device == "cuda" else None)
    if out_dir is not None:
        for metric in ("multiturn_efficiency", "prefix_cache_hit"):
            write_result(metric, figures[metric], "%", out_dir=out_dir)


if __name__ == "__main__":
    main()
