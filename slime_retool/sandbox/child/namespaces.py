"""Namespaces and a minimal read-only root."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from .syscalls import PR_SET_DUMPABLE, check, libc, prctl, syscall

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
FLAGS = {"mount": NEWNS, "cgroup": NEWCGROUP, "uts": NEWUTS, "ipc": NEWIPC, "pid": NEWPID, "net": NEWNET}

_MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_RDONLY = 2, 4, 32, 1
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = -100, 0x8000, 2

INSIDE_ID = 1000
"""User and group id that the code sees as its own."""
WORK = "/sandbox/work"
PACKAGES = "/sandbox/packages"


def unshare(flags: int) -> None:
    check(libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def join_pid_namespace(fd: int) -> None:
    check(libc.setns(fd, NEWPID), "setns")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    result = libc.mount(*encoded, flags, data.encode() if data is not None else None)
    check(result, f"mount of {source or kind or 'flags'} on {target}")


def mount_scratch(megabytes: int, inodes: int) -> None:
    """A fresh, bounded file system on the working directory of this mount namespace."""
    options = f"size={megabytes}m,nr_inodes={inodes},mode=700"
    _mount("tmpfs", WORK, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def become_nobody(uid: int) -> None:
    """From root to `uid` without groups; stays dumpable, so that its own /proc files can be written."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(PR_SET_DUMPABLE, 1)


def write_maps(uid: int, gid: int) -> None:
    """In a new user namespace: `INSIDE_ID` is this user and group outside."""
    maps = {"setgroups": "deny", "uid_map": f"{INSIDE_ID} {uid} 1", "gid_map": f"{INSIDE_ID} {gid} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def make_private() -> None:
    """Mounts of this namespace no longer spread to others."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def build_root(binds: list[tuple[str, str]], masked: list[str], links: list[tuple[str, str]]) -> str:
    """A root on a new tmpfs: `binds` (source, path inside) read-only, `masked` folders empty, `links` (path, target).

    Returns where it is mounted. No file of the host is created or changed: the tmpfs covers a folder that exists on
    every system, in this mount namespace only.
    """
    root = _mount_point([source for source, _ in binds])
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID, "size=1m,mode=755")
    for path, target in links:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    for source, inside in binds:
        _bind(source, root + inside)
    for path in masked:
        _mount("tmpfs", root + path, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_RDONLY, "size=0,nr_inodes=2,mode=755")
    os.makedirs(root + WORK, exist_ok=True)
    return root


def _mount_point(sources: list[str]) -> str:
    for folder in ("/sys", "/mnt", "/media", "/srv", "/home", "/var"):
        if os.path.isdir(folder) and not any(os.path.realpath(s).startswith(folder + "/") for s in sources):
            return folder
    raise OSError(errno.ENOENT, "no folder to mount the sandbox's root on: tried /sys, /mnt, /media, /srv, /home, /var")


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "a"):
            pass
    try:
        _mount(source, target, None, _MS_BIND)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Mounts below it belong to a more privileged namespace and cannot be left out.
        _mount(source, target, None, _MS_BIND | _MS_REC)
    attributes = _ATTR_RDONLY | _ATTR_NOSUID | (0 if source.startswith("/dev/") else _ATTR_NODEV)
    setting = struct.pack("QQQQ", attributes, 0, 0, 0)
    syscall("mount_setattr", _AT_FDCWD, target.encode(), _AT_RECURSIVE, setting, ctypes.c_size_t(len(setting)))


def enter_root(root: str) -> None:
    """Make `root` the root, drop the old one and seal the new one read-only."""
    # A user namespace locks the mounts it inherits; a bind of them can be pivoted to.
    _mount(root, root, None, _MS_BIND | _MS_REC)
    os.chdir(root)
    syscall("pivot_root", b".", b".")
    check(libc.umount2(b".", _MNT_DETACH), "umount2 of the old root")
    os.chdir("/")
    _mount(None, "/", None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID)
