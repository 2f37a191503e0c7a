"""Two classic-BPF system call filters, deny by default.

Stage 1 is put on the zygote and inherited: what Python, numpy and sympy need, and what the zygote needs to set up a
child. New threads and pipes are asked about at a listener, where the kernel lends one. Stage 2 is put on each child as
its last step and takes the zygote's part away again. It is small, since it is installed once a call.

File locks succeed and do nothing: a call shares no file with another program that it could write, and on those that it
can only read, or on /dev/null, a lock would be a signal to other calls. Timers with a number (timer_create) are
refused, as Python has no use for them: they count against one limit of all calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
from collections.abc import Iterator, Sequence

from .syscalls import AUDIT_ARCH, MACHINE, NR, PR_SET_SECCOMP, prctl, syscall

_FILTER_MODE = 2
_LD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_OFFSET_NR, _OFFSET_ARCH = 0, 4
_X32_BIT = 0x40000000

_PROGRAM = """
 read write readv writev pread64 pwrite64 preadv pwritev lseek close close_range dup dup2 dup3 open openat creat stat
fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd
chdir fchdir umask mmap mprotect munmap mremap madvise brk mincore msync futex futex_waitv set_robust_list
get_robust_list rseq set_tid_address rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait
rt_sigsuspend sigaltstack restart_syscall pause nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time
times getrusage getitimer setitimer alarm timerfd_create timerfd_settime timerfd_gettime
getpid getppid gettid getuid geteuid getgid getegid getgroups getresuid
getresgid getpgrp getpgid getsid getpriority getrlimit sysinfo uname getrandom getcpu sched_yield
sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min arch_prctl
membarrier exit exit_group wait4 waitid poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait
epoll_pwait epoll_pwait2 eventfd2 pipe fsync fdatasync truncate ftruncate fallocate fadvise64 rename renameat
renameat2 mkdir mkdirat rmdir unlink unlinkat symlink symlinkat link linkat chmod fchmod fchmodat fchmodat2 utimensat
utimes sendfile copy_file_range recvfrom shutdown getsockname getpeername
""".split()
# Allowed to a program only with some arguments: stage 2 decides.
_CHECKED = "clone kill tgkill socketpair sendto prlimit64 prctl ioctl fcntl flock pipe2".split()
_ZYGOTE_ONLY = """
 fork unshare setns mount umount2 capset landlock_create_ruleset landlock_add_rule landlock_restrict_self seccomp
pidfd_open pidfd_send_signal sendmsg recvmsg setuid setgid setresuid setresgid setgroups
""".split()
_METADATA = "chmod fchmod fchmodat fchmodat2 utimensat utimes".split()
_OF_A_PROCESS = {name: 0 for name in "getpgid getsid sched_getaffinity sched_getparam sched_getscheduler".split()}
_OF_A_PROCESS |= {"get_robust_list": 0, "getpriority": 1}
"""Calls about a process, and which argument is its number: without a process namespace, only about the caller."""
_OF_A_CLOCK = "clock_gettime clock_getres clock_nanosleep".split()
_ASKED = ("pipe", "pipe2")

_AF_UNIX = 1
_CLONE_THREAD = 0x10000
_OF_EVERY_THREAD = _CLONE_THREAD | 0x40F00
"""VM, FS, FILES, SIGHAND and SYSVSEM beside it: with a table of descriptors of its own, each thread would have what a
process may."""
_OF_SOME_THREADS = 0x1780000
"""SETTLS, PARENT_SETTID, CHILD_CLEARTID, CHILD_SETTID and, of musl, DETACHED."""
_CLOSE_RANGE_UNSHARE = 2
_FIRST_REALTIME_SIGNAL = 32
_O_NOTIFICATION_PIPE = os.O_EXCL
_PR_SET_NAME, _PR_GET_NAME = 15, 16
_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIO(N)CLEX
_BAD_FCNTLS = (8, 10, 15, 1024, 1026, 1031)  # SETOWN SETSIG SETOWN_EX SETLEASE NOTIFY SETPIPE_SZ
_LOCKS = (6, 7, 37, 38)  # SETLK SETLKW OFD_SETLK OFD_SETLKW
_LOCK_QUERIES = (5, 36)  # GETLK OFD_GETLK
_CPU_CLOCK, _OF_A_THREAD = 1 << 31, 4
"""Clock numbers of processes and threads are negative; for threads, the kernel takes only the caller's own."""

