"""Samples as JSON lines, for reading, replaying and the viewer: of a rollout, and of an evaluation as they end."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from slime_retool.errors import ConfigError
from slime_retool.rollout.hooks import USABLE
from slime_retool.types import Sample, SampleStatus

ENCODING: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
"""Half of a surrogate pair, which UTF-8 cannot hold, becomes the very escape that JSON has for it."""
_FIELDS = {field.name for field in fields(Sample)}


def dump_samples(path: Path, rows: Iterable[tuple[Sample, dict[str, Any]]]) -> None:
    """Write each sample's fields, and the further ones given with it, as one line.

    The file appears whole or not at all. What JSON cannot hold (from metadata, say) is written as its `repr`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w", **ENCODING) as file:
        file.writelines(_line(sample, further) for sample, further in rows)
    os.replace(part, path)


def prune_dumps(folder: Path, keep: int) -> None:
    """Delete what was dumped of all but the newest `keep` rollouts."""
    kept = {path.stem.rpartition("_")[2] for path in sorted(folder.glob("rollout_*.jsonl"))[-keep:]}
    for path in folder.glob("*.jsonl"):
        if path.stem.rpartition("_")[2] not in kept:
            path.unlink()


def sample_of(row: dict[str, Any]) -> Sample:
    """The sample of a dumped line. Raises TypeError, ValueError or AttributeError for a row that is none."""
    sample = Sample(**{name: value for name, value in row.items() if name in _FIELDS})
    sample.status = SampleStatus(sample.status)
    return sample


def _line(sample: Sample, further: dict[str, Any]) -> str:
    return json.dumps({**asdict(sample), **further}, ensure_ascii=False, default=repr) + "\n"


class Transcripts:
    """The samples of one evaluation set, written as they end: a stopped evaluation goes on where it was.

    Use it as a context manager.

    Without `resume` the file starts empty. With it, samples that an earlier evaluation left are in `done`, by
    `Sample.index`; those that FAILED or were ABORTED are not, so that they are tried again. `setting` describes what
    the samples depend on and is kept beside the file; another one is refused, but for what `may_differ`: then samples
    that are there must be written again (`write_again`), and until they are both files stay as they were.
    """

    def __init__(
        self, path: Path, *, further: dict[str, Any], setting: dict[str, Any], resume: bool = False,
        may_differ: Collection[str] = (),
    ) -> None:  # fmt: skip
        """`further`: fields that every line holds beside the sample's own. Raises ConfigError, see the class."""
        self._path, self._further = path, further
        self.done: dict[int, Sample] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".setting.json")
        text = json.dumps(setting, indent=1, sort_keys=True, default=repr)
        if resume and path.exists():
            self._check(beside, text, may_differ)
            self.done = _read(path)
        self._setting = beside, text
        if self.done and may_differ:
            self._file = path.open("a", **ENCODING)
        else:
            self._write_done()

    def add(self, sample: Sample) -> None:
        """Write one finished sample."""
        self._file.write(_line(sample, self._further))
        self._file.flush()

    def write_again(self, samples: Iterable[Sample]) -> None:
        """Replace those that were there already."""
        self._file.close()
        self.done = {sample.index: sample for sample in samples}
        self._write_done()

    def _write_done(self) -> None:
        beside, text = self._setting
        beside.write_text(text, encoding="utf-8")
        dump_samples(self._path, ((sample, self._further) for sample in self.done.values()))
        self._file = self._path.open("a", **ENCODING)

    def __enter__(self) -> Transcripts:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @staticmethod
    def _check(beside: Path, text: str, may_differ: Collection[str]) -> None:
        before = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
        now = json.loads(text)
        changed = sorted(key for key in {*before, *now} - {*may_differ} if before.get(key) != now.get(key))
        if changed:
            was, is_now = before.get(changed[0]), now.get(changed[0])
            raise ConfigError(
                f"{beside.parent} holds samples of another evaluation ({changed[0]} was {was}, now it is {is_now}); "
                "give --rescore where only scores depend on it, else a new --output-dir"
            )


def _read(path: Path) -> dict[int, Sample]:
    """Usable samples by index; a last line that was cut off is left out."""
    done: dict[int, Sample] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        sample = sample_of(row)
        if sample.status in USABLE:
            done[sample.index] = sample
    return done
