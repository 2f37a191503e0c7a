"""The hooks of the ReTool recipe.

    --custom-generate-function-path slime_retool.recipes.retool.generate_with_retool.generate
    --custom-rm-path slime_retool.recipes.retool.generate_with_retool.reward_func

`generate` lets the model write Python calls between its sentences and see what they print; `reward_func` scores
the final answer (`--rm-type`: by DAPO's published rule, or by meaning) and adds the tool-use shaping.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from slime_retool.config import Config, flag
from slime_retool.errors import ConfigError
from slime_retool.recipes.retool.tool_sandbox import make_tools, tools
from slime_retool.reward import check_label as check_label  # what `reward_func` needs of a data row
from slime_retool.reward import conversation_messages, default_reward, format_score, shape_tool_use
from slime_retool.reward.shaping import COUNTED
from slime_retool.rollout.context import current_context
from slime_retool.sandbox import Sandbox
from slime_retool.tool_use import LoopBudgets, ToolRegistry, make_format, run_chat_loop, run_tool_loop
from slime_retool.types import Sample, ToolSchema


@dataclass(frozen=True)
class HookArgs:
    """ReTool's reward_func."""

    shape_tool_use: str = flag(
        "turns",
        choices=COUNTED,
        help="What earns a wrong answer a smaller penalty: rounds of tool use, or executed calls.",
    )
    format_penalty: float = flag(0.0, help="Taken off the score of a response that is not well-formed.")


MakeTools = Callable[[Config], AbstractAsyncContextManager[ToolRegistry]]


def check_prompt(args: Config, sample: Sample) -> None:
    """Raise ConfigError for a data row that offers the model a tool which `generate` cannot run."""
    ToolRegistry(tools(args, Sandbox())).require(sample.tools or [])


def check_tools(args: Config, schemas: list[ToolSchema] | None, tokenizer: Any) -> None:
    """Raise ConfigError when `--tool-format` cannot write these tools (None: the recipe's) with this tokenizer."""
    make_format(args.tool_format, tokenizer, schemas or ToolRegistry(tools(args, Sandbox())).schemas())


async def generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """`generate_with_tools` with the recipe's tools."""
    return await generate_with_tools(make_tools, args, sample, sampling_params)


async def generate_with_tools(
    make_tools: MakeTools, args: Config, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    """Generate one response with tools; the model is offered the data row's, or all that are registered.

    `make_tools` is entered once and shared by all samples. `sampling_params["max_new_tokens"]`, where given, is the
    budget of the whole response, observations included.
    """
    context = current_context()
    if context.engine is None and context.chat is None:
        raise ConfigError("generate needs an inference engine, and this run has none; remove --debug-train-only")
    registry = await context.resource("tools", make_tools)
    schemas = sample.tools = sample.tools or registry.schemas()  # kept: metrics and dumps tell what was offered
    registry.require(schemas)
    budgets = LoopBudgets(
        max_response_tokens=sampling_params.get("max_new_tokens", args.rollout_max_response_len),
        max_context_tokens=args.context_limit,
        max_turns=args.max_turns,
        max_tool_calls=args.max_tool_calls,
        max_observation_tokens=args.max_observation_tokens,
    )
    if context.chat is not None:
        return await run_chat_loop(context.chat, registry, sample, sampling_params, budgets, schemas)
    assert context.engine is not None
    tool_format = await context.resource(
        "tool format " + json.dumps(schemas),
        lambda _: nullcontext(make_format(args.tool_format, context.tokenizer, schemas)),
    )
    return await run_tool_loop(context.engine, tool_format, registry, sample, sampling_params, budgets)


async def reward_func(args: Config, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """{"score", "acc", "pred"}: the score of `--rm-type`, for wrong answers with the tool-use shaping.

    `--shape-tool-use` says what the shaping counts, `--format-penalty` is taken off responses that are not well-formed.
    `acc` is never shaped.
    """
    result = await default_reward(args, sample)
    own = args.hook(HookArgs)
    result["score"] = shape_tool_use(result["score"], conversation_messages(sample, own.shape_tool_use))
    if own.format_penalty:
        result["score"] -= own.format_penalty * (1 - format_score(sample.scored_text))
    return result
