"""Thousands of calls with floods, timeouts, crashes and random kills; then looks for anything left behind.

    python benchmarks/sandbox_soak.py --calls 10000 --isolation namespaces
    python benchmarks/sandbox_soak.py --chaos

With --chaos, one-shots and cells of sessions that each know their answer run while processes of calls, zygotes, the
keeper of working folders and the broker are killed at random. A call may then be lost, and say so; none may be wrong,
and no cell may run twice or not at all. Afterwards the owner of a busy sandbox gets SIGKILL, and a busy server SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp

from slime_retool.sandbox import Result, Sandbox, SandboxPolicy, Status

SETTLE_SECONDS = 60.0
"""Until zygotes that were killed last have started again."""

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


def runs(pid: int) -> bool:
    """Also false for a zombie: when its parent reaps it is not ours to say."""
    return family(pid).get(pid, "Z") != "Z"


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
    """Until no call is left and as many processes wait as at rest, for at most SETTLE_SECONDS."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        stats = await box.stats()
        if not stats["running"] and stats["children"] == sum(stats["idle"].values()) or time.monotonic() > deadline:
            return stats
        await asyncio.sleep(0.02)


@dataclass(frozen=True)
class Held:
    """What a sandbox holds at rest: as much after any number of calls as before."""

    processes: int
    broker_files: int
    own_files: int
    """Open descriptors of this process, which may also close some that others left to the garbage collector."""

    def left(self, first: Held) -> bool:
        """Whether there is more, or less of the sandbox, than at first."""
        sandbox = (self.processes, self.broker_files) != (first.processes, first.broker_files)
        return sandbox or self.own_files > first.own_files


def held(box: Sandbox) -> Held:
    broker = box._client.broker_pid
    return Held(len(family(broker)), open_files(broker), open_files(os.getpid()))


async def soak(box: Sandbox, calls: int, callers: int, seed: int) -> Report:
    """Runs `MIX` at random; every hundredth call or so, a random process of a call is killed from outside."""
    report, r = Report(), random.Random(seed)
    statuses: collections.Counter[str] = collections.Counter()
    await settle(box)
    broker = box._client.broker_pid
    started = held(box)
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
    ended = held(box)
    if ended.left(started):
        report.problems.append(f"{started} at first, {ended} at the end")
    zombies = [pid for pid, state in family(broker).items() if state == "Z"]
    if zombies:
        report.problems.append(f"zombies: {zombies}")
    if report.broker_kb[-1] > report.broker_kb[0] * 1.2 + 4096:
        report.problems.append(f"the broker grew from {report.broker_kb[0]} to {report.broker_kb[-1]} kB")
    if stats["queued"] or stats["running"]:
        report.problems.append(f"left: {stats}")
    report.statuses = dict(statuses)
    return report


CHAOS = (("call", 12), ("zygote", 3), ("keeper", 2), ("broker", 1))
"""What is killed, and how often beside the others."""
CALLS_PER_KILL = 50
"""Mean of an exponential. Counted in answers, not in seconds: a fast machine meets as many kills as a slow one."""
END_SECONDS = 3.0


@dataclass
class ChaosReport:
    statuses: dict[str, int] = field(default_factory=dict)
    killed: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    """Calls that were `unavailable`, by reason."""
    problems: list[str] = field(default_factory=list)
    own_kb: list[int] = field(default_factory=list)
    """Resident memory of this process after a tenth of the calls and at the end."""
    seconds: float = 0.0
    seconds_to_end: dict[str, float] = field(default_factory=dict)
    """Until no process and no file was left, by how it was ended."""


def roles(broker: int) -> dict[str, list[int]]:
    """Processes of a sandbox by what they are."""
    found: dict[str, list[int]] = {"broker": [broker], "zygote": [], "keeper": [], "call": []}
    for pid in family(broker):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            if b"broker.keeper" in command:
                found["keeper"].append(pid)
            elif b"child.zygote" in command:
                # A call's process has the zygote's command line; only the zygote has children, or none as yet.
                found["zygote" if children else "call"].append(pid)
    return found


