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

from megatron_bridge.flags import option_name
from slime_retool.chat import ChatTemplate, load_tokenizer
from slime_retool.config import Config
from slime_retool.data.loss_mask import tokenize_conversation
from slime_retool.data.questions import known_columns
from slime_retool.data.readers import Row, read_rows
from slime_retool.data.rows import check_sample, read_sample
from slime_retool.errors import SlimeRetoolError, UserError, run_command
from slime_retool.reward import compute_score
from slime_retool.rollout.generate import check_prompt as check_no_tools
from slime_retool.rollout.hooks import row_checks
from slime_retool.types import Message, Sample, ToolSchema

PROG = "slime-retool data check"
MODES = ("dapo", "math_verify")
COLUMNS = ("input_key", "label_key", "tool_key", "metadata_key")
HOOKS = ("custom_generate_function_path", "custom_rm_path")
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


def check_file(path: str, template: ChatTemplate | None = None, config: Config | None = None) -> Report:
    """Check every row as training reads it. Raises ConfigError or DataError for a file that cannot be read at all.

    `config` names columns and hooks. Without it the first known columns of a row are read, and text is a question.
    """
    report = Report(path)
    checks = row_checks(config or Config())
    if config is None or config.custom_generate_function_path is None:
        checks = [check for check in checks if check is not check_no_tools]  # a hook that runs tools may be meant
    for number, row in enumerate(read_rows(path), start=1):
        report.rows += 1
        try:
            sample = read_sample(row, number - 1, config or _guess(row))
            if isinstance(sample.prompt, list) and _is_conversation(sample, row, config):
                _check_conversation(report, sample.prompt, sample.tools, template)
            else:
                ids = check_sample(sample, config or Config(), template, checks, measure=True)
                report.lengths += [] if template is None else [ids]
                _check_question(report, sample, number)
        except UserError as error:
            report.failures.append(f"row {number}: {error}")
    return report


def _guess(row: Row) -> Config:
    """What training has to be told to read this row."""
    if row.get("messages") is not None:
        return Config(input_key="messages")
    input_key, label_key = known_columns(row, "the row")
    return Config(input_key=input_key, label_key=label_key, apply_chat_template=True)


def _is_conversation(sample: Sample, row: Row, config: Config | None) -> bool:
    """Whether the row is one to learn from in SFT, and not a prompt."""
    if config is None:
        return row.get("messages") is not None
    return sample.label is None and isinstance(sample.prompt, list) and sample.prompt[-1]["role"] == "assistant"


def _check_conversation(
    report: Report, messages: list[Message], tools: list[ToolSchema] | None, template: ChatTemplate | None
) -> None:
    report.conversations += 1
    if template is not None:
        ids, mask = tokenize_conversation(template, messages, tools)
        report.lengths.append(len(ids))
        report.supervised += sum(mask)


def _check_question(report: Report, sample: Sample, number: int) -> None:
    answer = sample.label
    if answer is None:  # and the reward hook needs none
        return
    told = [sample.prompt] if isinstance(sample.prompt, str) else [message["content"] for message in sample.prompt]
    report.labels.setdefault("\n".join(told).strip(), set()).add(answer)
    for mode in MODES:
        if not compute_score(f"Answer: \\boxed{{{answer}}}", answer, mode)["acc"]:
            report.wrong[mode] += 1
            report.failures.append(f"row {number}: its own answer {answer!r} is not right by {mode}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help=".jsonl or .parquet; FILE@[a:b] for some of its rows")
    parser.add_argument(
        "--tokenizer", "--hf-checkpoint", metavar="DIR", help="folder of a Hugging Face tokenizer with a chat template"
    )
    group = parser.add_argument_group("as training has them (default: the first known columns that a row has)")
    for name in COLUMNS + HOOKS:
        group.add_argument(option_name(name), metavar="NAME" if name in COLUMNS else "MODULE.FUNCTION")
    group.add_argument("--apply-chat-template", action="store_true", help="text prompts are one user message")
    args = parser.parse_args(argv)
    given = {name: value for name in COLUMNS + HOOKS if (value := vars(args)[name]) is not None}
    config = Config(apply_chat_template=args.apply_chat_template, **given) if given else None
    return run_command(PROG, lambda: _check(args.files, args.tokenizer, config), mistakes=SlimeRetoolError)


def _check(files: Sequence[str], tokenizer_folder: str | None, config: Config | None) -> int:
    """Print a line of JSON for each file, and its first failures on stderr. Returns 1 when there are any."""
    template = ChatTemplate(load_tokenizer(tokenizer_folder, "--tokenizer")) if tokenizer_folder is not None else None
    failed = False
    for file in files:
        report = check_file(file, template, config)
        failed = failed or bool(report.failures)
        print(json.dumps(report.summary(), ensure_ascii=False))
        for failure in report.failures[:SHOWN]:
            print(f"  {failure}", file=sys.stderr)
        if len(report.failures) > SHOWN:
            print(f"  and {len(report.failures) - SHOWN} more", file=sys.stderr)
    return int(failed)
