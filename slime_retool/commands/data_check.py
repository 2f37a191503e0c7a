r"""`slime-retool data check FILE...`: whether data files can be used, before a run is started on them.

Every row is read, rendered with the tokenizer's chat template (`--tokenizer`) and, where it has an answer, scored: the
row's own answer, put in a box, must be right by both rules of `--rm-type`; by the one that is given, or with a
`--custom-rm-path` by what its `check_label` says. Conversations are tokenized as SFT does.
Each row that cannot be used is named, then rows that repeat a question; exit code 1 when there are any of the former, 2
when a file cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_retool.chat import ChatTemplate, load_tokenizer
from slime_retool.config import Config
from slime_retool.config.groups import RM_TYPES
from slime_retool.config.parse import build_parser
from slime_retool.config.validate import check_values
from slime_retool.data.loss_mask import refuse_empty_turns, require_assistant
from slime_retool.data.questions import known_columns
from slime_retool.data.readers import BadLine, Row, scan_rows
from slime_retool.data.rows import RowCheck, check_sample, read_sample
from slime_retool.errors import DataError, SlimeRetoolError, UnreadableLabel, UserError, run_command
from slime_retool.reward import compute_score
from slime_retool.rollout.generate import check_prompt as check_no_tools
from slime_retool.rollout.hooks import row_checks
from slime_retool.rollout.sft_tokens import NO_CONVERSATION, ConversationTokenizer
from slime_retool.types import Sample

PROG = "slime-retool data check"
READ = ("input_key", "label_key", "tool_key", "metadata_key", "apply_chat_template", "loss_type", "tool_format",
    "rollout_max_prompt_len", "rollout_max_context_len", "custom_generate_function_path", "custom_rm_path",
    "rm_type")  # fmt: skip
"""What is read of a run's options. Without any of them the first known columns of a row are read."""
LINES = 100


@dataclass
class Report:
    """What was found in one file."""

    file: str
    rows: int = 0
    conversations: int = 0
    """Rows with a `messages` column; the others are questions with answers."""
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RM_TYPES, 0))
    """Mode -> rows whose own answer it does not score as right."""
    failures: list[str] = field(default_factory=list)
    """What is wrong with which row."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each rendered prompt or conversation."""
    supervised: int = 0
    labels: dict[str, set[str]] = field(default_factory=dict)
    """Question -> its answers."""
    conflicts: list[str] = field(default_factory=list)
    """Which rows ask what an earlier one does, and have another answer."""
    repeats: list[str] = field(default_factory=list)
    """Which rows are there twice."""

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


def check_file(
    path: str, template: ChatTemplate | None = None, config: Config | None = None, *, rules: Sequence[str] = RM_TYPES
) -> Report:
    """Check every row as training reads it. Raises ConfigError or DataError for a file that cannot be read at all.

    `config` names columns, hooks, limits and the kind of training. Without it the first known columns of a row are
    read, and text is a question. By each of `rules` a row's own answer must be right, whatever the reward's hook takes.
    """
    check = _FileCheck(Report(path), template, config, rules)
    for number, row in enumerate(scan_rows(path), start=1):
        check.report.rows += 1
        try:
            check.row(row, number)
        except UserError as error:
            check.report.failures.append(f"row {number}: {error}")
    return check.report


