"""Hostile code fails at every layer, as root and as an ordinary user, and each layer stops something of its own.

The attacks run in a throw-away container (`jail_host`), where secrets are planted and listeners wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jail_host
import pytest
from test_jail import ALL_LEVELS, LEVELS, assert_refused, available, in_box

from benchmarks import sandbox_soak
from slime_retool.sandbox import Result, Sandbox, SandboxUnavailable, Status

TESTS = Path(__file__).parent
USERS = (0, 1000) if os.getuid() == 0 else (os.getuid(),)


CASES = [TESTS / "data" / f"jail_{kind}.jsonl" for kind in ("hostile", "harmless")]
CASES += sorted((TESTS.parents[1] / "shared" / "cases").glob("sandbox_*.jsonl"))
"""The project's own and, where they lie beside the checkout, those that developers collect."""


@pytest.mark.parametrize("uid", USERS)
@pytest.mark.parametrize("level", ALL_LEVELS)
def test_hostile_code_fails_and_harmless_code_runs(level: str, uid: int) -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "jail_host.py"), level, str(uid), *map(str, CASES)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if not available(level, uid):
        return assert_refused(level, answer["unavailable"])
    assert answer["failures"] == {}
    assert answer["cases"] == sum(len(jail_host.load(path)) for path in CASES)


def test_the_attacks_succeed_where_nothing_stops_them(tmp_path: Path) -> None:
    """Otherwise the proof above would be empty: the same attacks at level `none` do harm."""
    wanted = {"known secret", "open file of the host", "loopback", "unix socket", "abstract socket", "fork"}
    lines = (TESTS / "data" / "jail_hostile.jsonl").read_text().splitlines()
    chosen = [line for line in lines if any(name in json.loads(line)["id"] for name in wanted)]
    (tmp_path / "cases.jsonl").write_text("\n".join(chosen))
    code = (
        "import sys, jail_host\nfrom slime_retool.sandbox import Sandbox\n"
        "async def stats(self): return {'running': 0, 'queued': 0, 'children': 0, 'sessions': 0, 'idle': "
        "{}}\n"
        "Sandbox.stats = stats\njail_host.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "none", str(os.getuid()), str(tmp_path / "cases.jsonl")],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=TESTS,
    )
    failures = json.loads(done.stdout)["failures"]
    assert len(failures) >= len(wanted), (failures, done.stderr)


# What each layer stops: code that says "held" with the layer and does not without it. Layers overlap on
# purpose; where
# two stop the same thing, the other one is switched off as well.
HOLDS = {
    "environment": ("import os\n'held' if 'HOST_API_KEY' not in os.environ else 'broken'", ()),
    "mount": (
        "import os\n'broken' if os.path.exists('/proc/self') or os.path.exists('/var/lib') else 'held'",
        (),
    ),
    "pid": ("import os\n'held' if (os.getpid(), os.getppid()) == (1, 0) else 'broken'", ()),
    "uts": ("import os\n'held' if os.uname().nodename == 'sandbox' else 'broken'", ()),
    "net": (
        "import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 5); r = 'broken'\nexcept "
        "OSError: r = 'held'\nr",
        ("seccomp", "landlock"),
    ),
    "ipc": (
        "import ctypes\n'broken' if ctypes.CDLL(None).shmget({key}, 64, 0) >= 0 else 'held'",
        ("seccomp",),
    ),
    "landlock": (
        "try: open('/dev/urandom', 'wb').write(b'x'); r = 'broken'\nexcept OSError: r = 'held'\nr",
        (),
    ),
    "seccomp": (
        "import os\ntry:\n    os.fork() or os._exit(0)\n    r = 'broken'\nexcept OSError: r = 'held'\nr",
        (),
    ),
    "capabilities": (
        "import os\nopen('f', 'w').close()\nos.chmod('f', 0)\n"
        "try: open('f'); r = 'broken'\nexcept OSError: r = 'held'\nr",
        (),
    ),
    "rlimits": ("try: x = bytearray(3 << 30); r = 'broken'\nexcept MemoryError: r = 'held'\nr", ()),
}
HOLDS_LANDLOCK = {
    "landlock": ("try: open({own!r}); r = 'broken'\nexcept OSError: r = 'held'\nr", ()),
    "seccomp": HOLDS["seccomp"],
    "rlimits": HOLDS["rlimits"],
    "environment": HOLDS["environment"],
}


def outcome(level: str, code: str, without: tuple[str, ...], values: dict[str, object]) -> str | None:
    async def use(box: Sandbox) -> Result:
        return await box.run(code.format(**values) if "{" in code else code, timeout=20)

    return in_box(level, use, without).result


