"""Data rows as samples: training prompts in a shuffled, resumable order, and evaluation sets."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_retool.chat import ChatTemplate
from slime_retool.config import Config
from slime_retool.config.data_sets import DataSet
from slime_retool.data.messages import parse_messages, parse_tools
from slime_retool.data.questions import read_label
from slime_retool.data.readers import Row, parse_json, read_rows
from slime_retool.errors import ConfigError, DataError
from slime_retool.types import Message, Sample

logger = logging.getLogger(__name__)


class PromptDataSource:
    """The rows of `--prompt-data`, over and over; implements `protocols.DataSource`.

    Every data set is visited whole in each of its epochs, in an order that depends on (rollout_seed, epoch) alone, and
    which data set comes next depends on how much of each was used (`next_of_mixture`). So a resumed run goes on
    exactly where it stopped. Rows whose group was returned unused come again first.

    Raises ConfigError or DataError for a file that cannot be used, DataError when the length filter leaves nothing.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        sets = config.prompt_sets
        if not sets:
            raise ConfigError("--prompt-data is required: give a .jsonl or .parquet file")
        self._copies = config.n_samples_per_prompt
        self._streams = [_Stream(each, config, tokenizer, with_source=len(sets) > 1) for each in sets]
        self._weights = [
            each.weight or float(stream.num_rows) for each, stream in zip(sets, self._streams, strict=True)
        ]
        self.num_dropped = sum(stream.num_dropped for stream in self._streams)
        self._rows = [row for stream in self._streams for row in stream.rows]
        for number, row in enumerate(self._rows):
            row.row = number
        self._returned: list[int] = []
        self._next_index = self._next_group = 0

    @property
    def num_rows(self) -> int:
        """Rows after the length filter, of all data sets together: what `--num-epoch` counts as one pass."""
        return sum(stream.num_rows for stream in self._streams)

    def next_groups(self, count: int) -> list[list[Sample]]:
        """The next `count` rows, each as n_samples_per_prompt fresh samples; goes on into the next epoch."""
        return [self._next_group_of_samples() for _ in range(count)]

    def return_groups(self, groups: list[list[Sample]]) -> None:
        """Draw these groups' rows again, in this order, as fresh samples before any other."""
        self._returned += [group[0].row for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is only valid with."""
        return {
            "positions": [[stream.epoch, stream.offset] for stream in self._streams],
            "next_index": self._next_index,
            "next_group_index": self._next_group,
            "returned_rows": list(self._returned),
            **self._fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises ConfigError when data or shuffle are no longer the same."""
        for key, value in self._fingerprint().items():
            if state[key] != value:
                raise ConfigError(
                    f"the checkpoint's data position was taken with {key} {state[key]}, now it is {value}; resume with "
                    f"the same --prompt-data, --rollout-max-prompt-len, --rollout-seed and --rollout-shuffle"
                )
        self._next_index, self._next_group = state["next_index"], state["next_group_index"]
        self._returned = list(state["returned_rows"])
        for stream, (epoch, offset) in zip(self._streams, state["positions"], strict=True):
            stream.move_to(epoch, offset)

    def _fingerprint(self) -> dict[str, Any]:
        first = self._streams[0]
        return {
            "num_rows": self.num_rows,
            "data_sets": [[s.name, s.num_rows, w] for s, w in zip(self._streams, self._weights, strict=True)],
            "rollout_seed": first.seed,
            "rollout_shuffle": first.shuffle,
        }

    def _next_group_of_samples(self) -> list[Sample]:
        if self._returned:
            row = self._rows[self._returned.pop(0)]
        else:
            drawn = [stream.num_drawn for stream in self._streams]
            row = self._streams[next_of_mixture(drawn, self._weights)].next_row()
        group = [copy_sample(row, self._next_index + i, self._next_group) for i in range(self._copies)]
        self._next_index += self._copies
        self._next_group += 1
        return group


class _Stream:
    """The rows of one data set, epoch after epoch."""

    def __init__(self, data: DataSet, config: Config, tokenizer: Any, *, with_source: bool) -> None:
        self.name, self.shuffle, self.seed = data.name, config.rollout_shuffle, config.rollout_seed
        self.rows = samples_from_file(data.file, config)
        before, limit = len(self.rows), config.rollout_max_prompt_len
        if limit is not None:
            template = ChatTemplate(tokenizer)
            self.rows = [sample for sample in self.rows if _prompt_length(template, sample, data.file) <= limit]
        self.num_dropped = before - len(self.rows)
        if not self.rows:
            raise DataError(
                f"{data.file}: all {before} prompts have more than --rollout-max-prompt-len {limit} tokens; raise it"
            )
        if self.num_dropped:
            logger.warning(
                "%s: %d of %d rows left out, their prompt has more than %d tokens",
                data.file, self.num_dropped, before, limit,
            )  # fmt: skip
        if with_source or data.is_named:
            for sample in self.rows:
                sample.source = data.name
        self.move_to(0, 0)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_drawn(self) -> int:
        return self.epoch * len(self.rows) + self.offset

    def move_to(self, epoch: int, offset: int) -> None:
        self.epoch, self.offset = epoch, offset
        self._order = list(range(len(self.rows)))
        if self.shuffle:
            random.Random(f"{self.seed}-{epoch}").shuffle(self._order)

    def next_row(self) -> Sample:
        if self.offset == len(self.rows):
            self.move_to(self.epoch + 1, 0)
        self.offset += 1
        return self.rows[self._order[self.offset - 1]]


def samples_from_file(
    path: str | Path, config: Config, *, input_key: str | None = None, label_key: str | None = None
) -> list[Sample]:
    """One PENDING sample per row, in file order; `index` and `group_index` are the row's number.

    A message list (or JSON text of one) stays a conversation; other text is the prompt itself or, with
    `--apply-chat-template`, one user message. For the label see `read_label`; rows without one
    are named in a warning. Metadata holds the metadata column (else verl's `extra_info`) and `data_source`.

    Raises ConfigError or DataError, naming file and row.
    """
    input_key, label_key = input_key or config.input_key, label_key or config.label_key
    samples = []
    for number, row in enumerate(read_rows(path)):
        where = f"{path}, row {number + 1}"
        if row.get(input_key) is None:
            raise DataError(
                f"{where}: no column {input_key!r}, only {', '.join(row)}; set --input-key (--eval-input-key)"
            )
        samples.append(
            Sample(
                prompt=_prompt(row[input_key], config.apply_chat_template, f"{where}, column {input_key!r}"),
                label=read_label(row, label_key),
                index=number,
                group_index=number,
                tools=parse_tools(row.get(config.tool_key), f"{where}, column {config.tool_key!r}"),
                metadata=_metadata(row, config.metadata_key, where),
            )
        )
    unlabelled = [str(sample.index + 1) for sample in samples if sample.label is None]
    if unlabelled and not config.loss.supervised:
        count, shown = f"{len(unlabelled)} of {len(samples)}", ", ".join(unlabelled[:5])
        logger.warning("%s: %s rows have no label in column %r; the first: row %s", path, count, label_key, shown)
    return samples


def load_eval_samples(config: Config) -> dict[str, list[Sample]]:
    """The evaluation sets of `--eval-prompt-data` by name, one sample per row (see `samples_from_file`).

    Raises ConfigError for two sets of one name.
    """
    names = [name for name, _ in config.eval_sets]
    if len(set(names)) != len(names):
        raise ConfigError(f"--eval-prompt-data names must differ, got {', '.join(names)}")
    return {
        name: samples_from_file(
            path, config, input_key=config.eval_input_key, label_key=config.eval_label_key
        )
        for name, path in config.eval_sets
    }  # fmt: skip


def copy_sample(sample: Sample, index: int, group_index: int) -> Sample:
    """A fresh PENDING sample of the same row, sharing nothing that a hook could change."""
    return Sample(
        prompt=copy.deepcopy(sample.prompt),
        label=sample.label,
        index=index,
        group_index=group_index,
        row=sample.row,
        source=sample.source,
        tools=copy.deepcopy(sample.tools),
        metadata=copy.deepcopy(sample.metadata),
    )


def _prompt_length(template: ChatTemplate, sample: Sample, file: str) -> int:
    try:
        return len(template.prompt_ids(sample.prompt, sample.tools))
    except DataError as error:
        raise DataError(f"{file}, row {sample.index + 1}: {error}") from error


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


def _metadata(row: Row, key: str, where: str) -> dict[str, Any]:
    column = key if row.get(key) is not None else "extra_info"
    metadata = parse_json(row.get(column) or {}, f"{where}, column {column!r}")
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: column {column!r} must hold an object, got {str(metadata)[:80]!r}")
    if row.get("data_source") is not None:
        metadata = {"data_source": row["data_source"], **metadata}
    return metadata


def next_of_mixture(drawn: Sequence[int], weights: Sequence[float]) -> int:
    """Which data set comes next, when `drawn` rows of each were used.

    The one that is furthest behind its share. So the proportion holds in every stretch of rows, the order depends on
    the counts alone (which a resumed run knows), and with weights that are sizes every row is drawn once an epoch.
    """
    return min(range(len(drawn)), key=lambda i: ((drawn[i] + 1) / weights[i], i))
