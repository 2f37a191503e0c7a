"""Folders that code has filled, measured and removed by whoever may not trust them.

By descriptors and never by paths, so that neither links nor the length of a path lead anywhere else; iteratively, so
that depth costs no stack; and in steps, so that size stalls nobody.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import time
from collections import deque
from collections.abc import Iterator

WORK, TRASH = "work", "trash"
"""Of the sandbox's folder: where calls work, and what is being removed."""
REMOVE_SECONDS = 5.0

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""It was removed, or replaced by something that is no folder, since its name was read."""
_BLOCK = 512
"""Bytes of a block of `st_blocks`, whatever the file system's."""
_MAX_TRIES = 3
_RETRY_SECONDS = 0.02


def exceeds(parent: int, name: str, room: int, inodes: int) -> bool:
    """Whether folder `name` below descriptor `parent` holds more than `room` bytes or `inodes` entries.

    A folder that we cannot list, or that is too deep for our descriptors, hides what it holds: that exceeds them too.
    """
    if room < 0:  # by deleted files alone, beside which the folder may be empty
        return True
    open_folders = [(os.dup(parent), [name])]
    try:
        while open_folders:
            folder, names = open_folders[-1]
            if not names:
                os.close(open_folders.pop()[0])
                continue
            try:
                fd = os.open(names.pop(), os.O_RDONLY | _FOLDER, dir_fd=folder)
            except OSError as error:
                if error.errno in _GONE:
                    continue
                return True
            open_folders.append((fd, []))
            with os.scandir(fd) as entries:
                for entry in entries:
                    inodes -= 1
                    with contextlib.suppress(FileNotFoundError):
                        room -= entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                    if room < 0 or inodes < 0:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        open_folders[-1][1].append(entry.name)
        return False
    except OSError:
        return True
    finally:
        for fd, _ in open_folders:
            os.close(fd)


def deleted_bytes(pid: int, device: int) -> int:
    """Bytes on `device` of files that a process holds open and has deleted: no folder shows them."""
    total, seen = 0, set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{pid}/fd/{fd}")
                deleted = stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_dev == device
                if deleted and status.st_ino not in seen:
                    seen.add(status.st_ino)
                    total += status.st_blocks * _BLOCK
    return total


class Remover:
    """Removes folders that lie directly in the folder `root`, a descriptor.

    Every folder inside them is first moved up into `root`: two descriptors do for any depth.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._waiting: deque[tuple[str, int]] = deque()
        self._numbers = itertools.count()
        self._current: Iterator[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting) or self._current is not None

    def add(self, name: str, parent: int | None = None) -> None:
        """Remove folder `name` of `root`, or of `parent` on the same file system."""
        self._waiting.append((name if parent is None else self._move_up(name, parent), _MAX_TRIES))

    def step(self, entries: int) -> None:
        """Remove up to so many entries."""
        for _ in range(entries):
            if self._current is None:
                if not self._waiting:
                    return
                self._current = self._remove(*self._waiting.popleft())
            if next(self._current, "done") == "done":
                self._current = None

    def _move_up(self, name: str, parent: int) -> str:
        with _made_ours(name, parent):
            for number in self._numbers:
                with contextlib.suppress(FileExistsError, NotADirectoryError):
                    try:
                        os.rename(name, f".{number}", src_dir_fd=parent, dst_dir_fd=self._root)
                    except OSError as error:
                        if error.errno == errno.ENOTEMPTY:
                            continue  # what a predecessor left; an empty folder of that name is replaced
                        raise
                    return f".{number}"
        raise AssertionError("numbers do not end")

    def _remove(self, name: str, tries: int) -> Iterator[None]:
        """Yields after each entry. What cannot be removed after some tries is left."""
        with contextlib.suppress(OSError):
            with _made_ours(name, self._root):
                fd = os.open(name, os.O_RDONLY | _FOLDER, dir_fd=self._root)
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        with contextlib.suppress(OSError):
                            if entry.is_dir(follow_symlinks=False):
                                self.add(entry.name, fd)
                            else:
                                os.unlink(entry.name, dir_fd=fd)
                        yield
            finally:
                os.close(fd)
            try:
                os.rmdir(name, dir_fd=self._root)
            except OSError:
                if tries > 1:
                    self._waiting.append((name, tries - 1))


@contextlib.contextmanager
def _made_ours(name: str, parent: int) -> Iterator[None]:
    """For work on a folder whose mode may forbid it to its owner."""
    # Nothing follows a link here: the descriptor names the folder itself, which must be one.
    fd = os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)
    try:
        if os.geteuid() and os.fstat(fd).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{fd}", 0o700)
        yield
    finally:
        os.close(fd)


def remove_tree(path: str, seconds: float) -> bool:
    """Whether folder `path` is gone; tried for so many seconds, while processes may still be ending in it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            root = os.open(path, os.O_RDONLY | _FOLDER)
        except OSError as error:
            return error.errno in _GONE
        try:
            remover = Remover(root)
            with os.scandir(root) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            remover.add(entry.name)
                        else:
                            os.unlink(entry.name, dir_fd=root)
            while remover:
                remover.step(1024)
        finally:
            os.close(root)
        with contextlib.suppress(OSError):
            os.rmdir(path)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_RETRY_SECONDS)