class Chaos:
    def __init__(self, box: Sandbox, calls: int, callers: int, seed: int) -> None:
        self.box, self.left, self.callers, self.random = box, calls, callers, random.Random(seed)
        self.calls, self.done = calls, 0
        self.report = ChaosReport()
        self.statuses: collections.Counter[str] = collections.Counter()
        self.killed: collections.Counter[str] = collections.Counter()
        self.lost: collections.Counter[str] = collections.Counter()
        self.lost_one_shots = 0
        self.next_kill = self.random.expovariate(1 / CALLS_PER_KILL)

    async def run(self) -> ChaosReport:
        await settle(self.box)
        first = held(self.box)
        started = time.monotonic()
        callers = [self.cells(n) if n % 4 == 0 else self.one_shots() for n in range(self.callers)]
        await asyncio.gather(*callers)
        self.report.seconds = time.monotonic() - started
        for number in range(self.callers):
            self.box.session(str(number)).close()
        deadline = time.monotonic() + SETTLE_SECONDS
        await settle(self.box)  # a broker that was killed after the last answer has been replaced
        while (last := held(self.box)).left(first) and time.monotonic() < deadline:
            # More at once than processes wait: one that was killed in its set-up is replaced for a call that needs it.
            await asyncio.gather(*(self.box.run("1") for _ in range(self.box.policy.concurrency)))
            await settle(self.box)
            await asyncio.sleep(0.1)
        if last.left(first):
            self.report.problems.append(f"{first} at first, {last} at last")
        self.report.own_kb.append(resident_kb(os.getpid()))
        if self.report.own_kb[-1] > self.report.own_kb[0] * 1.1 + 4096:
            self.report.problems.append(f"this process grew: {self.report.own_kb} kB")
        if sum(self.statuses.values()) != self.calls:
            self.report.problems.append(f"{sum(self.statuses.values())} answers to {self.calls} calls")
        most = self.killed["call"] + (self.killed["zygote"] + self.killed["broker"]) * self.box.policy.concurrency
        if self.lost_one_shots > most:
            self.report.problems.append(f"{self.lost_one_shots} one-shots lost; at most {most} ran in what was killed")
        self.report.statuses, self.report.killed = dict(self.statuses), dict(self.killed)
        self.report.lost = dict(self.lost)
        return self.report

    def kill(self) -> None:
        names, weights = zip(*CHAOS, strict=True)
        (name,) = self.random.choices(names, weights)
        with contextlib.suppress(OSError, IndexError):  # it may have ended by itself
            os.kill(self.random.choice(roles(self.box._client.broker_pid)[name]), signal.SIGKILL)
            self.killed[name] += 1

    def note(self, result: Result, code: str, expected: str) -> None:
        self.done += 1
        self.statuses[result.status.value] += 1
        if result.status is Status.UNAVAILABLE:
            self.lost_one_shots += code[0] != "n"
            self.lost[re.sub(r"\d+|'[^']*'", "N", result.error or "")] += 1
        elif (result.status, result.result) != (Status.OK, expected):
            self.report.problems.append(f"{code!r}: {result.status.value} {result.result!r} {result.error}")
        if self.done == max(1, self.calls // 10):
            self.report.own_kb.append(resident_kb(os.getpid()))
        if self.done >= self.next_kill:
            self.kill()
            self.next_kill = self.done + self.random.expovariate(1 / CALLS_PER_KILL)

    async def one_shots(self) -> None:
        while self.left > 0:
            self.left -= 1
            number = self.random.randrange(1 << 40)
            code = f"{number} * 3"
            if number % 5 == 0:
                code = f"import time\ntime.sleep({number % 100 / 1000})\n{code}"
            elif number % 5 == 1:
                code = f"import numpy\nint(numpy.array([{number}])[0]) * 3"
            elif number % 5 == 2:
                code = f"for i in range(20): open(str(i), 'w').write('x' * 1000)\n{code}"
            self.note(await self.box.run(code, timeout=120), code, str(number * 3))

    async def cells(self, caller: int) -> None:
        """Cells that count themselves: one that was run twice, or not, would show in the next."""
        session, count = self.box.session(str(caller)), 0
        while self.left > 0:
            self.left -= 1
            code = "n = 0\nn" if count == 0 else "n += 1\nn"
            result = await session.run(code, timeout=120)
            self.note(result, code, str(count))
            count += 1
            if result.status is Status.UNAVAILABLE:
                session.close()
                count = 0


OWNER = """
import asyncio, sys
from slime_retool.sandbox import Sandbox, SandboxPolicy
async def main():
    async with Sandbox(SandboxPolicy(isolation=sys.argv[1], packages=())) as box:
        files = "for i in range(200): open(str(i), 'w').write('x')\\nwhile True: pass"
        calls = [asyncio.ensure_future(box.run(files, timeout=600)) for _ in range(8)]
        await box.session("s").run("x = 1")
        await asyncio.sleep(0.5)
        print(box._client.broker_pid, flush=True)
        await asyncio.gather(*calls)
asyncio.run(main())
"""


def seconds_to_end(process: subprocess.Popen[str], members: list[int], folder: Path, number: int) -> float:
    """Send the signal; until the process, `members` and all that is in `folder` are gone."""
    started = time.monotonic()
    process.send_signal(number)
    process.wait(60)
    while time.monotonic() < started + 60:
        if not any(map(runs, members)) and not list(folder.iterdir()):
            break
        time.sleep(0.01)
    return time.monotonic() - started


def end_owner(isolation: str, folder: Path) -> float:
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-c", OWNER, isolation]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        members = list(family(int(owner.stdout.readline())))
        return seconds_to_end(owner, members, folder, signal.SIGKILL)


async def end_server(isolation: str, folder: Path) -> float:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-m", "slime_retool.cli", "sandbox", "serve", "--port", str(port)]
    command += ["--isolation", isolation]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, text=True) as server:
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{port}"
            for _ in range(600):
                with contextlib.suppress(aiohttp.ClientError):
                    await (await http.get(f"{url}/v1/ping")).read()
                    break
                await asyncio.sleep(0.1)
            body = {"code": "while True: pass", "run_timeout": 30}
            calls = [asyncio.ensure_future(http.post(f"{url}/run_code", json=body)) for _ in range(8)]
            await asyncio.sleep(1.0)
            members = list(family(server.pid))
            took = await asyncio.to_thread(seconds_to_end, server, members, folder, signal.SIGTERM)
            await asyncio.gather(*calls, return_exceptions=True)
    return took


