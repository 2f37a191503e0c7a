"""examples/reference: worked answers as programs, programs as conversations, the tables, and the script's steps."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "reference"
sys.path.insert(0, str(EXAMPLE))

import coder_models  # noqa: E402
import evidence  # noqa: E402
import program_hooks  # noqa: E402
import program_traces  # noqa: E402
import questions  # noqa: E402
import tables  # noqa: E402

from slime_retool.data.leakage import EvaluationQuestions  # noqa: E402
from slime_retool.rollout.statistics import estimate  # noqa: E402

ANSWER = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TestProgramOf:
    def test_each_calculation_is_a_line_that_uses_earlier_results_by_name(self) -> None:
        assert program_traces.program_of(ANSWER) == (
            "# Natalia sold 48/2 = 24 clips in May.\n"
            "clips_in_may = 48 / 2\n"
            "# Natalia sold 48+24 = 72 clips altogether in April and May.\n"
            "answer = 48 + clips_in_may\n"
            "print(answer)"
        )

    def test_percentages_and_thousands_are_numbers(self) -> None:
        code = program_traces.program_of("He saves 20%*1,500=$<<20%*1500=300>>300.\n#### 300")
        assert code is not None and "answer = 20 / 100 * 1500" in code

    def test_a_number_within_a_number_is_not_replaced(self) -> None:
        code = program_traces.program_of("a <<3*4=12>>12 apples, then <<12*112=1344>>1344\n#### 1344")
        assert code is not None and "answer = apples * 112" in code

    @pytest.mark.parametrize("formula", ["x*2", "__import__('os')", "2**9", "1/0", "3 4"])
    def test_what_is_no_plain_arithmetic_makes_no_program(self, formula: str) -> None:
        assert program_traces.program_of(f"a <<{formula}=1>>1\n#### 1") is None

    def test_an_answer_without_marks_makes_no_program(self) -> None:
        assert program_traces.program_of("It is 4.\n#### 4") is None

    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("24 clips in May.", "clips_in_may"),
            ("$18 every day", "day"),
            ("5.", ""),
            ("3 class", ""),
            ("7 of them", ""),
        ],
    )
    def test_names_come_from_the_words_after_a_result(self, text: str, name: str) -> None:
        assert program_traces.name_of(text) == name


class TestConvert:
    def test_only_programs_that_print_the_answer_are_kept(self, tmp_path: Path) -> None:
        wrong = {"question": "b", "label": "73", "solution": ANSWER}
        jsonl(tmp_path / "train" / "gsm8k.jsonl", [{"question": "a", "label": "72", "solution": ANSWER}, wrong])
        assert program_traces.convert(tmp_path, "namespaces") == {"rows": 2, "programs": 2, "right": 1}
        (row,) = program_traces.read_jsonl(tmp_path / "converted.jsonl")
        assert (row["question"], row["output"]) == ("a", "72.0")


@pytest.mark.parametrize(
    ("code", "works"),
    [
        ("print(6 * 7)", True),
        ("from math import gcd\nprint(gcd(4, 6))", True),
        ("x = 42\nprint(x)", False),
        ("print(42)", False),
        ("y = 6 * 7\nprint(42)", False),
        ("print(", False),
    ],
)
def test_a_program_that_prints_a_constant_calculates_nothing(code: str, works: bool) -> None:
    assert program_traces.calculates(code) is works


def transcript(group: int, code: str, *, right: bool = True, status: str = "completed") -> dict[str, Any]:
    return {
        "group_index": group,
        "prompt": questions.Question(f"question {group}", "42").row()["program"],
        "status": status,
        "reward": {"acc": right},
        "metadata": {"thought": "Multiply.", "code": code, "output": "42"},
    }


class TestSelect:
    def run(self, folder: Path, lines: list[dict[str, Any]], *flags: str) -> dict[str, Any]:
        rows = [questions.Question(f"question {i}", "42").row() for i in range(4)]
        jsonl(folder / "train" / "gsm8k.jsonl", rows)
        jsonl(
            folder / "converted.jsonl",
            [{"question": "question 3", "label": "42", "code": "print(40 + 2)", "output": "42"}],
        )
        samples = jsonl(folder / "samples.jsonl", lines)
        command = [sys.executable, str(EXAMPLE / "program_traces.py"), "select", "--prepared", str(folder)]
        command += ["--samples", f"gsm8k={samples}", "--output-dir", str(folder / "out"), *flags]
        subprocess.run(command, check=True, env={"PYTHONPATH": f"{ROOT}", "PATH": ""}, capture_output=True)
        return json.loads((folder / "out" / "selection.json").read_text())

    def test_right_programs_that_differ_become_conversations_and_gaps_are_filled(self, tmp_path: Path) -> None:
        lines = [
            transcript(0, "print(6 * 7)"),
            transcript(0, "print(6*7)  # the same"),
            transcript(0, "print(7 * 6)"),
            transcript(1, "print(6 * 8)", right=False),
            transcript(2, "print(42)"),
        ]
        found = self.run(tmp_path, lines)
        assert found["gsm8k"]["own_conversations"] == 2
        assert found["gsm8k"]["converted_conversations"] == 1
        assert found["conversations"] == 3
        rows = program_traces.read_jsonl(tmp_path / "out" / "sft.jsonl")
        calls = {row["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"] for row in rows}
        assert calls == {"print(6 * 7)", "print(7 * 6)", "print(40 + 2)"}
        assert all(row["messages"][-1]["content"] == "<answer>\\boxed{42}</answer>" for row in rows)

    def test_rl_gets_what_was_solved_sometimes_or_not_tried(self, tmp_path: Path) -> None:
        never, always = transcript(1, "x", right=False), transcript(2, "print(6 * 7)")
        self.run(tmp_path, [transcript(0, "print(6 * 7)"), never, *[always] * 4])
        rows = program_traces.read_jsonl(tmp_path / "out" / "rl" / "gsm8k.jsonl")
        assert sorted(row["question"] for row in rows) == ["question 0", "question 3"]

    def test_a_lost_sample_is_no_try(self) -> None:
        rows = [questions.Question("question 0", "42").row()]
        (one,) = program_traces.tried(rows, [transcript(0, "", right=False, status="failed")])
        assert one.tries == 0 and program_traces.fit_for_rl(one)

    def test_transcripts_of_other_questions_are_refused(self) -> None:
        rows = [questions.Question("another", "42").row()]
        with pytest.raises(ValueError, match="other questions"):
            program_traces.tried(rows, [transcript(0, "print(6 * 7)")])

    def test_a_transcript_that_is_still_being_written_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"a": 1}\n{"a": ')
        assert program_traces.read_jsonl(path) == [{"a": 1}]
        path.write_text('{"a": \n{"a": 1}\n')
        with pytest.raises(ValueError):
            program_traces.read_jsonl(path)


class TestPrograms:
    def test_the_first_program_and_the_thought_before_it(self) -> None:
        text = "### Plan\nMultiply both. Here is the program:\n\n```python\nprint(6 * 7)\n```\nIt prints 42.\n"
        text += "```python\nprint(1)\n```"
        assert program_hooks.split_answer(text) == ("Multiply both.", "print(6 * 7)")

    def test_text_without_a_closed_block_has_no_program(self) -> None:
        assert program_hooks.split_answer("```python\nprint(1)") == ("", "")

    def test_a_long_thought_is_left_out(self) -> None:
        assert program_hooks.thought_of("x" * (program_hooks.MAX_THOUGHT + 1)) == ""


class TestData:
    def test_repeated_test_questions_are_left_out_and_listed(self) -> None:
        leaked = questions.Question("How many apples are there in two full boxes of twelve red apples each?", "24")
        fresh = questions.Question("What is the sum of the first seven primes?", "58")
        index = EvaluationQuestions([("gsm8k 1", leaked.question.upper())])
        kept, left_out = questions.without_leaks("math", [leaked, fresh], index)
        assert kept == [fresh]
        assert [(row["set"], row["evaluation"]) for row in left_out] == [("math", "gsm8k 1")]

    def test_a_question_with_two_answers_is_left_out_of_dapo(self, tmp_path: Path) -> None:
        rows = [
            {"prompt": [{"role": "user", "content": question}], "reward_model": {"ground_truth": answer}}
            for question, answer in [("a", "1"), ("a", "2"), ("b", "3"), ("b", "3")]
        ]
        assert questions.dapo_math(jsonl(tmp_path / "dapo.jsonl", rows)) == [questions.Question("b", "3")]

    def test_a_blank_answer_is_no_question(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "a.jsonl", [{"problem": "a", "answer": " "}, {"problem": "b", "answer": "1,000"}])
        assert questions.columns(path, "problem", "answer") == [questions.Question("b", "1000")]

    def test_gsm8k_labels_are_the_number_after_the_marks(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "a.jsonl", [{"question": " q ", "answer": "work\n#### 1,234"}])
        assert [(row.question, row.label) for row in questions.gsm8k(path)] == [("q", "1234")]


class TestModels:
    def test_parts_that_are_another_file_are_refused(self, tmp_path: Path) -> None:
        digest = hashlib.sha256(b"onetwo").hexdigest()
        coder_models.join(iter([b"one", b"two"]), digest, tmp_path / "a")
        assert (tmp_path / "a").read_bytes() == b"onetwo"
        with pytest.raises(SystemExit, match="SHA-256"):
            coder_models.join(iter([b"one", b"2"]), digest, tmp_path / "b")

    def test_pieces_join_to_the_file_they_are_of(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(coder_models, "PIECE_BYTES", 7)
        data_bytes = bytes(range(100))
        (tmp_path / "file").write_bytes(data_bytes)
        coder_models.save_pieces(tmp_path / "file", tmp_path / "pieces")
        assert b"".join(coder_models.carried_parts(tmp_path / "pieces")) == data_bytes

    @pytest.mark.parametrize(
        ("gguf", "hf"),
        [
            ("blk.3.attn_q.bias", "model.layers.3.self_attn.q_proj.bias"),
            ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
            ("output.weight", "model.embed_tokens.weight"),
            ("output_norm.weight", "model.norm.weight"),
        ],
    )
    def test_names_of_tensors(self, gguf: str, hf: str) -> None:
        assert coder_models.hf_name(gguf) == hf


def sample(index: int, *, right: bool, tool: bool = True, status: str = "completed") -> dict[str, Any]:
    return {
        "index": index, "group_index": index, "status": status, "label": "1", "response": f"answer {index}",
        "prompt": [{"role": "user", "content": f"question {index}"}], "reward": {"acc": right},
        "num_tool_calls": int(tool), "num_tool_errors": 0, "response_length": 5,
    }  # fmt: skip


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A run's folder: a base model in both forms, two seeds of GRPO and a control, on four problems a set."""
    folder = tmp_path / "work"
    rights = {
        ("base_plain", -1): (0, 0, 0, 1), ("base_tool", -1): (0, 0, 0, 0),
        ("rl_grpo_1", -1): (1, 0, 0, 1), ("rl_grpo_1", 3): (1, 1, 0, 1),
        ("rl_grpo_2", -1): (1, 0, 0, 1), ("rl_grpo_2", 3): (1, 1, 1, 1),
        ("rl_plain_1", -1): (0, 0, 0, 1), ("rl_plain_1", 3): (0, 0, 1, 1),
    }  # fmt: skip
    for (run, rollout), marks in rights.items():
        for name in tables.SETS:
            # Written in the order in which they end.
            rows = [sample(i, right=bool(mark), tool="plain" not in run) for i, mark in enumerate(marks)][::-1]
            jsonl(folder / "1.5b" / run / "eval" / f"{name}_{rollout:06d}.jsonl", rows)
    for run in ("sft", "rl_grpo_1", "rl_grpo_2", "rl_plain_1"):
        steps = [
            {"step": i, "rollout/accuracy": i / 10, "perf/step_seconds": 10.0 + i, "perf/train_mfu": 0.5}
            for i in range(5)
        ]
        jsonl(folder / "1.5b" / run / "metrics.jsonl", steps)
    (folder / "1.5b" / "sft" / "command.txt").write_text(f"/usr/bin/python3.12 -m train --save {folder}/1.5b/sft")
    jsonl(folder / "times.jsonl", [{"step": "1.5b/sft", "begin": 100.0, "end": 160.5}])
    return folder