@pytest.mark.parametrize(
    ("level", "layer"),
    [
        (level, name)
        for level, layers in (("namespaces", HOLDS), ("landlock", HOLDS_LANDLOCK))
        for name in layers
        if level in LEVELS
    ],
)
def test_a_layer_switched_off_lets_something_through(level: str, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes
    import socket

    code, others = (HOLDS if level == "namespaces" else HOLDS_LANDLOCK)[layer]
    monkeypatch.setenv("HOST_API_KEY", "x")
    libc = ctypes.CDLL(None)
    key = 0x5EC0 + os.getpid()
    segment = libc.shmget(key, 64, 0o1666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"port": server.getsockname()[1], "key": key, "own": __file__}
        try:
            assert outcome(level, code, others, values) == "'held'"
            assert outcome(level, code, (*others, layer), values) != "'held'"
        finally:
            libc.shmctl(segment, 0, None)


@pytest.mark.parametrize("level", LEVELS)
def test_without_the_freeze_a_thread_runs_between_cells(level: str) -> None:
    cell = "import threading\ndef f():\n    while True: pass\nthreading.Thread(target=f, daemon=True).start()"

    async def use(box: Sandbox) -> int:
        await box.session("s").run(cell)
        own = sandbox_soak.family(box._client.broker_pid)
        before, deadline = jail_host.cpu_ticks(own), time.monotonic() + 60
        while (used := jail_host.cpu_ticks(own) - before) <= 10 and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return used

    assert in_box(level, use, ("freeze",)) > 10


NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


def shared_namespaces(without: tuple[str, ...]) -> list[str]:
    """Those that a call shares with us, as the kernel names them from outside."""

    async def use(box: Sandbox) -> list[str]:
        await box.session("s").run("1")
        folders = Path("/proc/self/ns"), Path(f"/proc/{deepest(box._client.broker_pid)}/ns")
        ours, theirs = ([os.readlink(folder / name) for name in NAMESPACES] for folder in folders)
        return [name for name, mine, other in zip(NAMESPACES, ours, theirs, strict=True) if mine == other]

    return in_box("namespaces", use, without)


@pytest.mark.parametrize("level", LEVELS[: LEVELS.count("namespaces")])
def test_every_namespace_is_another_than_ours_and_each_can_be_missed(level: str) -> None:
    assert shared_namespaces(()) == []
    assert shared_namespaces(("cgroup",)) == ["cgroup"]
    if os.getuid() == 0:
        assert shared_namespaces(("user",)) == ["user"]
    else:  # without the user namespace an ordinary user gets none of the others
        with pytest.raises(SandboxUnavailable, match="layer 'user and other namespaces' was refused.*Errno 1"):
            shared_namespaces(("user",))


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def deepest(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return deepest(int(children[-1])) if children else pid


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("victim", ["client", "broker"])
def test_sigkill_of_client_or_broker_leaves_nothing_behind(level: str, victim: str, tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from slime_retool.sandbox import *
async def main():
    async with Sandbox(SandboxPolicy(isolation={level!r}, packages=())) as box:
        await box.session("s").run("x = 1")
        calls = [asyncio.ensure_future(box.run("while True: pass", timeout=600)) for _ in range(4)]
        while (await box.stats())["running"] < 4:  # one that has not begun would be run by the next broker
            await asyncio.sleep(0.02)
        print(box._client.broker_pid, flush=True)
        print([call.status.value for call in await asyncio.gather(*calls)], flush=True)
asyncio.run(main())
"""
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(TESTS.parent)}
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    broker = int(client.stdout.readline())
    members = list(sandbox_soak.family(broker))
    assert len(members) >= 6  # broker, zygote, four calls
    os.kill(client.pid if victim == "client" else broker, signal.SIGKILL)
    said = client.stdout.read()
    client.wait(30)
    client.stdout.close()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (alive(members) or list(tmp_path.iterdir())):
        time.sleep(0.05)
    assert (alive(members), list(tmp_path.iterdir())) == ([], [])
    assert victim == "client" or said == f"{[Status.UNAVAILABLE.value] * 4}\n"


@pytest.mark.parametrize("level", LEVELS)
def test_many_calls_with_floods_timeouts_and_kills_leave_nothing_behind(level: str) -> None:
    async def use(box: Sandbox) -> sandbox_soak.Report:
        return await sandbox_soak.soak(box, calls=250, callers=8, seed=3)

    report = in_box(level, use)
    assert report.problems == []
    assert sum(report.statuses.values()) == 250 and report.statuses["ok"] > 100


@pytest.mark.parametrize("level", LEVELS)
def test_while_its_processes_are_killed_no_call_is_wrong_doubled_or_lost(level: str) -> None:
    async def use(box: Sandbox) -> sandbox_soak.ChaosReport:
        return await sandbox_soak.Chaos(box, calls=400, callers=32, seed=5).run()

    report = in_box(level, use, packages=("numpy",), concurrency=8)
    assert report.problems == []
    assert sum(report.killed.values()) > 0 and report.statuses["ok"] > 50
