"""The jail at its limits: folders, threads, pipes, page tables and clocks, and what happens when its processes die."""

from __future__ import annotations

import asyncio
import collections
import errno
import gc
import inspect
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from test_jail import LEVELS, in_box

from benchmarks.sandbox_soak import leaves
from slime_retool.sandbox import Result, Sandbox, SandboxPolicy, Status
from slime_retool.sandbox.broker import cgroup, deadlines, keeper, oom, trees
from slime_retool.sandbox.broker.deadlines import Deadlines
from slime_retool.sandbox.broker.records import Job
from slime_retool.sandbox.broker.started import StartedCalls
from slime_retool.sandbox.child import memory, namespaces, zygote
from slime_retool.sandbox.child.environment import HostPaths
from slime_retool.sandbox.child.syscalls import NR
from slime_retool.sandbox.host import client
from slime_retool.sandbox.wire import Frames, pack

TESTS = Path(__file__).parent
ONLY_LANDLOCK = LEVELS[LEVELS.index("landlock") :] if "landlock" in LEVELS else []


def processes(broker: int, role: str) -> list[int]:
    """Those that the broker started as `role`."""
    found = []
    for pid in Path(f"/proc/{broker}/task/{broker}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended in between
            if role.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def nest(path: Path, depth: int) -> None:
    """Folders beyond the longest path, each in the other."""
    path.mkdir()
    fd = open_folder(path)
    for _ in range(depth):
        os.mkdir("n" * 100, dir_fd=fd)
        inner = os.open("n" * 100, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("deepest", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


def test_a_tree_of_any_depth_is_measured_and_removed_without_recursion(tmp_path: Path) -> None:
    nest(tmp_path / "deep", 500)
    parent = open_folder(tmp_path)
    gc.collect()  # what other tests left open
    recursion, here = sys.getrecursionlimit(), len(os.listdir("/proc/self/fd"))
    sys.setrecursionlimit(len(inspect.stack()) + 60)
    try:
        assert not trees.exceeds(parent, "deep", 1 << 30, 501)
        assert trees.exceeds(parent, "deep", 1 << 30, 500)
        assert trees.remove_tree(str(tmp_path / "deep"), 0.0)
    finally:
        sys.setrecursionlimit(recursion)
    assert len(os.listdir("/proc/self/fd")) == here
    assert os.listdir(parent) == []
    os.close(parent)


def test_links_are_neither_measured_nor_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(bytes(1 << 20))
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    (inside / "file").symlink_to(outside / "file")
    (tmp_path / "replaced").symlink_to(outside)
    parent = open_folder(tmp_path)
    assert not trees.exceeds(parent, "inside", 1 << 16, 2)
    assert not trees.exceeds(parent, "replaced", 0, 0)  # a link in the place of the folder itself
    assert not trees.exceeds(parent, "removed meanwhile", 0, 0)
    remover = trees.Remover(parent)
    for name in ("inside", "replaced"):
        remover.add(name)
    remover.step(100)
    assert not remover and not inside.exists() and (outside / "file").stat().st_size == 1 << 20
    os.close(parent)


def test_a_file_counts_by_the_space_that_it_takes(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x" * (1 << 20))
    os.truncate(tmp_path / "folder" / "file", 1 << 30)
    parent = open_folder(tmp_path)
    assert trees.exceeds(parent, "folder", (1 << 20) - 1, 9)
    assert not trees.exceeds(parent, "folder", 2 << 20, 9)
    os.close(parent)


def test_an_empty_folder_beside_too_many_deleted_bytes_holds_too_much(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    parent = open_folder(tmp_path)
    assert trees.exceeds(parent, "empty", -1, 9)
    assert not trees.exceeds(parent, "empty", 0, 9)
    os.close(parent)


def test_deleted_files_that_are_open_count_once_and_nothing_else(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    memory = os.memfd_create("elsewhere")
    os.write(memory, bytes(1 << 20))
    with open(tmp_path / "deleted", "wb") as deleted, open(tmp_path / "kept", "wb") as kept:
        before = trees.deleted_bytes(os.getpid(), device)
        for file in (deleted, kept):
            file.write(b"x" * (1 << 18))
            file.flush()
        os.unlink(tmp_path / "deleted")
        again = os.dup(deleted.fileno())
        counted = trees.deleted_bytes(os.getpid(), device) - before
        taken = os.fstat(again).st_blocks * 512
    for fd in (memory, again):
        os.close(fd)
    assert counted == taken > 0
    assert trees.deleted_bytes(0, device) == 0  # no such process


def test_removal_says_whether_the_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "held").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "held")
    assert trees.remove_tree(str(tmp_path / "none"), 0.0)
    assert trees.remove_tree(str(tmp_path / "link"), 0.0) and (tmp_path / "held").is_dir()
    tries = []

    def rmdir(path: str, **_: object) -> None:
        tries.append(path)
        raise OSError(errno.EBUSY, "still in use")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        assert not trees.remove_tree(str(tmp_path / "held"), 0.0)
        assert len(tries) == 1
        patch.setattr(trees.time, "monotonic", lambda: float(len(tries)))  # a second a try
        assert not trees.remove_tree(str(tmp_path / "held"), 3.0)
        assert len(tries) > 2
    assert trees.remove_tree(str(tmp_path / "held"), 0.0) and not (tmp_path / "held").exists()


def as_ordinary_user(path: Path, act: str) -> str:
    """What `act`, a program, prints as a user who is not root, in `path`."""
    code = f"""
import os, sys
sys.path.insert(0, {str(TESTS.parent)!r})
from pathlib import Path
from slime_retool.sandbox.broker import trees
if os.getuid() == 0:
    os.chown({str(path)!r}, 1000, 1000)
    parent = os.open({str(path)!r}, os.O_RDONLY)
    os.setgroups([]); os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000)
    os.fchdir(parent)
else:
    os.chdir({str(path)!r})
parent = os.open('.', os.O_RDONLY)
{act}
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_a_folder_closed_to_its_owner_counts_as_too_full_and_is_removed(tmp_path: Path) -> None:
    act = """
for name, mode in (('hidden', 0o300), ('fixed', 0o500), ('closed', 0)):
    os.makedirs(f'call/{name}/inner')
    Path(f'call/{name}/inner/file').write_text('x')
    os.chmod(f'call/{name}', mode)
print(trees.exceeds(parent, 'call', 1 << 30, 1000), trees.remove_tree('call', 0), os.listdir('.'))
"""
    assert as_ordinary_user(tmp_path, act) == "True True []\n"


def test_removal_goes_in_steps(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for number in range(50):
        (tmp_path / "many" / str(number)).touch()
    parent = open_folder(tmp_path)
    remover = trees.Remover(parent)
    remover.add("many")
    remover.step(10)
    assert remover and 35 <= len(list((tmp_path / "many").iterdir())) <= 45
    while remover:
        remover.step(10)
    assert os.listdir(parent) == []
    os.close(parent)


@contextmanager
def keeper_in(folder: Path) -> Iterator[tuple[keeper.Keeper, socket.socket]]:
    """A keeper of the folders there, and the broker's end of its socket."""
    for name in (trees.WORK, trees.TRASH):
        (folder / name).mkdir(exist_ok=True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack({"folder": str(folder), "limits": {"max_disk_mb": 1, "max_inodes": 9}}))
        yield keeper.Keeper(theirs), ours


def test_what_a_keeper_left_is_removed_by_the_next(tmp_path: Path) -> None:
    for name in (trees.WORK, trees.TRASH):
        (tmp_path / name).mkdir()
    nest(tmp_path / trees.TRASH / ".0", 3)
    (tmp_path / trees.TRASH / ".1").mkdir()
    nest(tmp_path / trees.WORK / "mine", 3)
    with keeper_in(tmp_path) as (made, ours):
        made._on_message({"remove": "mine"})
        while made._remover:
            made._remover.step(10)
        assert [list((tmp_path / name).iterdir()) for name in (trees.WORK, trees.TRASH)] == [[], []]
        frames = Frames()
        frames.feed(ours.recv(1 << 16))
        assert frames.take() == {"removed": "mine"}


def test_files_of_a_process_that_does_not_run_are_not_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dozen neighbours with a thousand files each then cost nothing."""
    looks: collections.Counter[str] = collections.Counter()

    def exceeds(parent: int, name: str, room: int, inodes: int) -> bool:
        looks[name] += 1
        return False

    monkeypatch.setattr(keeper, "exceeds", exceeds)
    with keeper_in(tmp_path) as (made, _):
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(99)"], stdout=-1)
        sleeper.stdout.readline()
        made._on_message({"watch": "sleeps", "pid": sleeper.pid, "clock": ~sleeper.pid << 3 | 2})
        made._on_message({"watch": "works", "pid": os.getpid(), "clock": ~os.getpid() << 3 | 2})
        for _ in range(20):
            made._look()
            begun = time.process_time()
            while time.process_time() < begun + 0.003:
                pass
        sleeper.kill()
        sleeper.wait()
        sleeper.stdout.close()
    assert looks["sleeps"] <= 2 and looks["works"] > 3  # it may have been on its way to sleep


def test_what_a_call_wrote_before_it_rests_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little CPU time writes megabytes where disks are fast; then it sleeps, and its clock stands still."""
    looks: list[float] = []
    clock = iter([0.5, 0.501, 0.501, 0.501, 0.5015, 0.502, 0.502, 0.502, 0.505])
    monkeypatch.setattr(keeper.time, "clock_gettime", lambda number: looks.append(next(clock)) or looks[-1])
    seen: list[float] = []
    monkeypatch.setattr(keeper, "exceeds", lambda *_: seen.append(looks[-1]) or False)
    with keeper_in(tmp_path) as (made, _):
        made._on_message({"watch": "call", "pid": os.getpid(), "clock": 1})
        for _ in range(9):
            made._look()
    assert seen == [0.5, 0.501, 0.502, 0.505]


def test_a_call_that_has_ended_is_looked_at_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: collections.Counter[str] = collections.Counter()
    monkeypatch.setattr(keeper, "exceeds", lambda parent, name, *_: looks.update([name]) or name == "full")
    with keeper_in(tmp_path) as (made, ours):
        for name in ("full", "small"):
            made._on_message({"watch": name, "pid": os.getpid(), "clock": ~os.getpid() << 3 | 2})
            made._on_message({"forget": name})
        for _ in range(3):
            made._look()
        frames = Frames()
        frames.feed(ours.recv(1 << 16))
    assert looks == {"full": 1, "small": 1} and not made._watched
    assert (frames.take(), frames.take()) == ({"exceeded": "full"}, None)


def test_short_cells_add_up_until_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at each would cost a twentieth of a cell."""
    looks: list[float] = []
    monkeypatch.setattr(Deadlines, "_look", lambda self, child, job: looks.append(child.cpu_seconds()))
    child = SimpleNamespace(cpu_looked_at=0.01)
    for cpu in (0.0105, 0.0115, 0.0125):
        child.cpu_seconds = lambda cpu=cpu: cpu
        Deadlines({}, None).look_last(child, None)
    assert looks == [0.0125]


@pytest.mark.parametrize("level", ONLY_LANDLOCK)
def test_files_of_cells_that_end_before_the_first_look_count(level: str) -> None:
    async def use(box: Sandbox) -> list[Result]:
        session = box.session("s")
        return [await session.run(f"open('f{n}', 'wb').write(bytes(4 << 20))") for n in range(40)]

    results = in_box(level, use)
    assert "disk" in [result.limit for result in results]
    assert {result.status for result in results} == {Status.OK, Status.KILLED}


@pytest.mark.parametrize("level", LEVELS)
def test_page_tables_of_cells_that_end_before_the_first_look_count(level: str) -> None:
    define = """
import ctypes
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
def spread(first):
    for n in range(first, first + 400):
        ctypes.memset(libc.mmap((1 << 36) + (n << 30), 4096, 3, 0x100022, -1, 0), 1, 1)
"""

    async def use(box: Sandbox) -> list[Result]:
        session = box.session("s")
        await session.run(define)
        return [await session.run(f"spread({n * 400})") for n in range(36)]

    results = in_box(level, use, memory_mb=64)
    stopped = next(number for number, result in enumerate(results) if result.status is Status.MEMORY)
    assert stopped < 20 and "page tables" in results[stopped].error  # at 8 kB a mapping within 64 MB and a little


def test_a_call_that_has_not_run_since_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look costs is paid by calls that compute, and not by those that wait."""
    looks: collections.Counter[str] = collections.Counter()
    monkeypatch.setattr(Deadlines, "_look", lambda self, child, job: looks.update([job.request["name"]]))
    current, cpu = 0.0, {"sleeps": 0.5, "works": 0.5}
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: current)
    timers = Deadlines({}, None)
    for name in cpu:
        child = SimpleNamespace(killed=None, cpu_seconds=lambda name=name: cpu[name])
        job = Job(1, {"name": name, "timeout": 99, "cpu": 99}, None, 0.0, child=child)
        timers.arm(job, 0.0)
    for _ in range(20):
        current += 0.06
        cpu["works"] += 0.001
        timers.run()
    assert looks == {"sleeps": 1, "works": 20}


@pytest.mark.parametrize("level", ONLY_LANDLOCK)
def test_a_keeper_that_is_killed_is_replaced_and_watches_on(level: str, caplog: pytest.LogCaptureFixture) -> None:
    code = """
import time
end = time.process_time() + 1
while time.process_time() < end: pass
for i in range(9): open(str(i), 'wb').write(b'0' * (1 << 20))
time.sleep(60)
"""

    async def use(box: Sandbox) -> Result:
        broker = box._client.broker_pid
        call = asyncio.ensure_future(box.run(code, timeout=50))
        while not (await box.stats())["running"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        (victim,) = processes(broker, "broker.keeper")
        os.kill(victim, signal.SIGKILL)
        return await call

    result = in_box(level, use, max_disk_mb=2, max_file_mb=1)
    assert (result.status, result.limit) == (Status.KILLED, "disk")
    assert [record.message for record in caplog.records].count(
        "sandbox: the keeper of working folders ended with status -9"
    ) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_threads_are_limited_at_once_and_not_in_all(level: str) -> None:
    code = """
import threading
for _ in range(3):
    go, threads = threading.Event(), []
    try:
        while True:
            threads.append(threading.Thread(target=go.wait)); threads[-1].start()
    except RuntimeError: threads.pop()
    print(len(threads))
    go.set()
    for thread in threads: thread.join()
"""

    async def use(box: Sandbox) -> Result:
        return await box.run(code, timeout=60)

    counts = [int(line) for line in in_box(level, use, max_threads=20).stdout.split()]
    # A thread that was joined may still be ending in the kernel.
    assert counts[0] == 19 and all(1 <= count <= 19 for count in counts)


@pytest.mark.parametrize("level", LEVELS)
def test_pipes_are_limited_at_once_and_not_in_all(level: str) -> None:
    code = """
import os
for _ in range(3):
    pipes = []
    try:
        while True: pipes.append(os.pipe())
    except OSError: print(len(pipes))
    for end in (end for pipe in pipes for end in pipe): os.close(end)
"""

    async def use(box: Sandbox) -> Result:
        return await box.run(code)

    assert in_box(level, use).stdout == "4\n4\n4\n"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "code",
    [
        "import os\nkept = [os.pipe() for _ in range(4)]\nwhile True:\n    try: os.pipe()\n    except OSError: pass",
        "import os\nwhile True:\n    for end in os.pipe(): os.close(end)",
        "import _thread, time\nfor _ in range(7): _thread.start_new_thread(time.sleep, (90,))\n"
        "while True:\n    try: _thread.start_new_thread(time.sleep, (90,))\n    except RuntimeError: pass",
    ],
    ids=["pipes that are refused", "pipes", "threads that are refused"],
)
def test_a_call_cannot_keep_the_broker_busy_with_questions(level: str, code: str) -> None:
    async def use(box: Sandbox) -> Result:
        return await box.run(code, timeout=80)

    result = in_box(level, use, max_threads=8)
    assert (result.status, result.limit) == (Status.KILLED, "threads") and "2,000 times" in result.error


@pytest.mark.parametrize("level", LEVELS)
def test_when_memory_runs_out_calls_go_before_the_zygote(level: str) -> None:
    """Whose end would take the sessions of all others along."""

    async def use(box: Sandbox) -> tuple[list[str], str]:
        broker = box._client.broker_pid
        await asyncio.gather(*(box.session(f"s{n}").run("1") for n in range(2)))
        found = [each for each in psutil.Process(broker).children(recursive=True) if not each.children()]
        calls = [each for each in found if each.parent().pid != broker]
        scores = [Path(f"/proc/{each.pid}/oom_score_adj").read_text().strip() for each in calls]
        (zygote_pid,) = {each.parent().pid for each in calls}
        return scores, Path(f"/proc/{zygote_pid}/oom_score_adj").read_text().strip()

    calls, of_zygote = in_box(level, use)
    assert len(calls) >= 2 and set(calls) == {"1000"} and of_zygote == "500"


@pytest.mark.parametrize("level", LEVELS)
def test_where_the_kernel_does_not_ask_threads_are_counted_now_and_then(level: str) -> None:
    code = "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(50,)).start()"

    async def use(box: Sandbox) -> Result:
        return await box.run(code, timeout=40)

    result = in_box(level, use, without=("notify",), max_threads=20)
    assert (result.status, result.limit, result.error) == (
        Status.KILLED,
        "threads",
        "the code started more than 20 threads",
    )


@pytest.mark.parametrize("level", LEVELS)
def test_page_tables_count_against_the_memory_limit(level: str) -> None:
    code = """
import ctypes, time
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for n in range(12_000):
    at = libc.mmap((1 << 40) + (n << 30), 4096, 3, 0x100022, -1, 0)
    ctypes.memset(at, 1, 1)
time.sleep(50)
"""

    async def use(box: Sandbox) -> tuple[Result, Result]:
        return await box.run(code, memory_mb=64), await box.run("x = bytearray(400 << 20)\nlen(x)")

    spread, dense = in_box(level, use)
    assert (spread.status, spread.limit) == (Status.MEMORY, "memory") and "page tables" in spread.error
    assert dense.result == str(400 << 20)


@pytest.mark.parametrize("level", LEVELS)
def test_a_process_whose_first_thread_has_left_is_ended(level: str) -> None:
    """Its `status` shows no memory, and its `fd` no files, whatever the other threads have."""
    code = f"""
import ctypes, threading
def work():
    while True: pass
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(ctypes.c_long({NR["exit"]}), ctypes.c_long(0))
"""

    async def use(box: Sandbox) -> Result:
        return await box.run(code, timeout=60)

    result = in_box(level, use)
    assert result.status is Status.KILLED and "ended the first thread" in result.error


@pytest.mark.parametrize(("runs", "looks", "kills"), [(True, 1, []), (True, 2, ["leader"]), (False, 2, [])])
def test_a_process_that_is_ending_is_not_taken_for_one(runs: bool, looks: int, kills: list[str]) -> None:
    seen: list[str] = []
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    kind = SimpleNamespace(address_space=0, page_tables=0, listener=3)
    child = SimpleNamespace(pid=ended.pid, kind=kind, runs=lambda: runs, kill=seen.append, cpu_seconds=lambda: 0.0)
    child.leaderless = False
    folders = SimpleNamespace(watch=lambda child: None)
    for _ in range(looks):
        Deadlines({"memory_mb": 1}, folders)._look(child, SimpleNamespace(request={"memory_mb": None}))
    ended.wait()
    assert seen == kills


def test_a_process_cannot_name_its_own_page_tables() -> None:
    name = "Name:\tVmSize: 1 kB VmPTE: 2 kB\n"
    status = f"{name}State:\tR\nVmSize:\t  8192 kB\nVmRSS:\t 5 kB\nVmPTE:\t 12 kB\nThreads:\t3\n"
    assert memory.usage(status.encode()) == (8192 << 10, 12 << 10, 3)
    assert memory.usage(Path("/proc/self/status").read_bytes())[0] > 0


@pytest.mark.parametrize(("clock", "limit"), [([0.9, 1.0], "timeout"), ([0.9, 0.9], "cpu")])
def test_of_two_limits_that_are_passed_the_first_is_named(clock: list[float], limit: str, monkeypatch) -> None:
    """The broker looks at the clock, then loses its core for a moment, and then sees a second of CPU time."""
    kills: list[str] = []
    child = SimpleNamespace(killed=None, cpu_seconds=lambda: 3.0, kill=kills.append)
    job = SimpleNamespace(started=0.0, request={"timeout": 1.0, "cpu": 1.0}, child=child, cpu_before=2.0, cpu_seen=0.0)
    made = Deadlines({}, None)
    made.arm(job, 0.0)
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=iter(clock).__next__))
    made.run()
    assert kills == [limit]


@pytest.mark.parametrize("level", LEVELS)
def test_every_call_has_its_cpu_time(level: str) -> None:
    async def use(box: Sandbox) -> list[Result]:
        return list(await asyncio.gather(*(box.run("print(sum(range(1000)))") for _ in range(200))))

    assert [result for result in in_box(level, use) if not 0 < result.cpu_s < 5] == []


@pytest.mark.parametrize("level", LEVELS)
def test_an_end_from_outside_is_an_outage_and_its_session_is_lost(level: str) -> None:
    async def use(box: Sandbox) -> tuple[Result, Result]:
        session = box.session("s")
        await session.run("x = 1")
        call = asyncio.ensure_future(session.run("import time\ntime.sleep(99)", timeout=90))
        while not (await box.stats())["running"]:
            await asyncio.sleep(0.01)
        broker = box._client.broker_pid
        for pid in set(leaves(broker)) - set(processes(broker, "broker.keeper")):
            os.kill(pid, signal.SIGKILL)
        return await call, await session.run("x")

    killed, after = in_box(level, use)
    assert killed.status is Status.UNAVAILABLE and "ended from outside (SIGKILL)" in killed.error
    assert after.status is Status.UNAVAILABLE and "lost" in after.error


def test_each_kill_for_want_of_memory_is_taken_once_and_only_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 7
    monkeypatch.setattr(oom, "_count", lambda: kills)
    seen = oom.OomKills()
    assert not seen.take()
    kills = 9
    assert [seen.take() for _ in range(3)] == [True, True, False]
    kills = 10
    seen.turn()
    assert seen.take()
    kills = 11
    seen.turn()
    seen.turn()
    assert not seen.take()


def test_the_kernels_count_of_such_kills_can_be_read() -> None:
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    assert oom._count() == int(counts["oom_kill"])


@pytest.mark.skipif(os.getuid() != 0, reason="another user's processes would be counted as well")
def test_where_processes_run_out_a_zygote_goes_on_and_calls_wait() -> None:
    code = """
import asyncio, json, os, resource, sys
import jail_host
from slime_retool.sandbox import *
jail_host.enter_container(1001); jail_host.become(1001)  # the limit counts the user's processes of all tests
resource.setrlimit(resource.RLIMIT_NPROC, (7, 7))  # client, broker, keeper and zygote; three calls
async def main():
    async with Sandbox(SandboxPolicy(isolation="landlock", packages=(), prefork=2, concurrency=8)) as box:
        session = box.session("s")
        await session.run("x = 7")
        calls = [box.run("import time\\ntime.sleep(0.3)\\n1") for _ in range(6)]
        results = await asyncio.gather(*calls)
        again = await box.run("2")
        for _ in range(100):
            if again.status is Status.OK: break
            await asyncio.sleep(0.1)
            again = await box.run("2")
        last = await session.run("x")
        print(json.dumps([[r.status.value for r in results], last.result, again.result, (await box.stats())["counts"]]))
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TESTS, timeout=120)
    statuses, session, again, counts = json.loads(done.stdout)
    assert (session, again) == ("7", "2") and set(statuses) <= {"ok", "unavailable"} and "ok" in statuses
    assert "zygote_restarts" not in counts


@pytest.mark.parametrize("level", LEVELS)
def test_a_zygote_that_dies_while_it_starts_again_is_tried_again(level: str, caplog: pytest.LogCaptureFixture) -> None:
    async def use(box: Sandbox) -> tuple[Result, bool]:
        broker = box._client.broker_pid
        killed: set[int] = set()
        while len(killed) < 3:  # the second and the third within milliseconds of their start
            for pid in processes(broker, "child.zygote"):
                if pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            await asyncio.sleep(0.001)
        while len(ends()) < 3:
            await asyncio.sleep(0.01)
        result = await box.run("'again'", timeout=60)
        return result, box._client.broker_pid == broker

    def ends() -> list[str]:
        return [record.message for record in caplog.records if "the zygote ended with status -9" in record.message]

    with caplog.at_level(logging.WARNING):
        result, same_broker = in_box(level, use)
    assert (result.result, same_broker) == ("'again'", True)
    assert len(ends()) == 3, caplog.text


@pytest.mark.parametrize("level", LEVELS)
def test_calls_that_wait_when_the_broker_dies_are_run_by_the_next(level: str, caplog: pytest.LogCaptureFixture) -> None:
    async def use(box: Sandbox) -> tuple[list[Result], list[Result]]:
        begun = [asyncio.ensure_future(box.run("import time\ntime.sleep(99)", timeout=90)) for _ in range(4)]
        while (await box.stats())["running"] < 4:
            await asyncio.sleep(0.01)
        fresh = box.session("begins later")
        waiting = [asyncio.ensure_future(box.run(f"print({n})")) for n in range(60)]
        cells = [asyncio.ensure_future(fresh.run(cell)) for cell in ("x = 5", "x + 1")]
        await asyncio.sleep(0.05)
        os.kill(box._client.broker_pid, signal.SIGKILL)
        return await asyncio.gather(*begun), await asyncio.gather(*waiting, *cells)

    begun, (*waiting, _, cell) = in_box(level, use)
    assert [result.status for result in begun] == [Status.UNAVAILABLE] * 4
    assert [result.stdout for result in waiting] == [f"{n}\n" for n in range(60)]
    assert cell.result == "6"
    assert caplog.text.count("another one is started") == 1


def test_leaving_while_a_broker_is_being_replaced_leaves_none() -> None:
    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    async def use() -> tuple[set[int], Result]:
        async with Sandbox(SandboxPolicy(isolation="none")) as box:
            broker = box._client
            os.kill(broker.broker_pid, signal.SIGKILL)
            while broker.alive:
                await asyncio.sleep(0.01)
            own = children() - {broker.broker_pid}
            call = asyncio.ensure_future(box.run("1"))
            while not box._starting.locked():
                await asyncio.sleep(0)
        return own, await call

    own, result = asyncio.run(use())
    assert result.status is Status.UNAVAILABLE
    assert children() <= own


def test_which_calls_have_begun_outlives_the_process_that_noted_it() -> None:
    calls = StartedCalls.create()
    pid = os.fork()
    if pid == 0:
        StartedCalls(calls.fd).add(41)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [call in calls for call in (40, 41, 42)] == [False, True, False]
    calls.clear(41)
    assert 41 not in calls
    calls.close()


@pytest.mark.parametrize("level", LEVELS[: LEVELS.count("namespaces")])
def test_an_interpreter_below_tmp_works(level: str) -> None:
    """Where code finds its own /tmp otherwise."""
    program = f"""
import asyncio
from slime_retool.sandbox import *
async def main():
    async with Sandbox(SandboxPolicy(isolation={level!r}, packages=())) as box:
        print(await box.run("import sys, tempfile\\ntempfile.TemporaryFile()\\nsys.base_prefix"))
asyncio.run(main())
"""
    code = """
import os, subprocess, sys
import jail_host
from slime_retool.sandbox.child import namespaces
ids = os.getuid(), os.getgid()
namespaces.unshare(namespaces.NEWNS | (namespaces.NEWUSER if ids[0] else 0))
if ids[0]: namespaces.write_maps(*ids)
namespaces.make_private()
place, program = sys.argv[1:]
jail_host.mount(sys.base_prefix, place, None, jail_host._MS_BIND | jail_host._MS_REC)
python = os.path.relpath(os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix))
subprocess.run([os.path.join(place, python), "-c", program], env={"PYTHONPATH": os.path.dirname(os.getcwd())})
"""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        command = [sys.executable, "-c", code, place, program]
        done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, timeout=120)
        assert f'result="{place!r}"' in done.stdout, done.stderr


def test_an_interpreter_where_calls_have_their_files_is_refused_with_the_reason() -> None:
    inside = f"{namespaces.WORK}/python"
    made = SimpleNamespace(paths=HostPaths([inside], [], []), config={"packages": {}})
    with pytest.raises(zygote.LayerError, match="is where a call's own files are") as refusal:
        zygote.Zygote._build_root(made)
    assert refusal.value.args[1] == "paths" and namespaces.WORK in client._ADVICE["paths"]


def test_a_cgroup_holds_what_it_says_and_goes_or_none_may_be_made() -> None:
    limits = {"concurrency": 2, "max_sessions": 2, "prefork": 1, "max_threads": 5, "memory_mb": 10, "max_disk_mb": 6}
    try:
        made = cgroup.Cgroup.make(f"slime-retool-test-{os.getpid()}", limits)
    except OSError as error:
        assert str(error)
        return
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    made.add(sleeper.pid)
    files = [file for folder in made.folders for file in Path(folder).iterdir() if file.name in FILES]
    texts = [file.read_text().strip() for file in files]
    members = [Path(folder, "cgroup.procs").read_text().split() for folder in made.folders]
    cgroup.remove(made.folders, 0.0)
    assert all(map(os.path.isdir, made.folders))  # a process is in it
    sleeper.kill()
    sleeper.wait()
    cgroup.remove(made.folders, 10.0)
    # Six processes of 5 threads and 16 MiB each.
    assert sorted(texts) == ["100663296", "30"] and all(each == [str(sleeper.pid)] for each in members)
    assert not any(map(os.path.exists, made.folders))


FILES = {"pids.max", "memory.max", "memory.limit_in_bytes"}


@pytest.mark.parametrize("level", LEVELS)
def test_the_cgroup_of_a_broker_that_was_killed_goes_as_well(level: str) -> None:
    async def use(box: Sandbox) -> object:
        group = (await box.stats())["cgroup"]
        os.kill(box._client.broker_pid, signal.SIGKILL)
        return group

    group = in_box(level, use)
    assert isinstance(group, str) or (group and not any(map(os.path.exists, group)))
