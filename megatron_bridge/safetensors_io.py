"""Read a Hugging Face checkpoint's safetensors files tensor by tensor, and rewrite them with other values.

Format: 8 bytes little-endian header length, JSON header, raw row-major data, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.direct_io import DirectWriter, read_tensor

INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `size` bytes from byte `start` of the file."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


class SafetensorsCheckpoint:
    """The weights of a checkpoint directory. Reading is safe from several threads.

    Raises ValueError for a directory without (readable, floating-point) safetensors, for a tensor that two of its files
    hold, and for one that is not in the file that the index names.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        weight_map = self._read_index()
        self.files = self._find_files(weight_map)
        self.entries: dict[str, TensorEntry] = {}
        for file in self.files:
            for entry in read_header(self.directory / file)[1]:
                if entry.name in self.entries:
                    raise ValueError(
                        f"{self.directory}: both {self.entries[entry.name].file} and {file} hold the tensor "
                        f"{entry.name}: leave it in one of them"
                    )
                self.entries[entry.name] = entry
        for name, file in (weight_map or {}).items():
            if name not in self.entries or self.entries[name].file != file:
                raise ValueError(
                    f"{self.directory}: {INDEX_FILE} says that {file} holds the tensor {name}, and it does not: "
                    "download the checkpoint again"
                )

    def _read_index(self) -> dict[str, str] | None:
        """Tensor name -> file name, as the index has it; None without an index."""
        index = self.directory / INDEX_FILE
        if not index.is_file():
            return None
        try:
            weight_map = dict(json.loads(index.read_text())["weight_map"].items())
            outside = [file for file in weight_map.values() if Path(file).name != file]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index} is damaged: it has no weight_map; download it again") from None
        if outside:
            raise ValueError(f"{index} names {outside[0]}, which is not a file of this folder: download it again")
        return weight_map

    def _find_files(self, weight_map: dict[str, str] | None) -> list[str]:
        if weight_map is not None:
            files = sorted(set(weight_map.values()))
        else:
            files = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.directory} has no *.safetensors: save the checkpoint in that format first")
        missing = [file for file in files if not (self.directory / file).is_file()]
        if missing:
            raise ValueError(f"{self.directory} lacks {', '.join(missing)}: download the checkpoint completely")
        return files

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        entry = self.entries[name]
        path = self.directory / entry.file
        try:
            return read_tensor(path, entry.start, entry.dtype, entry.shape)
        except EOFError as error:
            raise ValueError(f"{path} ends before tensor {name} does: download it again ({error})") from None

    def read_rows(self, name: str, rows: Iterable[int]) -> dict[int, bytes]:
        """Some rows of a matrix, as their bytes: row -> bytes. ValueError where the file ends before them."""
        entry, found = self.entries[name], {}
        size = entry.size // entry.shape[0]
        with (self.directory / entry.file).open("rb") as file:
            for row in rows:
                file.seek(entry.start + row * size)
                found[row] = file.read(size)
                if len(found[row]) < size:
                    raise ValueError(f"{file.name} ends before tensor {name} does: download it again")
        return found


def read_header(path: Path) -> tuple[bytes, list[TensorEntry]]:
    """The header as it stands in the file (with its length), and its tensors in order of their data."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        raw = file.read(length) if len(prefix) == 8 and length < 1 << 30 else b""
    try:
        header: dict[str, Any] = json.loads(raw)
    except ValueError:
        raise ValueError(f"{path} is not a safetensors file: its header is damaged") from None
    entries = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        if info["dtype"] not in DTYPES:
            raise ValueError(f"{path}: tensor {name} has dtype {info['dtype']}; supported are {', '.join(DTYPES)}")
        dtype, shape, (start, end) = DTYPES[info["dtype"]], tuple(info["shape"]), info["data_offsets"]
        if end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path}: tensor {name} has {end - start} bytes, which do not make shape {list(shape)}")
        entries.append(TensorEntry(name, path.name, dtype, shape, 8 + length + start, end - start))
    return prefix + raw, sorted(entries, key=lambda entry: entry.start)


def rewrite_file(source: Path, target: Path, value_of: Callable[[TensorEntry], Tensor]) -> None:
    """Write `target` with the header (names, dtypes, shapes, order) of `source` and the given values, one by one."""
    raw, entries = read_header(source)
    with DirectWriter(target) as file:
        file.write(raw)
        for entry in entries:
            assert file.tell() == entry.start, f"{source} has a gap before {entry.name}"
            value = value_of(entry)
            assert tuple(value.shape) == entry.shape and value.dtype == entry.dtype, entry.name
            file.write(value.contiguous().reshape(-1).view(torch.uint8).numpy())