class _FileCheck:
    """What one file is held to; fills `report`."""

    def __init__(
        self, report: Report, template: ChatTemplate | None, config: Config | None, rules: Sequence[str]
    ) -> None:
        self.report, self._template, self._config, self._rules = report, template, config, rules
        self._first: dict[str, tuple[int, str]] = {}  # question -> its first row, and that one's answer
        settled = config or Config()
        self._limit, self._limit_text = settled.prompt_limit
        self._checks: list[RowCheck] = row_checks(settled)
        if settled.custom_generate_function_path is None:  # one that runs tools may be meant
            self._checks = [check for check in self._checks if check is not check_no_tools]
        self._tokenize = None if template is None else ConversationTokenizer(settled.tool_format, template.tokenizer)

    def row(self, row: Row | BadLine, number: int) -> None:
        """Raises UserError for a row that cannot be used."""
        config = self._config or _guess(row)
        sample = read_sample(row, number - 1, config)
        if self._is_conversation(sample, config):
            self._conversation(sample, config)
        else:
            self._score(sample.label, number)
            try:
                length = check_sample(sample, row, config, self._template, self._checks, measure=True)
            except UnreadableLabel as error:  # of the hooks' last check: what follows them is left
                if not self._rules:  # by which `_score` has said so
                    self.report.failures.append(f"row {number}: {error}")
                length = check_sample(sample, row, config, self._template, (), measure=True)
            self._question(sample, length, number)

    def _is_conversation(self, sample: Sample, config: Config) -> bool:
        """Whether the row is one to learn from in SFT, and not a prompt."""
        if self._config is None:
            return config.input_key == "messages"
        is_answered = isinstance(sample.prompt, list) and sample.prompt[-1]["role"] == "assistant"
        return config.loss.supervised or (sample.label is None and is_answered)

    def _conversation(self, sample: Sample, config: Config) -> None:
        report, messages = self.report, sample.prompt
        report.conversations += 1
        if isinstance(messages, str):
            raise DataError(NO_CONVERSATION)
        require_assistant(messages)
        refuse_empty_turns(messages)
        if self._tokenize is None:
            return
        ids, mask = self._tokenize(messages, sample.tools)
        report.lengths.append(len(ids))
        report.supervised += sum(mask)
        if not config.fits_context(len(ids)):
            raise DataError(
                f"the conversation has {len(ids)} tokens, more than --rollout-max-context-len "
                f"{config.rollout_max_context_len}: training leaves it out"
            )

    def _question(self, sample: Sample, length: int, number: int) -> None:
        report, answer = self.report, sample.label
        if self._template is not None:
            report.lengths.append(length)
        if self._limit is not None and length > self._limit:
            raise DataError(f"the prompt has {length} tokens, more than {self._limit_text}: training leaves it out")
        if answer is None:  # and the reward hook needs none
            return
        told = [sample.prompt] if isinstance(sample.prompt, str) else [message["content"] for message in sample.prompt]
        question = "\n".join(told).strip()
        report.labels.setdefault(question, set()).add(answer)
        first, its_answer = self._first.setdefault(question, (number, answer))
        if first != number:
            if answer == its_answer:
                report.repeats.append(f"row {number}: asks what row {first} does, with the same answer {answer!r}")
            else:
                report.conflicts.append(
                    f"row {number}: asks what row {first} does, and says {answer!r} for {its_answer!r}"
                )

    def _score(self, answer: str | None, number: int) -> None:
        """The row's own answer by each rule; a failure by those that were asked for."""
        if answer is None:  # and the reward hook needs none
            return
        for mode in RM_TYPES:
            if not compute_score(f"Answer: \\boxed{{{answer}}}", answer, mode)["acc"]:
                self.report.wrong[mode] += 1
                if mode in self._rules:
                    self.report.failures.append(f"row {number}: its own answer {answer!r} is not right by {mode}")


def _guess(row: Row | BadLine) -> Config:
    """What training has to be told to read this row."""
    if isinstance(row, BadLine) or row.get("messages") is not None:
        return Config(input_key="messages")
    input_key, label_key = known_columns(row, "the row")
    return Config(input_key=input_key, label_key=label_key, apply_chat_template=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser(PROG, usage=None, description=__doc__, shown={*READ, "hf_checkpoint"})
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", metavar="FILE", help=".jsonl or .parquet; FILE@[a:b] for some of its rows")
    parser.add_argument("--tokenizer", metavar="DIR", help="--hf-checkpoint, of which only the tokenizer is read")
    parser.add_argument(
        "--show", type=int, default=LINES, metavar="N", help="lines of each kind about one file (default: %(default)s)"
    )
    parser.set_defaults(**dict.fromkeys(READ))  # so that what is given can be told
    return run_command(PROG, lambda: _check(parser.parse(argv)), mistakes=SlimeRetoolError)


def _check(args: argparse.Namespace) -> int:
    """Print a line of JSON for each file, and what was found in its rows on stderr. Returns 1 for rows that fail."""
    given = {name: value for name in READ if (value := vars(args)[name]) is not None}
    config = Config(**given, hook_args=args.hook_args) if given else None
    rules = () if {"custom_rm_path", "rm_type"} & given.keys() else RM_TYPES
    if config is not None:
        check_values(config)
    flag, folder = ("--tokenizer", args.tokenizer) if args.tokenizer else ("--hf-checkpoint", args.hf_checkpoint)
    template = ChatTemplate(load_tokenizer(folder, flag)) if folder is not None else None
    failed = False
    for file in args.files:
        report = check_file(file, template, config, rules=rules)
        failed = failed or bool(report.failures)
        print(json.dumps(report.summary(), ensure_ascii=False), flush=True)
        for lines in (report.failures, report.conflicts, report.repeats):
            for line in lines[: args.show]:
                print(f"  {file}, {line}", file=sys.stderr)
            if len(lines) > args.show:
                print(f"  and {len(lines) - args.show} more of {file}; --show N shows them", file=sys.stderr)
    return int(failed)
