"""Finished evaluation samples, one JSON line each, written as they end: a stopped evaluation goes on where it was."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from slime_retool.errors import ConfigError
from slime_retool.types import Sample, SampleStatus

ENCODING: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
"""Half of a surrogate pair, which UTF-8 cannot hold, becomes the very escape that JSON has for it."""
_FIELDS = {field.name for field in fields(Sample)}


class Transcripts:
    """The samples of one evaluation set. Use it as a context manager.

    Without `resume` the file starts empty. With it, samples that an earlier evaluation left are in `done`, by
    `Sample.index`; those that FAILED or were ABORTED are not, so that they are tried again. `setting` describes what
    the samples depend on and is kept beside the file; another one is refused.
    """

    def __init__(self, path: Path, *, further: dict[str, Any], setting: dict[str, Any], resume: bool = False) -> None:
        """`further`: fields that every line holds beside the sample's own. Raises ConfigError, see the class."""
        self._further = further
        self.done: dict[int, Sample] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".setting.json")
        text = json.dumps(setting, indent=1, sort_keys=True, default=repr)
        if resume and path.exists():
            self._check(beside, text)
            self.done = _read(path)
        beside.write_text(text, encoding="utf-8")
        part = path.with_name(path.name + ".part")
        with part.open("w", **ENCODING) as file:
            file.writelines(self._line(sample) for sample in self.done.values())
        os.replace(part, path)
        self._file = path.open("a", **ENCODING)

    def add(self, sample: Sample) -> None:
        """Write one finished sample."""
        self._file.write(self._line(sample))
        self._file.flush()

    def __enter__(self) -> Transcripts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _line(self, sample: Sample) -> str:
        return json.dumps({**asdict(sample), **self._further}, ensure_ascii=False, default=repr) + "\n"

    @staticmethod
    def _check(beside: Path, text: str) -> None:
        before = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
        now = json.loads(text)
        changed = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
        if changed:
            was, is_now = before.get(changed[0]), now.get(changed[0])
            raise ConfigError(
                f"{beside.parent} holds samples of another evaluation ({changed[0]} was {was}, now it is {is_now}); "
                "give a new --output-dir"
            )


def _read(path: Path) -> dict[int, Sample]:
    """Usable samples by index; a last line that was cut off is left out."""
    done: dict[int, Sample] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        sample = Sample(**{name: value for name, value in row.items() if name in _FIELDS})
        sample.status = SampleStatus(sample.status)
        if sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED):
            done[sample.index] = sample
    return done
