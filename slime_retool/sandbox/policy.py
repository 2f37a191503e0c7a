"""What a sandbox allows, and what one call reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

from slime_retool.errors import ConfigError, ToolUnavailable

ISOLATION_LEVELS = ("process",)


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
    """Ended by a signal (a crash in native code, the kernel's out-of-memory killer)."""
    UNAVAILABLE = "unavailable"
    """An outage of the sandbox. The code may not have run at all; never show it to a model."""


@dataclass(frozen=True, slots=True)
class SandboxPolicy:
    """Limits of every call in a sandbox. Raises ConfigError on values that cannot work."""

    isolation: str = "process"
    """`process`: a clean child process with resource limits. It protects against mistakes (endless loops, floods
    of output or memory, stray children, leaked variables). It is NOT a security boundary: the code runs as
    the same user, can read what that user can read and can use the network."""
    timeout: float = 10.0
    """Seconds of wall time for one call unless `run` says otherwise, from start of execution."""
    memory_mb: int = 512
    """Address space of each process of a call, in MiB."""
    concurrency: int = 16
    """Calls that run at once; further ones wait, and waiting is not counted as run time."""
    max_output_bytes: int = 65_536
    """Kept of each of stdout and stderr: the first and the last part."""
    max_file_mb: int = 16
    """Size of one file, in MiB."""
    max_open_files: int = 256
    max_processes: int = 4096
    """RLIMIT_NPROC. The kernel counts all processes and threads of the user, not of the call, and does not
    count for root: it only keeps a fork bomb from taking the whole machine."""
    startup_timeout: float = 60.0
    """Seconds the interpreter may take to start; beyond that the machine is out of order (`unavailable`)."""

    def __post_init__(self) -> None:
        if self.isolation not in ISOLATION_LEVELS:
            raise ConfigError(
                f"sandbox isolation must be one of {', '.join(ISOLATION_LEVELS)}, got {self.isolation!r}"
            )
        for name, value in asdict(self).items():
            if name != "isolation" and not value > 0:
                raise ConfigError(f"sandbox {name} must be above 0, got {value}")


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
    """CPU seconds of the code and the processes it started."""
    max_rss: int = 0
    """Bytes of resident memory of its largest process."""
    queue_s: float = 0.0
    """Seconds the call waited for its turn."""
    truncated: bool = False
    """Output was longer than kept."""
