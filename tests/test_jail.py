"""The jail runs what a model writes with plain semantics and stated limits, in one-shots and in sessions."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from benchmarks.sandbox import idle_session_mb
from slime_retool.sandbox import Result, Sandbox, SandboxPolicy, SandboxUnavailable, Status, wire
from slime_retool.sandbox.broker import folders, forks, loop
from slime_retool.sandbox.child import landlock, namespaces, syscalls
from slime_retool.sandbox.child.environment import package_folders
from slime_retool.sandbox.host.client import JailClient

T = TypeVar("T")
ALL_LEVELS = ("namespaces", "landlock")


async def run_once(code: str, policy: SandboxPolicy) -> Result:
    async with Sandbox(policy) as box:
        return await box.run(code)


def available(level: str, uid: int) -> bool:
    """Asked of the kernel directly, so that what the sandbox says is compared with an independent answer."""
    pid = os.fork()
    if pid == 0:
        try:
            if uid != os.getuid():
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            if level == "namespaces":
                namespaces.unshare(namespaces.NEWUSER | namespaces.NEWPID | namespaces.NEWNET)
            os._exit(0 if landlock.abi_version() >= landlock.ABI_TRUNCATE else 1)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


LEVELS = [level for level in ALL_LEVELS if available(level, os.getuid())]
"""Those that this machine has."""


def assert_refused(level: str, message: str) -> None:
    """The layer, the kernel's answer and what to do."""
    assert f"sandbox isolation '{level}' is not available: layer '" in message
    assert "Errno" in message or "ABI" in message
    assert "user namespaces" in message or "Landlock needs" in message


def in_box(level: str, use: Callable[[Sandbox], Awaitable[T]], without: tuple[str, ...] = (), **options: object) -> T:
    options.setdefault("packages", ())
    options.setdefault("concurrency", 4)

    async def main() -> T:
        async with Sandbox(SandboxPolicy(isolation=level, **options), _without=frozenset(without)) as box:
            return await use(box)

    return asyncio.run(main())


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_a_level_is_there_or_its_refusal_says_why(level: str) -> None:
    async def use(box: Sandbox) -> Result:
        return await box.run("6 * 7")

    if level in LEVELS:
        assert in_box(level, use).result == "42"
    else:
        with pytest.raises(SandboxUnavailable) as refusal:
            in_box(level, use)
        assert_refused(level, str(refusal.value))


@pytest.mark.parametrize("level", LEVELS)
def test_harmless_code_runs_with_plain_semantics(level: str) -> None:
    lines = (Path(__file__).parent / "data" / "jail_harmless.jsonl").read_text().splitlines()
    cases = [json.loads(line) for line in lines]

    async def use(box: Sandbox) -> list[Result]:
        return list(await asyncio.gather(*(box.run(case["code"]) for case in cases)))

    for case, result in zip(cases, in_box(level, use, packages=("numpy", "sympy")), strict=True):
        seen = (case["id"], result.status.value, result.stdout, result.result)
        assert seen == (case["id"], case.get("status", "ok"), case.get("stdout", ""), case.get("result"))
        assert case.get("error", "") in (result.error or "")


@pytest.mark.parametrize("level", LEVELS)
def test_a_session_keeps_variables_and_a_one_shot_does_not(level: str) -> None:
    async def use(box: Sandbox) -> list[str | None]:
        session, other = box.session("a"), box.session("b")
        await session.run("x = 3\ndef f(n): return n + x")
        await box.run("x = 4")
        await other.run("x = 5")
        cells = [await s.run(c) for s, c in ((session, "f(1)"), (other, "x"), (session, "_ + 1"), (session, "1/0"))]
        session.close()
        cells.append(await session.run("x"))
        return [cell.result or cell.error for cell in cells]

    four, five, again, error, closed = in_box(level, use)
    assert (four, five, again) == ("4", "5", "5")
    assert 'File "<cell 4>", line 1' in error
    assert "NameError" in closed


@pytest.mark.parametrize("level", LEVELS)
def test_cells_of_a_session_run_one_at_a_time_in_order(level: str) -> None:
    async def use(box: Sandbox) -> list[str | None]:
        session = box.session("s")
        await session.run("n = 0")
        cells = await asyncio.gather(*(session.run(f"n = n * 2 + {i % 2}\nn") for i in range(12)))
        return [cell.result for cell in cells]

    n, expected = 0, []
    for i in range(12):
        n = n * 2 + i % 2
        expected.append(str(n))
    assert in_box(level, use) == expected


