"""What a sandbox allows, what one call asks for, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path

from slime_retool.errors import ConfigError, ToolUnavailable

ISOLATION_LEVELS = ("namespaces", "landlock", "none")
MAX_TIMEOUT = 300.0
"""Seconds that a request to a server may ask for."""
_BEYOND = 1 << 32
"""Larger than any limit: what is above overflows one kernel interface or another."""


def check_limit(name: str, value: object, *, whole: bool) -> None:
    """Raises ConfigError on what is no number (of seconds, or a whole one of bytes, calls, ...) that a limit can be."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < _BEYOND:
        what = "a whole number" if whole else "a number"
        raise ConfigError(f"sandbox {name} must be above 0, got {value!r} (it must be {what} below {_BEYOND})")


def read_token(path: Path) -> str:
    """The text of a file, which servers of code are asked with. Raises ConfigError on what no header can hold."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the token file of the sandbox cannot be read: {error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"the token file of the sandbox, {path}, must hold one line of printable ASCII")
    return token


class SandboxUnavailable(ToolUnavailable):
    """The sandbox itself could not be set up; says nothing about the code that was to run."""


class Status(str, Enum):
    """How a call ended."""

    OK = "ok"
    ERROR = "error"
    """The code raised, did not compile, or left with a non-zero exit code."""
    TIMEOUT = "timeout"
    """Stopped at the wall-clock or CPU limit."""
    MEMORY = "memory"
    """Ended by the memory limit."""
    KILLED = "killed"
    """Ended by a signal (a crash in native code), or stopped at the disk limit."""
    UNAVAILABLE = "unavailable"
    """An outage of the sandbox. The code may not have run at all; never show it to a model."""


@dataclass(frozen=True, slots=True)
class SandboxPolicy:
    """Limits of a sandbox and of every call in it. Raises ConfigError on values that cannot work."""

    isolation: str = "namespaces"
    """`namespaces`: own user, process, mount, network, IPC and host-name namespaces with a minimal read-only root,
    Landlock, a system call filter, no capabilities, resource limits. `landlock`: all but the namespaces, for containers
    that refuse them. `none`: the same process with resource limits and no other layer; it protects against mistakes and
    is NOT a security boundary: the code can read what its user can read and use the network. A level is never replaced
    by a weaker one."""
    packages: tuple[str, ...] = ("numpy", "sympy")
    """Distributions that the code can import, with what they require; nothing else of the environment is there.
    Preloaded, so an import costs nothing. Level `none` sees all, and preloads those that are installed."""
    timeout: float = 10.0
    """Seconds of wall time for one call unless `run` says otherwise, from start of execution."""
    cpu_timeout: float | None = None
    """Seconds of CPU time of one call, all threads together; None: as many as its wall time."""
    memory_mb: int = 512
    """Memory of one call, in MiB of address space beyond the interpreter and its preloaded packages."""
    max_code_bytes: int = 1 << 20
    """Length of the code of one call, in UTF-8. Longer code is an error and is not looked at."""
    max_output_bytes: int = 65_536
    """Kept of each of stdout and stderr: the first and the last part."""
    max_file_mb: int = 16
    """Size of one file, in MiB."""
    max_disk_mb: int = 16
    """All files of one call or session, in MiB. Memory, at level `namespaces`."""
    max_inodes: int = 1024
    """Files and folders of one call or session."""
    max_open_files: int = 64
    max_threads: int = 128
    """Threads at once of one call or session; a further one fails to start. Not at level `none`."""
    concurrency: int = 16
    """Calls that run at once; further ones wait, and waiting is not counted as run time."""
    max_queue: int = 4096
    """Calls that wait; beyond it a call is `unavailable` at once."""
    max_sessions: int = 256
    """Sessions kept; a further one evicts the least recently used idle one."""
    session_idle: float = 600.0
    """Seconds without a call after which a session ends."""
    prefork: int = 4
    """Processes kept ready for the next calls."""
    uid: int = 65_534
    """Ordinary user to become when started by root."""
    max_processes: int = 4096
    """RLIMIT_NPROC, only at level `none` (elsewhere a call is one process). The kernel counts all processes and threads
    of the user, not of the call, and does not limit root."""
    startup_timeout: float = 60.0
    """Seconds the interpreter may take to start, or to start again with tries that fail; beyond that the machine is out
    of order (`unavailable`)."""

    def __post_init__(self) -> None:
        if self.isolation not in ISOLATION_LEVELS:
            raise ConfigError(f"sandbox isolation must be one of {', '.join(ISOLATION_LEVELS)}, got {self.isolation!r}")
        for each in fields(self):
            value = self.__getattribute__(each.name)
            if each.name not in ("isolation", "packages") and (each.name, value) != ("cpu_timeout", None):
                check_limit(each.name, value, whole=each.type == "int")


@dataclass(frozen=True, slots=True)
class Result:
    """What one call did. Text is valid Unicode but otherwise as the code wrote it: see `tool_use.observation`."""

    status: Status
    stdout: str = ""
    stderr: str = ""
    result: str | None = None
    """`repr` of the value when the last statement is a bare expression that is not None."""
    error: str | None = None
    """For any status but `ok`: a traceback of the code's own lines, or what stopped it."""
    wall_s: float = 0.0
    """Seconds from start of execution to its end, without start-up and queueing."""
    cpu_s: float = 0.0
    """CPU seconds of the code, all threads."""
    max_rss: int = 0
    """Bytes of resident memory at its largest, by the word of the call's own process."""
    queue_s: float = 0.0
    """Seconds the call waited for its turn."""
    truncated: bool = False
    """Output was longer than kept."""
    limit: str | None = None
    """The limit that was reached, if any: `wall`, `cpu`, `memory`, `disk`, `file_size`, `open_files`, `threads` or
    `output` (which alone does not stop a call)."""
    exit_code: int | None = None
    """Where the code ended itself: what it gave to `sys.exit` or `os._exit`, or -N for a crash by signal N."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of the `fetch_files` that exist, after a call that ended by itself."""

    def __post_init__(self) -> None:
        # An exception's text and a `repr` come as JSON, which can hold half of a surrogate pair.
        for name in ("stdout", "stderr", "result", "error"):
            text = self.__getattribute__(name)
            if text is not None and not text.isascii():
                object.__setattr__(self, name, text.encode("utf-8", "backslashreplace").decode())
