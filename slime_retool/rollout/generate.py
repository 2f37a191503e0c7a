"""The default `generate` hook: one plain turn, no tools."""

from __future__ import annotations

from typing import Any

from slime_retool.config import Config
from slime_retool.errors import RolloutError
from slime_retool.rollout.context import current_context
from slime_retool.rollout.sampling import remaining_tokens
from slime_retool.tool_use.chat_loop import run_chat_loop
from slime_retool.tool_use.loop import LoopBudgets
from slime_retool.tool_use.registry import ToolRegistry
from slime_retool.types import Sample, SampleStatus

STATUS_OF_FINISH = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}
"""What the finish reason of the last turn says about the sample."""


async def generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Render the prompt, let the engine answer once, and record exactly the ids and log-probs it returned.

    Raises EngineError, and RolloutError when the prompt leaves no room for an answer.
    """
    sample.reset()
    context = current_context()
    if context.chat is not None:
        budgets = LoopBudgets(max_response_tokens=sampling_params["max_new_tokens"])
        return await run_chat_loop(context.chat, ToolRegistry(), sample, sampling_params, budgets, [])
    assert context.engine is not None, "generation needs an engine"
    prompt = context.template.prompt_ids(sample.prompt, sample.tools)
    room = remaining_tokens(args, sampling_params, prompt_length=len(prompt))
    if room < 1:
        raise RolloutError(
            f"a prompt of {len(prompt)} tokens leaves no room for an answer within --rollout-max-context-len "
            f"{args.rollout_max_context_len}; raise it, or leave such prompts out with --rollout-max-prompt-len"
        )
    completion = await context.engine.generate(
        list(prompt), {**sampling_params, "max_new_tokens": room}, session=str(sample.index)
    )
    sample.tokens = prompt
    sample.append(completion.ids, log_probs=completion.log_probs)
    sample.response = context.tokenizer.decode(completion.ids, skip_special_tokens=True)
    sample.weight_versions.append(completion.weight_version)
    sample.num_turns = 1
    sample.status = STATUS_OF_FINISH[completion.finish_reason]
    return sample