@pytest.mark.parametrize("level", LEVELS)
def test_a_killed_cell_says_that_variables_are_gone_and_a_lost_session_is_an_outage(level: str) -> None:
    async def use(box: Sandbox) -> tuple[Result, ...]:
        first = box.session("first")
        await first.run("x = 1")
        killed = await first.run("while True: pass", timeout=0.3)
        fresh = await first.run("'x' in globals()")
        await box.session("second").run("1")
        await box.session("third").run("1")  # evicts `first`
        evicted = await first.run("1")
        return killed, fresh, evicted

    async def wait(box: Sandbox) -> Result:
        await box.session("first").run("1")
        while (await box.stats())["sessions"]:
            await asyncio.sleep(0.02)
        return await box.session("first").run("1")

    killed, fresh, evicted = in_box(level, use, max_sessions=2)
    expired = in_box(level, wait, session_idle=0.5)
    assert killed.status is Status.TIMEOUT and "variables of earlier cells are gone" in killed.error
    assert fresh.result == "False"
    assert evicted.status is Status.UNAVAILABLE and "least recently used of 2 sessions" in evicted.error
    assert expired.status is Status.UNAVAILABLE and "idle for more than 0.5 s" in expired.error


@pytest.mark.parametrize("level", LEVELS)
def test_every_limit_is_reported(level: str) -> None:
    cases = {
        "wall": ("import time\ntime.sleep(60)", Status.TIMEOUT),
        "cpu": ("import time\nt = time.process_time()\nwhile True: pass", Status.TIMEOUT),
        "memory": ("x = bytearray(10**10)", Status.MEMORY),
        "output": ("print('x' * 10**6)", Status.OK),
        "open_files": ("k = [open('/dev/null') for _ in range(999)]", Status.ERROR),
        "file_size": ("open('f', 'wb').write(b'0' * (3 << 20))", Status.ERROR),
    }

    async def use(box: Sandbox) -> list[Result]:
        calls = (box.run(code, timeout=0.6 if name == "wall" else 30) for name, (code, _) in cases.items())
        return list(await asyncio.gather(*calls))

    results = in_box(level, use, cpu_timeout=0.4, max_file_mb=1)
    for (name, (_, status)), result in zip(cases.items(), results, strict=True):
        assert (name, result.limit, result.status) == (name, name, status), result
    wall, cpu, memory = results[:3]
    assert wall.wall_s >= 0.6 and wall.cpu_s < 0.3
    assert 0.4 <= cpu.cpu_s < 5 and "CPU time" in cpu.error
    assert "512 MB" in memory.error and memory.max_rss > 1 << 20


@pytest.mark.parametrize("level", LEVELS)
def test_cpu_time_is_limited_per_cell_and_not_per_session(level: str) -> None:
    burn = "import time\nt = time.process_time()\nwhile time.process_time() - t < 0.3: pass"

    async def use(box: Sandbox) -> list[Result]:
        session = box.session("s")
        return [await session.run(burn, timeout=30) for _ in range(4)] + [
            await session.run("while True: pass", timeout=30)
        ]

    *cells, last = in_box(level, use, cpu_timeout=0.8)
    assert [cell.status for cell in cells] == [Status.OK] * 4 and all(0.2 < cell.cpu_s < 0.8 for cell in cells)
    assert (last.status, last.limit) == (Status.TIMEOUT, "cpu")


@pytest.mark.parametrize("level", LEVELS)
def test_disk_is_limited(level: str) -> None:
    async def use(box: Sandbox) -> list[Result]:
        many = "import time\nfor i in range(20000): open(str(i), 'w').close()\ntime.sleep(9)"
        large = "import time\nfor i in range(9): open(str(i), 'wb').write(b'0' * (1 << 20))\ntime.sleep(9)"
        return list(await asyncio.gather(box.run(many), box.run(large)))

    for result in in_box(level, use, max_disk_mb=2, max_inodes=100, max_file_mb=1):
        assert result.limit == "disk" and result.status in (Status.ERROR, Status.KILLED)


