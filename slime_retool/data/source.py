"""Data rows as samples: training prompts in a shuffled, resumable order, and evaluation sets."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

from slime_retool.config import Config
from slime_retool.config.data_sets import DataSet
from slime_retool.data.rows import RowReader
from slime_retool.errors import ConfigError, DataError
from slime_retool.types import Sample


class PromptDataSource:
    """The rows of `--prompt-data`, over and over; implements `protocols.DataSource`.

    Every data set is visited whole in each of its epochs, in an order that depends on (rollout_seed, epoch) alone, and
    which data set comes next depends on how much of each was used (`next_of_mixture`). So a resumed run goes on
    exactly where it stopped. Rows whose group was returned unused come again first.

    Raises ConfigError or DataError for a file that cannot be used, DataError when the length filter leaves nothing.
    """

    def __init__(self, config: Config, tokenizer: Any, reader: RowReader | None = None) -> None:
        reader = reader or RowReader(config, tokenizer)
        sets = config.prompt_sets
        assert sets, "`validate` refuses a run without --prompt-data"
        self._copies = config.n_samples_per_prompt
        self._streams = [_Stream(each, config, reader, with_source=len(sets) > 1) for each in sets]
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
        self.return_rows([group[0].row for group in groups])

    def return_rows(self, rows: Sequence[int]) -> None:
        """`return_groups` by `Sample.row`."""
        self._returned += rows

    def sample_of_row(self, row: int, index: int, group_index: int) -> Sample:
        """A row that was drawn before (`Sample.row`), as a fresh sample."""
        return copy_sample(self._rows[row], index, group_index)

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
            if state.get(key, value) != value:  # checkpoints of earlier versions have no row_digests
                raise ConfigError(
                    f"the checkpoint's data position was taken with {key} {state[key]}, now it is {value}; resume with "
                    "the same rows in the same order (--prompt-data, --rollout-max-prompt-len, --skip-bad-rows), "
                    "--rollout-seed and --rollout-shuffle"
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
            "row_digests": [stream.digest for stream in self._streams],
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

    def __init__(self, data: DataSet, config: Config, reader: RowReader, *, with_source: bool) -> None:
        self.name, self.shuffle, self.seed = data.name, config.rollout_shuffle, config.rollout_seed
        limit, limit_text = config.prompt_limit
        self.rows, self.num_dropped = reader.read(data.file, limit=limit)
        before = len(self.rows) + self.num_dropped
        if not self.rows:
            raise DataError(f"{data.file}: all {before} prompts have more than {limit_text}; raise it")
        if with_source or data.is_named:
            for sample in self.rows:
                sample.source = data.name
        # What a run reads of them.
        self.digest = digest([row.prompt, row.label, row.tools, row.metadata] for row in self.rows)
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


def digest(contents: Iterable[list[Any]]) -> str:
    """Tells rows apart by these contents of each, and by their order."""
    found = hashlib.sha256()
    for content in contents:
        found.update(json.dumps(content, sort_keys=True, default=repr).encode())
    return found.hexdigest()[:16]


def load_eval_samples(config: Config, reader: RowReader | None = None) -> dict[str, list[Sample]]:
    """The evaluation sets of `--eval-prompt-data` by name, one sample per row (see `RowReader.read`)."""
    reader = reader or RowReader(config)
    return {
        name: reader.read(path, input_key=config.eval_input_key, label_key=config.eval_label_key)[0]
        for name, path in config.eval_sets
    }


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


def next_of_mixture(drawn: Sequence[int], weights: Sequence[float]) -> int:
    """Which data set comes next, when `drawn` rows of each were used.

    The one that is furthest behind its share. So the proportion holds in every stretch of rows, the order depends on
    the counts alone (which a resumed run knows), and with weights that are sizes every row is drawn once an epoch.
    """
    return min(range(len(drawn)), key=lambda i: ((drawn[i] + 1) / weights[i], i))
