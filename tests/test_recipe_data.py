"""The recipe's data scripts on rows of the published shapes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime_retool.config import parse_config
from slime_retool.data.math_prompts import INSTRUCTION, bare_question, with_instruction
from slime_retool.data.readers import read_rows, write_rows
from slime_retool.data.source import samples_from_file
from slime_retool.errors import DataError

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "retool"))
import rl_data_preprocess  # noqa: E402
import sft_data_processing  # noqa: E402

PREAMBLE = "You may write code in <code> blocks.\n*user question:*\nWhat is 2+3?\n\n<answer>\n\\boxed{'it'}\n</answer>"
SOLUTION = """First I add.
<code>
```python
print(2 + 3)
print("</code>")
```
</code>
<interpreter>
5
</code>
</interpreter>
Now I check.
<code>
```python
if True:
    print("ok")
```
</code>
<interpreter></interpreter>
So it is five.
<answer>
\\boxed{5}
</answer>"""


def retool_row(solution, question=PREAMBLE):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]}


# SFT


def test_code_becomes_calls_and_interpreter_text_becomes_tool_turns():
    messages = sft_data_processing.convert_row(retool_row(SOLUTION))["messages"]
    codes = [m["tool_calls"][0]["function"]["arguments"]["code"] for m in messages if "tool_calls" in m]
    assert codes == ['print(2 + 3)\nprint("</code>")', 'if True:\n    print("ok")']
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", f"What is 2+3?\n\n{INSTRUCTION}"),
        ("assistant", "First I add."),
        ("tool", "5\n</code>"),
        ("assistant", "Now I check."),
        ("tool", ""),
        ("assistant", "So it is five.\n\nAnswer: \\boxed{5}"),
    ]


@pytest.mark.parametrize("extension", ["parquet", "jsonl"])
def test_written_rows_are_read_back_exactly_with_tools_as_a_list_of_objects(tmp_path, extension):
    rows = [retool_row(SOLUTION), retool_row("Simply <answer>\\boxed{5}</answer>")]
    write_rows(tmp_path / "in.parquet", rows)
    output = tmp_path / "made" / f"sft.{extension}"
    assert sft_data_processing.main(["--input", str(tmp_path / "in.parquet"), "--output", str(output)]) == 0
    expected = [sft_data_processing.convert_row(row) for row in rows]
    assert read_rows(output) == expected
    samples = samples_from_file(output, parse_config(["--input-key", "messages", "--loss-type", "sft_loss"]))
    assert [(s.prompt, s.tools) for s in samples] == [(r["messages"], sft_data_processing.TOOLS) for r in expected]


BLOCK = "<code>\n```python\nprint(1)\n```\n</code>"
BAD = {
    "is not followed by an <interpreter>": BLOCK + " then <answer>\\boxed{1}</answer>",
    "a <interpreter> tag has no partner": "<interpreter>1</interpreter><answer>\\boxed{1}</answer>",
    "a <code> tag has no partner": "<code>print(1) <answer>\\boxed{1}</answer>",
    "a <code> block is empty": "<code>\n```python\n\n```\n</code><interpreter></interpreter>\\boxed{1}",
    "holds no boxed answer": "The answer is 1.",
    "text follows the <answer> block": "<answer>\\boxed{1}</answer> Or is it?",
    "nothing follows the last": BLOCK + "<interpreter>1</interpreter>",
    "a <answer> tag has no partner": "<answer>\\boxed{1}",
}


def test_rows_of_another_shape_are_counted_and_listed_with_their_reasons(tmp_path, capsys):
    rows = [retool_row(text) for text in BAD.values()]
    rows += [retool_row(SOLUTION), {"messages": [{"role": "assistant", "content": "\\boxed{1}"}]}]
    write_rows(tmp_path / "in.jsonl", rows)
    output = tmp_path / "sft.parquet"
    assert sft_data_processing.main(["--input", str(tmp_path / "in.jsonl"), "--output", str(output)]) == 0
    assert "1 rows written, 9 left out" in capsys.readouterr().out
    rejected = read_rows(f"{output}.rejected.jsonl")
    assert [row["row"] for row in rejected] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    reasons = [*BAD, "must begin with a user message"]
    assert all(words in row["reason"] for words, row in zip(reasons, rejected, strict=True))
    assert rejected[0]["messages"] == rows[0]["messages"] and len(read_rows(output)) == 1


def test_a_folder_is_read_file_by_file(tmp_path):
    for name in ("b", "a"):
        write_rows(tmp_path / f"{name}.jsonl", [retool_row(name)])
    (tmp_path / "README.md").write_text("not data")
    assert [row["messages"][1]["content"] for row in sft_data_processing.load_rows(str(tmp_path))] == [
        "a",
        "b",
    ]


def test_input_that_does_not_exist_or_has_no_usable_row_ends_with_one_line(tmp_path, capsys):
    write_rows(tmp_path / "in.jsonl", [retool_row("no answer")])
    for name, words in (("nowhere.parquet", "does not exist"), ("in.jsonl", "none of 1 rows")):
        output = str(tmp_path / "out.parquet")
        assert sft_data_processing.main(["--input", str(tmp_path / name), "--output", output]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out.parquet").exists()


# RL


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "How many?"}], "reward_model": {"ground_truth": "34", "style": "rule"}},
        {"prompt": "How many?", "label": 34},
        {"prompt": [{"role": "user", "content": "How many?"}], "label": "34"},
        {"input": "How many?", "output": "34"},
        {"problem": "How many?", "answer": "34"},
        {"question": "How many?", "answer": "Count them: 30 + 4.\n#### 34"},
    ],
)  # fmt: skip
def test_every_known_schema_becomes_one_prompt_with_the_instruction(tmp_path, row):
    write_rows(tmp_path / "in.jsonl", [row])
    output = tmp_path / "out.jsonl"
    assert rl_data_preprocess.main(["--input", str(tmp_path / "in.jsonl"), "--output", str(output)]) == 0
    sample = samples_from_file(output, parse_config([]))[0]
    assert sample.prompt == [{"role": "user", "content": f"How many?\n\n{INSTRUCTION}"}]
    assert sample.label == "34" and sample.metadata == {"source": "in", "row": 0}


def test_duplicates_are_written_once_and_contradictions_reported_and_left_out(tmp_path, capsys):
    pairs = [
        ("a", "1"),
        ("b", "2"),
        ("a", "1"),
        ("c", "3"),
        ("b", "4"),
        (" c ", "3"),
        ("d", "5"),
        ("d\n", "6"),
    ]
    write_rows(tmp_path / "in.jsonl", [{"prompt": question, "label": label} for question, label in pairs])
    output = tmp_path / "out.jsonl"
    assert rl_data_preprocess.main(["--input", str(tmp_path / "in.jsonl"), "--output", str(output)]) == 0
    assert [(row["label"], row["metadata"]["row"]) for row in read_rows(output)] == [("1", 0), ("3", 3)]
    assert read_rows(f"{output}.contradictions.jsonl") == [
        {"question": "b", "labels": ["2", "4"]},
        {"question": "d", "labels": ["5", "6"]},
    ]
    said = capsys.readouterr().out
    assert "8 rows, 6 unique prompts, 1 of them with contradictory" in said
    assert "4 unique questions" in said and "2 contradictory left out, 2 rows written" in said


def test_a_row_of_an_unknown_schema_is_named():
    with pytest.raises(DataError, match="s, row 1: needs one of the column pairs .* it has text"):
        rl_data_preprocess.convert([{"text": "x"}], "s")


def test_published_instructions_are_replaced_by_ours_once():
    wrapped = (
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: \\boxed{$Answer} where $Answer is the answer to the problem.\n\nHow many?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    assert bare_question(wrapped) == "How many?"
    once = with_instruction(wrapped)
    assert once == f"How many?\n\n{INSTRUCTION}" and with_instruction(once) == once
    assert "Answer: \\boxed{" in once
