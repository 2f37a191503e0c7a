"""The second tool of docs/tools.md works as it stands there."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from tool_helpers import ScriptedEngine, call_text, tokenizer

from slime_retool.config import Config
from slime_retool.protocols import load_function
from slime_retool.rollout.context import RolloutContext, use_context
from slime_retool.types import Sample, SampleStatus

ROOT = Path(__file__).parents[1]


def convert_text(**arguments: object) -> str:
    return "<tool_call>" + json.dumps({"name": "convert", "arguments": arguments}) + "</tool_call>"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The documented file as a user would place it; returns the hook's path."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "tools.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_tools.py").write_text(block)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "retool"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_tools.generate"


def test_the_documented_tool_is_called_next_to_the_code_interpreter(example: str) -> None:
    first = call_text("print(6 * 7)") + convert_text(value=3, unit="km", to="mm")
    wrong = convert_text(value=3, unit="km", to="furlong")
    engine = ScriptedEngine([(first, "stop"), (wrong, "stop"), ("It is \\boxed{42}.", "stop")])
    # What is tested is the registry: no isolation, which works on any machine.
    config = Config(rollout_max_response_len=20_000, sandbox_isolation="none")
    sample = Sample(prompt=[{"role": "user", "content": "3 km?"}], label="42")

    async def main() -> None:
        context = RolloutContext(config, tokenizer(), engine)
        try:
            async with use_context(context):
                await load_function(example)(config, sample, {})
        finally:
            await context.aclose()

    asyncio.run(main())
    assert sample.status is SampleStatus.COMPLETED
    assert "<tool_response>\n42\n</tool_response>\n<tool_response>\n3000000 mm\n</tool_response>" in sample.response
    assert "argument 'to' must be one of" in sample.response
    assert (sample.num_tool_calls, sample.num_tool_errors, sample.num_malformed_calls) == (2, 0, 1)
    assert '"convert"' in tokenizer().decode(sample.tokens[: sample.prompt_length])
