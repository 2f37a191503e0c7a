"""The conversation between a model and its tools, for one sample: ids in, ids out.

Each round: send all ids, append the engine's ids and log-probs as they are, read the turn's calls, run them at once,
append the observations' ids with loss mask 0. How calls and observations are written is the `ToolFormat`'s.

How it ends:
- COMPLETED: a turn without calls, malformed ones included.
- TRUNCATED: a budget in tokens, turns or tool calls is used up. Observations that leave the model no token to
  answer are not appended.
- ABORTED: the engine was told to stop.
- EngineError, ToolUnavailable: raised; the sample is not to be trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_retool.errors import ConfigError, EngineError, PromptTooLong
from slime_retool.protocols import Completion, GenerationEngine
from slime_retool.tool_use.calls import ToolCall, ToolCallError, ToolResult, Turn
from slime_retool.tool_use.format import ToolFormat
from slime_retool.tool_use.registry import ToolRegistry
from slime_retool.types import OPEN_THOUGHT, RoutedExperts, Sample, SampleStatus, Span

_TAIL = 16
"""Tokens that hold the tag which a prompt ends with, also where each is a byte."""


@dataclass(frozen=True, slots=True)
class LoopBudgets:
    """Limits of one sample. Raises ConfigError when one is below 1."""

    max_response_tokens: int
    """Response, observations included."""
    max_context_tokens: int | None = None
    """Prompt and response together."""
    max_turns: int = 16
    """Requests to the engine."""
    max_tool_calls: int = 16
    """Executed calls. After the last one the model still gets to see its result and answer."""
    max_observation_tokens: int = 512
    """Text of one observation."""

    def __post_init__(self) -> None:
        limits = {
            "rollout_max_response_len": self.max_response_tokens,
            "rollout_max_context_len": self.max_context_tokens,
            "max_turns": self.max_turns,
            "max_observation_tokens": self.max_observation_tokens,
        }
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    def remaining(self, sample: Sample) -> int:
        """Tokens that the sample may still grow by."""
        left = self.max_response_tokens - sample.response_length
        if self.max_context_tokens is not None:
            left = min(left, self.max_context_tokens - len(sample.tokens))
        return left

    def start(self, sample: Sample, prompt: list[int], decode: Callable[[list[int]], str] | None = None) -> None:
        """Begin `sample` anew with these ids; `decode` gives their text, to see whether they end in a thought.

        Raises PromptTooLong when they leave no room for a response.
        """
        sample.reset()
        sample.tokens = prompt
        tail = "" if decode is None else decode(prompt[-_TAIL:])
        sample.begins_in_thought = tail.rstrip().endswith(OPEN_THOUGHT)
        if self.remaining(sample) < 1:
            raise PromptTooLong(
                f"a prompt of {len(prompt)} tokens leaves no room for a response within {self.max_context_tokens} "
                "(--rollout-max-context-len, by default the model's positions); raise it, or leave such prompts out of "
                "training with --rollout-max-prompt-len"
            )

    def calls_left(self, sample: Sample) -> int:
        """Calls of its last turn that may be executed; none when there may be no further turn to show their results."""
        return 0 if sample.num_turns >= self.max_turns else max(0, self.max_tool_calls - sample.num_tool_calls)


async def answer_calls(
    sample: Sample,
    calls: Sequence[ToolCall | ToolCallError],
    registry: ToolRegistry,
    budgets: LoopBudgets,
    fit: Callable[[str], str],
) -> list[str]:
    """What the model is shown for each call of a turn, in order, cut by `fit`; counts what was executed.

    Calls beyond the sample's budget do not run. Each call is a span of the sample. Raises ToolUnavailable on an outage.
    """
    start = time.time()
    executed = [call for call in calls if isinstance(call, ToolCall)][: budgets.calls_left(sample)]
    results = iter(await registry.execute_all(executed))
    sample.num_tool_calls += len(executed)
    not_run = ToolResult(f"Error: not run, all {budgets.max_tool_calls} tool calls are used up. Answer without tools.")
    texts = []
    for call in calls:
        if isinstance(call, ToolCallError):
            further: Span = {"seconds": 0.0, "status": "malformed"}
            texts.append(fit(call.message))
        else:
            result = next(results, not_run)
            status = "not run" if result is not_run else "error" if result.is_error else "ok"
            further = {"seconds": round(result.seconds, 6), "status": status, "tool": call.name}
            further["waited"] = round(result.waited, 6)
            sample.num_tool_errors += result.is_error
            texts.append(fit(result.text))
        sample.spans.append({"name": "tool", "start": round(start, 6), **further, "turn": sample.num_turns})
    return texts


async def run_tool_loop(
    engine: GenerationEngine,
    tool_format: ToolFormat,
    registry: ToolRegistry,
    sample: Sample,
    sampling_params: dict[str, Any],
    budgets: LoopBudgets,
) -> Sample:
    """Generate one response with tools into `sample`.

    It always starts from the prompt: what an earlier try left (an aborted or failed one, say) is dropped.

    Raises EngineError or ToolUnavailable on an outage, PromptTooLong when the prompt leaves no room for a response.
    """
    budgets.start(sample, tool_format.prompt_ids(sample.prompt), tool_format.text)
    params = _with_stop(sampling_params, tool_format.stop)
    session = str(sample.index)
    turn_start = len(sample.tokens)
    texts: list[str] = []  # of what stands before turn_start, so that no turn is decoded twice
    async with registry.conversation() as tools:
        while sample.status is SampleStatus.PENDING:
            limit = budgets.remaining(sample)
            # A copy: the engine must not see ids that are appended while it still holds the request.
            request = list(sample.tokens), {**params, "max_new_tokens": limit}
            completion = await engine.generate(*request, session=session, **known_routing(sample.routed_experts))
            append_turn(sample, completion, limit)
            if completion.finish_reason == "abort":
                sample.status = SampleStatus.ABORTED
            elif completion.finish_reason == "length":
                sample.status = SampleStatus.TRUNCATED
            else:
                turn = tool_format.read_turn(sample.tokens[turn_start:])
                turn_end = len(sample.tokens)
                if not turn.unfinished:
                    sample.num_malformed_calls += sum(isinstance(call, ToolCallError) for call in turn.calls)
                if not turn.calls and not turn.unfinished:
                    sample.status = SampleStatus.COMPLETED
                elif not await _answer(sample, turn, tool_format, tools, budgets):
                    sample.status = SampleStatus.TRUNCATED
                elif not turn.unfinished:
                    texts += [turn.text, tool_format.text(sample.tokens[turn_end:])]
                    turn_start = len(sample.tokens)
    sample.response = "".join(texts) + tool_format.text(sample.tokens[turn_start:])
    sample.check()
    return sample


def _with_stop(sampling_params: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Parameters that also stop at `texts`, which the engine is to leave in the ids."""
    if not texts:
        return sampling_params
    given = sampling_params.get("stop") or []
    given = [given] if isinstance(given, str) else given
    return {**sampling_params, "stop": [*given, *texts], "no_stop_trim": True}


