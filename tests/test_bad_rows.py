"""Rows that a run would fail on: refused before anything starts or left out and listed, by check and training alike."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from chat_templates import SMOLLM2
from test_data_rendering import TOOLS, assistant, byte_tokenizer, user

from slime_retool.chat import ChatTemplate
from slime_retool.commands import data_check
from slime_retool.commands.data_check import check_file
from slime_retool.config import Config
from slime_retool.config.parse import parse_config
from slime_retool.data.readers import read_rows, write_rows
from slime_retool.errors import ConfigError, DataError
from slime_retool.recipes.retool.tool_sandbox import SCHEMA
from slime_retool.rollout.manager import RolloutManager
from slime_retool.run_folder import forget_skipped_rows

RECIPE = Path(__file__).parents[1] / "examples" / "retool"
RECIPE_HOOKS = {
    "custom_generate_function_path": "generate_with_retool.generate",
    "custom_rm_path": "generate_with_retool.reward_func",
}
GOOD = {"prompt": [user("1 + 1?")], "label": "2"}
TEMPLATE = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}<|im_start|>"
BROWSER = {"type": "function", "function": {"name": "browser", "parameters": {"type": "object"}}}
BAD = {
    "no label": ({"label": " "}, {}, "no label to compare with; check --label-key"),
    "no label for the recipe": ({"label": None}, RECIPE_HOOKS, "no label to compare with"),
    "tools that nothing runs": ({"tools": TOOLS}, {}, "no hook runs them; give a --custom-generate-function-path"),
    "unknown tool": ({"tools": [*TOOLS, BROWSER]}, RECIPE_HOOKS, "no code is registered for: browser"),
    "unknown tool in short": ({"tools": [BROWSER["function"]]}, RECIPE_HOOKS, "no code is registered for: browser"),
    "assistant last": ({"prompt": [user("1 + 1?"), assistant("2")]}, {}, "ends with an assistant message"),
    "refused role": ({"prompt": [{"role": "system", "content": "x"}, user("y")]}, {}, "no system role"),
    "unknown role": ({"prompt": [{"role": "robot", "content": "x"}]}, {}, "role is one of"),
    "empty prompt": ({"prompt": [user(" ")]}, {}, "prompt must not be empty"),
    "empty text": ({"prompt": "\n"}, {}, "prompt must not be empty"),
    "no prompt": ({"prompt": None}, {}, "no column 'prompt'"),
    "metadata": ({"metadata": [1]}, {}, "column 'metadata' must hold an object"),
}
KINDS = pytest.mark.parametrize("kind", BAD)


@pytest.fixture(autouse=True)
def recipe_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))


def tokenizer_of(config: Config) -> object:
    """The recipe's format needs a template with tools."""
    return byte_tokenizer(TEMPLATE) if config.custom_generate_function_path is None else byte_tokenizer()


def config_of(tmp_path: Path, rows: list[dict], **values: object) -> Config:
    write_rows(tmp_path / "rows.jsonl", rows)
    defaults = {"device": "cpu", "output_dir": str(tmp_path / "out"), "rollout_batch_size": 1, "num_rollout": 1}
    return Config(**{**defaults, "prompt_data": [str(tmp_path / "rows.jsonl")], **values})


def start(config: Config) -> RolloutManager:
    with RolloutManager(config, tokenizer=tokenizer_of(config)) as manager:
        return manager


@KINDS
def test_a_row_that_the_run_would_fail_on_is_named_with_its_file_and_how_many_more(tmp_path, kind):
    change, hooks, words = BAD[kind]
    config = config_of(tmp_path, [GOOD, GOOD | change, GOOD, GOOD | change], **hooks)
    with pytest.raises(DataError) as error:
        start(config)
    said = str(error.value)
    assert said.startswith(f"{tmp_path / 'rows.jsonl'}, row 2: ") and words in said and "\n" not in said
    assert said.endswith("(1 more of 4 rows cannot be used); --skip-bad-rows leaves such rows out")


@KINDS
def test_an_evaluation_set_is_held_to_the_same(tmp_path, kind):
    change, hooks, words = BAD[kind]
    write_rows(tmp_path / "eval.jsonl", [GOOD, GOOD | change])
    config = config_of(tmp_path, [GOOD], eval_prompt_data=["e", str(tmp_path / "eval.jsonl")], **hooks)
    with pytest.raises(DataError, match=rf"eval.jsonl, row 2: .*{words}"):
        start(config)


@KINDS
def test_with_skip_bad_rows_they_are_left_out_and_listed_beside_the_output(tmp_path, caplog, kind):
    change, hooks, words = BAD[kind]
    write_rows(tmp_path / "eval.jsonl", [GOOD | change, GOOD])
    sets = ["e", str(tmp_path / "eval.jsonl")]
    manager = start(
        config_of(tmp_path, [GOOD, GOOD | change, GOOD], skip_bad_rows=True, eval_prompt_data=sets, **hooks)
    )
    assert manager.data.num_rows == 2 and [sample.index for sample in manager.eval_sets["e"]] == [1]
    listed = read_rows(tmp_path / "out" / "skipped_rows.jsonl")
    assert [(row["file"], row["row"]) for row in listed] == [
        (str(tmp_path / "rows.jsonl"), 2),
        (str(tmp_path / "eval.jsonl"), 1),
    ]
    assert all(words in row["reason"] for row in listed)
    assert [line for line in caplog.messages if line.startswith("2 rows cannot be used and are left out, see ")]


