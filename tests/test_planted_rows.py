"""Planted faults of data rows: `data check` and training's start name each by file and row, in the same words."""

from __future__ import annotations

import decimal
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from test_bad_rows import RECIPE, RECIPE_HOOKS, TEMPLATE
from test_config import HF_CONFIG, argv
from test_data_rendering import TEMPLATE as CHATML
from test_data_rendering import assistant, byte_tokenizer, tool, user

from slime_retool import cli
from slime_retool.cluster import cluster, connection
from slime_retool.commands.data_check import check_file
from slime_retool.config import Config
from slime_retool.data.readers import read_rows, write_rows
from slime_retool.rollout.manager import RolloutManager
from slime_retool.train import main as train

RL = {"prompt": [user("1 + 1?")], "label": "2"}
CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOLS = [{"type": "function", "function": {"name": "code_interpreter", "parameters": CODE}}]
SFT = {"prompt": [user("1 + 1?"), assistant("", "print(2)"), tool("2"), assistant("2")], "tools": TOOLS}
BROWSER = {"type": "function", "function": {"name": "browser", "parameters": {"type": "object"}}}
RECIPE_FLAGS = {"--" + name.replace("_", "-"): value for name, value in RECIPE_HOOKS.items()}
RETOOL = {"--tool-format": "retool"}


