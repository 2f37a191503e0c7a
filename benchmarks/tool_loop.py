"""What the tool loop adds to the wall time of the same token traffic: a scripted engine, 256 samples at once.

    python benchmarks/tool_loop.py
    python benchmarks/tool_loop.py --format retool --prompt-tokens 4000

Every engine request takes `--turn-ms` whoever asks. The bare loop sends the same requests, one after another for each
sample, and does nothing else. The tool answers at once, with another text every time. Both alternate, `--repeats`
times; the medians are compared. Prints JSON; `loop_cpu_us` is the processor time that the loop takes for one turn.

One core keeps 256 samples of 20 ms a turn going while a turn takes it less than 78 us, engine client included. Above
that the core sets the pace, so run this on an idle machine. Python's garbage collector is set as the rollout manager
sets it, on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_retool.protocols import Completion
from slime_retool.rollout.garbage_collection import settle_garbage_collector
from slime_retool.tool_use import FORMATS, LoopBudgets, Tool, ToolFormat, ToolRegistry, make_format, run_tool_loop
from slime_retool.types import Sample, SampleStatus

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Tokens of their own, as in Qwen3's vocabulary."""
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
CODE = "from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6, x))"
CALLS = {
    "qwen": f"Let me compute it.\n<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': CODE}})}\n"
    "</tool_call><|im_end|>",
    "retool": f"Let me compute it.\n<code>\n```python\n{CODE}\n```\n</code>",
}
ANSWER = "The answer is \\boxed{3}.<|im_end|>"
PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on this file: about three characters a token in the calls, as in a real vocabulary."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([Path(__file__).read_text()], trainer)
    model.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", additional_special_tokens=SPECIAL, chat_template=TEMPLATE
    )


@dataclass
class SleepingEngine:
    """Answers after `seconds`; every sample's last of `turns` turns is an answer, the others call the tool."""

    seconds: float
    turns: int
    call: Completion
    answer: Completion
    asked: dict[str | None, int] = field(default_factory=dict)

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None
    ) -> Completion:
        await asyncio.sleep(self.seconds)
        number = self.asked[session] = self.asked.get(session, 0) + 1
        return self.answer if number == self.turns else self.call


def completion(tokenizer: PreTrainedTokenizerFast, text: str) -> Completion:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Completion(ids, [-0.5] * len(ids), "stop", 1, 0, 0)


async def timed(options: argparse.Namespace, work: Callable[[int], Awaitable[None]]) -> tuple[float, float]:
    """Wall and processor seconds of all samples, `concurrency` at once."""
    waiting = iter(range(options.samples))

    async def worker() -> None:
        for index in waiting:
            await work(index)

    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(options.concurrency)))
    return time.perf_counter() - wall, time.process_time() - cpu


async def one_round(
    options: argparse.Namespace, tool_format: ToolFormat, registry: ToolRegistry, engine: SleepingEngine, looped: bool
) -> tuple[float, float]:
    engine.asked.clear()
    budgets = LoopBudgets(max_response_tokens=100_000, max_turns=options.turns, max_tool_calls=options.turns)

    async def with_loop(index: int) -> None:
        question = f"Problem {index // options.group}: " + "x " * options.prompt_tokens
        sample = Sample(prompt=[{"role": "user", "content": question}], index=index)
        await run_tool_loop(engine, tool_format, registry, sample, {}, budgets)
        assert sample.status is SampleStatus.COMPLETED and sample.num_tool_calls == options.turns - 1

    async def bare(index: int) -> None:
        for _ in range(options.turns):
            await engine.generate([], {}, session=str(index))

    result = await timed(options, with_loop if looped else bare)
    assert sum(engine.asked.values()) == options.samples * options.turns
    return result


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = small_tokenizer()
    calls = 0

    async def tool(arguments: dict[str, Any]) -> str:
        nonlocal calls
        calls += 1
        return f"[2, {calls}]"

    registry = ToolRegistry([Tool("python", "Run Python.", PARAMETERS, tool)])
    tool_format = make_format(options.format, tokenizer, registry.schemas())
    call, answer = completion(tokenizer, CALLS[options.format]), completion(tokenizer, ANSWER)
    settle_garbage_collector()
    engine = SleepingEngine(options.turn_ms / 1000, options.turns, call, answer)
    rounds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(options.repeats):
        for looped in rounds:
            rounds[looped].append(await one_round(options, tool_format, registry, engine, looped))
    bare, loop = ([statistics.median(column) for column in zip(*rounds[key], strict=True)] for key in (False, True))
    return {
        "overhead_percent": round(100 * (loop[0] / bare[0] - 1), 2),
        "loop_wall_s": round(loop[0], 4),
        "bare_wall_s": round(bare[0], 4),
        "loop_cpu_us": round((loop[1] - bare[1]) / (options.samples * options.turns) * 1e6, 1),
        "call_tokens": len(call.ids),
        **vars(options),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=list(FORMATS), default="qwen")
    parser.add_argument("--group", type=int, default=8, help="samples of one prompt")
    parser.add_argument("--samples", type=int, default=2048, help="samples of one round")
    parser.add_argument("--concurrency", type=int, default=256, help="samples at once")
    parser.add_argument("--turns", type=int, default=8, help="engine requests of one sample")
    parser.add_argument("--turn-ms", type=float, default=20.0, help="what one engine request takes")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
