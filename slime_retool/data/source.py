"""Data rows as samples: training prompts in a shuffled, resumable order, and evaluation sets."""

from __future__ import annotations

import copy
import json
import logging
import random
from pathlib import Path
from typing import Any

from slime_retool.config import Config
from slime_retool.data.messages import parse_messages, parse_tools
from slime_retool.data.readers import Row, parse_json, read_rows
from slime_retool.data.rendering import render_prompt
from slime_retool.errors import ConfigError, DataError
from slime_retool.types import Message, Sample

logger = logging.getLogger(__name__)


class PromptDataSource:
    """The rows of `--prompt-data`, over and over; implements `rollout.context.DataSource`.

    Every epoch visits every row once. Its order depends on (rollout_seed, epoch) alone, so a resumed run goes on
    exactly where it stopped and later epochs are whole. Rows whose group was returned unused come again first.

    Raises ConfigError or DataError for a file that cannot be used, DataError when the length filter leaves nothing.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        if config.prompt_data is None:
            raise ConfigError("--prompt-data is required: give a .jsonl or .parquet file")
        self._rows = samples_from_file(config.prompt_data, config)
        self._copies = config.n_samples_per_prompt
        self._shuffle, self._seed = config.rollout_shuffle, config.rollout_seed
        before = len(self._rows)
        if config.rollout_max_prompt_len is not None:
            self._rows = [s for s in self._rows if _prompt_length(tokenizer, s) <= config.rollout_max_prompt_len]
        self.num_dropped = before - len(self._rows)
        if self.num_dropped:
            logger.warning(
                "%s: %d of %d rows left out, their prompt has more than %d tokens",
                config.prompt_data, self.num_dropped, before, config.rollout_max_prompt_len,
            )  # fmt: skip
        if not self._rows:
            raise DataError(
                f"{config.prompt_data}: all {before} prompts have more than --rollout-max-prompt-len "
                f"{config.rollout_max_prompt_len} tokens; raise it"
            )
        self._position = {sample.row: position for position, sample in enumerate(self._rows)}
        self._returned: list[int] = []
        self._epoch = self._offset = self._next_index = self._next_group = 0
        self._order = self._order_of(0)

    @property
    def num_rows(self) -> int:
        """Rows of one epoch, after the length filter."""
        return len(self._rows)

    def next_groups(self, count: int) -> list[list[Sample]]:
        """The next `count` rows, each as n_samples_per_prompt fresh samples; goes on into the next epoch."""
        return [self._next_group_of_samples() for _ in range(count)]

    def return_groups(self, groups: list[list[Sample]]) -> None:
        """Draw these groups' rows again, in this order, as fresh samples before any other."""
        self._returned += [group[0].row for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is only valid with."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
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
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._next_index, self._next_group = state["next_index"], state["next_group_index"]
        self._returned = list(state["returned_rows"])
        self._order = self._order_of(self._epoch)

    def _fingerprint(self) -> dict[str, Any]:
        return {"num_rows": self.num_rows, "rollout_seed": self._seed, "rollout_shuffle": self._shuffle}

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._rows)))
        if self._shuffle:
            random.Random(f"{self._seed}-{epoch}").shuffle(order)
        return order

    def _next_group_of_samples(self) -> list[Sample]:
        row = self._rows[self._next_position()]
        group = [copy_sample(row, self._next_index + i, self._next_group) for i in range(self._copies)]
        self._next_index += self._copies
        self._next_group += 1
        return group

    def _next_position(self) -> int:
        if self._returned:
            return self._position[self._returned.pop(0)]
        if self._offset == len(self._order):
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        self._offset += 1
        return self._order[self._offset - 1]


def samples_from_file(
    path: str | Path, config: Config, *, input_key: str | None = None, label_key: str | None = None
) -> list[Sample]:
    """One PENDING sample per row, in file order; `row`, `index` and `group_index` are the row's number.

    A message list (or JSON text of one) stays a conversation; other text is the prompt itself or, with
    `--apply-chat-template`, one user message. The label is `label_key`'s column, else verl's
    `reward_model.ground_truth`, as text. Metadata holds the metadata column (else verl's `extra_info`) and
    `data_source`.

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
                label=_label(row, label_key),
                index=number,
                group_index=number,
                row=number,
                tools=parse_tools(row.get(config.tool_key), f"{where}, column {config.tool_key!r}"),
                metadata=_metadata(row, config.metadata_key, where),
            )
        )
    unlabelled = sum(sample.label is None for sample in samples)
    if unlabelled and config.loss_type != "sft_loss":
        logger.warning("%s: %d of %d rows have no label in column %r", path, unlabelled, len(samples), label_key)
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
        tools=copy.deepcopy(sample.tools),
        metadata=copy.deepcopy(sample.metadata),
    )


def _prompt_length(tokenizer: Any, sample: Sample) -> int:
    return len(render_prompt(tokenizer, sample.prompt, sample.tools))


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


def _label(row: Row, key: str) -> str | None:
    value = row.get(key)
    if value is None and isinstance(row.get("reward_model"), dict):
        value = row["reward_model"].get("ground_truth")
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _metadata(row: Row, key: str, where: str) -> dict[str, Any]:
    column = key if row.get(key) is not None else "extra_info"
    metadata = parse_json(row.get(column) or {}, f"{where}, column {column!r}")
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: column {column!r} must hold an object, got {str(metadata)[:80]!r}")
    if row.get("data_source") is not None:
        metadata = {"data_source": row["data_source"], **metadata}
    return metadata