async def chaos(isolation: str, calls: int, callers: int, seed: int) -> ChaosReport:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tempfile.tempdir = name
        async with Sandbox(SandboxPolicy(isolation=isolation, packages=("numpy",))) as box:
            report = await Chaos(box, calls, callers, seed).run()
            members = list(family(box._client.broker_pid))
            started = time.monotonic()
        report.seconds_to_end["close"] = time.monotonic() - started
        left = [pid for pid in members if runs(pid)], os.listdir(folder)
        if any(left):
            report.problems.append(f"processes and files left after close: {left}")
        report.seconds_to_end["SIGKILL of the owner"] = await asyncio.to_thread(end_owner, isolation, folder)
        report.seconds_to_end["SIGTERM of the server"] = await end_server(isolation, folder)
        tempfile.tempdir = None
    report.problems += [f"{how} took {s:.1f} s" for how, s in report.seconds_to_end.items() if s > END_SECONDS]
    return report


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--callers", type=int, help="default 16, with --chaos 256")
    parser.add_argument("--chaos", action="store_true", help="kill the sandbox's own processes as well")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--isolation", default="namespaces")
    args = parser.parse_args()
    report: Report | ChaosReport
    if args.chaos:
        report = await chaos(args.isolation, args.calls, args.callers or 256, args.seed)
    else:
        async with Sandbox(SandboxPolicy(isolation=args.isolation, packages=())) as box:
            report = await soak(box, args.calls, args.callers or 16, args.seed)
    print(json.dumps(asdict(report), indent=1))
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    asyncio.run(main())