class TestReport:
    def made(self, work: Path) -> dict[str, str]:
        results = work.parent / "results"
        evidence.collect(work, results / "data")
        return tables.report(results)

    def test_the_summary_takes_the_better_base_and_the_mean_of_the_seeds(self, work: Path) -> None:
        summary = json.loads(self.made(work)["summary.json"])
        assert summary["qwen2.5-coder-1.5b"] == {
            "seeds": 2,
            "gsm8k": {"base": 0.25, "sft": 0.5, "rl": 0.875},
            "math500": {"base": 0.25, "sft": 0.5, "rl": 0.875},
            "tool_use": {"base": 1.0, "sft": 1.0, "rl": 1.0},
        }
        assert summary["peer"]["verl"]["step_ratio"] is None and summary["peer"]["verl"]["why"]

    def test_a_peer_that_was_measured_has_a_table_of_its_phases(self, work: Path) -> None:
        assert "## Peers" not in self.made(work)["tables.md"]
        times = {"ours_seconds": {"step": 4.0, "update": 0.25}, "theirs_seconds": {"step": 10.0, "log_probs": 0.5}}
        (work.parent / "results" / "peer.json").write_text(json.dumps({"trl": {"step_ratio": 2.5, **times}}))
        made = self.made(work)
        assert made["tables.md"].endswith(
            "| trl | step | 4.00 | 10.00 | 2.50 |\n| trl | update | 0.25 |  |  |\n| trl | log_probs |  | 0.50 |  |\n"
        )
        assert {name: entry["step_ratio"] for name, entry in json.loads(made["summary.json"])["peer"].items()} == {
            "verl": None, "trl": 2.5,
        }  # fmt: skip

    def test_intervals_are_over_problems_not_over_answers(self, work: Path) -> None:
        found = estimate([1.0, 1.0, 0.5, 1.0])
        cell = f"87.5 % ({100 * found.low:.1f} to {100 * found.high:.1f})"
        (row,) = [line for line in self.made(work)["tables.md"].splitlines() if "mean of 2 seeds" in line]
        assert row.split(" | ")[1] == cell

    def test_medians_leave_out_the_first_steps(self, work: Path) -> None:
        (row,) = [line for line in self.made(work)["tables.md"].splitlines() if line.startswith("| rl_grpo_1 ")]
        assert " | 13.00 | " in row and "50.0 %" in row

    def test_the_engines_share_is_told_where_it_was_measured(self, work: Path) -> None:
        assert "of the same engine" not in self.made(work)["tables.md"]
        (work / "1.5b" / "engine_rate.json").write_text('{"engine_share": 63.4, "shares": {"10": 62.2, "20": 64.6}}')
        line = "Generation reaches 63 % of the tokens per second of the same engine on the same lengths without turns, "
        assert f"{line}tools and rewards (62 % in rollout 10, 65 % in rollout 20)." in self.made(work)["tables.md"]

    def test_a_sample_lost_to_an_outage_is_in_no_accuracy(self, work: Path) -> None:
        rows = [sample(0, right=True), sample(1, right=False, status="failed"), sample(2, right=False)]
        jsonl(work / "1.5b" / "base_plain" / "eval" / "gsm8k_-00001.jsonl", rows)
        assert json.loads(self.made(work)["summary.json"])["qwen2.5-coder-1.5b"]["gsm8k"]["base"] == 0.5

    def test_a_run_that_was_cut_short_shows_what_it_measured(self, work: Path) -> None:
        (work / "1.5b" / "rl_grpo_2" / "eval" / "math500_000003.jsonl").unlink()
        summary = json.loads(self.made(work)["summary.json"])["qwen2.5-coder-1.5b"]
        assert summary["seeds"] == 1 and summary["gsm8k"]["rl"] == 0.75

    def test_an_evaluation_that_is_not_complete_is_left_out(self, work: Path) -> None:
        """Short answers end first: half of them say something else than all."""
        evaluation = work / "1.5b" / "rl_grpo_2" / "eval" / "math500_000003"
        for prompts, seeds in ((4, 2), (5, 1)):
            setting = {"prompts": prompts, "samples_per_prompt": 1}
            evaluation.with_suffix(".setting.json").write_text(json.dumps(setting))
            assert json.loads(self.made(work)["summary.json"])["qwen2.5-coder-1.5b"]["seeds"] == seeds

    def test_a_seed_that_was_cut_short_is_in_no_mean_with_the_others(self, work: Path) -> None:
        for name in tables.SETS:
            evaluation = work / "1.5b" / "rl_grpo_2" / "eval" / f"{name}_000003.jsonl"
            evaluation.rename(evaluation.with_name(f"{name}_000001.jsonl"))
        made = self.made(work)
        assert json.loads(made["summary.json"])["qwen2.5-coder-1.5b"]["gsm8k"]["rl"] == 0.75
        assert "| GRPO, seed 2, cut short after rollout 2 |" in made["tables.md"] and "mean of" not in made["tables.md"]

    def test_aime_is_told_by_the_mean_over_the_samples_of_a_problem(self, work: Path) -> None:
        assert "AIME" not in self.made(work)["tables.md"]
        rows = [sample(i, right=right) | {"group_index": i // 2} for i, right in enumerate((True, False, True, True))]
        jsonl(work / "1.5b" / "aime" / "eval" / "aime24_-00001.jsonl", rows)
        found = estimate([0.5, 1.0])
        line = f"AIME 2024 mean@2 75.0 % ({100 * found.low:.1f} to {100 * found.high:.1f})."
        assert f"The first run's model, sampled at temperature 1: {line}" in self.made(work)["tables.md"]

    def test_steps_of_a_stream_are_told_by_their_mean(self, work: Path) -> None:
        steps = [{"step": i, "perf/step_seconds": seconds} for i, seconds in enumerate((99.0, 99.0, 40.0, 10.0, 10.0))]
        jsonl(work / "1.5b" / "rl_stream_1" / "metrics.jsonl", steps)
        assert "| rl_stream_1 (means) | 5 | 20.00 |" in self.made(work)["tables.md"]

    def test_the_same_files_give_the_same_bytes(self, work: Path) -> None:
        assert self.made(work) == self.made(work)

    def test_curves_are_an_svg_with_a_line_for_each_run(self, work: Path) -> None:
        from xml.etree import ElementTree

        root = ElementTree.fromstring(self.made(work)["curves-1.5b.svg"])
        lines = root.findall("{http://www.w3.org/2000/svg}polyline")
        assert len(lines) == 3 + 6

    def test_the_readme_gets_the_table_between_its_marks(self, work: Path) -> None:
        self.made(work)
        readme = work / "README.md"
        readme.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
        text = tables.readme_lines(work.parent / "results", readme)
        assert text.startswith(f"before\n{tables.BEGIN}\n**qwen2.5-coder-1.5b**") and "old" not in text
        assert text.endswith(f"{tables.END}\nafter\n")


class TestCollect:
    def test_transcripts_are_spread_over_the_last_evaluation_of_the_first_run(self, work: Path) -> None:
        evidence.collect(work, work.parent / "data")
        rows = program_traces.read_jsonl(work.parent / "data" / "1.5b" / "transcripts.jsonl")
        assert {(row["run"], row["set"]) for row in rows} == {("rl_grpo_1", "gsm8k"), ("rl_grpo_1", "math500")}
        assert [row["problem"] for row in rows[:4]] == [0, 1, 2, 3]
        assert evidence.spread([{"n": i} for i in range(10)], 3) == [{"n": 0}, {"n": 3}, {"n": 6}]

    def test_folders_of_the_host_are_not_kept(self, work: Path) -> None:
        evidence.collect(work, work.parent / "data")
        text = (work.parent / "data" / "1.5b" / "sft" / "command.txt").read_text()
        assert text == "python -m train --save $WORK/1.5b/sft"

    def test_a_package_also_holds_answers_and_logs(self, work: Path) -> None:
        import tarfile

        (work / "logs" / "1.5b").mkdir(parents=True)
        (work / "logs" / "1.5b" / "sft.log").write_text("line\n" * 100)
        evidence.pack(work, work / "packed" / "results.tar.xz")
        with tarfile.open(work / "packed" / "results.tar.xz") as archive:
            names = archive.getnames()
            log = archive.extractfile("data/logs/1.5b/sft.log")
            assert log is not None and len(log.read().splitlines()) == evidence.LOG_LINES
        assert "data/1.5b/answers.jsonl" in names and "data/1.5b/outcomes.jsonl" in names


def test_committed_results_are_what_the_report_makes_of_their_files() -> None:
    """docs/results holds nothing that is not made from docs/results/data."""
    results = ROOT / "docs" / "results"
    for name, text in tables.report(results).items():
        assert (results / name).read_text(encoding="utf-8") == text, name
    readme = ROOT / "README.md"
    assert tables.readme_lines(results, readme) == readme.read_text(encoding="utf-8")


class TestScript:
    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, **variables}
        return subprocess.run(["bash", str(EXAMPLE / "run.sh"), *words], env=env, capture_output=True, text=True)

    def program(self, path: Path, text: str) -> str:
        """A program of that name that does what the lines of bash say."""
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def test_an_unknown_step_is_refused_with_the_list(self, tmp_path: Path) -> None:
        done = self.run("nonsense", WORK=str(tmp_path))
        assert done.returncode == 2 and "models | data | traces" in done.stderr

    def test_a_finished_step_is_not_repeated_and_a_failed_one_is(self, tmp_path: Path) -> None:
        failed = self.run("data", WORK=str(tmp_path / "w"), DATA_DIR=str(tmp_path / "none"))
        assert failed.returncode == 1 and "gsm8k" in failed.stderr
        (tmp_path / "w" / "done" / "prepared").mkdir(parents=True, exist_ok=True)
        for name in ("data", "converted"):
            (tmp_path / "w" / "done" / "prepared" / name).touch()
        again = self.run("data", WORK=str(tmp_path / "w"), DATA_DIR=str(tmp_path / "none"))
        assert again.returncode == 0 and again.stdout.count("done before") == 2

    def test_each_algorithm_of_runs_has_its_flags_and_others_are_refused(self, tmp_path: Path) -> None:
        python = self.program(tmp_path / "python", '[[ "$*" == *"$WANTED"* ]]')
        for run, wanted in {
            "grpo:1": "--advantage-estimator grpo", "stream:1": "--max-staleness 1 --use-tis",
            "dapo:1": "--overlong-filtering", "ppo:1": "--advantage-estimator ppo", "plain:1": "--input-key plain",
            "sarsa:1": "",
        }.items():  # fmt: skip
            variables = {"WORK": str(tmp_path / run[:4]), "PYTHON": python, "WANTED": wanted}
            done = self.run("rl", MODEL="0.5b", RUNS=run, APART="0", DEVICE="cpu", **variables)
            assert done.returncode == (not wanted), (run, done.stderr)
        assert "an algorithm is grpo, stream, dapo, ppo or plain, got 'sarsa'" in done.stderr

    @pytest.mark.parametrize(
        ("parallel", "mps", "second", "shared"),
        [("2", "1", "grpo", True), ("2", "0", "grpo", False), ("1", "1", "grpo", False), ("1", "1", "stream", True)],
    )
    def test_runs_on_one_gpu_share_it_through_a_server_that_ends_with_them(
        self, tmp_path: Path, parallel: str, mps: str, second: str, shared: bool
    ) -> None:
        programs = tmp_path / "bin"
        server = '[[ $# -gt 0 ]] || read -r word; echo "server ${1:-}${word:-}" >> "$CALLS"'
        self.program(programs / "nvidia-cuda-mps-control", server)
        python = self.program(programs / "python", 'echo "run ${CUDA_MPS_PIPE_DIRECTORY:-alone}" >> "$CALLS"')
        calls = tmp_path / "calls"
        done = self.run(
            "rl", WORK=str(tmp_path / "w"), MODEL="0.5b", RUNS=f"grpo:1 {second}:2", DEVICE="cuda", APART="0",
            PARALLEL=parallel, MPS=mps, PYTHON=python, PATH=f"{programs}:/usr/bin:/bin",
            CALLS=str(calls),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = calls.read_text().splitlines()
        if not shared:
            assert lines == ["run alone", "run alone"]
            return
        assert (lines[0], lines[-1]) == ("server -d", "server quit") and len(lines) == 4
        (folder,) = {line.removeprefix("run ") for line in lines[1:3]}
        assert folder != "alone" and not Path(folder).exists()

    def test_the_first_run_with_the_tool_measures_the_sft_model(self, tmp_path: Path) -> None:
        python, runs = self.program(tmp_path / "python", "true"), ("plain_1", "grpo_1", "grpo_2")
        variables = {"WORK": str(tmp_path / "w"), "PYTHON": python, "RUNS": "plain:1 grpo:1 grpo:2"}
        assert self.run("rl", MODEL="0.5b", APART="0", DEVICE="cpu", **variables).returncode == 0
        commands = [(tmp_path / "w" / "0.5b" / f"rl_{run}" / "command.txt").read_text() for run in runs]
        assert ["--skip-eval-before-train" in command for command in commands] == [True, False, True]

    def test_an_export_that_a_killed_run_left_is_made_again(self, tmp_path: Path) -> None:
        python = self.program(tmp_path / "python", '[[ ! -e "$WORK/0.5b/rl_grpo_1/hf" ]]')
        left = tmp_path / "w" / "0.5b" / "rl_grpo_1" / "hf" / "model.safetensors"
        left.parent.mkdir(parents=True)
        left.touch()
        variables = {"WORK": str(tmp_path / "w"), "PYTHON": python, "RUNS": "grpo:1"}
        assert self.run("rl", MODEL="0.5b", APART="0", DEVICE="cpu", **variables).returncode == 0

    def test_the_rate_of_a_run_that_shared_its_gpu_is_refused(self, tmp_path: Path) -> None:
        done = self.run("rate", WORK=str(tmp_path), MODEL="0.5b", PARALLEL="5", DEVICE="cpu")
        assert done.returncode == 2 and "with PARALLEL=5 on 1 GPU(s) the first run shared its GPU" in done.stderr

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_what_runs_ends_with_the_script_and_no_other_script_joins_in(
        self, number: signal.Signals, status: int, tmp_path: Path
    ) -> None:
        """As with `kill` of the script alone, or a terminal's Ctrl-C; and with a command that is given twice."""
        calls, work = tmp_path / "calls", str(tmp_path / "w")
        told = "for n in INT TERM; do trap \"echo $n >> '$CALLS'; ended=1\" $n; done\necho begun >> \"$CALLS\""
        stays = "until [[ -n ${ended:-} ]]; do sleep 0.05; done\nsleep 0.5\nexit 130"
        variables = {
            "PATH": "/usr/bin:/bin", "PYTHON": self.program(tmp_path / "python", f"{told}\n{stays}"),
            "CALLS": str(calls), "WORK": work, "MODEL": "0.5b", "RUNS": "grpo:1 grpo:2", "APART": "0", "DEVICE": "cpu",
        }  # fmt: skip
        calls.touch()
        script = subprocess.Popen(
            ["bash", str(EXAMPLE / "run.sh"), "rl"], env=variables, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 60
            while calls.read_text().count("begun") < 2:
                assert script.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            other = self.run("sft", WORK=work, MODEL="0.5b", DEVICE="cpu")
            assert other.returncode == 2
            assert f"another run.sh, or what is left of one, works in WORK={work}" in other.stderr
            read = self.run("table", WORK=work, MODEL="0.5b", PYTHON="true")  # which may be at any time
            assert read.returncode == 0
        finally:
            if number == signal.SIGINT:
                os.killpg(script.pid, number)
            else:
                script.terminate()
            time.sleep(0.1)
            script.terminate()  # once more is no more
            ended = script.wait(60)
        assert ended == status
        assert calls.read_text().split() == ["begun", "begun", "TERM", "TERM"]

    def test_a_server_of_others_that_shares_the_gpu_is_used_and_stays(self, tmp_path: Path) -> None:
        calls, folder = tmp_path / "calls", tmp_path / "mps"
        folder.mkdir()
        self.program(tmp_path / "bin" / "nvidia-cuda-mps-control", 'echo server >> "$CALLS"')
        python = self.program(tmp_path / "bin" / "python", 'echo "run ${CUDA_MPS_PIPE_DIRECTORY}" >> "$CALLS"')
        done = self.run(
            "rl", WORK=str(tmp_path / "w"), MODEL="0.5b", RUNS="grpo:1", DEVICE="cuda", APART="0", PARALLEL="2",
            CUDA_MPS_PIPE_DIRECTORY=str(folder), CALLS=str(calls), PYTHON=python,
            PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert calls.read_text() == f"run {folder}\n" and folder.is_dir()

    @pytest.mark.parametrize(("seconds", "taken"), [("1", True), ("30", False)], ids=["time is over", "killed"])
    def test_programs_that_are_there_are_taken_when_the_time_is_over_and_only_then(
        self, seconds: str, taken: bool, tmp_path: Path
    ) -> None:
        left = "$WORK/programs/gsm8k/eval"
        text = f'mkdir -p "{left}"; echo 1 > "{left}/gsm8k_-00001.jsonl"; sleep "$LASTS"; kill -KILL $$'
        serves = 'while [[ "$1" != --url-file ]]; do shift; done; echo http://none > "$2"; sleep 100'
        python = self.program(
            tmp_path / "python",
            f'case "$*" in *shared_server.py*) {serves} ;; *" eval "*) {text} ;; *) exit 0 ;; esac',
        )
        (tmp_path / "w" / "prepared" / "train").mkdir(parents=True)
        (tmp_path / "w" / "prepared" / "train" / "gsm8k.jsonl").write_text("{}\n")
        done = self.run(
            "traces", WORK=str(tmp_path / "w"), MODEL="0.5b", DEVICE="cpu", PYTHON=python, SAMPLE_SECONDS=seconds,
            LASTS="2" if taken else "0",
        )  # fmt: skip
        assert (done.returncode == 0) is taken, done.stdout + done.stderr
        assert (tmp_path / "w" / "done" / "programs" / "gsm8k").exists() is taken
