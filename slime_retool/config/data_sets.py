"""Which files a run draws its rows from, under which names and in which proportion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_retool.errors import ConfigError

_NAMED = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*)=(?P<file>.+)$")
_WEIGHTED = re.compile(r"^(?P<file>.+)@(?P<weight>\d+(?:\.\d+)?)$")
_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


@dataclass(frozen=True, slots=True)
class DataSet:
    """One value of `--prompt-data`: FILE, NAME=FILE, each with an optional @[a:b] of rows and an optional @weight."""

    name: str
    """The given one, else the file's stem."""
    file: str
    """A path, with its slice."""
    weight: float | None
    is_named: bool


def parse_data_sets(values: Sequence[str]) -> list[DataSet]:
    """The data sets that the values of `--prompt-data` name.

    Raises ConfigError for two of one name, for weights on some of them only, and for a weight of 0.
    """
    sets = [_parse(value) for value in values]
    names = [each.name for each in sets]
    if len(set(names)) != len(names):
        raise ConfigError(f"--prompt-data: data sets must have different names, got {', '.join(names)}; use NAME=FILE")
    weighted = [each for each in sets if each.weight is not None]
    if weighted and len(weighted) != len(sets):
        without = next(each.name for each in sets if each.weight is None)
        raise ConfigError(f"--prompt-data: give every data set a weight or none; {without} has none")
    if any(each.weight == 0 for each in weighted):
        raise ConfigError("--prompt-data: a weight must be above 0; leave the data set out")
    return sets


def split_slice(path: str | Path) -> tuple[str, slice]:
    """(path, rows) of "FILE@[a:b]", a Python slice of the file's rows; without one, all of them."""
    match = _SLICE.match(str(path))
    if match is None:
        return str(path), slice(None)
    start, stop = (int(match[bound]) if match[bound] else None for bound in ("start", "stop"))
    return match["path"], slice(start, stop)


def _parse(value: str) -> DataSet:
    name, file, weight = "", value, None
    # A path that exists means itself, whatever characters it holds.
    if not Path(value).is_file():
        if match := _NAMED.match(value):
            name, file = match["name"], match["file"]
        if match := _WEIGHTED.match(file):
            file, weight = match["file"], float(match["weight"])
    return DataSet(name or Path(split_slice(file)[0]).stem, file, weight, bool(name))
