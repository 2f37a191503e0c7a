"""Run one command and make sure that nothing of it outlives whoever asked for it.

    python supervisor.py LIFELINE_FD GRACE_SECONDS COMMAND...

The command runs in a session of its own. It ends when it ends itself, when this process gets SIGTERM or SIGINT,
or when the lifeline closes: a pipe whose other end only the owner holds, so that this happens even when the owner is
killed with SIGKILL. Ending means: SIGTERM to the command, which ends its own children in good order; after at most
GRACE_SECONDS of patience (2 when the owner is gone) SIGKILL to all that is left of its process group. Processes that
it leaves behind elsewhere are adopted (PR_SET_CHILD_SUBREAPER) and ended too. Should this process itself be killed, the
kernel kills the command (PR_SET_PDEATHSIG).

Why not PR_SET_PDEATHSIG alone: it fires when the *thread* that started the process ends, and it does not reach
grandchildren. Exit status: the command's, or 128 + signal.

Linux only. Runs as a file of its own; standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.2
ORPHAN_GRACE_SECONDS = 2.0


def main(lifeline: int, grace: float, command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked_to_stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: asked_to_stop.append(received))
    child = subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    while child.poll() is None and not asked_to_stop:
        readable, _, _ = select.select([lifeline], [], [], POLL_SECONDS)
        if readable:  # end of file: the owner is gone (it never writes)
            grace = min(grace, ORPHAN_GRACE_SECONDS)
            break
    if child.poll() is None:
        child.terminate()
    deadline = time.monotonic() + grace
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 4)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    adopted = Path(f"/proc/self/task/{os.getpid()}/children")  # whatever session they are in
    while children := [int(pid) for pid in adopted.read_text().split()]:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