@pytest.mark.parametrize("level", LEVELS)
def test_output_keeps_head_and_tail_also_of_a_killed_call(level: str) -> None:
    async def use(box: Sandbox) -> list[Result]:
        code = "print('HEAD')\nfor i in range(3000): print(i, 'x' * 50)\nprint('TAIL')\n"
        return [await box.run(code), await box.run(code + "while True: pass", timeout=60)]

    for result in in_box(level, use, max_output_bytes=4000, cpu_timeout=1.0):
        assert result.truncated and len(result.stdout) < 4200
        assert result.stdout.startswith("HEAD\n0 x") and result.stdout.endswith("2999 " + "x" * 50 + "\nTAIL\n")


@pytest.mark.parametrize("level", LEVELS)
def test_input_and_files_go_in_and_come_out(level: str) -> None:
    async def use(box: Sandbox) -> tuple[Result, Result, Result]:
        code = "n = int(input())\nopen('out/b', 'w').write(str(n * int(open('in/a').read())))"
        given = await box.run(
            "import os\nos.mkdir('out')\n" + code,
            stdin="6\n",
            files={"in/a": b"7"},
            fetch_files=("out/b", "none"),
        )
        escaped = await box.run("1", files={"/etc/x": b""})
        small = await box.run("x = bytearray(200 << 20)", memory_mb=50)
        return given, escaped, small

    given, escaped, small = in_box(level, use)
    assert given.files == {"out/b": b"42"}, given
    assert escaped.status is Status.ERROR
    assert small.status is Status.MEMORY


@pytest.mark.parametrize("level", LEVELS)
def test_a_seed_makes_random_numbers_repeatable(level: str) -> None:
    code = "import random, numpy\nprint(random.random(), numpy.random.rand())"

    async def use(box: Sandbox) -> list[str]:
        return [(await box.run(code, seed=seed)).stdout for seed in (1, 1, 2, None, None)]

    one, same, two, free, other = in_box(level, use, packages=("numpy",))
    assert one == same and len({one, two, free, other}) == 4


@pytest.mark.parametrize("level", LEVELS)
def test_waiting_is_not_run_time_and_a_full_queue_is_an_outage(level: str) -> None:
    async def use(box: Sandbox) -> tuple[list[Result], float]:
        start = time.monotonic()
        calls = (box.run("import time\ntime.sleep(0.2)", timeout=60) for _ in range(9))
        return list(await asyncio.gather(*calls)), time.monotonic() - start

    results, elapsed = in_box(level, use, concurrency=2, max_queue=6)
    outages = [result for result in results if result.status is Status.UNAVAILABLE]
    ran = [result for result in results if result.status is Status.OK]
    assert len(ran) + len(outages) == 9 and 1 <= len(outages) <= 3
    assert all("queue is full (6 calls wait)" in result.error for result in outages)
    assert max(result.queue_s for result in ran) >= 0.4 and all(result.wall_s > 0.19 for result in ran)
    assert sum(result.wall_s for result in ran) <= 2 * elapsed  # two at once; with their waiting it would be more


@pytest.mark.parametrize("level", LEVELS)
def test_cancelling_a_call_ends_it_and_frees_its_place(level: str) -> None:
    async def use(box: Sandbox) -> tuple[Result, dict]:
        calls = [asyncio.ensure_future(box.run("import time\ntime.sleep(99)", timeout=200)) for _ in range(3)]
        await asyncio.sleep(0.3)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        result = await box.run("'next'")
        return result, await box.stats()

    result, stats = in_box(level, use, concurrency=1)
    assert result.result == "'next'" and (stats["running"], stats["queued"]) == (0, 0)


@pytest.mark.parametrize("level", LEVELS)
def test_large_code_to_a_stuck_session_does_not_block_others(level: str) -> None:
    """The process stops reading its socket; megabytes for it stay in the broker, which goes on."""
    stuck = "import threading, signal\ndef f():\n    while True: pass\nx = 1"
    code = "y = '" + "a" * (6 << 20) + "'\nwhile True: pass"

    async def use(box: Sandbox) -> tuple[Result, list[Result]]:
        session = box.session("s")
        await session.run(stuck)
        large = asyncio.ensure_future(session.run(code, timeout=1.5))
        others = [await box.run("1") for _ in range(5)]
        return await large, others

    large, others = in_box(level, use, max_code_bytes=8 << 20)
    assert large.status is Status.TIMEOUT and [other.result for other in others] == ["1"] * 5


