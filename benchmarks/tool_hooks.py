"""The generate hook of `step_overhead.py`: real calls of the code interpreter between turns of random tokens."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

from tool_sandbox import make_tools

from benchmarks.scripted_turns import ScriptedFormat, run_scripted, turn_lengths
from slime_retool.config import Config
from slime_retool.rollout.context import current_context
from slime_retool.tool_use import ToolCall
from slime_retool.types import Sample

PROGRAMS = (
    "print(sum(i * i for i in range({n})))",
    "from math import comb\nprint(comb({n}, 7) % 1000007)",
    "from sympy import factorint\nprint(factorint({n} ** 3 + 1))",
    "import numpy as np\nprint(np.arange({n} * 2).reshape(2, -1).sum(axis=1).tolist())",
)


def next_call() -> ToolCall:
    """A call that no other sample makes, of what a reasoner typically computes."""
    code = random.choice(PROGRAMS).format(n=random.randrange(1_000, 50_000))
    return ToolCall("code_interpreter", {"code": code})


async def generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """`--max-turns` turns, together about half of `--rollout-max-response-len`, each but the last with a call."""
    context = current_context()
    registry = await context.resource("tools", make_tools)
    tool_format = await context.resource(
        "scripted format", lambda _: nullcontext(ScriptedFormat(context.tokenizer, registry.schemas(), next_call))
    )
    assert context.engine is not None
    mean = max(1, args.rollout_max_response_len // (2 * args.max_turns))
    await run_scripted(
        context.engine, tool_format, registry, sample, sampling_params,
        turn_lengths(sample.index, args.max_turns, mean, args.seed),
        max_observation_tokens=args.max_observation_tokens, max_context_tokens=args.context_limit,
    )  # fmt: skip
    return sample