Instructions = list[bytes]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


def _refuse(code: int = errno.EPERM) -> Instructions:
    return [_instruction(_RET, _ERRNO | code)]


_ACCEPT = [_instruction(_RET, _ALLOW)]
_SUCCEED = _refuse(0)
"""The call returns 0 and does nothing."""


def _low(argument: int) -> bytes:
    """Load the low half of an argument (both architectures are little-endian)."""
    return _instruction(_LD, 16 + 8 * argument)


def _only_if_null(argument: int) -> Instructions:
    high = _instruction(_LD, 20 + 8 * argument)
    tests = [_low(argument), _instruction(_JEQ, 0, 0, 3), high, _instruction(_JEQ, 0, 0, 1)]
    return tests + _ACCEPT + _refuse()


def _choose(cases: Sequence[tuple[Sequence[int], Instructions]], other: Instructions) -> Instructions:
    """A test of what is loaded against the values of each case; outcomes are one instruction each."""
    values = [(value, outcome) for outcome, (values, _) in enumerate(cases) for value in values]
    tests = [_instruction(_JEQ, v, len(values) - index + outcome) for index, (v, outcome) in enumerate(values)]
    return [*tests, *other, *(instruction for _, outcome in cases for instruction in outcome)]


def _one_of(values: Sequence[int], found: Instructions, other: Instructions) -> Instructions:
    return _choose([(values, found)], other)


def _sendable(argument: int) -> Instructions:
    """Go on, unless the argument is a signal that a program may not even send to itself: SIGKILL, and those that queue,
    which count against one limit of the user and so of all calls."""
    refused = [_instruction(_JEQ, signal.SIGKILL, 1), _instruction(_JGE, _FIRST_REALTIME_SIGNAL, 0, 1)]
    return [_low(argument), *refused, *_refuse()]


def _own_clock(pid: int) -> Instructions:
    """Clocks of the system, of the caller's threads and of its process, which has the number `pid` or 0."""
    own = [~number << 3 | kind for number in (0, pid) for kind in range(3)]
    tests = [_low(0), _instruction(_JGE, _CPU_CLOCK, 0, len(own) + 2)]
    tests += [_instruction(_JSET, _OF_A_THREAD, len(own) + 1, 0)]
    tests += [_instruction(_JEQ, clock, len(own) - index) for index, clock in enumerate(own)]
    return [*tests, *_refuse(errno.EINVAL), *_ACCEPT]


def _for(name: str, body: Instructions) -> Instructions:
    if name not in NR:
        return []
    return [_instruction(_JEQ, NR[name], 0, len(body)), *body]


def _architecture() -> Instructions:
    """Kill on another architecture's calls (32-bit `int 0x80`, x32), whose numbers mean something else."""
    program = [
        _instruction(_LD, _OFFSET_ARCH),
        _instruction(_JEQ, AUDIT_ARCH[MACHINE], 1, 0),
        _instruction(_RET, _KILL_PROCESS),
        _instruction(_LD, _OFFSET_NR),
    ]
    if MACHINE == "x86_64":
        program += [_instruction(_JGE, _X32_BIT, 0, 1), _instruction(_RET, _KILL_PROCESS)]
    return program


def _numbers(names: list[str]) -> list[int]:
    return sorted({NR[name] for name in names if name in NR})


def stage1(ask: bool) -> bytes:
    """The zygote's filter. A call it does not know fails with EPERM.

    ask: ask at the listener about new threads and pipes.
    """
    program = _architecture()
    # The C library then falls back to the older call, which can be checked.
    for name in ("clone3", "openat2"):
        program += _for(name, _refuse(errno.ENOSYS))
    if ask:
        asked = [_instruction(_RET, _ASK)]
        program += _for("clone", [_low(0), _instruction(_JSET, _CLONE_THREAD, 0, 1), *asked, *_ACCEPT])
        for name in _ASKED:
            program += _for(name, asked)
    return b"".join(program + _one_of(_numbers(_PROGRAM + _CHECKED + _ZYGOTE_ONLY), _ACCEPT, _refuse()))


