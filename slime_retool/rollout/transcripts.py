"""Samples as JSON lines, for reading, replaying and the viewer: of a rollout, and of an evaluation as they end."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from slime_retool.dumps import ENCODING, dumps_in, json_value, number_of, written_whole
from slime_retool.errors import ConfigError
from slime_retool.rollout.hooks import USABLE
from slime_retool.types import Sample, SampleStatus, ShownSample

SHOWN = 8
"""Samples of a dumped rollout that trackers show."""
SHOWN_CHARACTERS = 4000
_FIELDS = {field.name for field in fields(Sample)}


def dump_samples(path: Path, rows: Iterable[tuple[Sample, dict[str, Any]]]) -> None:
    """Write each sample's fields, and the further ones given with it, as one line.

    The file appears whole or not at all. What JSON cannot hold (from metadata, say) is written as its `repr`.
    """
    with written_whole(path) as file:
        file.writelines(_line(sample, further) for sample, further in rows)


def prune_dumps(folder: Path, keep: int, newest: int) -> None:
    """Delete what was dumped before the last `keep` rollouts until `newest`, of which any kind may be there.

    What an attempt left that went further, before the run went back, stays until it is written again.
    """
    numbered = {path: int(number_of(path)) for path in dumps_in(folder) if number_of(path).isdigit()}
    kept = sorted({number for number in numbered.values() if number <= newest})[-keep:]
    for path, number in numbered.items():
        if number < min(kept, default=0):
            path.unlink()


def shown_samples(samples: Sequence[Sample], reward_key: str | None) -> list[ShownSample]:
    """`SHOWN` samples, evenly from all, for trackers."""
    chosen = samples[:: max(1, math.ceil(len(samples) / SHOWN))]
    return [
        ShownSample(
            index=sample.index,
            group=sample.group_index,
            prompt=_bounded(last_asked(sample)),
            response=_bounded(sample.response),
            reward=None if sample.reward is None else sample.reward_value(reward_key),
            turns=sample.num_turns,
            status=sample.status.value,
        )
        for sample in chosen
    ]


def last_asked(sample: Sample) -> str:
    """A prompt that is text, or what its last message of a user says."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    said = (message.get("content") for message in reversed(sample.prompt) if message.get("role") == "user")
    return next((text for text in said if isinstance(text, str)), "")


def _bounded(text: str) -> str:
    """At most `SHOWN_CHARACTERS` of it, the end included, where the answer is; nothing that UTF-8 cannot hold."""
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return text.encode(**ENCODING).decode()


def sample_of(row: dict[str, Any]) -> Sample:
    """The sample of a dumped line. Raises TypeError, ValueError or AttributeError for a row that is none."""
    sample = Sample(**{name: value for name, value in row.items() if name in _FIELDS})
    sample.status = SampleStatus(sample.status)
    return sample


def _line(sample: Sample, further: dict[str, Any]) -> str:
    # Nobody reads experts here, and they would be most of the file: what is trained on is in another one.
    values = asdict(replace(sample, routed_experts=None)) | further
    del values["routed_experts"]
    try:
        return json.dumps(values, ensure_ascii=False, default=json_value) + "\n"
    except TypeError:
        return json.dumps(_with_text_keys(values), ensure_ascii=False, default=json_value) + "\n"


