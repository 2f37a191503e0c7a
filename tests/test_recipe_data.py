"""The recipe's data scripts on rows of the published shapes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from slime_retool.config import parse_config
from slime_retool.data.leakage import EvaluationQuestions
from slime_retool.data.math_prompts import bare_question, with_instruction
from slime_retool.data.readers import read_rows, write_rows
from slime_retool.data.rows import samples_from_file
from slime_retool.errors import ConfigError, DataError, ToolUnavailable
from slime_retool.sandbox import Result, SandboxPolicy, Status

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "retool"))
import code_agreement  # noqa: E402
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
        ("user", with_instruction("What is 2+3?")),
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


def test_a_data_sets_name_may_hold_a_point(monkeypatch):
    monkeypatch.setattr(sft_data_processing, "_hub_rows", lambda name: iter([{"from": name}]))
    assert sft_data_processing.load_rows("someone/traces-v1.5") == [{"from": "someone/traces-v1.5"}]


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
    assert sample.prompt == [{"role": "user", "content": with_instruction("How many?")}]
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
    assert with_instruction("How many?") == wrapped
    for instruction, mark in (("dapo", "Answer: \\boxed{"), ("short", "Answer: \\boxed{"), ("none", "How many?")):
        once = with_instruction(wrapped, instruction)
        assert bare_question(once) == "How many?" and with_instruction(once, instruction) == once and mark in once
    with pytest.raises(ConfigError, match="dapo, short, none"):
        with_instruction("How many?", "long")


def test_more_rows_can_be_verified_than_a_sandbox_lets_wait():
    solution = "<code>\n```python\nprint(2)\n```\n</code>\n<interpreter>2</interpreter>\\boxed{2}"
    row = sft_data_processing.convert_row(retool_row(solution))
    policy = SandboxPolicy("none", concurrency=1, max_queue=1)
    assert asyncio.run(sft_data_processing.verify_rows(dict.fromkeys(range(4), row), policy)) == {}


def test_both_published_schemas_are_written_and_read_again(tmp_path):
    write_rows(tmp_path / "in.jsonl", [{"problem": "How many?", "answer": "34"}])
    for schema, file in (("slime", "a.jsonl"), ("verl", "b.parquet"), ("verl", "c.jsonl")):
        flags = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / file), "--schema", schema]
        assert rl_data_preprocess.main(flags) == 0
        sample = samples_from_file(tmp_path / file, parse_config([]))[0]
        assert (sample.prompt[0]["content"], sample.label) == (with_instruction("How many?"), "34")
        assert rl_data_preprocess.convert(read_rows(tmp_path / file), "again").rows[0]["label"] == "34"
    (row,) = read_rows(tmp_path / "b.parquet")
    assert row == read_rows(tmp_path / "c.jsonl")[0]
    assert row == {
        "data_source": "in",
        "prompt": [{"role": "user", "content": with_instruction("How many?")}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule"},
        "extra_info": {
            "index": 0,
            "need_tools_kwargs": True,
            "tools_kwargs": {"code_interpreter": {"create_kwargs": {"ground_truth": "34"}}},
        },
    }


LONG = (
    "Find the number of ordered pairs of positive integers whose product is less than one hundred and whose sum is even"
)


def test_questions_of_an_evaluation_set_are_left_out_and_listed(tmp_path, capsys):
    write_rows(tmp_path / "eval.jsonl", [{"input": "What is $2+3$?", "output": "5"}, {"input": LONG, "output": "1"}])
    questions = [
        "what is 2 + 3",
        LONG.replace("Find", "Determine") + ".",
        "What is $2+4$?",
        LONG.replace("even", "odd"),
    ]
    other = "Find the number of " + LONG.removeprefix("Find the number of ordered pairs").replace("hundred", "thousand")
    rows = [{"question": question, "answer": "5"} for question in [*questions, other]]
    write_rows(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    flags = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output), "--instruction", "none"]
    assert rl_data_preprocess.main([*flags, "--evaluation-sets", str(tmp_path / "eval.jsonl")]) == 0
    assert [row["prompt"][0]["content"] for row in read_rows(output)] == ["What is $2+4$?", other]
    leaked = read_rows(f"{output}.leaked.jsonl")
    assert [(row["question"], row["evaluation"]) for row in leaked] == [
        (questions[0], "eval.jsonl, row 1"),
        (questions[1], "eval.jsonl, row 2"),
        (questions[3], "eval.jsonl, row 2"),
    ]
    assert leaked[0]["overlap"] == 1.0 and 0.8 <= leaked[1]["overlap"] < 1.0
    assert "3 that an evaluation set holds left out" in capsys.readouterr().out


def test_a_question_without_words_of_an_evaluation_set_leaks_nothing():
    assert EvaluationQuestions([("e", LONG)]).find("x = 1?") is None


def test_questions_of_other_scripts_are_compared_by_their_letters():
    known = EvaluationQuestions(
        [("zh", "已知三角形的三边长为3, 5和7, 求最大角的度数"), ("ru", "Найдите все корни: x = 5"), ("?", "∀?")]
    )
    assert known.find("某商店以3元, 5元和7元的价格出售三种铅笔, 求平均价格") is None
    assert known.find("Сколько будет, если x = 5") is None and known.find("∃!") is None
    assert known.find("已知三角形的三边长为 3、5 和 7，求最大角的度数。").overlap == 1.0
    assert known.find("已知一个三角形的三边长为3, 5和7, 求最大角的度数").evaluation == "zh"


def test_code_is_run_again_and_rows_with_another_output_are_left_out(tmp_path, capsys):
    def row(code, output):
        block = f"<code>\n```python\n{code}\n```\n</code>\n<interpreter>\n{output}\n</interpreter>\n"
        return retool_row(block + "<answer>\\boxed{1}</answer>")

    rows = [row("print(6 * 7)", "42"), row("print(6 * 7)", "41"), retool_row("no code"), row("1 / 0", "Traceback:\n"
            "  somewhere\nZeroDivisionError: division by zero"), row("while True: pass", "1")]  # fmt: skip
    write_rows(tmp_path / "in.jsonl", rows)
    output = tmp_path / "sft.jsonl"
    flags = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output), "--verify-code", "--tool-timeout", "10"]
    assert sft_data_processing.main([*flags, "--sandbox-isolation", "none"]) == 0
    assert [r["messages"][2]["content"].rpartition("\n")[2] for r in read_rows(output)] == [
        "42", "ZeroDivisionError: division by zero",
    ]  # fmt: skip
    rejected = {r["row"]: r["reason"] for r in read_rows(f"{output}.rejected.jsonl")}
    assert rejected[2] == "a block prints something else when run again" and "timeout" in rejected[5]
    assert sorted(rejected) == [2, 3, 5]
    assert "2 rows written, 3 left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recorded", "result", "same"),
    [
        ("1\n2", Result(Status.OK, stdout="1\n2\n"), True),
        ("1  2", Result(Status.OK, stdout="1\n2\n"), True),
        ("", Result(Status.OK, stdout="", result="5"), True),
        ("5", Result(Status.OK, stdout="", result="5"), True),
        ("0.3333333333333333", Result(Status.OK, stdout="0.33333333333333337"), True),
        ("0.333", Result(Status.OK, stdout="0.334"), False),
        ("10000001", Result(Status.OK, stdout="10000002"), False),
        ("<f at 0x7f00aa11>", Result(Status.OK, stdout="<f at 0x7f99bb22>"), True),
        ("a\nKeyError: 'x'", Result(Status.ERROR, stderr="", error="Traceback\nKeyError: 'x'"), True),
        ("ok", Result(Status.ERROR, error="KeyError: 'x'"), False),
    ],
)
def test_outputs_agree_up_to_what_a_second_run_may_change(recorded, result, same):
    assert code_agreement.agrees(recorded, result) is same


def test_an_outage_of_the_sandbox_judges_no_row():
    class Down:
        async def run(self, code):
            return Result(Status.UNAVAILABLE, error="down")

    messages = sft_data_processing.convert_row(retool_row(SOLUTION))["messages"]
    with pytest.raises(ToolUnavailable, match="down"):
        asyncio.run(code_agreement.disagreement(Down(), messages))