def stage2(pid: int, private_root: bool) -> bytes:
    """A child's own filter: threads that share all but no processes, signals only to itself (`pid` as it sees itself).

    SIGKILL not even to itself, by no way: as an end from outside it would pass for an outage.
    private_root: False also denies changing modes and times, which Landlock does not cover, reserving space and hard
    links, which are faster than the keeper of the working folders looks, and asking about other processes.
    """
    denied = _ZYGOTE_ONLY + ["vfork", "execve"] + ([] if private_root else [*_METADATA, "link", "linkat"])
    to_itself = [_low(0), *_one_of([pid], _ACCEPT, _refuse())]
    without = _instruction(_AND, ~_OF_SOME_THREADS)
    no_cpu_limit = [_low(1), _instruction(_JEQ, resource.RLIMIT_CPU, 0, 6), *_only_if_null(2)]
    locks = [(_LOCKS, _SUCCEED), (_LOCK_QUERIES + _BAD_FCNTLS, _refuse())]
    program = [
        _instruction(_LD, _OFFSET_NR),
        *_for("clone", [_low(0), without, _instruction(_JEQ, _OF_EVERY_THREAD, 0, 1), *_ACCEPT, *_refuse()]),
        *_for("close_range", [_low(2), _instruction(_JSET, _CLOSE_RANGE_UNSHARE, 0, 1), *_refuse(), *_ACCEPT]),
        *_for("kill", [*_sendable(1), *to_itself]),
        *_for("tgkill", [*_sendable(2), *to_itself]),
        *_for("socketpair", [_low(0), *_one_of([_AF_UNIX], _ACCEPT, _refuse())]),
        *_for("sendto", _only_if_null(4)),  # no address: only on a connected socket
        # Its own, which it can only lower; the kernel ends with SIGKILL at the one of CPU time.
        *_for("prlimit64", [_low(0), _instruction(_JEQ, 0, 1, 0), *_refuse(), *no_cpu_limit, *_ACCEPT]),
        *_for("prctl", [_low(0), *_one_of([_PR_SET_NAME, _PR_GET_NAME], _ACCEPT, _refuse())]),
        *_for("ioctl", [_low(1), *_one_of(_HARMLESS_IOCTLS, _ACCEPT, _refuse(errno.ENOTTY))]),
        *_for("fcntl", [_low(1), *_choose(locks, _ACCEPT)]),
        *_for("flock", _SUCCEED),
        *_for("pipe2", [_low(1), _instruction(_JSET, _O_NOTIFICATION_PIPE, 1, 0), *_ACCEPT, *_refuse()]),
    ]
    if not private_root:
        program += _for("fallocate", _refuse(errno.EOPNOTSUPP))  # the C library writes instead
        for name in _OF_A_CLOCK:
            program += _for(name, _own_clock(pid))
        for name, argument in _OF_A_PROCESS.items():
            program += _for(name, [_low(argument), *_one_of([0, pid], _ACCEPT, _refuse())])
    return b"".join(program + _one_of(_numbers(denied), _refuse(), _ACCEPT))


def install(program: bytes) -> None:
    """Put a filter in force for this thread and what it forks. Needs no_new_privs."""
    with _program(program) as pointer:
        prctl(PR_SET_SECCOMP, _FILTER_MODE, pointer)


def install_and_listen(program: bytes) -> int:
    """As `install`; the descriptor at which calls that ask are answered. Raises OSError where there is none (Linux
    before 5.5; another listener in force)."""
    with _program(program) as pointer:
        return syscall("seccomp", *map(ctypes.c_ulong, (_SET_MODE_FILTER, _NEW_LISTENER, pointer)))


@contextlib.contextmanager
def _program(program: bytes) -> Iterator[int]:
    """Its address, as the kernel wants it."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    pointer = ctypes.create_string_buffer(header, len(header))
    yield ctypes.addressof(pointer)
