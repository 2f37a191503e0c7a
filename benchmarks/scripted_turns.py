"""Tool conversations of a given shape out of a model that never calls a tool (random weights do not).

Everything is the product's own (tool loop, registry, tool format, engine client) but for two doubles:

- `TurnEngine` bounds each turn of a sample to its planned number of tokens and calls the bound the turn's end
  (finish reason "stop"; an end token that comes by chance is ignored). It keeps what each turn found in the cache.
- `ScriptedFormat` is the qwen format, in which every turn calls the planned tool, whatever the model wrote.

The loop's own budget of turns ends a sample (TRUNCATED, which is scored and trained on).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_retool.protocols import Completion, GenerationEngine
from slime_retool.tool_use import LoopBudgets, ToolCall, ToolRegistry, Turn, run_tool_loop
from slime_retool.tool_use.qwen import QwenFormat
from slime_retool.types import Sample, ToolSchema


def around(mean: int, rng: random.Random) -> int:
    """A length between half of the mean and one and a half."""
    return rng.randint(max(1, mean // 2), mean + mean // 2)


def turn_lengths(index: int, turns: int, mean: int, seed: int) -> list[int]:
    """Planned tokens of each turn of sample `index`; the same for the same arguments."""
    rng = random.Random(f"{seed}/{index}")
    return [around(mean, rng) for _ in range(turns)]


@dataclass
class TurnCounts:
    """Tokens of one engine request."""

    turn: int
    """From 0."""
    prompt: int
    cached: int
    generated: int


@dataclass
class TurnEngine:
    """A `GenerationEngine` for one sample."""

    engine: GenerationEngine
    lengths: Sequence[int]
    counts: list[TurnCounts] = field(default_factory=list)

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None
    ) -> Completion:
        turn = len(self.counts)
        limit = min(self.lengths[turn], sampling_params["max_new_tokens"])
        params = {**sampling_params, "max_new_tokens": limit, "ignore_eos": True}
        completion = await self.engine.generate(input_ids, params, session=session)
        self.counts.append(TurnCounts(turn, completion.prompt_tokens, completion.cached_tokens, len(completion.ids)))
        if completion.finish_reason == "length":
            completion = replace(completion, finish_reason="stop")
        return completion


class ScriptedFormat(QwenFormat):
    """`next_call()` says what a turn calls."""

    def __init__(self, tokenizer: Any, tools: Sequence[ToolSchema], next_call: Callable[[], ToolCall]) -> None:
        super().__init__(tokenizer, tools)
        self._next_call = next_call

    def read_turn(self, ids: Sequence[int]) -> Turn:
        return replace(super().read_turn(ids), calls=[self._next_call()], unfinished=False)


async def run_scripted(
    engine: GenerationEngine,
    tool_format: ScriptedFormat,
    registry: ToolRegistry,
    sample: Sample,
    sampling_params: dict[str, Any],
    lengths: Sequence[int],
    *,
    max_observation_tokens: int = 512,
    max_context_tokens: int | None = None,
) -> list[TurnCounts]:
    """Generate `sample` in turns of these lengths, through the product's loop. Returns what each turn took."""
    scripted = TurnEngine(engine, lengths)
    budgets = LoopBudgets(
        max_response_tokens=sum(lengths) + len(lengths) * (max_observation_tokens + 100),
        max_context_tokens=max_context_tokens,
        max_turns=len(lengths),
        max_tool_calls=len(lengths),
        max_observation_tokens=max_observation_tokens,
    )
    await run_tool_loop(scripted, tool_format, registry, sample, sampling_params, budgets)
    return scripted.counts
