"""Data rows as samples, each checked for what the run will do with it before anything starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_retool.chat import ChatTemplate
from slime_retool.config import Config
from slime_retool.data.messages import parse_messages, parse_tools
from slime_retool.data.questions import read_label
from slime_retool.data.readers import Row, parse_json, read_rows
from slime_retool.errors import DataError, UserError
from slime_retool.types import Message, Sample

logger = logging.getLogger(__name__)

RowCheck = Callable[[Config, Sample], None]
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
        config, rows = self._config, read_rows(path)
        samples, bad, too_long = [], [], 0
        for number, row in enumerate(rows):
            try:
                sample = read_sample(row, number, config, input_key=input_key, label_key=label_key)
                length = check_sample(sample, config, self._template, self._checks, measure=limit is not None)
            except UserError as error:
                bad.append({"file": str(path), "row": number + 1, "reason": str(error)})
                continue
            if limit is not None and length > limit:
                too_long += 1
            else:
                samples.append(sample)
        if bad and not (config.skip_bad_rows and len(bad) < len(rows)):
            more = "" if config.skip_bad_rows else "; --skip-bad-rows leaves such rows out"
            rest = f" ({len(bad) - 1} more of {len(rows)} rows cannot be used)" if len(bad) > 1 else ""
            raise DataError(f"{path}, row {bad[0]['row']}: {bad[0]['reason']}{rest}{more}")
        self.skipped += [row for row in bad if row not in self.skipped]
        self._warn_of_labels(path, samples, label_key or config.label_key)
        return samples, too_long

    def _warn_of_labels(self, path: str | Path, samples: list[Sample], label_key: str) -> None:
        unlabelled = [str(sample.index + 1) for sample in samples if sample.label is None]
        if unlabelled and not self._config.loss.supervised:
            count, shown = f"{len(unlabelled)} of {len(samples)}", ", ".join(unlabelled[:5])
            logger.warning("%s: %s rows have no label in column %r; the first: row %s", path, count, label_key, shown)


def read_sample(
    row: Row, number: int, config: Config, *, input_key: str | None = None, label_key: str | None = None
) -> Sample:
    """Row `number` as a PENDING sample.

    A message list (or JSON text of one) stays a conversation; other text is the prompt itself or, with
    `--apply-chat-template`, one user message. For the label see `read_label`. Metadata holds the metadata column (else
    verl's `extra_info`) and `data_source`. Raises DataError, naming the column.
    """
    input_key = input_key or config.input_key
    if row.get(input_key) is None:
        raise DataError(f"no column {input_key!r}, only {', '.join(row)}; set --input-key (--eval-input-key)")
    return Sample(
        prompt=_prompt(row[input_key], config.apply_chat_template, f"column {input_key!r}"),
        label=read_label(row, label_key or config.label_key),
        index=number,
        group_index=number,
        tools=parse_tools(row.get(config.tool_key), f"column {config.tool_key!r}"),
        metadata=_metadata(row, config.metadata_key),
    )


def check_sample(
    sample: Sample, config: Config, template: ChatTemplate | None, checks: Sequence[RowCheck], *, measure: bool
) -> int:
    """Tokens of the prompt (0 unless `measure`). Raises UserError for a row that a run would fail on.

    That is what the hooks refuse and, of a prompt to answer, one that is empty, that ends with an answer or that the
    chat template refuses. What SFT cannot use it leaves out itself.
    """
    for check in checks:
        check(config, sample)
    prompt, supervised = sample.prompt, config.loss.supervised
    if not supervised:
        if not (prompt.strip() if isinstance(prompt, str) else any(message["content"].strip() for message in prompt)):
            raise DataError("the prompt must not be empty")
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            raise DataError(
                "the prompt ends with an assistant message, so that nothing is left to generate; end it with a user "
                "message, or learn from whole conversations with --loss-type sft_loss"
            )
    if template is not None and measure:
        return len(template.prompt_ids(prompt, sample.tools))
    if template is not None and not isinstance(prompt, str) and not supervised:
        template.render(prompt, sample.tools)
    return 0


def samples_from_file(
    path: str | Path, config: Config, *, input_key: str | None = None, label_key: str | None = None
) -> list[Sample]:
    """One PENDING sample per row, in file order (see `read_sample`); rows without a label are named in a warning.

    Raises ConfigError or DataError, naming file and row.
    """
    return RowReader(config).read(path, input_key=input_key, label_key=label_key)[0]


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
