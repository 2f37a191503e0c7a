"""The viewer without a browser: what a run's files become, and that no text of a sample can become script."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from viewer_runs import call_text, make_sample, trained_line, write_rows, write_run

from slime_retool.cli import main
from slime_retool.commands.viewer.columns import FLAGS, LEARNED_OBSERVATION, NO_CALL, NO_END, NO_LABEL, REPEATED
from slime_retool.commands.viewer.page import build_page
from slime_retool.commands.viewer.pieces import PIECE_SAMPLES, TRIGRAM_BITS, trigram_bits, write_data
from slime_retool.commands.viewer.reading import read_samples, sample_files
from slime_retool.errors import DataError
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.dump import dump_trained
from slime_retool.types import Sample, TrainSample

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"); alert(1); ("',
    "\u2028\u2029\x00\x1b[31m\x7f\ufeff\u202e",
    "\ud800 half a pair",
    "\\u003c/script\\u003e \\",
    "${alert(1)} `alert(1)`",
)


def data(path: Path) -> Any:
    """The value that a data file hands over, read as the JSON that it is."""
    text = path.read_text(encoding="ascii")
    name, value = json.loads(f"[{text.removeprefix('viewerData(').removesuffix(');' + chr(10))}]")
    assert path.as_posix().endswith(f"data/{name}.js")
    return value


def page_of(run: Path, out: Path, **options: Any) -> dict[str, Any]:
    """The described run, once its page is built."""
    build_page([run], out, **options)
    return data(out / "data" / "a" / "run.js")


def run_of(folder: Path, *rows: dict[str, Any]) -> Path:
    write_rows(folder / "rollouts" / "rollout_000000.jsonl", list(rows))
    return folder


# What a page holds


def test_every_sample_is_a_row_and_has_its_text_and_tokens(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=4, groups=16, size=5)
    described = page_of(run, tmp_path / "page")
    columns, starts = described["columns"], described["starts"]
    assert {len(column) for column in columns.values()} == {4 * 16 * 5 + 10}
    assert starts == [0, PIECE_SAMPLES]
    rows = [json.loads(line) for path in sample_files(run) for line in path.read_text().splitlines()]
    for place in (0, PIECE_SAMPLES - 1, PIECE_SAMPLES, len(rows) - 1):
        piece, row = sum(start <= place for start in starts) - 1, rows[place]
        texts = data(tmp_path / "page" / "data" / "a" / "texts" / f"{piece:04d}.js")
        tokens = data(tmp_path / "page" / "data" / "a" / "tokens" / f"{piece:04d}.js")
        text, token = texts["samples"][place - starts[piece]], tokens["samples"][place - starts[piece]]
        assert columns["index"][place] == row["index"] and text["label"] == row["label"]
        assert "".join(part for _, part in text["parts"]) == row["response"]
        words = [tokens["vocabulary"][number] for number in tokens["prompts"][token["prompt"]] + token["response"]]
        assert words == row["token_texts"]
        assert texts["prompts"][text["prompt"]]["text"] == "".join(row["token_texts"][: -row["response_length"]])


def test_columns_say_what_the_dump_says(tmp_path: Path):
    row = make_sample(7, step=0, num_tool_errors=1, status="truncated")
    described = page_of(run_of(tmp_path / "run", row), tmp_path / "page")
    columns = {name: values[0] for name, values in described["columns"].items()}
    names = {name: described["names"][name][columns[name]] for name in described["names"]}
    assert names == {"kind": "train", "source": "gsm8k", "status": "truncated"}
    assert columns["reward"] == row["reward"]["score"] and columns["right"] == int(row["reward"]["acc"])
    assert columns["model_tokens"] == sum(row["loss_mask"]) and columns["response_tokens"] == row["response_length"]
    assert columns["prompt_tokens"] == len(row["tokens"]) - row["response_length"]
    assert (columns["turns"], columns["calls"], columns["errors"]) == (2, 1, 1)
    mean = sum(row["rollout_log_probs"]) / sum(row["loss_mask"])
    assert math.isclose(columns["log_prob"], mean, abs_tol=1e-5)
    assert columns["mismatch"] is None and columns["advantage"] is None


def test_the_trainers_values_are_joined_by_sample(tmp_path: Path):
    rows = [make_sample(index) for index in (3, 5)]
    run = run_of(tmp_path / "run", *rows)
    line = trained_line(rows[1], 0.75)
    first = rows[1]["loss_mask"].index(1)
    line = {name: value[first:] if isinstance(value, list) else value for name, value in line.items()}
    write_rows(run / "rollouts" / "trained_000000.jsonl", [line])
    described = page_of(run, tmp_path / "page")
    gaps = [abs(a - b) for a, b in zip(line["log_probs"], rows[1]["rollout_log_probs"][first:], strict=True)]
    assert described["columns"]["mismatch"] == [None, pytest.approx(max(gaps), abs=1e-5)]
    assert described["columns"]["advantage"] == [None, 0.75]


def test_the_trainer_writes_what_the_viewer_reads(tmp_path: Path):
    """Two samples of 2 + 3 and 1 + 2 tokens, values counted through; the second begins with an observation."""
    samples = [
        Sample("q", "1", index=4, tokens=[1, 2, 3, 4, 5], response_length=3, loss_mask=[1, 1, 1], reward=1.0,
               rollout_log_probs=[-1.0, -2.0, -3.0]),
        Sample("q", "1", index=9, tokens=[6, 7, 8], response_length=2, loss_mask=[0, 1], reward=0.0,
               rollout_log_probs=[0.0, -4.0]),
    ]  # fmt: skip
    batch = TrainBatch.from_samples([TrainSample.from_sample(sample, reward=0.0) for sample in samples])
    counted = torch.arange(8, dtype=torch.float32)
    dump_trained(tmp_path / "rollouts" / "trained_000000.jsonl", batch, counted, 10 * counted)
    rows = [
        {"prompt": s.prompt, "label": s.label, "index": s.index, "tokens": s.tokens, "loss_mask": s.loss_mask,
         "response_length": s.response_length, "rollout_log_probs": s.rollout_log_probs, "response": "r",
         "status": "completed", "reward": s.reward}
        for s in samples
    ]  # fmt: skip
    run_of(tmp_path, *rows)
    trained = [dumped.trained for _, dumped in read_samples(tmp_path / "rollouts" / "rollout_000000.jsonl")]
    assert [found.log_probs for found in trained if found] == [[2.0, 3.0, 4.0], [0.0, 7.0]]
    assert [found.advantages for found in trained if found] == [[20.0, 30.0, 40.0], [0.0, 70.0]]


def test_metrics_are_lists_over_steps(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=3)
    metrics = page_of(run, tmp_path / "page")["metrics"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics["step"] == [0, 1, 2]
    assert metrics["train/entropy"] == [row["train/entropy"] for row in rows]


def test_a_run_without_samples_has_curves(tmp_path: Path):
    write_rows(tmp_path / "sft" / "metrics.jsonl", [{"step": 0, "train/loss": 2.0}, {"step": 1, "train/loss": None}])
    described = page_of(tmp_path / "sft", tmp_path / "page")
    assert described["metrics"]["train/loss"] == [2.0, None] and described["columns"]["step"] == []


def test_the_list_of_skipped_rows_holds_no_samples(tmp_path: Path):
    write_rows(tmp_path / "metrics.jsonl", [{"step": 0, "train/loss": 2.0}])
    write_rows(tmp_path / "skipped_rows.jsonl", [{"file": "rows.jsonl", "row": 1, "reason": "it has no label"}])
    assert page_of(tmp_path, tmp_path / "page")["metrics"]["train/loss"] == [2.0]
    with pytest.raises(DataError, match="holds no samples"):
        sample_files(tmp_path)


def test_two_runs_share_a_prompts_key(tmp_path: Path):
    runs = [write_run(tmp_path / name / "rl", steps=2) for name in ("one", "two")]
    build_page(runs, tmp_path / "page")
    a, b = (data(tmp_path / "page" / "data" / letter / "run.js") for letter in "ab")
    assert (a["name"], b["name"]) == ("one/rl", "two/rl")
    assert a["prompts"]["key"] == b["prompts"]["key"] and len(set(a["prompts"]["key"])) == len(a["prompts"]["key"])


def test_a_page_is_replaced_and_nothing_else_is(tmp_path: Path):
    run, out = write_run(tmp_path / "run", steps=3, groups=30, size=4), tmp_path / "page"
    build_page([run], out)
    build_page([write_run(tmp_path / "small", steps=1)], out)
    assert [path.name for path in (out / "data" / "a" / "texts").iterdir()] == ["0000.js"]
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="holds thesis.txt, not a page"):
        build_page([run], out)


def test_the_page_holds_all_that_it_names(tmp_path: Path):
    out = tmp_path / "page"
    build_page([write_run(tmp_path / "run", steps=1)], out)
    named = re.findall(r'(?:src|href)="([^":]+)"', (out / "index.html").read_text())
    assert len(named) > 5 and all((out / name).is_file() for name in named)
    assert not re.search(r"https?://(?!www\.w3\.org/)", "".join(p.read_text() for p in (out / "assets").iterdir()))


# Suspicious samples


def flags_of(tmp_path: Path, *rows: dict[str, Any]) -> list[int]:
    return page_of(run_of(tmp_path / "run", *rows), tmp_path / "page")["columns"]["flags"]


def test_nothing_is_suspicious_about_an_honest_sample(tmp_path: Path):
    assert flags_of(tmp_path, *(make_sample(i) for i in range(20))) == [0] * 20


def test_each_suspicion_has_its_flag(tmp_path: Path):
    right = {"score": 1.0, "acc": True}
    learned = make_sample(3)
    learned["loss_mask"] = [1] * len(learned["loss_mask"])
    rows = [
        make_sample(0),
        make_sample(1, turns=[("model", "It is \\boxed{60}.<|im_end|>")], reward=right),
        make_sample(2, turns=[("model", "so I try again. " * 60 + "<|im_end|>")]),
        learned,
        make_sample(4, label="1234567", reward=right),
        make_sample(5, turns=[("model", call_text("print(1)")), ("tool", "1"), ("model", "The result is")]),
    ]
    assert flags_of(tmp_path, *rows) == [0, NO_CALL, REPEATED, LEARNED_OBSERVATION, NO_LABEL, NO_END]
    assert len(FLAGS) == 5


def test_a_run_without_tools_misses_no_calls(tmp_path: Path):
    row = make_sample(1, turns=[("model", "It is \\boxed{60}.<|im_end|>")], reward=1.0)
    assert flags_of(tmp_path, row) == [0]


# Hostile text


def test_no_text_leaves_its_string(tmp_path: Path):
    """Each data file is ASCII, one line, one call, without `<`; its value is the text, unchanged."""
    rows = [
        make_sample(i, turns=[("model", text)], label=text, error=text, metadata={text: text}, source=text)
        for i, text in enumerate(HOSTILE)
    ]
    page_of(run_of(tmp_path / "run", *rows), tmp_path / "page")
    files = list((tmp_path / "page" / "data").rglob("*.js"))
    assert len(files) == 5
    for path in files:
        text = path.read_bytes()
        assert text.isascii() and text.count(b"\n") == 1 and text.endswith(b");\n") and b"<" not in text
        assert re.match(rb'viewerData\("[a-z0-9/]+",[\[{]', text)
    texts = data(tmp_path / "page" / "data" / "a" / "texts" / "0000.js")
    assert [sample["parts"][0][1] for sample in texts["samples"]] == list(HOSTILE)


@pytest.mark.skipif(shutil.which("node") is None, reason="node reads the files as a browser does")
def test_a_script_engine_reads_the_same_values(tmp_path: Path):
    file = tmp_path / "data" / "x.js"
    write_data(file, "x", {text: [text] for text in HOSTILE})
    read = "let out; globalThis.viewerData = (n, v) => (out = v); require(process.argv[1]); "
    done = subprocess.run(
        ["node", "-e", read + "console.log(JSON.stringify(out))", str(file)], capture_output=True, check=True
    )
    assert json.loads(done.stdout) == {text: [text] for text in HOSTILE}


def test_a_line_of_a_megabyte_is_kept_whole_and_ends_its_piece(tmp_path: Path):
    rows = [make_sample(i, turns=[("model", "x" * 1_100_000)]) for i in range(3)] + [make_sample(3)]
    described = page_of(run_of(tmp_path / "run", *rows), tmp_path / "page")
    assert described["starts"] == [0, 2]
    texts = data(tmp_path / "page" / "data" / "a" / "texts" / "0000.js")
    assert len(texts["samples"][0]["parts"][0][1]) == 1_100_000


def test_numbers_that_are_not_finite_do_not_reach_the_page(tmp_path: Path):
    row = make_sample(0, reward={"score": 1.0, "entropy": float("nan")}, rollout_log_probs=None)
    row["rollout_log_probs"] = [float("-inf")] * row["response_length"]
    described = page_of(run_of(tmp_path / "run", row), tmp_path / "page")
    assert described["columns"]["log_prob"] == [None]
    assert data(tmp_path / "page" / "data" / "a" / "texts" / "0000.js")["samples"][0]["reward"]["entropy"] == "nan"


# Search index


def test_a_piece_is_found_by_every_text_it_holds():
    text = "The Result of x = 3 * 14 is 42, said été 🙂."
    bits = trigram_bits(text)
    for start in range(0, len(text) - 6, 3):
        wanted = trigram_bits(text[start : start + 6].swapcase() if start < 24 else text[start : start + 6])
        assert not np.any(wanted & ~bits)
    assert bits.sum() <= len(text) + 1 and len(bits) == TRIGRAM_BITS


def test_a_trigrams_place_is_that_of_the_page():
    """store.js: (first * 961 + second * 31 + third) % bits, of UTF-16 units, ASCII in lower case."""
    assert list(np.flatnonzero(trigram_bits("Abc"))) == [(97 * 961 + 98 * 31 + 99) % TRIGRAM_BITS]


# Sizes


def test_a_page_is_smaller_than_its_dump(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=10, groups=8, size=8)
    page = build_page([run], tmp_path / "page")
    dumped = sum(path.stat().st_size for path in (run / "rollouts").iterdir())
    assert page.samples == 10 * 64 + 16 and page.size < dumped
    assert page.size == sum(path.stat().st_size for path in (tmp_path / "page").rglob("*") if path.is_file())


def test_fifty_thousand_rows_stay_one_compact_piece(tmp_path: Path):
    """The table's columns are loaded at once: they may take no more than 100 bytes a sample."""
    row = make_sample(0, turns=[("model", "\\boxed{60}<|im_end|>")])
    line = json.dumps(row)
    path = tmp_path / "run" / "rollouts" / "rollout_000000.jsonl"
    path.parent.mkdir(parents=True)
    head = f'"index": {row["index"]},'
    assert head in line
    path.write_text("".join(line.replace(head, f'"index": {i},', 1) + "\n" for i in range(50_000)))
    described = page_of(tmp_path / "run", tmp_path / "page")
    assert described["columns"]["index"] == list(range(50_000)) and len(described["starts"]) == 250
    assert (tmp_path / "page" / "data" / "a" / "run.js").stat().st_size < 50_000 * 100