def _with_text_keys(value: Any) -> Any:
    """JSON has no other keys than text."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _with_text_keys(each) for key, each in value.items()}
    return [_with_text_keys(each) for each in value] if isinstance(value, (list, tuple)) else value


@dataclass(slots=True)
class KeptSample:
    """A sample as its line has it, with what the line says of how it came about."""

    sample: Sample
    """With its reward; FAILED where an outage kept it from being scored again."""
    from_row: list[str]
    """Keys of its metadata that have the values of the data row; all others are of hooks."""
    generated: dict[str, Any]
    """`status` and `error` before it was scored again."""

    @classmethod
    def new(cls, sample: Sample, row: Sample) -> KeptSample:
        """A sample that was just generated for this data row."""
        # Compared as text: of arrays, == is no yes or no, and NaN is not equal to itself.
        from_row = [
            key for key, value in row.metadata.items()
            if key in sample.metadata and repr(sample.metadata[key]) == repr(value)
        ]  # fmt: skip
        return cls(sample, from_row, {"status": sample.status, "error": sample.error})

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> KeptSample:
        """What was written of one."""
        generated = line["generated"]
        return cls(sample_of(line), line["from_row"], generated | {"status": SampleStatus(generated["status"])})

    @property
    def beside(self) -> dict[str, Any]:
        """Fields of its line beside the sample's own."""
        return {"from_row": self.from_row, "generated": self.generated}

    @property
    def of_hooks(self) -> dict[str, Any]:
        """Its metadata that hooks set."""
        return {key: value for key, value in self.sample.metadata.items() if key not in self.from_row}

    def unscored(self, row: Sample) -> Sample:
        """As it was generated, with the label and the metadata that its data row has now and what hooks added."""
        metadata = row.metadata | self.of_hooks
        return replace(self.sample, label=row.label, metadata=metadata, reward=None, **self.generated)

    def scored_again(self, sample: Sample, row: Sample) -> KeptSample:
        """The same with what `unscored` of this data row became."""
        return replace(self, sample=sample, from_row=[key for key in row.metadata if key not in self.of_hooks])


class Transcripts:
    """The samples of one evaluation set, written as they end: a stopped evaluation goes on where it was.

    Use it as a context manager.

    Without `resume` the file starts empty. With it, samples that an earlier evaluation left are in `kept`, by
    `Sample.index`; those that FAILED or were ABORTED as they were made are not, so that they are tried again. `setting`
    describes what the samples depend on and is kept beside the file; another one is refused, but for what `may_differ`:
    then samples that are there must be written again (`write_again`), and until they are both files stay as they were.
    """

    def __init__(
        self, path: Path, *, further: dict[str, Any], setting: dict[str, Any], resume: bool = False,
        may_differ: Collection[str] = (),
    ) -> None:  # fmt: skip
        """`further`: fields that every line holds beside the sample's own. Raises ConfigError, see the class."""
        self._path, self._further = path, further
        self.kept: dict[int, KeptSample] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".setting.json")
        text = json.dumps(setting, indent=1, sort_keys=True, default=repr)
        if resume and path.exists():
            self._check(beside, text, may_differ)
            self.kept = _read(path)
        self._setting = beside, text
        if self.kept and may_differ:
            self._file = path.open("a", **ENCODING)
        else:
            self._write_kept()

    def add(self, sample: Sample, row: Sample) -> None:
        """Write one finished sample of this data row."""
        self._file.write(_line(sample, self._further | KeptSample.new(sample, row).beside))
        self._file.flush()

    def write_again(self, samples: Iterable[tuple[Sample, Sample]]) -> None:
        """Replace these, which were there already; each with its data row."""
        self._file.close()
        for sample, row in samples:
            self.kept[sample.index] = self.kept[sample.index].scored_again(sample, row)
        self._write_kept()

    def _write_kept(self) -> None:
        beside, text = self._setting
        beside.write_text(text, encoding="utf-8")
        dump_samples(self._path, ((each.sample, self._further | each.beside) for each in self.kept.values()))
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
            rescore = "" if may_differ else "--rescore where only scores depend on it, else "
            raise ConfigError(
                f"{beside.parent} holds samples of another evaluation ({changed[0]} was {was}, now it is {is_now}); "
                f"give {rescore}a new --output-dir"
            )


def _read(path: Path) -> dict[int, KeptSample]:
    """Samples that were generated, by index; a last line that was cut off is left out."""
    found: dict[int, KeptSample] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        kept = KeptSample.of_line(row)
        if kept.generated["status"] in USABLE:
            found[kept.sample.index] = kept
    return found
