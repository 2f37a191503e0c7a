"""What a run wrote, read one sample at a time: rollouts/*.jsonl[.gz] of --dump-rollouts, eval/*.jsonl transcripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_retool.dumps import DAMAGED, FOLDER, dumps_in, find_dump, open_dump
from slime_retool.errors import DataError
from slime_retool.rollout.transcripts import sample_of
from slime_retool.run_folder import SKIPPED_ROWS
from slime_retool.types import Sample

FOLDERS = (FOLDER, "eval")
TRAINED = "trained_"
"""Files of this name hold what the trainer computed for the samples of the rollout with the same number."""
_NOT_SAMPLES = ("metrics.jsonl", SKIPPED_ROWS)
"""What else a run writes to its folder in lines."""
_REQUIRED = ("index", "prompt", "response", "label", "reward", "status")


@dataclass(frozen=True, slots=True)
class Trained:
    """What the trainer computed for the R response tokens of one sample; None where the dump lacks it."""

    log_probs: list[float] | None  # [R] under the weights before the update
    advantages: list[float] | None  # [R]

    @classmethod
    def of_line(cls, row: dict[str, Any], response_length: int) -> Trained:
        """A line's values begin at the first learned token and end with the response."""

        def laid_out(values: list[float] | None) -> list[float] | None:
            return None if values is None else [0.0] * (response_length - len(values)) + values[-response_length:]

        return cls(laid_out(row.get("log_probs")), laid_out(row.get("advantages")))


@dataclass(frozen=True, slots=True)
class DumpedSample:
    """One line of a dump."""

    sample: Sample
    rollout_id: int
    eval_set: str | None
    """None for a training sample."""
    token_texts: list[str] | None  # [T]
    trained: Trained | None


def sample_files(folder: Path) -> list[Path]:
    """Files with samples of a run (rollouts first, each kind in the order of steps), or directly in `folder`.

    Raises DataError when there are none.
    """
    inside = [folder / name for name in FOLDERS if (folder / name).is_dir()]
    found = [path for part in inside or [folder] for path in dumps_in(part)]
    files = [path for path in found if not path.name.startswith(TRAINED) and path.name not in _NOT_SAMPLES]
    if not files:
        raise DataError(
            f"{folder} holds no samples; give the --output-dir of a run that had --dump-rollouts or an evaluation"
        )
    return files


def read_samples(path: Path, *, with_trained: bool = True) -> Iterator[tuple[int, DumpedSample]]:
    """Each sample with its line's number, from 1. A last line that is still being written, or was cut off, is left out.

    Raises DataError for a file that cannot be read, or that holds something else than samples.
    """
    try:
        trained = _read_trained(path) if with_trained else {}
        with open_dump(path) as file:
            for number, line in enumerate(file, start=1):
                if line == b"\n":
                    continue
                try:
                    yield number, _parse(json.loads(line), trained)
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    if not line.endswith(b"\n"):
                        return
                    raise DataError(
                        f"{path}, line {number} is no dumped sample; give a file below OUTPUT_DIR/rollouts "
                        "(--dump-rollouts) or OUTPUT_DIR/eval"
                    ) from error
    except (OSError, *DAMAGED) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _parse(row: dict[str, Any], trained: dict[int, dict[str, Any]]) -> DumpedSample:
    """LookupError, TypeError, ValueError or AttributeError for another object."""
    for name in _REQUIRED:
        row[name]
    sample = sample_of(row)
    texts, line = row.get("token_texts"), trained.get(sample.index) if "eval_set" not in row else None
    return DumpedSample(
        sample,
        rollout_id=int(row.get("rollout_id", 0)),
        eval_set=row.get("eval_set"),
        token_texts=texts if texts and len(texts) == len(sample.tokens) else None,
        trained=None if line is None else Trained.of_line(line, sample.response_length),
    )


def _read_trained(path: Path) -> dict[int, dict[str, Any]]:
    """Lines by `Sample.index`; empty where the trainer wrote nothing for the rollout of `path`."""
    beside = find_dump(path.with_name(path.name.replace("rollout_", TRAINED, 1)))
    if beside.name == path.name or not beside.is_file():
        return {}
    found = {}
    with open_dump(beside) as file:
        lines = file.read().split(b"\n")
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the last line, cut off
            continue
        found[row["index"]] = row
    return found
