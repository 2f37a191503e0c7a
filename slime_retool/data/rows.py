"""Data rows as samples, each checked for what the run will do with it before anything starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime_retool.chat import ChatTemplate
from slime_retool.config import Config
from slime_retool.data.messages import parse_messages, parse_tools
from slime_retool.data.questions import LABELS, QUESTIONS, read_label, similar_columns
from slime_retool.data.readers import BadLine, Row, parse_json, scan_rows
from slime_retool.errors import ConfigError, DataError, MissingLabel, UserError
from slime_retool.types import Message, Sample, ToolSchema

logger = logging.getLogger(__name__)


class ToolsCheck:
    """What a hook needs of the tools that a row shows (None: of its own) and of the tokenizer.

    `check` raises ConfigError. It is asked once for each set of tools: to try a chat template takes milliseconds.
    """

    def __init__(self, check: Callable[[Config, list[ToolSchema] | None, Any], None]) -> None:
        self._check = check
        self._problems: dict[str, str] = {}  # a set of tools -> what is wrong with it, empty where nothing is

    def __call__(self, config: Config, sample: Sample, template: ChatTemplate) -> None:
        """Raises ConfigError."""
        key = json.dumps(sample.tools)
        if key not in self._problems:
            self._problems[key] = ""
            try:
                self._check(config, sample.tools, template.tokenizer)
            except ConfigError as error:
                self._problems[key] = str(error)
        if self._problems[key]:
            raise ConfigError(self._problems[key])


RowCheck = Callable[[Config, Sample], None] | ToolsCheck
"""What a hook needs of a row: raises ConfigError or DataError for one that it cannot use."""


class RowReader:
    """Reads a run's files; `skipped` lists {file, row, reason} of the rows that `--skip-bad-rows` left out.

    Without `tokenizer` nothing is rendered. `checks` are those of the hooks.
    """

    def __init__(self, config: Config, tokenizer: Any = None, checks: Sequence[RowCheck] = ()) -> None:
        self._config, self._checks = config, checks
        self._template = None if tokenizer is None else ChatTemplate(tokenizer)
        self.skipped: list[Row] = []

    def read(
        self, path: str | Path, *, input_key: str | None = None, label_key: str | None = None, limit: int | None = None
    ) -> tuple[list[Sample], int]:
        """A PENDING sample per row, in file order, and how many more have a prompt of more than `limit` tokens.

        `index` and `group_index` are the row's number. Raises ConfigError for a file that cannot be used, and
        DataError, naming file and row, for rows that cannot: with `--skip-bad-rows` only when there is no other.
        """
        config, rows = self._config, scan_rows(path)
        config = replace(config, input_key=input_key or config.input_key, label_key=label_key or config.label_key)
        samples, bad, too_long = [], [], []
        for number, row in enumerate(rows):
            try:
                sample = read_sample(row, number, config)
                length = check_sample(sample, row, config, self._template, self._checks, measure=limit is not None)
            except UserError as error:
                bad.append({"file": str(path), "row": number + 1, "reason": str(error)})
                continue
            if limit is not None and length > limit:
                too_long.append(number + 1)
            else:
                samples.append(sample)
        if bad and not (config.skip_bad_rows and len(bad) < len(rows)):
            more = "" if config.skip_bad_rows else "; --skip-bad-rows leaves such rows out"
            rest = f" ({len(bad) - 1} more of {len(rows)} rows cannot be used)" if len(bad) > 1 else ""
            raise DataError(f"{path}, row {bad[0]['row']}: {bad[0]['reason']}{rest}{more}")
        self.skipped += [row for row in bad if row not in self.skipped]
        if too_long and samples:
            logger.warning(
                "%s: %d of %d rows left out, their prompt has more than %d tokens; the first: row %s",
                path, len(too_long), len(too_long) + len(samples), limit, ", ".join(map(str, too_long[:5])),
            )  # fmt: skip
        self._warn_of_labels(path, samples, config.label_key)
        return samples, len(too_long)

    def _warn_of_labels(self, path: str | Path, samples: list[Sample], label_key: str) -> None:
        unlabelled = [str(sample.index + 1) for sample in samples if sample.label is None]
        if unlabelled and not self._config.loss.supervised:
            count, shown = f"{len(unlabelled)} of {len(samples)}", ", ".join(unlabelled[:5])
            logger.warning("%s: %s rows have no label in column %r; the first: row %s", path, count, label_key, shown)


def read_sample(row: Row | BadLine, number: int, config: Config) -> Sample:
    """Row `number` as a PENDING sample.

    A message list (or JSON text of one) stays a conversation; other text is the prompt itself or, with
    `--apply-chat-template`, one user message. For the label see `read_label`. Metadata holds the metadata column (else
    verl's `extra_info`) and `data_source`. Raises DataError, naming the column.
    """
    if isinstance(row, BadLine):
        raise DataError(f"line {row.line}: {row.reason}")
    if row.get(config.input_key) is None:
        raise DataError(_no_prompt(row, config))
    return Sample(
        prompt=_prompt(row[config.input_key], config.apply_chat_template, f"column {config.input_key!r}"),
        label=read_label(row, config.label_key),
        index=number,
        group_index=number,
        tools=parse_tools(row.get(config.tool_key), f"column {config.tool_key!r}"),
        metadata=_metadata(row, config.metadata_key),
    )


def check_sample(
    sample: Sample,
    row: Row | BadLine,
    config: Config,
    template: ChatTemplate | None,
    checks: Sequence[RowCheck],
    *,
    measure: bool,
) -> int:
    """Tokens of the prompt (0 unless `measure`) of what `row` holds. Raises UserError for one that a run would fail on.

    That is what the hooks refuse and, of a prompt to answer, one that is empty, that ends with an answer or that the
    chat template refuses. What SFT needs is one of `checks` (`rollout.sft_tokens.conversation_check`).
    """
    assert not isinstance(row, BadLine)
    for check in checks:
        try:
            if not isinstance(check, ToolsCheck):
                check(config, sample)
            elif template is not None:
                check(config, sample, template)
        except MissingLabel as error:
            meant = [] if config.label_key in row else similar_columns(row, config.label_key, LABELS)
            hint = f"; there is no column {config.label_key!r}: --label-key {meant[0]}?" if meant else ""
            raise MissingLabel(f"{error}{hint}") from error
    prompt, supervised = sample.prompt, config.loss.supervised
    if not supervised:
        if not (prompt.strip() if isinstance(prompt, str) else any(message["content"].strip() for message in prompt)):
            raise DataError("the prompt must not be empty")
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            raise DataError(
                "the prompt ends with an assistant message, so that nothing is left to generate; end it with a user "
                "message, or learn from whole conversations with --loss-type sft_loss"
            )
        if template is not None and not isinstance(prompt, str):
            template.refuse_control_texts(prompt)
    if template is not None and measure:
        return len(template.prompt_ids(prompt, sample.tools))
    if template is not None and not isinstance(prompt, str) and not supervised:
        template.render(prompt, sample.tools)
    return 0


def samples_from_file(path: str | Path, config: Config) -> list[Sample]:
    """One PENDING sample per row, in file order (see `read_sample`); rows without a label are named in a warning.

    Raises ConfigError or DataError, naming file and row.
    """
    return RowReader(config).read(path)[0]


def _no_prompt(row: Row, config: Config) -> str:
    """What to say of a row without a prompt: the columns that may hold it, and its label."""
    key = config.input_key
    filled = [name for name, value in row.items() if value is not None]
    said = f"no column {key!r}{' (it is null)' if key in row else ''}, only {', '.join(filled) or 'nulls'}"
    meant = similar_columns(filled, key, QUESTIONS)
    if key in row or not meant:
        return f"{said}; set --input-key (--eval-input-key)"
    labels = [] if config.label_key in filled else similar_columns(filled, config.label_key, LABELS)
    labels = [name for name in labels if name != meant[0]]
    advice = f"--input-key {meant[0]}" + (f" --label-key {labels[0]}" if labels else "")
    return f"{said}; set {advice} (of evaluation sets: --eval-input-key)"


def _prompt(value: Any, as_user_message: bool, where: str) -> list[Message] | str:
    if isinstance(value, str) and not _is_message_text(value):
        return [{"role": "user", "content": value}] if as_user_message else value
    return parse_messages(value, where)


def _is_message_text(text: str) -> bool:
    """Whether `text` is JSON of a message list, and not a question that happens to begin with a bracket."""
    if not text.lstrip().startswith("[{"):
        return False
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return all(isinstance(item, dict) and "role" in item for item in value)


def _metadata(row: Row, key: str) -> dict[str, Any]:
    column = key if row.get(key) is not None else "extra_info"
    metadata = parse_json(row.get(column) or {}, f"column {column!r}")
    if not isinstance(metadata, dict):
        raise DataError(f"column {column!r} must hold an object, got {str(metadata)[:80]!r}")
    if row.get("data_source") is not None:
        metadata = {"data_source": row["data_source"], **metadata}
    return metadata
