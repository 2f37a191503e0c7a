"""Output files of a child: memory files that it writes, of bounded size, and that we read after it has stopped."""

from __future__ import annotations

import os


def take(fd: int, limit: int, written: int | None) -> tuple[str, bool]:
    """(text, truncated) of what was written, then empties the file.

    `executor._RingWriter` keeps the first half of `limit` bytes and a ring of the last half; the file's offset, shared
    with us, is the ring's seam. Code that writes to the descriptor itself just makes the file longer. written: bytes in
    all, as far as the child could tell.
    """
    try:
        size, position = os.fstat(fd).st_size, os.lseek(fd, 0, os.SEEK_CUR)
        if size == position == 0:
            return "", False
        half = limit // 2
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
    first, last = (part.decode("utf-8", "replace") for part in (head, tail))
    if not tail:
        return first, written is not None and written > len(head)
    omitted = max(size, written or 0) - len(head) - len(tail)
    count = f"{omitted} bytes of output" if written is not None or not wrapped else "output"
    return f"{first}\n... [{count} omitted] ...\n{last}", True
