"""Read and write big files past the page cache (O_DIRECT), in large aligned blocks.

A converter touches every byte once, so caching them gains nothing, and giving each 4 KiB a page of the cache costs more
processor time than the disk needs for them. Where a file system refuses O_DIRECT, the same calls go through the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import math
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 4096
"""Bytes; file positions, lengths and memory are multiples of it: a multiple of every usual disk's sector."""
BLOCK = 16 << 20
"""Bytes of one request."""


def read_tensor(path: Path, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor whose row-major values lie at byte `start` of the file, in memory of its own.

    Raises EOFError where the file ends before the tensor does. Safe to call from several threads.
    """
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    end = start + numel * dtype.itemsize
    first = start - start % ALIGNMENT
    memory = aligned_memory(end - first)
    file = _open(path, os.O_RDONLY)
    try:
        at = first
        while at < end:
            with memoryview(memory) as view, view[at - first : at - first + BLOCK] as block:
                count = _unless_refused(file, os.preadv, [block], at)
            if count == 0:
                raise EOFError(f"{path} has {at} bytes, {end} were expected")
            at += count
    finally:
        os.close(file)
    values = torch.frombuffer(memory, dtype=torch.uint8)[start - first : end - first]
    return view_as(values, dtype).reshape(shape)


def view_as(values: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [n * itemsize], a part of `aligned_memory` -> dtype [n], with a storage of just that size.

    Values that do not lie at a multiple of their size are moved down, over the few bytes before them.
    """
    address = values.data_ptr()
    shift = address % dtype.itemsize
    if shift:
        ctypes.memmove(address - shift, address, len(values))
        values = torch.as_strided(values, values.shape, values.stride(), values.storage_offset() - shift)
    return torch.frombuffer(values.numpy().data, dtype=dtype)


def aligned_memory(size: int) -> mmap.mmap:
    """Zeroed memory of at least `size` bytes, in huge pages where the kernel has them."""
    size = -(-size // ALIGNMENT) * ALIGNMENT
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class DirectWriter:
    """Writes a new file from its beginning to its end; a thread writes one block while the next is filled.

    `close` writes the rest and waits until the disk has everything. Left by an exception, the file is incomplete.
    What the thread raises (OSError) is raised by the next call.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._filling, self._writing = aligned_memory(BLOCK), aligned_memory(BLOCK)
        self._size, self._closed = 0, False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="direct-writer")
        self._written: Future[None] | None = None

    def write(self, data: Any) -> int:
        """Append the bytes of a contiguous buffer; returns their number."""
        left = memoryview(data).cast("B")
        total = len(left)
        while left:
            at = self._size % BLOCK
            part = left[: BLOCK - at]
            self._filling[at : at + len(part)] = part
            self._size += len(part)
            left = left[len(part) :]
            if self._size % BLOCK == 0:
                self._wait()
                self._written = self._thread.submit(self._write_block, self._filling, BLOCK, self._size - BLOCK)
                self._filling, self._writing = self._writing, self._filling
        return total

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Nothing: a part of a block cannot be written past the cache."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wait()
        rest = self._size % BLOCK
        # Whole sectors only; what is too much is cut off.
        self._write_block(self._filling, -(-rest // ALIGNMENT) * ALIGNMENT, self._size - rest)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)

    def _wait(self) -> None:
        if self._written is not None:
            self._written.result()

    def _write_block(self, memory: mmap.mmap, size: int, start: int) -> None:
        done = 0
        while done < size:
            with memoryview(memory) as view, view[done:size] as block:
                done += _unless_refused(self._file, os.pwritev, [block], start + done)

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._thread.shutdown()
            os.close(self._file)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666)


def _unless_refused(file: int, call: Any, *args: Any) -> int:
    """`call(file, *args)`, through the page cache where the file system only then refuses O_DIRECT."""
    try:
        return call(file, *args)
    except OSError as error:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return call(file, *args)
