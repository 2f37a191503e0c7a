"""The rows that docs/data.md shows are read as it says, and pass the check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_bad_rows import RECIPE, RECIPE_HOOKS
from test_data_rendering import byte_tokenizer

from slime_retool.chat import ChatTemplate
from slime_retool.commands.data_check import check_file
from slime_retool.config import Config
from slime_retool.data.rows import samples_from_file
from slime_retool.rollout.manager import RolloutManager

DOCS = Path(__file__).parents[1] / "docs" / "data.md"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Each block as a file: RL with text, RL with messages, SFT."""
    blocks = re.findall(r"^```jsonl\n(.*?)^```$", DOCS.read_text(), re.M | re.S)
    for number, block in enumerate(blocks):
        (tmp_path / f"{number}.jsonl").write_text(block)
    return [str(tmp_path / f"{number}.jsonl") for number in range(len(blocks))]


def test_the_rows_are_read_as_the_page_says(files):
    text, messages, sft = files
    (plain,), (asked,) = (samples_from_file(text, Config(apply_chat_template=chat)) for chat in (False, True))
    assert (plain.prompt, plain.label) == ("What is 6 * 7?", "42")
    assert asked.prompt == [{"role": "user", "content": plain.prompt}]
    (sample,) = samples_from_file(messages, Config())
    assert (sample.prompt, sample.label, sample.metadata) == (asked.prompt, "42", {"level": 1})
    assert [tool["function"]["name"] for tool in sample.tools] == ["code_interpreter"]
    (learned,) = samples_from_file(sft, Config(input_key="messages", loss_type="sft_loss"))
    assert [message["role"] for message in learned.prompt] == ["user", "assistant", "tool", "assistant"]
    assert learned.prompt[1]["tool_calls"][0]["function"]["arguments"] == {"code": "print(6 * 7)"}


def test_the_rows_pass_the_check_and_start_a_run(files, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    template = ChatTemplate(byte_tokenizer())
    reports = [check_file(file, template) for file in files]
    assert [report.failures for report in reports] == [[], [], []]
    assert [report.conversations for report in reports] == [0, 0, 1] and reports[2].supervised > 0
    values = {"output_dir": str(tmp_path / "out"), "rollout_batch_size": 1, "num_rollout": 1, "prompt_data": files[:2]}
    with RolloutManager(Config(**values, **RECIPE_HOOKS), tokenizer=byte_tokenizer()) as manager:
        assert manager.data.num_rows == 2
