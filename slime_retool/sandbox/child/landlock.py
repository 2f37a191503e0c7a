"""Landlock: the kernel's unprivileged file access rules. Everything not allowed by a rule is denied.

It does not cover metadata (stat, chmod, utime), so the seccomp filter does where there is no private root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from .syscalls import NR, libc, syscall

EXECUTE, WRITE, READ, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
READ_ONLY = READ | READ_DIR | EXECUTE
READ_WRITE = READ | READ_DIR | WRITE | TRUNCATE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SYM | REFER
_OF_A_FILE = EXECUTE | WRITE | READ | TRUNCATE | IOCTL_DEV
_RULE_PATH_BENEATH = 1

ABI_TRUNCATE = 3
"""First ABI version that can deny truncation (Linux 6.2)."""


def abi_version() -> int:
    """The kernel's Landlock ABI; 0 where it has none."""
    version = libc.syscall(ctypes.c_long(NR["landlock_create_ruleset"]), None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(0, version)


class Ruleset:
    """Rules being collected; `restrict_self` puts them in force for this process and all it forks."""

    def __init__(self) -> None:
        self.abi = abi_version()
        if not self.abi:
            raise OSError(ctypes.get_errno() or errno.ENOSYS, "landlock_create_ruleset: not supported or disabled")
        files = (1 << 13) - 1
        for since, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV)):
            files |= right if self.abi >= since else 0
        tcp_bind_and_connect = 3 if self.abi >= 4 else 0
        scoped_sockets_and_signals = 3 if self.abi >= 6 else 0
        self._handled = files
        attributes = struct.pack("QQQ", files, tcp_bind_and_connect, scoped_sockets_and_signals)
        size = 8 if self.abi < 4 else 16 if self.abi < 6 else 24
        self.fd = syscall("landlock_create_ruleset", attributes, ctypes.c_size_t(size), ctypes.c_uint(0))

    def allow(self, path: str, rights: int) -> None:
        """Allow `rights` on `path` and everything below it; a path that does not exist is left out."""
        try:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if not os.path.isdir(path):
                rights &= _OF_A_FILE
            if not rights & self._handled:
                return
            rule = struct.pack("=Qi", rights & self._handled, parent)
            syscall("landlock_add_rule", ctypes.c_int(self.fd), _RULE_PATH_BENEATH, rule, ctypes.c_uint(0))
        except OSError as error:
            raise OSError(error.errno, f"landlock_add_rule for {path}: {os.strerror(error.errno or 0)}") from error
        finally:
            os.close(parent)

    def restrict_self(self) -> None:
        syscall("landlock_restrict_self", ctypes.c_int(self.fd), ctypes.c_uint(0))