def schema(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


NO_LABEL = "it has no label to compare with; check --label-key"
LABELS: dict[str, tuple[dict | bytes, dict, str]] = {
    "null label": ({"label": None}, {}, NO_LABEL),
    "empty label": ({"label": ""}, {}, NO_LABEL),
    "blank label": ({"label": " \r\n"}, {}, NO_LABEL),
    "solution without its answer": ({"label": "so it is\n#### "}, {}, NO_LABEL),
    "NaN label": ({"label": float("nan")}, {}, NO_LABEL),
    "infinite label": ({"label": float("inf")}, {}, NO_LABEL),
    "label in another column": (
        {"prompt": "q", "label": ..., "answer": "2"}, {}, "there is no column 'label': --label-key answer?",
    ),
    "label that no box can hold": ({"label": "\\frac{1}{2"}, {}, "its own answer '\\\\frac{1}{2' is not right by dapo"),
    "label for a recipe": ({"label": None}, RECIPE_FLAGS, NO_LABEL),
}  # fmt: skip
PROMPTS: dict[str, tuple[dict | bytes, dict, str]] = {
    "no prompt": ({"prompt": ...}, {}, "no column 'prompt', only label; set --input-key"),
    "null prompt": ({"prompt": None}, {}, "no column 'prompt' (it is null), only label"),
    "prompt and label in other columns": (
        {"prompt": ..., "label": ..., "problem": "q", "answer": "2"},
        {},
        "no column 'prompt', only problem, answer; set --input-key problem --label-key answer",
    ),
    "prompt that is a number": ({"prompt": 5}, {}, "column 'prompt' must be a list of messages"),
    "prompt that is one message": ({"prompt": user("q")}, {}, "column 'prompt' must be a list of messages"),
    "prompt without messages": ({"prompt": []}, {}, "with at least one entry"),
    "empty prompt": ({"prompt": [user(" ")]}, {}, "the prompt must not be empty"),
    "blank text": ({"prompt": "\n"}, {}, "the prompt must not be empty"),
    "prompt with its answer": ({"prompt": [user("q"), assistant("2")]}, {}, "prompt ends with an assistant message"),
    "unknown role": ({"prompt": [{"role": "robot", "content": "x"}]}, {}, "role is one of system, user, assistant"),
    "role that the template refuses": (
        {"prompt": [{"role": "system", "content": "x"}, user("q")]}, {}, "no system role",
    ),
    "message that is text": ({"prompt": ["q"]}, {}, "message 0 must be an object"),
    "content in parts": (
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}, {}, "content must be text",
    ),
    "end of turn in a question": ({"prompt": [user("q<|im_end|>")]}, {}, "message 0 holds '<|im_end|>'"),
    "metadata that is a list": ({"metadata": [1]}, {}, "column 'metadata' must hold an object"),
}  # fmt: skip
TOOL_ROWS: dict[str, tuple[dict | bytes, dict, str]] = {
    "tool message without a call": (
        {"prompt": [user("q"), tool("1")]}, {}, "message 1: a tool message must follow the assistant message that",
    ),
    "more tool messages than calls": (
        {"prompt": [user("q"), calling({}), tool("1"), tool("2")]}, {}, "message 3: more tool messages than the 1 call",
    ),
    "call of a user": (
        {"prompt": [user("q") | {"tool_calls": calling({})["tool_calls"]}]}, {}, "only an assistant message can hold",
    ),
    "arguments that are no JSON": (
        {"prompt": [user("q"), calling("1 +"), tool("1")]}, {}, "arguments of f must be a list or object, or JSON text",
    ),
    "tool without a name": ({"tools": [{"type": "function"}]}, RECIPE_FLAGS, "must be an object with a function name"),
    "parameters that are a list": ({"tools": schema(["code"])}, RECIPE_FLAGS, "parameters of f must be a JSON schema"),
    "parameters that are no schema": (
        {"tools": schema({"type": "object", "properties": {"x": {"type": "strng"}}})},
        RECIPE_FLAGS,
        "the parameters of f must be a JSON schema of an object; properties.x.type: 'strng'",
    ),
    "tool that nobody runs": ({"tools": [*TOOLS, BROWSER]}, RECIPE_FLAGS, "no code is registered for: browser"),
}  # fmt: skip
LINES: dict[str, tuple[dict | bytes, dict, str]] = {
    "line that is cut off": (b'{"prompt": "q", "lab', {}, "line 2: not valid JSON (Unterminated string"),
    "line with a list": (b'["q", "2"]', {}, "line 2: every line must be a JSON object, got list"),
    "line that is no UTF-8": (b'{"prompt": "\xff"}', {}, "line 2: not valid JSON ('utf-8' codec can't decode"),
    "half of a surrogate pair": (b'{"prompt": "\\ud83d", "label": "1"}', {}, "line 2: not valid JSON ('utf-8' codec"),
}
CONVERSATIONS: dict[str, tuple[dict | bytes, dict, str]] = {
    "nothing to learn": ({"prompt": [user("q")]}, {}, "needs at least one assistant message, got none"),
    "an answer that says nothing": (
        {"prompt": [user("q"), assistant(" ")]}, {}, "message 1 is an assistant's and empty",
    ),
    "end of turn in an answer": (
        {"prompt": [user("q"), assistant("2<|im_end|>")]}, {}, "message 1 holds '<|im_end|>', which the chat",
    ),
    "text for SFT": ({"prompt": "q"}, {}, "SFT needs conversations, this row's prompt is plain text"),
    "an answer before the question": (
        {"prompt": [assistant("2"), user("q"), assistant("3")]}, RETOOL, "must be a prompt followed by assistant",
    ),
    "a call without its output": (
        {"prompt": [user("q"), assistant("", "print(1)"), assistant("1")]}, RETOOL, "message 1 has a call without",
    ),
    "a template that shows no tools": ({"tools": [BROWSER, *TOOLS]}, {}, "does not show the tool 'browser'"),
}  # fmt: skip
RL_FAULTS = LABELS | PROMPTS | TOOL_ROWS | LINES
FAULTS = RL_FAULTS | CONVERSATIONS
NO_TOOLS = CHATML.replace("{%- if tools %}", "{%- if false %}")


def test_there_are_more_than_thirty_of_them():
    assert len(FAULTS) == len(LABELS) + len(PROMPTS) + len(TOOL_ROWS) + len(LINES) + len(CONVERSATIONS) >= 40


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of what a start reads of a model, one for each chat template."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, template in {"rl": TEMPLATE + CHATML, "sft": CHATML, "no_tools": NO_TOOLS}.items():
        byte_tokenizer(template).save_pretrained(root / name)
        (root / name / "config.json").write_text(json.dumps(HF_CONFIG | {"vocab_size": 300}))
    (root / "ref").mkdir()
    (root / "ref" / "latest_checkpointed_iteration.txt").write_text("release")
    return root


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(config: Config, ray_start: object) -> None:
        raise AssertionError("trainers and engines would have started")

    monkeypatch.setattr(connection, "RayStart", lambda config: nullcontext())
    monkeypatch.setattr(cluster, "Cluster", started)
    monkeypatch.syspath_prepend(str(RECIPE))


