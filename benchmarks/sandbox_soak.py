"""Thousands of calls with floods, timeouts, crashes and random kills; then looks for anything left behind.

python benchmarks/sandbox_soak.py --calls 10000 --isolation namespaces
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_retool.sandbox import Sandbox, SandboxPolicy, Status

# (code, seconds, statuses it may end with unless it was killed from outside)
MIX = (
    ("print(6 * 7)", 10.0, ("ok",)),
    ("print(6 * 7)", 10.0, ("ok",)),
    ("print(6 * 7)", 10.0, ("ok",)),
    ("while True: pass", 0.1, ("timeout",)),
    ("while True: print('x' * 9999)", 0.1, ("timeout",)),
    ("import os\nwhile True: os.write(1, b'x' * 65536)", 0.1, ("timeout", "error")),
    ("import os\nos.abort()", 10.0, ("killed",)),
    ("x = bytearray(10**11)", 10.0, ("memory",)),
    ("import os\nos._exit(3)", 10.0, ("error",)),
    (
        "import threading, time\nfor _ in range(5): threading.Thread(target=time.sleep, args=(9,), "
        "daemon=True).start()",
        10.0,
        ("ok",),
    ),
    ("for i in range(50): open(str(i), 'w').write('x' * 1000)", 10.0, ("ok",)),
)


@dataclass
class Report:
    statuses: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    broker_kb: list[int] = field(default_factory=list)
    """Resident memory of the broker after a tenth of the calls and at the end."""


def family(pid: int) -> dict[int, str]:
    """State letters of a process and all its descendants."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return {}
    found = {pid: state}
    for child in children:
        found |= family(int(child))
    return found


def leaves(pid: int) -> list[int]:
    """Processes without children: those of the calls, and the idle ones."""
    found = []
    for member in family(pid):
        with contextlib.suppress(OSError):
            if not Path(f"/proc/{member}/task/{member}/children").read_text():
                found.append(member)
    return found


def resident_kb(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def settle(box: Sandbox) -> dict[str, object]:
    """Until no call is left and as many processes wait as at rest."""
    for _ in range(200):
        stats = await box.stats()
        if not stats["running"] and stats["children"] == sum(stats["idle"].values()):
            break
        await asyncio.sleep(0.02)
    return stats


async def soak(box: Sandbox, calls: int, callers: int, seed: int) -> Report:
    """Runs `MIX` at random; every hundredth call or so, a random process of a call is killed from outside."""
    report, r = Report(), random.Random(seed)
    statuses: collections.Counter[str] = collections.Counter()
    await settle(box)
    broker = box._client.broker_pid
    started = (len(family(broker)), open_files(broker), open_files(os.getpid()))
    queue = [r.choice(MIX) for _ in range(calls)]
    done = 0

    async def caller() -> None:
        nonlocal done
        while queue:
            code, seconds, expected = queue.pop()
            result = await box.run(code, timeout=seconds)
            statuses[result.status.value] += 1
            killed = result.status in (Status.MEMORY, Status.UNAVAILABLE) and "SIGKILL" in (result.error or "")
            if result.status.value not in expected and not killed:
                report.problems.append(f"{code!r}: {result.status.value}: {result.error}")
            elif code == MIX[0][0] and result.status is Status.OK and result.stdout != "42\n":
                report.problems.append(f"{code!r} printed {result.stdout!r}")
            done += 1
            if done == max(1, calls // 10):
                report.broker_kb.append(resident_kb(broker))
            if r.random() < 0.01:
                with contextlib.suppress(OSError, IndexError):  # it may have ended by itself
                    os.kill(r.choice(leaves(broker)), signal.SIGKILL)

    await asyncio.gather(*(caller() for _ in range(callers)))
    stats = await settle(box)
    await asyncio.sleep(0.2)
    report.broker_kb.append(resident_kb(broker))
    ended = (len(family(broker)), open_files(broker), open_files(os.getpid()))
    if ended != started:
        report.problems.append(f"processes, the broker's and our descriptors: {started} at first, {ended} at the end")
    zombies = [pid for pid, state in family(broker).items() if state == "Z"]
    if zombies:
        report.problems.append(f"zombies: {zombies}")
    if report.broker_kb[-1] > report.broker_kb[0] * 1.2 + 4096:
        report.problems.append(f"the broker grew from {report.broker_kb[0]} to {report.broker_kb[-1]} kB")
    if stats["queued"] or stats["running"]:
        report.problems.append(f"left: {stats}")
    report.statuses = dict(statuses)
    return report


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--isolation", default="namespaces")
    args = parser.parse_args()
    async with Sandbox(SandboxPolicy(isolation=args.isolation, packages=())) as box:
        report = await soak(box, args.calls, args.callers, args.seed)
    print(json.dumps(asdict(report), indent=1))
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    asyncio.run(main())
