"""Samples as text, for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_retool.commands.viewer.reading import read_samples, sample_files
from slime_retool.dumps import DAMAGED, ENCODING, open_dump
from slime_retool.errors import ConfigError, DataError
from slime_retool.rollout.sample_metrics import is_right
from slime_retool.types import Sample


@dataclass(frozen=True, slots=True)
class Choice:
    """Which samples to show."""

    index: int | None
    limit: int
    wrong: bool
    """Only those that an evaluation counts as wrong, and those without a reward."""
    reward_key: str | None
    accuracy_threshold: float | None

    def is_wrong(self, sample: Sample) -> bool:
        """Raises ConfigError where the reward does not say which answers are right, and no threshold does."""
        if sample.reward is None:
            return True
        right = is_right(sample, self.reward_key, self.accuracy_threshold)
        if right is None:
            raise ConfigError("--wrong: rewards alone do not say which answers are wrong; add --accuracy-threshold")
        return not right


def show(path: Path, choice: Choice) -> int:
    """Print the chosen samples of a file or of all files of a run; returns how many. Raises DataError."""
    if path.is_dir():
        files = sample_files(path)
        for file in files:
            print(f"{_lines(file):>8} samples  {file}")
    elif path.is_file():
        files = [path]
    else:
        raise DataError(f"no such file or folder: {path}")
    shown = 0
    for file in files:
        shown += _show_file(file, choice, choice.limit - shown, name=file if path.is_dir() else None)
    if not shown:
        print("no sample matches")
    return shown


def _show_file(path: Path, choice: Choice, limit: int, name: Path | None) -> int:
    """Print up to `limit` samples, the first one below `name`."""
    shown = 0
    if limit <= 0:
        return shown
    for number, dumped in read_samples(path, with_trained=False):
        if choice.index is not None and dumped.sample.index != choice.index:
            continue
        try:
            if choice.wrong and not choice.is_wrong(dumped.sample):
                continue
        except ConfigError:
            raise
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        if name is not None and not shown:
            print(f"\n{name}")
        # A model may write half of a surrogate pair.
        print(sample_text(dumped.sample, choice.reward_key).encode(**ENCODING).decode(), flush=True)
        shown += 1
        if shown == limit:
            break
    return shown


def _lines(path: Path) -> int:
    """How many there are. Raises DataError for a file that cannot be read."""
    try:
        with open_dump(path) as file:
            return sum(1 for _ in file)
    except (OSError, *DAMAGED) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def sample_text(sample: Sample, reward_key: str | None) -> str:
    """One dumped sample as a page."""
    reward, acc = sample.reward, ""
    if isinstance(reward, dict):
        acc = f"  acc {reward['acc']}" if "acc" in reward else ""
        reward = reward.get(reward_key or "score", reward)
    head = f"sample {sample.index}  label {sample.label}  reward {reward}{acc}  {sample.status.value}"
    line = "-" * 80
    return f"{'=' * 80}\n{head}\n{line}\n{prompt_text(sample)}\n{line}\n{sample.response}"


def prompt_text(sample: Sample) -> str:
    """The prompt's messages, one below the other."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    return "\n".join(f"[{message['role']}] {message.get('content', '')}" for message in sample.prompt)