# Text


def test_a_folder_is_listed_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run", steps=2, groups=1, size=3)
    assert main(["view", str(run), "--limit", "4"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^ +(\d+) samples  .*/(\w+/\w+)\.jsonl$", out, re.MULTILINE) == [
        ("3", "rollouts/rollout_000000"), ("3", "rollouts/rollout_000001"), ("6", "eval/aime_000001"),
    ]  # fmt: skip
    assert re.findall(r"^sample (\d+)", out, re.MULTILINE) == ["0", "1", "2", "3"]
    assert main(["view", str(run / "eval"), "--index", "5"]) == 0
    assert re.findall(r"^sample (\d+)", capsys.readouterr().out, re.MULTILINE) == ["5"]


def test_a_compressed_dump_is_counted_by_its_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = "".join(json.dumps(make_sample(index)) + "\n" for index in range(20)).encode()
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "rollout_000000.jsonl.gz").write_bytes(gzip.compress(lines))
    assert main(["view", str(tmp_path), "--limit", "1"]) == 0
    assert re.findall(r"^ +(\d+) samples", capsys.readouterr().out, re.MULTILINE) == ["20"]
    (tmp_path / "rollouts" / "rollout_000000.jsonl.gz").write_bytes(gzip.compress(lines)[:-20])
    assert main(["view", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "rollout_000000.jsonl.gz cannot be read" in error and error.count("\n") == 1


def test_half_of_a_surrogate_pair_is_shown_as_its_escape(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_of(tmp_path, make_sample(0) | {"response": "it is \ud800 half a pair", "label": "\udfff"})
    assert main(["view", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "it is \\ud800 half a pair" in out and "label \\udfff" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}/nowhere"], "no such file or folder"),
        (["{}/empty"], "holds no samples; give the --output-dir"),
        (["{}/empty", "{}/empty"], "2 runs were given; text shows one run at a time"),
        (["{}/nowhere", "--out", "{}/page"], "is not a folder; a page needs the --output-dir"),
        (["{}/empty", "--out", "{}/page"], "holds no samples"),
        (["{}/run", "{}/run", "{}/run", "--out", "{}/page"], "3 runs were given"),
        (["{}/run", "--out", "{}/page", "--reward-key", "points"], "line 1: the reward has no entry 'points'"),
    ],
)
def test_what_cannot_be_shown_is_one_line(arguments: list[str], said: str, tmp_path: Path, capsys):
    (tmp_path / "empty").mkdir()
    run_of(tmp_path / "run", make_sample(0))
    assert main(["view", *(argument.format(tmp_path) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_the_command_says_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run", steps=2)
    assert main(["view", str(run), "--out", str(tmp_path / "page")]) == 0
    assert f"{tmp_path}/page/index.html: 40 samples, 2 steps of metrics" in capsys.readouterr().out
