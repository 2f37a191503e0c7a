"""What the zygote does to its memory so that its children write, and so copy, few of its pages; what a process uses."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys

from .syscalls import libc

_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20
_IMMORTAL = 0xFFFFFFFF
_BYTES_HEADER = b"".__sizeof__()
_SMALL = range(48, 513, 16)
"""Sizes of the interpreter's own allocator that a `bytes` object can have."""
_MAX_PLUGS = 20_000
_FRESH_RUN = 3072
"""Bytes of consecutive addresses that tell a fresh pool; pools are 4 KiB before Python 3.10 and 16 KiB since."""


STATUS_SIZE = 4096
_STATUS = re.compile(rb"^VmSize:\s*(\d+) kB.*?^VmPTE:\s*(\d+) kB.*?^Threads:\s*(\d+)", re.DOTALL | re.MULTILINE)
"""At the start of lines: the first one is the name that the process gave itself."""


def usage(status: bytes) -> tuple[int, int, int]:
    """Bytes of address space, bytes of page tables and threads, by the text of a /proc/PID/status.

    Zeros of a process that has ended.
    """
    found = _STATUS.search(status)
    if found is None:
        return 0, 0, 0
    size, tables, threads = map(int, found.groups())
    return size << 10, tables << 10, threads


def make_immortal() -> None:
    """Exempt all objects from reference counting, whose writes would copy half of the pages that a child only reads.

    Python 3.12 and 3.13, where an object of this count in its low 32 bits is never counted (PEP 683).
    """
    if not (3, 12) <= sys.version_info[:2] <= (3, 13) or sys.byteorder != "little":
        return
    seen: set[int] = set()
    found = gc.get_objects()
    while found:
        seen.update(map(id, found))
        found = [each for each in gc.get_referents(*found) if id(each) not in seen]
    for address in seen:
        count = ctypes.c_uint32.from_address(address)
        if count.value < 1 << 31:
            count.value = _IMMORTAL


def use_up_gaps() -> list[bytes]:
    """Fill the free places between small objects, so that a child's own objects lie together on new pages.

    What is returned has to be kept.
    """
    plugs = []
    for size in _SMALL:
        last = run = 0
        for _ in range(_MAX_PLUGS):
            plug = bytes(size - _BYTES_HEADER)
            plugs.append(plug)
            run = run + size if id(plug) - last == size else 0
            last = id(plug)
            if run >= _FRESH_RUN:
                break
    return plugs


def collapse(maps_file: int) -> None:
    """Huge pages where the kernel can (Linux 6.1): a fork then copies far fewer page-table entries.

    maps_file: descriptor of an open /proc/self/maps.
    """
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    os.lseek(maps_file, 0, os.SEEK_SET)
    with os.fdopen(os.dup(maps_file)) as file:
        lines = [line.split() for line in file]
    for line in lines:
        if not line[1].startswith("rw") or (len(line) > 5 and line[5] != "[heap]"):
            continue
        first, last = (int(address, 16) for address in line[0].split("-"))
        start = -(-first // _HUGE_PAGE) * _HUGE_PAGE
        for page in range(start, last - _HUGE_PAGE + 1, _HUGE_PAGE):
            libc.madvise(page, _HUGE_PAGE, _MADV_COLLAPSE)