def row_of(good: dict[str, Any], change: dict | bytes) -> dict[str, Any] | bytes:
    """`good` with what `change` sets; `...` takes a column away."""
    if isinstance(change, bytes):
        return change
    return {name: value for name, value in (good | change).items() if value is not ...}


def write_lines(path: Path, rows: list[dict[str, Any] | bytes]) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def planted(folder: Path, fault: str) -> tuple[Path, dict[str, str | None], str]:
    """(a file whose second of three rows has the fault, the flags that a run of it has, words of the refusal)."""
    change, flags, words = FAULTS[fault]
    good = SFT if fault in CONVERSATIONS else RL
    if fault in CONVERSATIONS:
        flags = {"--loss-type": "sft_loss", **flags}
    file = write_lines(folder / "rows.jsonl", [good, row_of(good, change), good])
    return file, dict(flags), words


def run_flags(checkpoints: Path, fault: str, file: Path, folder: Path) -> dict[str, str | None]:
    hf = "no_tools" if "shows no tools" in fault else "sft" if fault in CONVERSATIONS else "rl"
    values = {
        "--device": "cpu", "--hf-checkpoint": str(checkpoints / hf), "--ref-load": str(checkpoints / "ref"),
        "--num-rollout": "1", "--rollout-batch-size": "4", "--prompt-data": str(file),
        "--output-dir": str(folder / "out"),
    }  # fmt: skip
    return values if fault in CONVERSATIONS else values | {"--n-samples-per-prompt": "2"}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_and_start_name_the_row_in_the_same_words(fault: str, checkpoints: Path, tmp_path: Path, capsys):
    file, flags, words = planted(tmp_path, fault)
    run = run_flags(checkpoints, fault, file, tmp_path)
    tokenizer = {"--tokenizer": run["--hf-checkpoint"]}
    meant = {"--input-key": "prompt"}  # as training does, not the first known columns
    code = cli.main(["data", "check", str(file), *argv(tokenizer | meant | flags)])
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if words in line]
    assert code == 1 and len(lines) == 1 and lines[0].startswith(f"  {file}, row 2: "), said.err
    assert train(argv(run | flags)) == 2
    error = capsys.readouterr().err
    assert error == f"slime_retool.train: error: {lines[0].strip()}; --skip-bad-rows leaves such rows out\n"
    assert not (tmp_path / "out" / "skipped_rows.jsonl").exists()


def test_all_of_them_in_one_file_are_named_left_out_and_listed(checkpoints: Path, tmp_path: Path, capsys):
    faults = [fault for fault in RL_FAULTS if not RL_FAULTS[fault][1]]
    rows = [row_of(RL, RL_FAULTS[fault][0]) for fault in faults]
    file = write_lines(tmp_path / "rows.jsonl", [RL, *rows, RL])
    hf = str(checkpoints / "rl")
    assert len(faults) >= 25
    assert cli.main(["data", "check", str(file), "--tokenizer", hf, "--input-key", "prompt"]) == 1
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if "asks what" not in line and "math_verify" not in line]
    assert [line.split(": ")[0] for line in lines] == [f"  {file}, row {number}" for number in range(2, len(rows) + 2)]
    config = Config(
        device="cpu", prompt_data=[str(file)], output_dir=str(tmp_path / "out"), skip_bad_rows=True, hf_checkpoint=hf,
        rollout_batch_size=1, num_rollout=1,
    )  # fmt: skip
    with RolloutManager(config) as manager:
        assert [sample.index for sample in manager.data.next_groups(1)[0]] and manager.data.num_rows == 2
    listed = read_rows(tmp_path / "out" / "skipped_rows.jsonl")
    assert [(row["file"], row["row"]) for row in listed] == [(str(file), n) for n in range(2, len(rows) + 2)]
    assert [line.partition(": ")[2] for line in lines] == [row["reason"] for row in listed]


