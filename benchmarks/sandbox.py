"""The sandbox beside a plain `python -c` subprocess, and beside another sandbox: calls a second and CPU a call.

    python benchmarks/sandbox.py --callers 1 32 256
    python benchmarks/sandbox.py --against other/sandbox.py    # a module or class with `async execute_code(code)`

Three programs (`print`, a sympy equation, 50 ms of CPU), as one-shots and as cells of sessions. CPU counts the caller
and every process of the sandbox. On a busy machine compare `cpu_ms`. With --neighbours, prints once more beside so many
calls that hold 1,000 files each. Prints a table and, with --json, writes all numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_retool.sandbox import Result, Sandbox, SandboxPolicy

PROGRAMS = {
    "print": "print(6 * 7)",
    "sympy": "from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6, x))",
    "cpu50": "from time import *\nt = process_time()\nwhile process_time() < t + 0.05: pass\nprint('done')",
}
EXPECTED = {"print": "42", "sympy": "[2, 3]", "cpu50": "done"}
NEIGHBOUR = "import time\nfor i in range(1000): open(f'f{i}', 'w').close()\nprint('there')\ntime.sleep(3600)"
TICKS = os.sysconf("SC_CLK_TCK")
_CPUCLOCK_PROCESS = 2
Run = Callable[[str, int], Awaitable[str]]
"""(code, number of the caller) -> what was printed."""


@dataclass
class Measurement:
    subject: str
    program: str
    callers: int
    calls: int
    calls_per_s: float
    cpu_ms: float
    p50_ms: float
    p99_ms: float
    loop_lag_p99_ms: float


def tree_cpu(pid: int) -> float:
    """CPU seconds of a process, its descendants and all that they have waited for.

    Of live processes by their clocks in nanoseconds: the ticks of /proc/PID/stat are 10 ms, rounded down, and hide most
    of what hundreds of sessions use that run a few cells each.
    """
    try:
        waited_for = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[13:15]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        used = time.clock_gettime((~pid << 3) | _CPUCLOCK_PROCESS)
    except OSError:
        return 0.0
    return used + sum(map(int, waited_for)) / TICKS + sum(tree_cpu(int(child)) for child in children)


def own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def measure(
    subject: str, program: str, callers: int, calls: int, run: Run, cpu: Callable[[], float]
) -> Measurement:
    code, times, lags = PROGRAMS[program], [], []
    left = calls
    stop = asyncio.Event()

    async def ticker() -> None:
        while not stop.is_set():
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - before - 0.005)

    async def caller(number: int) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            before = time.perf_counter()
            printed = await run(code, number)
            times.append(time.perf_counter() - before)
            if EXPECTED[program] not in printed:
                raise RuntimeError(f"{subject} {program}: expected {EXPECTED[program]!r}, got {printed[:500]!r}")

    watch = asyncio.ensure_future(ticker())
    await asyncio.sleep(0.02)
    lags.clear()
    used, started = cpu(), time.perf_counter()
    await asyncio.gather(*(caller(number) for number in range(min(callers, calls))))
    wall, used = time.perf_counter() - started, cpu() - used
    stop.set()
    await watch
    times.sort()
    lags.sort()
    return Measurement(
        subject,
        program,
        callers,
        calls,
        calls / wall,
        1e3 * used / calls,
        1e3 * times[len(times) // 2],
        1e3 * times[int(len(times) * 0.99)],
        1e3 * lags[int(len(lags) * 0.99)],
    )


@contextlib.asynccontextmanager
async def jail(
    isolation: str, callers: int, neighbours: int = 0
) -> AsyncIterator[tuple[Sandbox, Callable[[], float]]]:
    concurrency = min(callers, 2 * (os.cpu_count() or 1)) + neighbours
    policy = SandboxPolicy(isolation=isolation, concurrency=concurrency, max_sessions=2 * callers)
    async with Sandbox(policy) as box:
        broker = box._client.broker_pid
        yield box, lambda: own_cpu() + tree_cpu(broker)


async def measure_jail(isolation: str, callers: int, scale: float) -> list[Measurement]:
    found = []
    async with jail(isolation, callers) as (box, cpu):

        async def one_shot(code: str, number: int) -> str:
            return (await box.run(code, timeout=60)).stdout

        async def cell(code: str, number: int) -> str:
            return (await box.session(str(number)).run(code, timeout=60)).stdout

        for program, counts in (("print", (300, 4000)), ("sympy", (80, 400)), ("cpu50", (24, 24))):
            for kind, run, count in (("one-shot", one_shot, counts[0]), ("session", cell, counts[1])):
                calls = max(callers, int(count * scale))
                if kind == "session":  # its process exists and has run the program once
                    await asyncio.gather(*(cell(PROGRAMS[program], number) for number in range(callers)))
                await asyncio.sleep(0.3)  # processes of earlier calls have ended and are counted
                found.append(await measure(f"{isolation} {kind}", program, callers, calls, run, cpu))
                print_row(found[-1])
            print(
                f"private memory of an idle session after {program}: {idle_session_mb(box):.2f} MB (median)",
                flush=True,
            )
    return found


async def measure_beside_neighbours(isolation: str, callers: int, neighbours: int, scale: float) -> list[Measurement]:
    async with jail(isolation, callers, neighbours) as (box, cpu):

        async def one_shot(code: str, number: int) -> str:
            return (await box.run(code, timeout=60)).stdout

        async def cell(code: str, number: int) -> str:
            return (await box.session(str(number)).run(code, timeout=60)).stdout

        calls = max(callers, int(4000 * scale))
        found: list[Measurement] = []
        holding: list[asyncio.Future[Result]] = []
        for others in ("alone", f"+{neighbours}"):
            if others != "alone":
                holding = [asyncio.ensure_future(box.run(NEIGHBOUR, timeout=7200)) for _ in range(neighbours)]
                while (await box.stats())["running"] < neighbours:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(1.0)  # their files are there
            for kind, run in (("one-shot", one_shot), ("session", cell)):
                subject = f"{isolation} {kind} {others}"
                await measure(subject, "print", callers, callers, run, cpu)
                found.append(await measure(subject, "print", callers, calls, run, cpu))
                print_row(found[-1])
        for call in holding:
            call.cancel()
    return found


def idle_session_mb(box: Sandbox) -> float:
    """Median over the children that are stopped between two cells."""

    def leaves(pid: int) -> list[int]:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [leaf for child in children for leaf in leaves(int(child))] or [pid]

    sizes = []
    for pid in leaves(box._client.broker_pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                sizes.append(sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024)
    return sorted(sizes)[len(sizes) // 2] if sizes else float("nan")


async def measure_subprocess(callers: int, scale: float) -> list[Measurement]:
    slots = asyncio.Semaphore(2 * (os.cpu_count() or 1))

    async def run(code: str, number: int) -> str:
        async with slots:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            return (await process.communicate())[0].decode()

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return own_cpu() + used.ru_utime + used.ru_stime

    found = []
    for program, count in (("print", 100), ("sympy", 4), ("cpu50", 24)):
        # A sympy process takes most of a second: more callers only wait for one another.
        calls = max(1, int(count * scale)) if program == "sympy" else max(callers, int(count * scale))
        found.append(await measure("python -c", program, callers, calls, run, cpu))
        print_row(found[-1])
    return found


async def measure_other(path: str, callers: int, scale: float) -> list[Measurement]:
    """A file with a function, or a class without arguments, that has `async execute_code(code)`."""
    spec = importlib.util.spec_from_file_location("other_sandbox", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    owner = module if "execute_code" in vars(module) else None
    if owner is None:
        classes = [c for c in vars(module).values() if inspect.isclass(c) and "execute_code" in vars(c)]
        if not classes:
            raise SystemExit(f"{path} has neither a function execute_code nor a class with one")
        owner = classes[0]()

    async def run(code: str, number: int) -> str:
        return str(await owner.execute_code(code))

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return own_cpu() + used.ru_utime + used.ru_stime

    found = []
    for program, count in (("print", 40), ("sympy", 4), ("cpu50", 12)):
        try:
            found.append(await measure("other", program, callers, max(callers, int(count * scale)), run, cpu))
            print_row(found[-1])
        except RuntimeError as error:
            print(f"other: {error}")
    return found


def print_row(m: Measurement) -> None:
    print(
        f"{m.subject:28} {m.program:6} {m.callers:4} callers {m.calls_per_s:8.1f}/s {m.cpu_ms:8.2f} CPU-ms "
        f"p50 {m.p50_ms:8.1f} p99 {m.p99_ms:8.1f} ms  loop lag p99 {m.loop_lag_p99_ms:6.1f} ms",
        flush=True,
    )


def ratios(found: list[Measurement]) -> list[dict[str, object]]:
    """Each subject against `python -c` with the same program and callers; above 1 is cheaper or faster."""
    base = {(m.program, m.callers): m for m in found if m.subject == "python -c"}
    return [
        {
            "subject": m.subject,
            "program": m.program,
            "callers": m.callers,
            "cpu": round(base[m.program, m.callers].cpu_ms / m.cpu_ms, 2),
            "calls_per_s": round(m.calls_per_s / base[m.program, m.callers].calls_per_s, 2),
        }
        for m in found
        if m.subject != "python -c" and (m.program, m.callers) in base
    ]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--isolation", nargs="+", default=["namespaces"])
    parser.add_argument("--neighbours", type=int, metavar="N", help="print beside N calls that hold 1,000 files each")
    parser.add_argument("--against", metavar="PATH", help="another sandbox with `async execute_code(code)`")
    parser.add_argument("--scale", type=float, default=1.0, help="number of calls, as a factor")
    parser.add_argument("--json", metavar="FILE", help="write all numbers here")
    args = parser.parse_args()
    found: list[Measurement] = []
    for callers in args.callers:
        found += await measure_subprocess(callers, args.scale)
        for isolation in args.isolation:
            found += await measure_jail(isolation, callers, args.scale)
            if args.neighbours:
                found += await measure_beside_neighbours(isolation, callers, args.neighbours, args.scale)
        if args.against:
            found += await measure_other(args.against, callers, args.scale)
    table = ratios(found)
    print("\ntimes better than python -c          by CPU   by calls/s")
    for row in table:
        print(f"{row['subject']:22} {row['program']:6} {row['callers']:4}  {row['cpu']:8} {row['calls_per_s']:10}")
    if args.json:
        Path(args.json).write_text(json.dumps({"measurements": [asdict(m) for m in found], "ratios": table}, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
