"""One tensor out of the bytes that `torch.save` wrote for it, without copying them.

The format is a zip archive of uncompressed records: `data.pkl` says how the tensor is made of its storage,
`data/<key>` is the storage (https://pytorch.org/docs/stable/notes/serialization.html).
"""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zipfile
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.direct_io import view_as

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Fixed part of the header before a record: the lengths of name and extra field come last."""


def load_archive(archive: Tensor) -> Tensor:
    """uint8 [n], what `torch.save` wrote for one tensor -> that tensor, in the archive's memory, which it takes over.

    `archive` comes from `direct_io.read_tensor`. Nothing but a tensor's parts is unpickled; ValueError for all else.
    """
    try:
        return _Unpickler(archive).load()
    except (zipfile.BadZipFile, KeyError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(f"a record of the checkpoint is damaged or holds no tensor: {error}") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: Tensor) -> None:
        self._archive = archive
        with zipfile.ZipFile(io.BufferedReader(_Bytes(archive))) as file:
            self._records = {info.filename.partition("/")[2]: info for info in file.infolist()}
        super().__init__(io.BytesIO(self._record("data.pkl").numpy().data))

    def _record(self, name: str) -> Tensor:
        info = self._records[name]
        if info.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"{name} is compressed")
        header = self._archive[info.header_offset :][: _LOCAL_HEADER.size].numpy().data
        start = info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
        return self._archive[start : start + info.file_size]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return torch.__dict__[name].dtype
        raise pickle.UnpicklingError(f"{module}.{name} is not a part of a tensor")

    def persistent_load(self, pid: tuple[str, torch.dtype, str, str, int]) -> Tensor:
        """The storage, as a tensor of one dimension."""
        _, dtype, key, _, numel = pid
        return view_as(self._record(f"data/{key}"), dtype)[:numel]


def _rebuild(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    return storage.as_strided(size, stride, offset)


class _Bytes(io.RawIOBase):
    """A uint8 tensor as a readable file."""

    def __init__(self, values: Tensor) -> None:
        self._view, self._at = values.numpy().data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)
