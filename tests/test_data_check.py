"""`slime-retool data check`: every row read, rendered and scored before a run is started."""

from __future__ import annotations

import json

import pytest
from test_data_rendering import TOOLS, assistant, byte_tokenizer, template_ids, tool, user

from slime_retool import cli
from slime_retool.data.readers import write_rows
from slime_retool.reward import compute_score


def check(capsys, *arguments):
    code = cli.main(["data", "check", *map(str, arguments)])
    said = capsys.readouterr()
    return code, [json.loads(line) for line in said.out.splitlines()], said.err


def test_a_good_file_is_counted_rendered_and_scored(tmp_path, capsys):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    rows = [
        {"problem": "a", "answer": "\\frac{1}{2}"},
        {"problem": "a", "answer": "2"},
        {"problem": "bb", "answer": "3"},
    ]
    write_rows(tmp_path / "math.jsonl", rows)
    code, (figures,), said = check(capsys, tmp_path / "math.jsonl", "--tokenizer", tmp_path / "tokenizer")
    lengths = [
        len(byte_tokenizer().apply_chat_template([user(row["problem"])], add_generation_prompt=True, return_dict=False))
        for row in rows
    ]
    assert code == 0
    repeated = "row 2: asks what row 1 does, and says '2' for '\\\\frac{1}{2}'"
    assert said == f"  {tmp_path / 'math.jsonl'}, {repeated}\n"
    assert figures == {
        "file": str(tmp_path / "math.jsonl"), "rows": 3, "failures": 0, "unique_questions": 2,
        "contradictory_questions": 1, "own_answer_wrong_dapo": 0, "own_answer_wrong_math_verify": 0,
        "tokens": sum(lengths), "tokens_p50": lengths[0], "tokens_p95": lengths[2], "tokens_p100": lengths[2],
    }  # fmt: skip


def test_conversations_are_tokenized_as_sft_does(tmp_path, capsys):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    messages = [user("q"), assistant("", "1"), tool("1"), assistant("one")]
    write_rows(tmp_path / "sft.parquet", [{"messages": messages, "tools": TOOLS}])
    code, (figures,), _ = check(capsys, tmp_path / "sft.parquet", "--tokenizer", tmp_path / "tokenizer")
    assert (code, figures["conversations"]) == (0, 1)
    assert figures["tokens"] == len(template_ids(byte_tokenizer(), messages, TOOLS)) > figures["supervised_tokens"] > 0


def test_bad_rows_and_answers_are_named_and_counted(tmp_path, capsys):
    write_rows(tmp_path / "bad.jsonl", [{"problem": "a", "answer": "}{"}, {"text": "x"}, {"messages": [{"role": "x"}]}])
    code, (figures,), said = check(capsys, tmp_path / "bad.jsonl")
    assert (code, figures["failures"], figures["own_answer_wrong_dapo"]) == (1, 4, 1)
    assert "row 1: its own answer '}{' is not right by dapo" in said and "row 2: the row: needs one of" in said
    code, figures, said = check(capsys, tmp_path / "nowhere.jsonl")
    assert (code, figures) == (2, []) and "does not exist" in said


def test_a_label_that_no_rule_reads_is_named_and_a_matrix_that_lost_its_row_separators_is_read(tmp_path, capsys):
    matrix = "\\begin{pmatrix}1/5\\-18/5\\end{pmatrix}"
    rows = [{"problem": str(i), "answer": label} for i, label in enumerate([matrix, "\\boxed{", "{2}}", "2"])]
    write_rows(tmp_path / "labels.jsonl", rows)
    code, (figures,), said = check(capsys, tmp_path / "labels.jsonl")
    assert (code, figures["own_answer_wrong_dapo"], figures["own_answer_wrong_math_verify"]) == (1, 2, 2)
    assert {row for row in range(1, 5) if f"row {row}: its own answer" in said} == {2, 3}
    right, wrong = (matrix.replace("\\-", between) for between in ("\\\\-", "&-"))
    assert compute_score(f"\\boxed{{{right}}}", matrix, "math_verify")["acc"]
    assert not compute_score(f"\\boxed{{{wrong}}}", matrix, "math_verify")["acc"]


def test_a_folder_without_a_tokenizer_is_named_by_the_flag_in_one_line(tmp_path, capsys):
    write_rows(tmp_path / "rows.jsonl", [{"problem": "1 + 1", "answer": "2"}])
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert cli.main(["data", "check", str(tmp_path / "rows.jsonl"), "--tokenizer", str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"slime-retool data check: error: --tokenizer '{folder}' ") and error.count("\n") == 1


REWARD = """
from dataclasses import dataclass
from slime_retool.config import flag
from slime_retool.errors import DataError

@dataclass(frozen=True)
class HookArgs:
    most: int = flag(10, help="Largest label.")

def check_label(args, sample):
    if len(sample.label) > args.hook(HookArgs).most:
        raise DataError(f"a label of {len(sample.label)} is above --most {args.hook(HookArgs).most}")

def reward_func(args, sample):
    return 1.0
"""


def test_a_reward_of_ones_own_says_which_labels_it_takes(tmp_path, capsys, monkeypatch):
    (tmp_path / "reward_of_tests.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "label": "}{"}, {"prompt": "b", "label": "x" * 20}])
    own = [tmp_path / "rows.jsonl", "--custom-rm-path", "reward_of_tests.reward_func"]
    code, (figures,), said = check(capsys, *own, "--most", "50")
    assert (code, said) == (0, "") and figures["own_answer_wrong_dapo"] == 1
    code, (figures,), said = check(capsys, *own)
    assert code == figures["failures"] == 1 and "row 2: a label of 20 is above --most 10" in said
    with pytest.raises(SystemExit, match="2"):
        check(capsys, *own, "--mots", "50")
    assert "unknown flag --mots; did you mean --most" in capsys.readouterr().err


def test_the_rule_that_is_given_decides(tmp_path, capsys):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "label": "x y $\\{"}])
    by_mode = {mode: check(capsys, tmp_path / "rows.jsonl", "--rm-type", mode) for mode in ("dapo", "math_verify")}
    assert {mode: code for mode, (code, _, _) in by_mode.items()} == {"dapo": 1, "math_verify": 0}
    assert by_mode["dapo"][2].count("is not right by dapo") == by_mode["dapo"][1][0]["failures"] == 1


def test_a_row_with_an_unreadable_label_is_rendered_and_held_to_the_other_rules(tmp_path, capsys):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "label": "}{"}, {"prompt": "b<|im_end|>", "label": "}{"}])
    flags = ["--tokenizer", tmp_path / "tokenizer", "--apply-chat-template"]
    rendered = byte_tokenizer().apply_chat_template([user("a")], add_generation_prompt=True, return_dict=False)
    for chosen in ([], ["--rm-type", "dapo"]):
        code, (figures,), said = check(capsys, tmp_path / "rows.jsonl", *flags, *chosen)
        assert code == 1 and figures["tokens_p50"] == len(rendered)
        assert {row for row in (1, 2) if f"row {row}: its own answer '}}{{' is not right by dapo" in said} == {1, 2}
        assert "row 2: message 0 holds '<|im_end|>'" in said
