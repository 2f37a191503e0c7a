"""Rows of .jsonl and .parquet files as plain dicts, in file order; and the same two formats written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_retool.config.data_sets import split_slice
from slime_retool.errors import ConfigError, DataError

Row = dict[str, Any]
"""One data row: column name -> plain Python value (str, int, float, bool, None, list, dict)."""


_NOT_TEXT = {
    b"\x1f\x8b": "compressed by gzip",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a parquet file",
}
"""How files begin that are called .jsonl by mistake."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of a .jsonl file that holds no row."""

    line: int
    """Its number, from 1: that of the row too, unless blank lines stand before it."""
    reason: str


def read_rows(path: str | Path) -> list[Row]:
    """All rows of a .jsonl or .parquet file, or those of "FILE@[a:b]", as `scan_rows` has them.

    Raises DataError also for a line that holds no row, and names it.
    """
    rows: list[Row] = []
    for row in scan_rows(path):
        if isinstance(row, BadLine):
            raise DataError(f"{split_slice(path)[0]}, line {row.line}: {row.reason}")
        rows.append(row)
    return rows


def scan_rows(path: str | Path) -> list[Row | BadLine]:
    """All rows of a .jsonl or .parquet file, or those of "FILE@[a:b]"; a line without one is a `BadLine` in its place.

    Parquet stores a list of objects as one struct type, so that every object has every object's keys, filled with
    null. Such nulls (inside a column, not the column itself) are removed again. JSON lines are returned as written.

    Raises ConfigError for a missing file or an unknown extension, DataError for a file that cannot be read at all.
    """
    name, chosen = split_slice(path)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"data file {str(path)!r} does not exist; check the path")
    rows: list[Row | BadLine]
    if path.suffix == ".jsonl":
        try:
            rows = _read_jsonl(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
    elif path.suffix == ".parquet":
        rows = [*_read_parquet(path)]
    else:
        raise ConfigError(f"data file {str(path)!r} must end in .jsonl or .parquet")
    if not rows:
        raise DataError(f"{path} holds no rows")
    if not rows[chosen]:
        raise DataError(f"{path} has {len(rows)} rows, none of them in [{chosen.start or ''}:{chosen.stop or ''}]")
    return rows[chosen]


def write_rows(path: str | Path, rows: Iterable[Row]) -> int:
    """Write rows as .jsonl or .parquet (by extension), making missing folders; returns how many were written.

    Raises ConfigError for another extension and where nothing can be written, DataError for values that parquet cannot
    hold.
    """
    path = Path(path)
    rows = list(rows)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"output file {str(path)!r} must end in .jsonl or .parquet")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, rows)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return len(rows)


def _write(path: Path, rows: list[Row]) -> None:
    if path.suffix == ".jsonl":
        path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        return
    import pyarrow
    import pyarrow.parquet

    columns = list(dict.fromkeys(key for row in rows for key in row))
    try:
        table = pyarrow.table({key: [row.get(key) for row in rows] for key in columns})
        pyarrow.parquet.write_table(table, path)
    except (pyarrow.ArrowException, TypeError, OverflowError) as error:
        raise DataError(f"parquet cannot hold these rows ({error}); write .jsonl instead") from error


def parse_json(value: Any, where: str) -> Any:
    """`value` itself, or what it says when it is JSON text. DataError, naming `where`, for other text."""
    if not isinstance(value, str):
        return value
    try:
        return _loads(value)
    except ValueError as error:
        raise DataError(f"{where} must be a list or object, or JSON text of one: {error}; got {value[:80]!r}") from None


def _loads(text: str) -> Any:
    """What JSON text says. ValueError also for half of a surrogate pair: no tokenizer takes it, no file can hold it."""
    value = json.loads(text)
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _read_jsonl(path: Path) -> list[Row | BadLine]:
    rows: list[Row | BadLine] = []
    content = path.read_bytes()
    for begin, what in _NOT_TEXT.items():
        if content.startswith(begin):
            raise DataError(f"{path} is {what}, not lines of JSON: unpack or rename it first")
    # Lines end at \n only: text may hold other line separators (U+2028, U+0085) which str.splitlines would cut at.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        rows.append(_read_line(line, number))
    return rows


def _read_line(line: bytes, number: int) -> Row | BadLine:
    try:
        row = _loads(line.decode())
    except (ValueError, RecursionError) as error:
        is_list = line.strip() == b"["
        return BadLine(number, f"not valid JSON ({'a list over several lines' if is_list else error})")
    if not isinstance(row, dict):
        return BadLine(number, f"every line must be a JSON object, got {type(row).__name__}")
    return row


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    rows: list[Row] = []
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                rows += batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    return [{key: _without_nulls(value) for key, value in row.items()} for row in rows]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
