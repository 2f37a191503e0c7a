"""The tool loop against a chat endpoint (OpenAI's API): messages instead of ids, the same tools and budgets.

For measuring other models. Nothing here can be trained on: such an endpoint returns no ids and no log-probs.
"""

from __future__ import annotations

import json
from typing import Any

from slime_retool.protocols import ChatEngine, ChatReply
from slime_retool.tool_use.calls import ToolCallError
from slime_retool.tool_use.loop import LoopBudgets, answer_calls
from slime_retool.tool_use.observation import shorten
from slime_retool.tool_use.parser import to_call
from slime_retool.tool_use.registry import ToolRegistry
from slime_retool.types import Message, Sample, SampleStatus, ToolSchema, timed

CHARACTERS_PER_TOKEN = 4
"""How observations are measured, since the endpoint's tokenizer is not known."""


async def run_chat_loop(
    engine: ChatEngine,
    registry: ToolRegistry,
    sample: Sample,
    sampling_params: dict[str, Any],
    budgets: LoopBudgets,
    tools: list[ToolSchema],
) -> Sample:
    """Let the endpoint answer `sample`, running the calls it makes.

    Fills in `response` (assistant texts, calls and observations in order), the counters, `status`, and
    `metadata["completion_tokens"]`; `metadata["messages"]` holds the whole conversation. `tokens` stay empty. Raises
    EngineError or ToolUnavailable on an outage.
    """
    sample.reset()
    prompt = sample.prompt
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    start, used = len(messages), 0
    async with registry.conversation() as own_tools:
        while sample.status is SampleStatus.PENDING:
            limit = budgets.max_response_tokens - used
            with timed("request", sample.spans) as span:
                reply = await engine.chat(messages, {**sampling_params, "max_new_tokens": limit}, tools)
            used += reply.completion_tokens
            sample.num_turns += 1
            span |= {"turn": sample.num_turns, "tokens": reply.completion_tokens}
            called = {"tool_calls": reply.tool_calls} if reply.tool_calls else {}
            messages.append({"role": "assistant", "content": reply.content, **reply.reasoning, **called})
            if reply.finish_reason == "length":
                sample.status = SampleStatus.TRUNCATED
            elif not reply.tool_calls:
                sample.status = SampleStatus.COMPLETED
            elif not budgets.calls_left(sample) or used >= budgets.max_response_tokens:
                sample.status = SampleStatus.TRUNCATED
            else:
                messages += await _answer(sample, reply, own_tools, budgets, tools)
    sample.response = "\n".join(_text(message) for message in messages[start:])
    sample.metadata = {**sample.metadata, "completion_tokens": used, "messages": messages}
    return sample


def _text(message: Message) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", [])]
    parts = [message.get("content") or "", *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    text = "\n".join(part for part in parts if part)
    return f"<tool_response>\n{text}\n</tool_response>" if message["role"] == "tool" else text


async def _answer(
    sample: Sample, reply: ChatReply, registry: ToolRegistry, budgets: LoopBudgets, tools: list[ToolSchema]
) -> list[Message]:
    """One tool message for each call, in order."""
    functions = [call["function"] for call in reply.tool_calls]
    calls = [to_call({"name": f.get("name"), "arguments": f.get("arguments") or "{}"}, tools) for f in functions]
    sample.num_malformed_calls += sum(isinstance(call, ToolCallError) for call in calls)
    limit = budgets.max_observation_tokens * CHARACTERS_PER_TOKEN
    texts = await answer_calls(sample, calls, registry, budgets, lambda text: shorten(text.rstrip(), limit))
    return [
        {"role": "tool", "tool_call_id": raw.get("id") or "", "content": text}
        for raw, text in zip(reply.tool_calls, texts, strict=True)
    ]
