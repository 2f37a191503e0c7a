r"""`slime-retool data check FILE...`: whether data files can be used, before a run is started on them.

Every row is read, rendered with the tokenizer's chat template (`--tokenizer`) and, where it has an answer, scored: the
row's own answer, put in a box, must be right by both rules of `--rm-type`. Conversations are tokenized as SFT does.
Exit code 1 when a row fails, 2 when a file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_retool.chat import ChatTemplate, load_tokenizer
from slime_retool.data.loss_mask import tokenize_conversation
from slime_retool.data.messages import parse_messages, parse_tools
from slime_retool.data.questions import question_and_answer
from slime_retool.data.readers import Row, read_rows
from slime_retool.errors import DataError, SlimeRetoolError, run_command
from slime_retool.reward import compute_score

PROG = "slime-retool data check"
MODES = ("dapo", "math_verify")
SHOWN = 5


@dataclass
class Report:
    """What was found in one file."""

    file: str
    rows: int = 0
    conversations: int = 0
    """Rows with a `messages` column; the others are questions with answers."""
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    """Mode -> rows whose own answer it does not score as right."""
    failures: list[str] = field(default_factory=list)
    """What is wrong with which row."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each rendered prompt or conversation."""
    supervised: int = 0
    labels: dict[str, set[str]] = field(default_factory=dict)
    """Question -> its answers."""

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {"file": self.file, "rows": self.rows, "failures": len(self.failures)}
        if self.conversations:
            found["conversations"] = self.conversations
        if self.labels:
            found["unique_questions"] = len(self.labels)
            found["contradictory_questions"] = sum(len(answers) > 1 for answers in self.labels.values())
            found |= {f"own_answer_wrong_{mode}": count for mode, count in self.wrong.items()}
        if self.lengths:
            ordered = sorted(self.lengths)
            found["tokens"] = sum(ordered)
            found |= {f"tokens_p{p}": ordered[round((len(ordered) - 1) * p / 100)] for p in (50, 95, 100)}
        if self.conversations and self.lengths:
            found["supervised_tokens"] = self.supervised
        return found


def check_file(path: str, template: ChatTemplate | None = None) -> Report:
    """Check every row. Raises ConfigError or DataError for a file that cannot be read at all."""
    report = Report(path)
    for number, row in enumerate(read_rows(path), start=1):
        report.rows += 1
        try:
            if row.get("messages") is not None:
                _check_conversation(report, row, template)
            else:
                _check_question(report, row, number, template)
        except DataError as error:
            report.failures.append(f"row {number}: {error}")
    return report


def _check_conversation(report: Report, row: Row, template: ChatTemplate | None) -> None:
    report.conversations += 1
    messages = parse_messages(row["messages"], "messages")
    tools = parse_tools(row.get("tools"), "tools")
    if template is not None:
        ids, mask = tokenize_conversation(template, messages, tools)
        report.lengths.append(len(ids))
        report.supervised += sum(mask)


def _check_question(report: Report, row: Row, number: int, template: ChatTemplate | None) -> None:
    question, answer = question_and_answer(row, "the row")
    report.labels.setdefault(question.strip(), set()).add(answer)
    if template is not None:
        prompt = row.get("prompt")
        messages = [{"role": "user", "content": question}] if prompt is None or isinstance(prompt, str) else prompt
        ids = template.prompt_ids(parse_messages(messages, "prompt"), parse_tools(row.get("tools"), "tools"))
        report.lengths.append(len(ids))
    for mode in MODES:
        if not compute_score(f"Answer: \\boxed{{{answer}}}", answer, mode)["acc"]:
            report.wrong[mode] += 1
            report.failures.append(f"row {number}: its own answer {answer!r} is not right by {mode}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help=".jsonl or .parquet; FILE@[a:b] for some of its rows")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of a Hugging Face tokenizer with a chat template")
    args = parser.parse_args(argv)
    return run_command(PROG, lambda: _check(args.files, args.tokenizer), mistakes=SlimeRetoolError)


def _check(files: Sequence[str], tokenizer_folder: str | None) -> int:
    """Print a line of JSON for each file, and its first failures on stderr. Returns 1 when there are any."""
    template = ChatTemplate(load_tokenizer(tokenizer_folder, "--tokenizer")) if tokenizer_folder is not None else None
    failed = False
    for file in files:
        report = check_file(file, template)
        failed = failed or bool(report.failures)
        print(json.dumps(report.summary(), ensure_ascii=False))
        for failure in report.failures[:SHOWN]:
            print(f"  {failure}", file=sys.stderr)
        if len(report.failures) > SHOWN:
            print(f"  and {len(report.failures) - SHOWN} more", file=sys.stderr)
    return int(failed)
