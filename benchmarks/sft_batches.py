"""How long a trainer of SFT waits for its next batch.

    python benchmarks/sft_batches.py --batch 64 --train-seconds 0.2

The product's rollout manager makes batches of conversations with tool calls (made-up text, the quickstart's tokenizer
and chat template) for a caller that is busy elsewhere for `--train-seconds` between two of them, as the driver is while
it waits for the processes that train. Median seconds of waiting per batch: with the next batch made meanwhile, and with
each made when it is asked for (the same function under another name, which the manager does not know).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "quickstart"))

from slime_retool.config import parse_config, resolve
from slime_retool.config.groups import SFT_ROLLOUT
from slime_retool.data.readers import write_rows
from slime_retool.protocols import DataSource
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.manager import RolloutManager
from slime_retool.rollout.sft_rollout import generate_rollout
from slime_retool.types import RolloutBatch

TOOL = {"type": "function", "function": {"name": "code_interpreter", "parameters": {"type": "object"}}}


async def on_demand(context: RolloutContext, data: DataSource, rollout_id: int) -> RolloutBatch:
    """SFT's rollout function, which the manager takes for another."""
    return await generate_rollout(context, data, rollout_id)


def conversation(words: int, rng: random.Random) -> list[dict[str, Any]]:
    """A question, two calls with their outputs and an answer, of about `words` words each."""

    def text() -> str:
        return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 8))) for _ in range(words))

    def call() -> dict[str, Any]:
        function = {"name": "code_interpreter", "arguments": {"code": text()}}
        return {"role": "assistant", "content": text(), "tool_calls": [{"type": "function", "function": function}]}

    turns = [turn for _ in range(2) for turn in (call(), {"role": "tool", "content": text()})]
    return [{"role": "user", "content": text()}, *turns, {"role": "assistant", "content": text()}]


def waiting(folder: Path, function: str, args: argparse.Namespace, tokenizer: Any) -> tuple[float, float]:
    """(median seconds waited for a batch after the first, tokens per batch)."""
    config = resolve(
        parse_config([
            "--prompt-data", str(folder / "rows.jsonl"), "--input-key", "messages", "--loss-type", "sft_loss",
            "--rollout-batch-size", str(args.batch), "--num-rollout", str(args.batches), "--device", "cpu",
            "--rollout-function-path", function, "--output-dir", str(folder),
        ])
    )  # fmt: skip
    seconds, tokens = [], []
    with RolloutManager(config, tokenizer=tokenizer) as manager:
        for rollout_id in range(args.batches):
            begin = time.perf_counter()
            batch = manager.generate(rollout_id)
            seconds.append(time.perf_counter() - begin)
            tokens.append(batch.metrics["rollout/tokens"])
            time.sleep(args.train_seconds)
    return statistics.median(seconds[1:]), statistics.mean(tokens)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="Conversations of a batch.")
    parser.add_argument("--batches", type=int, default=8, help="Batches; the first is not counted.")
    parser.add_argument("--words", type=int, default=60, help="Words of each piece of a conversation.")
    parser.add_argument("--train-seconds", type=float, default=0.2, help="Between two batches.")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    from base_model import train_tokenizer

    args = build_parser().parse_args(argv)
    tokenizer, rng = train_tokenizer(), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"messages": conversation(args.words, rng), "tools": [TOOL]} for _ in range(2 * args.batch)]
        write_rows(Path(folder) / "rows.jsonl", rows)
        for name, function in (("ahead", SFT_ROLLOUT), ("on demand", "benchmarks.sft_batches.on_demand")):
            seconds, tokens = waiting(Path(folder), function, args, tokenizer)
            print(f"{name}: {seconds:.3f} s waiting for a batch of {tokens:.0f} tokens")


if __name__ == "__main__":
    main()
