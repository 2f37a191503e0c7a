"""`--tool-state session`: a conversation's variables last between its calls, and no longer; with the real jail."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from test_jail import LEVELS
from tool_helpers import TOOLS, ScriptedEngine, call_text, tokenizer

from slime_retool.config import Config
from slime_retool.errors import EngineError, ToolUnavailable
from slime_retool.protocols import ChatReply
from slime_retool.tool_use import LoopBudgets, ToolRegistry, make_format, run_chat_loop, run_tool_loop
from slime_retool.types import Sample, SampleStatus

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "retool"))
import tool_sandbox  # noqa: E402

BUDGETS = LoopBudgets(max_response_tokens=4000)
PROMPT = [{"role": "user", "content": "x"}]


def config_of(state: str) -> Config:
    isolation = (*LEVELS, "none")[0]
    return Config(device="cpu", sandbox_isolation=isolation, tool_state=state, tool_retries=0, tool_timeout=2.0)


async def converse(registry: ToolRegistry, *codes: str, end: tuple[str, str] = ("done", "stop")) -> Sample:
    """One conversation whose turns call these codes, one each; its response."""
    engine = ScriptedEngine([*((call_text(code), "stop") for code in codes), end])
    sample = Sample(PROMPT)
    return await run_tool_loop(engine, make_format("qwen", tokenizer(), TOOLS), registry, sample, {}, BUDGETS)


def observations(sample: Sample) -> list[str]:
    return [part.partition("\n</tool_response>")[0] for part in sample.response.split("<tool_response>\n")[1:]]


async def sessions_of(registry: ToolRegistry) -> int:
    """Sessions that the jail keeps, as soon as it has ended those that are to end."""
    box = registry._tools["code_interpreter"].function.__closure__[0].cell_contents
    for _ in range(100):
        if not (count := (await box.stats())["sessions"]):
            break
        await asyncio.sleep(0.02)
    return count


async def test_variables_last_as_long_as_their_conversation():
    async with tool_sandbox.make_tools(config_of("session")) as registry:
        samples = await asyncio.gather(*(converse(registry, f"x = {i}", "x += 10", "x") for i in range(3)))
        assert [observations(sample)[-1] for sample in samples] == ["10", "11", "12"]
        assert "NameError" in observations(await converse(registry, "x"))[0]
        assert await sessions_of(registry) == 0
        assert "Variables are kept" in registry.schemas()[0]["function"]["description"]


async def test_by_default_every_call_starts_afresh():
    async with tool_sandbox.make_tools(config_of("call")) as registry:
        assert "NameError" in observations(await converse(registry, "x = 1", "x"))[1]
        assert registry.schemas() == [tool_sandbox.SCHEMA]


async def test_calls_of_one_turn_run_in_order():
    calls = "\n".join(call_text(code) for code in ("x = []", "x.append(1)", "x.append(2)", "x"))
    async with tool_sandbox.make_tools(config_of("session")) as registry:
        engine = ScriptedEngine([(calls, "stop"), ("done", "stop")])
        tool_format = make_format("qwen", tokenizer(), TOOLS)
        sample = await run_tool_loop(engine, tool_format, registry, Sample(PROMPT), {}, BUDGETS)
    assert observations(sample)[-1] == "[1, 2]"


async def test_a_killed_call_says_that_the_variables_are_gone():
    async with tool_sandbox.make_tools(config_of("session")) as registry:
        sample = await converse(registry, "x = 1", "while True: pass", "x")
    first, killed, after = observations(sample)
    assert "longer than 2 s" in killed and "variables of earlier cells are gone" in killed and "NameError" in after
    assert sample.status is SampleStatus.COMPLETED and sample.num_tool_errors == 2


@pytest.mark.parametrize("end", [("part of an answ", "abort"), ("", "down"), ("cut", "length")])
async def test_the_session_ends_however_its_conversation_does(end: tuple[str, str]):
    async with tool_sandbox.make_tools(config_of("session")) as registry:
        try:
            sample = await converse(registry, "x = 1", end=end)
            assert sample.status in (SampleStatus.ABORTED, SampleStatus.TRUNCATED)
        except EngineError:
            assert end[1] == "down"
        assert await sessions_of(registry) == 0


async def test_a_cancelled_conversation_leaves_no_session():
    async with tool_sandbox.make_tools(config_of("session")) as registry:
        conversation = asyncio.ensure_future(converse(registry, "x = 1", "import time\ntime.sleep(1.9)"))
        await asyncio.sleep(0.5)
        conversation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await conversation
        assert await sessions_of(registry) == 0


async def test_a_session_that_the_sandbox_lost_is_an_outage():
    async with tool_sandbox.make_tools(config_of("session")) as registry, registry.conversation() as tools:
        (tool,) = tools._tools.values()
        await tool.function({"code": "x = 1"})
        session = tool.function.__closure__[0].cell_contents
        session._box._lost_sessions.add(session.name)  # as when its broker ended
        with pytest.raises(ToolUnavailable, match="is lost"):
            await tool.function({"code": "x"})


async def test_a_chat_endpoint_has_sessions_too():
    class Chat:
        codes = ["x = 20", "x + 1"]

        async def chat(self, messages, sampling_params, tools) -> ChatReply:
            if not self.codes:
                return ChatReply(messages[-1]["content"])
            function = {"name": "code_interpreter", "arguments": json.dumps({"code": self.codes.pop(0)})}
            return ChatReply("", [{"id": "1", "type": "function", "function": function}])

    async with tool_sandbox.make_tools(config_of("session")) as registry:
        sample = await run_chat_loop(Chat(), registry, Sample(PROMPT), {}, BUDGETS, TOOLS)
    assert sample.response.endswith("21")
