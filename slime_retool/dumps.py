"""Files of --dump-rollouts: JSON lines, compressed where asked for; each appears whole or not at all."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ENCODING: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
"""Half of a surrogate pair, which UTF-8 cannot hold, becomes the very escape that JSON has for it."""
FOLDER = "rollouts"
"""Of --output-dir."""
COMPRESSED = ".gz"
LEVEL = 1
"""Of gzip: level 6 takes several times as long for a tenth less (benchmarks/observing.py)."""
DAMAGED = (EOFError, zlib.error)
"""What reading a damaged compressed file raises beside OSError."""


def json_value(value: Any) -> Any:
    """What json.dumps writes of a value that JSON has no form for: NumPy's and torch's as numbers, else its `repr`."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "dtype") else repr(value)


def dump_path(folder: Path, kind: str, rollout_id: int, *, compressed: bool = False) -> Path:
    """Where the file of this kind is to be written."""
    return folder / f"{kind}_{rollout_id:06d}.jsonl{COMPRESSED if compressed else ''}"


def find_dump(path: Path) -> Path:
    """`path`, or where only that is there, the same file in the other form."""
    other = _other_form(path)
    return other if other.is_file() and not path.is_file() else path


def _other_form(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == COMPRESSED else path.with_name(path.name + COMPRESSED)


def dumps_in(folder: Path, kind: str = "*") -> list[Path]:
    """All files of this kind, by name."""
    return sorted([*folder.glob(f"{kind}.jsonl"), *folder.glob(f"{kind}.jsonl{COMPRESSED}")])


def number_of(path: Path) -> str:
    """The digits of the rollout in a file's name."""
    return path.name.partition(".")[0].rpartition("_")[2]


@contextmanager
def written_whole(path: Path) -> Iterator[IO[str]]:
    """A file to write text to, which gets its name at the end. The same file in the other form is deleted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with gzip.open(part, "wt", LEVEL, **ENCODING) if path.suffix == COMPRESSED else part.open("w", **ENCODING) as file:
        yield file
    os.replace(part, path)
    _other_form(path).unlink(missing_ok=True)


def open_dump(path: Path) -> IO[bytes]:
    """To read. What it raises later for a damaged file is OSError or in `DAMAGED`."""
    return gzip.open(path, "rb") if path.suffix == COMPRESSED else path.open("rb")  # type: ignore[return-value]
