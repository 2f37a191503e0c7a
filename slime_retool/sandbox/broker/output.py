"""Output files of a child: memory files that it writes, of bounded size, and that we read after it has stopped."""

from __future__ import annotations

import os

_SHORT = 4096
"""Bytes that are read in one go, as most output is shorter."""
_GIVEN_UP = 4
"""One part in so many, at most, on each side of a cut for whole lines."""
_CONTINUES = range(0x80, 0xC0)
"""Bytes of UTF-8 that begin no character."""


def take(fd: int, limit: int, written: int | None) -> tuple[str, bool]:
    """(text, truncated) of what was written, then empties the file.

    `executor._RingWriter` keeps the first half of `limit` bytes and a ring of the last half; the file's offset, shared
    with us, is the ring's seam. Code that writes to the descriptor itself just makes the file longer. written: bytes in
    all, as far as the child could tell.

    A cut is marked, and is made between two lines, or else inside a long line, where the mark then stands: a part of a
    number never looks like a number.
    """
    try:
        half = limit // 2
        room = min(half, _SHORT)
        head = os.pread(fd, room, 0)
        if len(head) < room and (written or 0) <= len(head):  # all of it, and no ring
            if head:
                os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
            return head.decode("utf-8", "replace"), False
        size, position = os.fstat(fd).st_size, os.lseek(fd, 0, os.SEEK_CUR)
        if size == position == 0:
            return "", False
        wrapped = half <= position < size <= limit
        if wrapped:
            tail = os.pread(fd, size - position, position) + os.pread(fd, position - half, half)
        else:
            tail = b"" if size <= limit else os.pread(fd, half, size - half)
        head = os.pread(fd, half if tail else min(size, limit), 0)
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        return "", False
    if not tail and (written is None or written <= len(head)):
        return head.decode("utf-8", "replace"), False
    # Of a ring whose writer was killed, nobody knows how often it went round.
    known = written is not None or not wrapped
    head, (after, tail) = _until_line_end(head), _from_line_start(tail)
    omitted = f"{max(size, written or 0) - len(head) - len(tail)} bytes of output" if known else "output"
    first, last = (part.decode("utf-8", "replace") for part in (head, tail))
    return f"{first}... [{omitted} omitted] ...{after}{last}", True


def _until_line_end(head: bytes) -> bytes:
    """Whole lines, or whole characters where the last line is long."""
    end = head.rfind(b"\n", len(head) - len(head) // _GIVEN_UP) + 1
    if end:
        return head[:end]
    start = len(head)
    while start > max(0, len(head) - 4) and head[start - 1] in _CONTINUES:
        start -= 1
    # The character that begins there may have lost its end.
    return head[: start - 1] if start and head[start - 1] >= 0xC0 else head


def _from_line_start(tail: bytes) -> tuple[str, bytes]:
    """What stands between the mark and the tail, and the tail, as `_until_line_end`."""
    start = tail.find(b"\n", 0, len(tail) // _GIVEN_UP) + 1
    if start:
        return "\n", tail[start:]
    while start < min(len(tail), 3) and tail[start] in _CONTINUES:
        start += 1
    return "", tail[start:]