@pytest.mark.parametrize("kind", [kind for kind in BAD if kind != "tools that nothing runs"])
def test_check_refuses_the_rows_that_training_refuses(tmp_path, kind):
    change, hooks, words = BAD[kind]
    config = config_of(tmp_path, [GOOD, GOOD | change, GOOD], **hooks)  # without a hook, one that runs tools is meant
    (failure,) = check_file(str(tmp_path / "rows.jsonl"), ChatTemplate(tokenizer_of(config)), config).failures
    assert failure.startswith("row 2: ") and words in failure


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_that_the_tool_format_cannot_use_ends_the_start(tmp_path, tools):
    rows = [GOOD | {"tools": tools}] * 3
    config = config_of(tmp_path, rows, **RECIPE_HOOKS)
    with pytest.raises(DataError, match=r"row 1: the chat template .*; use --tool-format retool.*2 more of 3 rows"):
        RolloutManager(config, tokenizer=byte_tokenizer(SMOLLM2))
    failures = check_file(str(tmp_path / "rows.jsonl"), ChatTemplate(byte_tokenizer(SMOLLM2)), config).failures
    assert len(failures) == 3 and "--tool-format retool" in failures[0]
    in_retool = config_of(tmp_path, [GOOD] * 3, tool_format="retool", **RECIPE_HOOKS)
    with RolloutManager(in_retool, tokenizer=byte_tokenizer(SMOLLM2)) as manager:
        assert manager.data.num_rows == 3


def test_the_tool_format_is_tried_once_for_each_set_of_tools(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(
        "slime_retool.recipes.retool.generate_with_retool.make_format", lambda name, _, tools: tried.append(tools)
    )
    assert start(config_of(tmp_path, [GOOD, GOOD | {"tools": TOOLS}] * 3, **RECIPE_HOOKS)).data.num_rows == 6
    assert tried == [[SCHEMA], TOOLS]


def test_with_skip_bad_rows_a_file_without_a_usable_row_is_still_refused(tmp_path):
    with pytest.raises(DataError, match=r"row 1: .*no label.*\(1 more of 2 rows cannot be used\)$"):
        start(config_of(tmp_path, [GOOD | {"label": None}] * 2, skip_bad_rows=True))


def test_rows_without_a_label_are_left_to_a_reward_hook_of_ones_own(tmp_path):
    config = config_of(tmp_path, [GOOD | {"label": None}], custom_rm_path="rollout_hooks.constant_reward")
    assert start(config).data.num_rows == 1 and not os.path.exists(tmp_path / "out" / "skipped_rows.jsonl")


def test_only_a_run_that_skips_nothing_forgets_the_list_of_an_earlier_one(tmp_path):
    listed = tmp_path / "out" / "skipped_rows.jsonl"
    assert start(config_of(tmp_path, [GOOD, GOOD | {"label": None}], skip_bad_rows=True)).rows_skipped == 1
    assert start(config_of(tmp_path, [GOOD])).rows_skipped == 0 and listed.exists()  # an evaluation, say
    forget_skipped_rows(str(tmp_path / "out"))
    assert not listed.exists()
    forget_skipped_rows(str(tmp_path / "out"))


def test_prompts_that_leave_no_room_in_the_context_are_left_out_and_all_of_them_refused(tmp_path):
    long = GOOD | {"prompt": "x" * 50}
    assert start(config_of(tmp_path, [GOOD | {"prompt": "x"}, long], rollout_max_context_len=50)).data.num_dropped == 1
    words = "all 2 prompts have more than 49 tokens, and --rollout-max-context-len 50 must hold an answer too"
    with pytest.raises(DataError, match=words):
        start(config_of(tmp_path, [long, long], rollout_max_context_len=50))


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_tokenizer_folder_without_its_files_is_refused_by_training_and_check(tmp_path, capsys, kind):
    folder = tmp_path / "hf"
    byte_tokenizer().save_pretrained(folder)
    (folder / "tokenizer.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": kind}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="--hf-checkpoint '.*hf' has no tokenizer that loads"):
        RolloutManager(config_of(tmp_path, [GOOD], hf_checkpoint=str(folder)))
    assert data_check.main([str(tmp_path / "rows.jsonl"), "--tokenizer", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "has no tokenizer that loads" in error and error.count("\n") == 1


def test_check_reads_the_columns_that_training_is_told(tmp_path, capsys):
    rows = [{"q": "1 + 1?", "a": "2"}, {"q": "1 + 2?", "a": ""}]
    write_rows(tmp_path / "rows.jsonl", rows)
    flags = ["--input-key", "q", "--label-key", "a"]
    with pytest.raises(DataError, match="row 2: it has no label"):
        values = parse_config([*flags, "--prompt-data", str(tmp_path / "rows.jsonl"), "--rollout-batch-size", "1"])
        start(values)
    assert data_check.main([str(tmp_path / "rows.jsonl"), *flags]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["failures"] == 1 and "row 2: it has no label" in said.err
