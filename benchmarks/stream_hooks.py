"""The generate hook of `stream_step.py --lengths`: one turn of random tokens, of a length drawn for each sample."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from slime_retool.config import Config, flag
from slime_retool.rollout.context import current_context
from slime_retool.tool_use.loop import LoopBudgets, append_turn
from slime_retool.types import Sample, SampleStatus


@dataclass(frozen=True)
class HookArgs:
    """Lengths of stream_step.py."""

    shortest_response: int = flag(200, min=1, help="Responses are log-uniform from here to --rollout-max-response-len.")


def drawn_length(seed: int, index: int, low: int, high: int) -> int:
    """Log-uniform in [low, high]; the same for a sample however it is generated."""
    return round(math.exp(random.Random(f"{seed} {index}").uniform(math.log(low), math.log(high))))


async def generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As many tokens as were drawn: no end token ends it."""
    context, limit = current_context(), sampling_params["max_new_tokens"]
    assert context.engine is not None
    length = drawn_length(args.seed, sample.index, args.hook(HookArgs).shortest_response, limit)
    budgets = LoopBudgets(max_response_tokens=limit, max_context_tokens=args.context_limit)
    budgets.start(sample, context.template.prompt_ids(sample.prompt))
    params = {"temperature": sampling_params["temperature"], "ignore_eos": True, "max_new_tokens": length}
    completion = await context.engine.generate(list(sample.tokens), params, session=str(sample.index))
    append_turn(sample, completion, length)
    sample.response = context.tokenizer.decode(completion.ids)
    sample.status = SampleStatus.COMPLETED
    return sample