def test_parquet_has_faults_of_its_own(tmp_path: Path):
    good = {"prompt": "q", "label": decimal.Decimal("2.5")}
    write_rows(tmp_path / "decimals.parquet", [good, good | {"label": None}])
    assert [f.partition(": ")[0] for f in check_file(str(tmp_path / "decimals.parquet"), None, Config()).failures] == [
        "row 2"
    ]
    write_rows(tmp_path / "bytes.parquet", [{"prompt": "q", "label": b"2"}])
    (failure,) = check_file(str(tmp_path / "bytes.parquet"), None, Config()).failures
    assert failure == "row 1: a label must be text or a number, got bytes"
    write_rows(tmp_path / "floats.parquet", [{"prompt": "q", "label": 2.0}, {"prompt": "q", "label": float("nan")}])
    (failure,) = check_file(str(tmp_path / "floats.parquet"), None, Config()).failures
    assert failure.startswith("row 2: it has no label")


def test_rows_that_are_too_long_or_repeat_a_question_are_named(checkpoints: Path, tmp_path: Path, capsys, caplog):
    long = RL | {"prompt": [user("x" * 60)]}
    file = write_lines(tmp_path / "rows.jsonl", [RL, long, RL, RL | {"label": "3"}])
    limit = ["--rollout-max-prompt-len", "50", "--tokenizer", str(checkpoints / "rl")]
    assert cli.main(["data", "check", str(file), *limit]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"  {file}, row 2: the prompt has 80 tokens, more than --rollout-max-prompt-len 50 tokens: "
        "training leaves it out",
        f"  {file}, row 4: asks what row 1 does, and says '3' for '2'",
        f"  {file}, row 3: asks what row 1 does, with the same answer '2'",
    ]
    values = {"prompt_data": [str(file)], "output_dir": str(tmp_path), "rollout_batch_size": 1, "num_rollout": 1}
    hf = str(checkpoints / "rl")
    with RolloutManager(Config(**values, device="cpu", hf_checkpoint=hf, rollout_max_prompt_len=50)):
        pass
    assert "1 of 4 rows left out, their prompt has more than 50 tokens; the first: row 2" in caplog.text
    conversation = write_lines(tmp_path / "sft.jsonl", [SFT])
    long_sft = ["--loss-type", "sft_loss", "--rollout-max-context-len", "9", "--tokenizer", str(checkpoints / "sft")]
    assert cli.main(["data", "check", str(conversation), *long_sft]) == 1
    assert f"{conversation}, row 1: the conversation has " in (error := capsys.readouterr().err)
    assert "tokens, more than --rollout-max-context-len 9: training leaves it out" in error


def test_a_list_of_rows_in_one_piece_is_answered_with_what_is_wanted(tmp_path: Path, capsys):
    (tmp_path / "rows.json").write_text(json.dumps([RL]))
    assert cli.main(["data", "check", str(tmp_path / "rows.json")]) == 2
    assert "must end in .jsonl or .parquet" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text(json.dumps([RL], indent=1))
    assert cli.main(["data", "check", str(tmp_path / "rows.jsonl"), "--show", "1"]) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}/rows.jsonl, row 1: line 1: not valid JSON (a list over several lines)" in error
    assert error.splitlines()[1].endswith(f"more of {tmp_path}/rows.jsonl; --show N shows them")


def test_a_held_out_conversation_that_cannot_be_used_ends_the_start(checkpoints: Path, tmp_path: Path, capsys):
    file = write_lines(tmp_path / "rows.jsonl", [SFT])
    held_out = write_lines(tmp_path / "held_out.jsonl", [SFT, SFT | {"prompt": [user("q")]}])
    run = run_flags(checkpoints, "nothing to learn", file, tmp_path) | {"--loss-type": "sft_loss"}
    assert train(argv(run | {"--eval-prompt-data": f"e {held_out}", "--eval-interval": "1"})) == 2
    assert f"{held_out}, row 2: a conversation to learn from needs" in capsys.readouterr().err
    short = {"--eval-prompt-data": f"e {file}", "--eval-interval": "1", "--rollout-max-context-len": "9"}
    assert train(argv(run | short)) == 2
    assert "held-out set 'e': none of its 1 conversations has at most --rollout-max" in capsys.readouterr().err
