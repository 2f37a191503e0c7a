"""The tool loop against a chat endpoint (OpenAI's API): messages instead of ids, the same tools and budgets.

For measuring other models. Nothing here can be trained on: such an endpoint returns no ids and no log-probs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    `metadata["completion_tokens"]`; `metadata["messages"]` holds the whole conversation, as sent. `tokens` stay empty.
    Raises EngineError or ToolUnavailable on an outage.
    """
    sample.reset()
    prompt = sample.prompt
    messages = _as_sent([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    texts: list[str] = []
    used = 0
    async with registry.conversation() as own_tools:
        while sample.status is SampleStatus.PENDING:
            limit = budgets.max_response_tokens - used
            with timed("request", sample.spans) as span:
                reply = await engine.chat(messages, {**sampling_params, "max_new_tokens": limit}, tools)
            used += reply.completion_tokens
            sample.num_turns += 1
            span |= {"turn": sample.num_turns, "tokens": reply.completion_tokens}
            texts.append(_text(reply.content, reply.tool_calls))
            calls = [_sendable(call, f"turn{sample.num_turns:03d}", i) for i, call in enumerate(reply.tool_calls)]
            called = {"tool_calls": calls} if calls else {}
            messages.append({"role": "assistant", "content": reply.content, **reply.reasoning, **called})
            if reply.finish_reason == "length":
                sample.status = SampleStatus.TRUNCATED
            elif not reply.tool_calls:
                sample.status = SampleStatus.COMPLETED
            elif not budgets.calls_left(sample) or used >= budgets.max_response_tokens:
                sample.status = SampleStatus.TRUNCATED
            else:
                answers = await _answer(sample, reply, own_tools, budgets, tools)
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": text}
                    for call, text in zip(calls, answers, strict=True)
                ]
                texts += [f"<tool_response>\n{text}\n</tool_response>" for text in answers]
    sample.response = "\n".join(texts)
    sample.metadata = {**sample.metadata, "completion_tokens": used, "messages": messages}
    return sample


def _text(content: str, tool_calls: Sequence[dict[str, Any]]) -> str:
    """What the model said, its calls as it wrote them."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in tool_calls]
    return "\n".join(part for part in (content, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)) if part)


def _as_sent(prompt: Sequence[Message]) -> list[Message]:
    """A prompt as OpenAI's API takes it: calls hold JSON text and an id, which the tool messages after them name."""
    messages: list[Message] = []
    waiting: list[str] = []  # ids of calls without a tool message yet
    for number, message in enumerate(prompt):
        if message.get("tool_calls"):
            calls = [_sendable(call, f"call{number:03d}", i) for i, call in enumerate(message["tool_calls"])]
            waiting = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and waiting:
            named = message.get("tool_call_id")
            answered = named if named in waiting else waiting[0]
            waiting.remove(answered)
            message = {**message, "tool_call_id": answered}
        messages.append(message)
    return messages


def _sendable(call: dict[str, Any], message: str, number: int) -> dict[str, Any]:
    """A call as servers take it back, which may read its arguments: one that is malformed would end the conversation.

    A call without an id gets `message` and its number, nine letters and digits together: Mistral takes nothing else.
    """
    function, identity = call["function"], call.get("id") or f"{message}{number:02d}"
    made = {**function, "name": function.get("name") or "unknown", "arguments": _json_text(function.get("arguments"))}
    return {"type": "function", **call, "id": identity, "function": made}


def _json_text(arguments: Any) -> str:
    """JSON of an object: the arguments as `to_call` reads them; an empty object where it cannot."""
    try:
        value = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, dict) else "{}"
    except (ValueError, RecursionError):
        return "{}"


async def _answer(
    sample: Sample, reply: ChatReply, registry: ToolRegistry, budgets: LoopBudgets, tools: list[ToolSchema]
) -> list[str]:
    """What the model is shown for each call, in order."""
    functions = [call["function"] for call in reply.tool_calls]
    calls = [to_call({"name": f.get("name"), "arguments": f.get("arguments") or "{}"}, tools) for f in functions]
    sample.num_malformed_calls += sum(isinstance(call, ToolCallError) for call in calls)
    limit = budgets.max_observation_tokens * CHARACTERS_PER_TOKEN
    return await answer_calls(sample, calls, registry, budgets, lambda text: shorten(text.rstrip(), limit))
