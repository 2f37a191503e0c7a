"""Huge pages for the zygote's memory, so that a fork copies far fewer page-table entries."""

from __future__ import annotations

import ctypes
import os

from .syscalls import libc

_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20


def collapse_memory(maps_file: int) -> int:
    """Collapse private memory where the kernel can (Linux 6.1). Returns the number of huge pages.

    maps_file: descriptor of an open /proc/self/maps.
    """
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    os.lseek(maps_file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(maps_file)) as file:
        lines = [line.split() for line in file]
    collapsed = 0
    for line in lines:
        if not line[1].startswith("rw") or (len(line) > 5 and line[5] != "[heap]"):
            continue
        first, last = (int(address, 16) for address in line[0].split("-"))
        start = -(-first // _HUGE_PAGE) * _HUGE_PAGE
        for page in range(start, last - _HUGE_PAGE + 1, _HUGE_PAGE):
            collapsed += libc.madvise(page, _HUGE_PAGE, _MADV_COLLAPSE) == 0
    return collapsed