def known_routing(routed: RoutedExperts | None) -> dict[str, Any]:
    """What a further request of a conversation tells the engine of the experts that are known."""
    return {} if routed is None else {"routed_from": routed.first_unrouted}


def append_turn(sample: Sample, completion: Completion, limit: int) -> None:
    """What the engine wrote, as it is. Raises EngineError when it has more than `limit` tokens or other log-probs."""
    if len(completion.ids) != len(completion.log_probs) or len(completion.ids) > limit:
        raise EngineError(
            f"the engine must return one log-prob for each of at most {limit} tokens, got {len(completion.ids)} "
            f"tokens and {len(completion.log_probs)} log-probs"
        )
    sample.append(completion.ids, log_probs=completion.log_probs, versions=completion.token_versions)
    sample.put_routed_experts(completion.routed_from, completion.routed_experts)
    sample.weight_versions.append(completion.weight_version)
    sample.num_turns += 1
    sample.spans += [{**span, "turn": sample.num_turns} for span in completion.spans]


async def _answer(
    sample: Sample, turn: Turn, tool_format: ToolFormat, registry: ToolRegistry, budgets: LoopBudgets
) -> bool:
    """Run a turn's calls and append what they show; False when a budget ends the sample instead.

    A turn that is unfinished has nothing to answer (its whole calls, if any, are answered when it is finished) and is
    held to the same budgets.
    """
    if not budgets.calls_left(sample):
        return False
    observations = []
    if not turn.unfinished:
        limit = budgets.max_observation_tokens
        observations = await answer_calls(
            sample, turn.calls, registry, budgets, lambda text: tool_format.fit_observation(text, limit)
        )
    ids = tool_format.observation_ids(observations, turn)
    if len(ids) >= budgets.remaining(sample):
        return False
    sample.append(ids, log_probs=None)
    return True
