"""Linux system calls by number, for x86_64 and aarch64, and the few that Python does not wrap."""

from __future__ import annotations

import ctypes
import os
import platform

MACHINE = platform.machine()
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name, x86_64, aarch64; "-" where the architecture has no such call (its C library uses a newer one).
_TABLE = """
read 0 63|write 1 64|open 2 -|close 3 57|stat 4 -|fstat 5 80|lstat 6 -|poll 7 -|lseek 8 62|mmap 9 222|mprotect 10 226
munmap 11 215|brk 12 214|rt_sigaction 13 134|rt_sigprocmask 14 135|rt_sigreturn 15 139|ioctl 16 29|pread64 17 67
pwrite64 18 68|readv 19 65|writev 20 66|access 21 -|pipe 22 -|select 23 -|sched_yield 24 124|mremap 25 216
msync 26 227|mincore 27 232|madvise 28 233|dup 32 23|dup2 33 -|pause 34 -|nanosleep 35 101|getitimer 36 102|alarm 37 -
setitimer 38 103|getpid 39 172|sendfile 40 71|sendto 44 206|recvfrom 45 207
sendmsg 46 211|recvmsg 47 212|shutdown 48 210|getsockname 51 204|getpeername 52 205|socketpair 53 199|clone 56 220
fork 57 -|vfork 58 -|execve 59 221|exit 60 93|wait4 61 260|kill 62 129|uname 63 160|fcntl 72 25|flock 73 32
fsync 74 82|fdatasync 75 83|truncate 76 45|ftruncate 77 46|getdents 78 -|getcwd 79 17|chdir 80 49|fchdir 81 50
rename 82 -|mkdir 83 -|rmdir 84 -|creat 85 -|link 86 -|unlink 87 -|symlink 88 -|readlink 89 -|chmod 90 -|fchmod 91 52
umask 95 166|gettimeofday 96 169|getrlimit 97 163|getrusage 98 165|sysinfo 99 179|times 100 153|ptrace 101 117
getuid 102 174|getgid 104 176|setuid 105 146|setgid 106 144|geteuid 107 175|getegid 108 177|getppid 110 173
getpgrp 111 -|getgroups 115 158|setgroups 116 159|setresuid 117 147|getresuid 118 148|setresgid 119 149
getresgid 120 150|getpgid 121 155|getsid 124 156|capget 125 90|capset 126 91|rt_sigpending 127 136
rt_sigtimedwait 128 137|rt_sigsuspend 130 133|sigaltstack 131 132|statfs 137 43|fstatfs 138 44|getpriority 140 141
sched_getparam 143 121|sched_getscheduler 145 120|sched_get_priority_max 146 125|sched_get_priority_min 147 126
pivot_root 155 41|prctl 157 167|arch_prctl 158 -|mount 165 40|umount2 166 39|gettid 186 178|time 201 -|futex 202 98
sched_getaffinity 204 123|epoll_create 213 -|getdents64 217 61|set_tid_address 218 96|restart_syscall 219 128
fadvise64 221 223|timer_create 222 107|timer_settime 223 110|timer_gettime 224 108|timer_getoverrun 225 109
timer_delete 226 111|clock_gettime 228 113|clock_getres 229 114|clock_nanosleep 230 115|exit_group 231 94
epoll_wait 232 -|epoll_ctl 233 21|tgkill 234 131|utimes 235 -|waitid 247 95|openat 257 56|mkdirat 258 34
newfstatat 262 79|unlinkat 263 35|renameat 264 38|linkat 265 37|symlinkat 266 36|readlinkat 267 78|fchmodat 268 53
faccessat 269 48|pselect6 270 72|ppoll 271 73|unshare 272 97|set_robust_list 273 99|get_robust_list 274 100
utimensat 280 88|epoll_pwait 281 22|timerfd_create 283 85|fallocate 285 47|timerfd_settime 286 86
timerfd_gettime 287 87|eventfd2 290 19|epoll_create1 291 20|dup3 292 24|pipe2 293 59|preadv 295 69|pwritev 296 70
prlimit64 302 261|setns 308 268|getcpu 309 168|renameat2 316 276|seccomp 317 277|getrandom 318 278
membarrier 324 283|copy_file_range 326 285|statx 332 291|rseq 334 293|pidfd_send_signal 424 424
pidfd_open 434 434|clone3 435 435|close_range 436 436|openat2 437 437|faccessat2 439 439|epoll_pwait2 441 441
mount_setattr 442 442|landlock_create_ruleset 444 444|landlock_add_rule 445 445|landlock_restrict_self 446 446
futex_waitv 449 449|fchmodat2 452 452
"""


def numbers(machine: str) -> dict[str, int]:
    """System call numbers by name; calls that `machine` does not have are absent."""
    column = {"x86_64": 1, "aarch64": 2}[machine]
    entries = [entry.split() for line in _TABLE.strip().splitlines() for entry in line.split("|")]
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}


NR = numbers(MACHINE) if MACHINE in AUDIT_ARCH else {}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
libc.mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITY_VERSION_3 = 0x20080522


def check(value: int, call: str) -> int:
    """`value`, or OSError with the kernel's reason."""
    if value < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return value


def syscall(name: str, *arguments: object) -> int:
    return check(libc.syscall(ctypes.c_long(NR[name]), *arguments), name)


def prctl(option: int, argument: int = 0, second: int = 0) -> None:
    check(libc.prctl(option, argument, second, 0, 0), f"prctl({option})")


def drop_capabilities() -> None:
    """Empty the effective, permitted and inheritable sets of this thread."""
    header = _CAPABILITY_VERSION_3.to_bytes(4, "little") + bytes(4)
    syscall("capset", header, bytes(24))


def drop_bounding_set() -> None:
    """No later exec can gain a capability. Needs CAP_SETPCAP; without it there is nothing to drop."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            return


_without_handlers = ctypes.PyDLL(None)


def raw_fork() -> int:
    """fork(2) without Python's fork handlers (`threading`, `random`, `logging`, ...), which touch and so copy many
    pages.

    Sound only in a process that has one thread and holds the interpreter's lock, as the zygote does: thread identities
    and locks then mean the same in the child.
    """
    return check(_without_handlers.fork(), "fork")
