"""The default `generate` hook: one plain turn, no tools."""

from __future__ import annotations

from typing import Any

from slime_retool.config import Config
from slime_retool.errors import ConfigError
from slime_retool.rollout.context import current_context
from slime_retool.tool_use.chat_loop import run_chat_loop
from slime_retool.tool_use.loop import LoopBudgets, append_turn
from slime_retool.tool_use.registry import ToolRegistry
from slime_retool.types import Sample, SampleStatus

STATUS_OF_FINISH = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}
"""What the finish reason of the last turn says about the sample."""


def check_prompt(args: Config, sample: Sample) -> None:
    """Raise ConfigError for a data row with tools: the model would be shown them, and no call of it run."""
    if sample.tools:
        raise ConfigError(
            f"it offers tools in column {args.tool_key!r}, and no hook runs them; give a "
            "--custom-generate-function-path that does (generate_with_retool.generate, say) or remove the column"
        )


async def generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Render the prompt, let the engine answer once, and record exactly the ids and log-probs it returned.

    Raises EngineError, and PromptTooLong when the prompt leaves no room for an answer.
    """
    context, limit = current_context(), sampling_params["max_new_tokens"]
    if context.chat is not None:
        budgets = LoopBudgets(max_response_tokens=limit)
        return await run_chat_loop(context.chat, ToolRegistry(), sample, sampling_params, budgets, [])
    assert context.engine is not None, "generation needs an engine"
    budgets = LoopBudgets(max_response_tokens=limit, max_context_tokens=args.context_limit)
    budgets.start(sample, context.template.prompt_ids(sample.prompt, sample.tools), context.tokenizer.decode)
    params = {**sampling_params, "max_new_tokens": budgets.remaining(sample)}
    completion = await context.engine.generate(list(sample.tokens), params, session=str(sample.index))
    append_turn(sample, completion, params["max_new_tokens"])
    sample.response = context.tokenizer.decode(completion.ids, skip_special_tokens=True)
    sample.status = STATUS_OF_FINISH[completion.finish_reason]
    return sample