@pytest.mark.parametrize("level", LEVELS)
def test_zygote_and_broker_are_replaced_when_they_die(level: str, caplog: pytest.LogCaptureFixture) -> None:
    async def use(box: Sandbox) -> tuple[Result, ...]:
        session = box.session("s")
        await session.run("x = 1")
        broker = box._client.broker_pid
        for pid in Path(f"/proc/{broker}/task/{broker}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        running = await box.run("1")
        for _ in range(100):
            if (running := await box.run("2")).status is Status.OK:
                break
            await asyncio.sleep(0.05)
        # A killed process is gone a little later: until its end is noticed, a cell may still be answered.
        for _ in range(100):
            lost = await session.run("x")
            if lost.error is not None and "lost" in lost.error:
                break
            await asyncio.sleep(0.05)
        broker = box._client.broker_pid
        call = asyncio.ensure_future(box.run("import time\ntime.sleep(99)"))
        while not (await box.stats())["running"]:  # one that has not begun would be run by the next broker
            await asyncio.sleep(0.02)
        os.kill(broker, signal.SIGKILL)
        return running, lost, await call, await box.run("3")

    after_zygote, lost, during, after_broker = in_box(level, use)
    assert after_zygote.result == "2"
    assert lost.status is Status.UNAVAILABLE and "lost" in lost.error
    assert during.status is Status.UNAVAILABLE and "broker ended (killed by SIGKILL" in during.error
    assert after_broker.result == "3"
    assert "broker ended (killed by SIGKILL" in caplog.text and "another one is started" in caplog.text


def test_a_zygote_that_ended_with_requests_unread_does_not_end_the_broker() -> None:
    """To its peer that is a reset (ECONNRESET), where a socket that was read to its end gives EPIPE."""
    config = {"limits": {"startup_timeout": 1}, "zygote": {"work": None}, "kinds": {"plain": []}, "pool": 1}
    event_loop = loop.Loop()
    no_folders = folders.Folders(event_loop, None, {}, lambda child: None, lambda why: None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(b"request")
    theirs.close()
    all_forks = forks.Forks(event_loop, config, None, no_folders, None, collections.Counter())
    kind = all_forks.kinds["plain"]
    kind.ready, kind.socket = True, ours
    all_forks.fill()
    assert all_forks.children == {} and kind.starting == 0
    ours.close()


@pytest.mark.parametrize("level", LEVELS[:1])
def test_a_fault_of_the_broker_is_named_to_those_who_wait(level: str) -> None:
    async def use(box: Sandbox) -> tuple[Result, Result]:
        call = asyncio.ensure_future(box.run("import time\ntime.sleep(99)"))
        while not (await box.stats())["running"]:  # one that has not begun would be run by the next broker
            await asyncio.sleep(0.02)
        box._client._write({"op": "no such operation"})
        return await call, await box.run("7")

    during, after = in_box(level, use)
    assert during.status is Status.UNAVAILABLE
    assert "the sandbox stopped: a fault of the broker: AssertionError in broker.py, line" in during.error
    assert after.result == "7"


def test_messages_are_cut_at_their_ends_whatever_the_pieces() -> None:
    messages = [{"n": n, "text": "é" * n} for n in range(5)]
    stream = b"".join(wire.pack(message) for message in messages)
    for size in (1, 3, 50, len(stream)):
        frames, found = wire.Frames(), []
        for start in range(0, len(stream), size):
            frames.feed(stream[start : start + size])
            while (message := frames.take()) is not None:
                found.append(message)
        assert found == messages


@pytest.mark.parametrize("level", LEVELS)
def test_an_idle_session_has_at_most_4_mb_of_its_own(level: str) -> None:
    """After sympy only where objects can be exempt from reference counting, as from Python 3.12."""
    solve = "from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - 5*x + 6, x))"

    async def use(box: Sandbox) -> float:
        for number in range(3):
            session = box.session(str(number))
            await session.run("print(6 * 7)")
            if sys.version_info >= (3, 12):
                await session.run(solve)
        return idle_session_mb(box)

    assert 0 < in_box(level, use, packages=("numpy", "sympy")) <= 4


@pytest.mark.parametrize("level", LEVELS)
def test_only_chosen_packages_can_be_imported(level: str) -> None:
    async def use(box: Sandbox) -> list[Result]:
        return [
            await box.run(f"import {name}\n{name}.__name__") for name in ("numpy", "mpmath", "pytest", "pip", "aiohttp")
        ]

    results = in_box(level, use, packages=("numpy", "mpmath"))
    assert [result.result for result in results] == ["'numpy'", "'mpmath'", None, None, None]
    assert all("ModuleNotFoundError" in result.error for result in results[2:])


def test_packages_bring_what_they_require() -> None:
    assert {"sympy", "mpmath"} <= set(package_folders(("sympy",)))
    with pytest.raises(SandboxUnavailable, match="package no-such-package is not installed"):
        asyncio.run(run_once("1", SandboxPolicy(packages=("no-such-package",))))


def test_a_refusal_names_the_layer_the_kernels_answer_and_what_to_do() -> None:
    """In a process whose limit of user namespaces is none, as where they are forbidden."""
    code = """
import asyncio, os, sys
from slime_retool.sandbox.child import namespaces
from slime_retool.sandbox.host import client
from slime_retool.sandbox import *
{change}
async def run_once():
    async with Sandbox(SandboxPolicy(isolation={level!r}, packages=())) as box:
        print(await box.run("1"))
try:
    asyncio.run(run_once())
except SandboxUnavailable as error:
    print("refused:", error)
"""
    no_namespaces = (
        "ids = os.getuid(), os.getgid()\nnamespaces.unshare(namespaces.NEWUSER)\nnamespaces.write_maps(*ids)\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')"
    )
    if "namespaces" in LEVELS:
        done = subprocess.run(
            [sys.executable, "-c", code.format(change=no_namespaces, level="namespaces")],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (
            "refused: sandbox isolation 'namespaces' is not available: layer 'user and other namespaces'" in done.stdout
        )
        assert "[Errno 28]" in done.stdout and "max_user_namespaces" in done.stdout and "'landlock'" in done.stdout


@pytest.mark.parametrize("abi", [1, 2])
def test_landlock_abi_1_and_2_are_refused_with_the_version_that_is_needed(
    abi: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime_retool.sandbox.child import zygote

    control = zygote.socket.socketpair()[0]
    config = {
        "limits": {},
        "isolation": "landlock",
        "off": [],
        "path": ["/"],
        "packages": {},
        "work": "/",
    }
    monkeypatch.setattr(landlock, "abi_version", lambda: abi)
    monkeypatch.setattr(landlock, "syscall", lambda *_: os.open("/dev/null", os.O_RDONLY))
    with pytest.raises(OSError, match=rf"ABI {abi} cannot deny truncating a file, which needs ABI 3 \(Linux 6.2\)"):
        zygote.Zygote(control, config)._rules()


def test_level_none_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert asyncio.run(run_once("1", SandboxPolicy(isolation="none"))).result == "1"
    assert [record.levelname for record in caplog.records if "ISOLATION IS OFF" in record.message] == ["WARNING"] * 2


def test_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_retool.sandbox.host.client.MACHINE", "riscv64")
    with pytest.raises(SandboxUnavailable, match="x86_64 or aarch64, this is linux on riscv64"):
        asyncio.run(JailClient(SandboxPolicy()).start())


def test_the_event_loop_goes_on_during_floods() -> None:
    async def use(box: Sandbox) -> float:
        calls = [asyncio.ensure_future(box.run("while True: print('x' * 9999)", timeout=1.0)) for _ in range(8)]
        ticks = 0
        while not all(call.done() for call in calls):
            await asyncio.sleep(0.002)
            ticks += 1
        return ticks

    assert in_box(LEVELS[0], use) > 10


def test_both_architectures_have_every_name_the_filters_use() -> None:
    from slime_retool.sandbox.child import seccomp

    x86, arm = syscalls.numbers("x86_64"), syscalls.numbers("aarch64")
    names = {*seccomp._PROGRAM, *seccomp._CHECKED, *seccomp._ZYGOTE_ONLY, *seccomp._METADATA}
    assert names <= set(x86)
    # aarch64 has no call that a newer one replaces.
    assert names - set(arm) == {
        "open",
        "creat",
        "stat",
        "lstat",
        "access",
        "readlink",
        "getdents",
        "dup2",
        "pipe",
        "pause",
        "alarm",
        "time",
        "getpgrp",
        "arch_prctl",
        "poll",
        "select",
        "epoll_create",
        "epoll_wait",
        "rename",
        "mkdir",
        "rmdir",
        "unlink",
        "symlink",
        "link",
        "chmod",
        "utimes",
        "fork",
    }
    assert len(set(x86.values())) == len(x86) and len(set(arm.values())) == len(arm)
    assert (x86["pidfd_open"], arm["pidfd_open"]) == (434, 434)
