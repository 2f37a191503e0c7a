"""Level `none`, a clean process: plain semantics, within limits, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from slime_retool.errors import ConfigError, ToolUnavailable
from slime_retool.sandbox import Result, Sandbox, SandboxPolicy, SandboxUnavailable, Status
from slime_retool.sandbox.host import client

T = TypeVar("T")
POLICY = SandboxPolicy(isolation="none", packages=(), memory_mb=1024, concurrency=2)


def run(code: str, **options: object) -> Result:
    return in_box(lambda box: box.run(code, **options))


def in_box(use: Callable[[Sandbox], Awaitable[T]], policy: SandboxPolicy = POLICY) -> T:
    async def main() -> T:
        async with Sandbox(policy) as box:
            return await use(box)

    return asyncio.run(main())


def wait_until(condition: Callable[[], bool]) -> bool:
    """Poll for up to two minutes."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def running(marker: str) -> list[int]:
    """Processes whose command line or working directory contains `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace") + os.readlink(entry / "cwd")
            except OSError:
                continue
            if marker in words:
                found.append(int(entry.name))
    return found


async def until_calls(box: Sandbox, number: int) -> None:
    """Wait until so many calls run."""
    while (await box.stats())["running"] != number:
        await asyncio.sleep(0.02)


HARMLESS = {
    "print": ("print(1 + 1)", "2\n", None),
    "echo": ("x = 3\nx ** 2", "", "9"),
    "assignment is not echoed": ("x = 5", "", None),
    "None is not echoed": ("print('a')", "a\n", None),
    "loop is not echoed": ("for i in range(2):\n    print(i)", "0\n1\n", None),
    "indented end": ("if True:\n    y = 1\n    print(y)", "1\n", None),
    "future import": ("from __future__ import annotations\nprint('ok')", "ok\n", None),
    "multi-line string": ('s = """a\n  b"""\nprint(repr(s))', "'a\\n  b'\n", None),
    "main": ("print(__name__)\nif __name__ == '__main__': print('yes')", "__main__\nyes\n", None),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\nprint(P(1))",
        "P(x=1)\n",
        None,
    ),
    "recursion": (
        "import sys\nsys.setrecursionlimit(5000)\nf = lambda n: n and 1 + f(n - 1)\nf(3000)",
        "",
        "3000",
    ),
    "scratch file": ("open('a', 'w').write('1 2')\nprint(open('a').read())", "1 2\n", None),
    "own module": ("open('m.py', 'w').write('v = 4')\nimport m\nm.v", "", "4"),
    "isinstance and eval": ("print(isinstance(eval('3*4'), int), type('').__name__)", "True str\n", None),
    "thread": ("import threading\nthreading.Thread(target=print, args=('t',)).start()", "t\n", None),
    "exit": ("print('before')\nexit()\nprint('after')", "before\n", None),
    "unicode": ("print('∑ 中文 😀')", "∑ 中文 😀\n", None),
    "surrogate": ("print('a\\ud800')", "a\\ud800\n", None),
    "surrogate in a repr": ("class A:\n    def __repr__(self): return '\\ud800'\nA()", "", "\\ud800"),
    "no final newline": ("import sys\nsys.stdout.write('x')\nNone", "x", None),
    "empty": ("", "", None),
}


def test_harmless_code_runs_with_plain_semantics() -> None:
    async def use(box: Sandbox) -> list[Result]:
        return list(await asyncio.gather(*(box.run(code) for code, _, _ in HARMLESS.values())))

    for (name, (_, stdout, echoed)), result in zip(HARMLESS.items(), in_box(use), strict=True):
        assert (name, result.status, result.stdout, result.result) == (name, Status.OK, stdout, echoed)


def test_sympy_and_numpy_can_be_imported() -> None:
    code = "import numpy as np\nfrom sympy import *\nx = Symbol('x')\nprint(np.arange(4).sum(), factor(x**2 - 1))"
    assert run(code, timeout=60).stdout == "6 (x - 1)*(x + 1)\n"


def test_a_traceback_names_the_codes_own_lines_only() -> None:
    result = run("import json\ndef f():\n    return json.loads('{')\nprint('step 1')\nf()")
    assert (result.status, result.stdout) == (Status.ERROR, "step 1\n")
    assert result.error.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<string>", line 5, in <module>',
        "    f()",
        '  File "<string>", line 3, in f',
        "    return json.loads('{')",
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("for i in range(3)\n    print(i)", "SyntaxError"),
        ("x = input()", "input() is not available"),
        ("import sys\nsys.exit('bye')", "SystemExit: bye"),
        ("import os\nos._exit(7)", "exit code 7"),
        ("x = 'a\ud83d'", "surrogates not allowed"),
        ("raise ValueError('a\\ud83d')", "ValueError: a\\ud83d"),
        ("def f(): f()\nf()", "RecursionError"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E"),
    ],
)
def test_failing_code_says_why(code: str, error: str) -> None:
    result = run(code)
    assert result.status is Status.ERROR and error in result.error and len(result.error) < 4100


def test_a_crash_is_reported_with_its_signal() -> None:
    result = run("print('before', flush=True)\nimport ctypes\nctypes.string_at(0)")
    assert (result.status, result.stdout) == (Status.KILLED, "before\n") and "SIGSEGV" in result.error


@pytest.mark.parametrize("code", ["x = 'a' * 10**12", "import numpy\nnumpy.ones((40000, 40000))"])
def test_memory_is_limited(code: str) -> None:
    result = run(code, timeout=60)
    assert result.status is Status.MEMORY and "1024 MB" in result.error


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\nwhile True:\n    try:\n        while True: time.sleep(1)\n    except BaseException: pass",
        "import signal\nfor s in (2, 10, 14, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "x = 10 ** 10 ** 8",
        "class A:\n    def __repr__(self):\n        while True: pass\nA()",
    ],
)
def test_endless_code_is_stopped(code: str) -> None:
    result = run("print('partial')\n" + code, timeout=2)
    assert (result.status, result.stdout) == (Status.TIMEOUT, "partial\n")
    assert result.wall_s >= 2 and "longer than 2 s" in result.error


def test_output_is_bounded_to_head_and_tail() -> None:
    result = run("print('HEAD')\nfor i in range(1000): print('x' * 9999)\nprint('TAIL')", timeout=30)
    assert result.status is Status.OK and result.truncated
    assert result.stdout.startswith("HEAD\n") and result.stdout.endswith("TAIL\n")
    assert len(result.stdout) < POLICY.max_output_bytes + 100


def test_no_variable_of_ours_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary")
    monkeypatch.setenv("PYTHONPATH", "/canary")
    result = run("import os, sys\nprint(dict(os.environ), sys.path, os.getcwd())")
    assert "canary" not in result.stdout and "slime-retool-sandbox" in result.stdout


def test_code_cannot_break_later_calls_or_its_own_report() -> None:
    patch = "import builtins, json, os, sys, traceback\nos.write = json.dumps = traceback.TracebackException = None\n"
    junk = 'b\'{"status": "memory"}\' * 99'
    forge = f"for fd in range(3, 20):\n    try: os.write(fd, {junk})\n    except OSError: pass\n"
    close = "import os\nos.closerange(0, 100)"

    async def use(box: Sandbox) -> list[Result]:
        return [await box.run(code) for code in (patch + "print(1)", "import os\n" + forge + "print(2)", close, "3")]

    patched, forged, _, last = in_box(use)
    assert (patched.status, patched.stdout) == (Status.OK, "1\n")
    assert forged.status is Status.KILLED and "interfered" in forged.error
    assert last.result == "3"


def test_no_descendant_outlives_a_call() -> None:
    # A child in the same session, and one that left it and lost its parent.
    code = (
        "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)\n"
        "print(os.getcwd())\n"
    )
    for end, status, timeout in (("", Status.OK, 60), ("while True: pass", Status.TIMEOUT, 2)):
        result = run(code + end, timeout=timeout)
        assert result.status is status
        assert running(result.stdout.strip()) == []


def test_the_scratch_folder_is_removed() -> None:
    code = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.chmod('a/b', 0)\nprint(os.getcwd())"

    async def use(box: Sandbox) -> Path:
        folder = Path((await box.run(code)).stdout.strip())
        assert folder.parent.exists() and wait_until(lambda: not folder.exists())
        return folder.parent

    assert not in_box(use).exists()


def test_a_seed_makes_random_numbers_repeatable() -> None:
    code = "import random, numpy\nprint(random.random(), numpy.random.rand())"

    async def use(box: Sandbox) -> list[str]:
        return [(await box.run(code, seed=seed)).stdout for seed in (1, 1, 2)]

    first, second, other = in_box(use, SandboxPolicy(isolation="none"))
    assert first == second != other


def test_waiting_for_a_turn_is_not_run_time_and_the_limit_on_calls_holds() -> None:
    code = "import time\nprint(time.time())\ntime.sleep(0.3)\nprint(time.time())"

    async def use(box: Sandbox) -> list[Result]:
        return list(await asyncio.gather(*(box.run(code, timeout=60) for _ in range(6))))

    results = in_box(use)
    assert all(result.status is Status.OK for result in results)
    spans = [tuple(map(float, result.stdout.split())) for result in results]
    assert max(sum(a <= start < b for a, b in spans) for start, _ in spans) <= POLICY.concurrency
    # The last pair waits for two pairs before it; its own time is that of one.
    assert max(result.queue_s for result in results) > 0.5
    assert all(result.wall_s > 0.29 for result in results)


def test_the_event_loop_goes_on_during_calls() -> None:
    async def use(box: Sandbox) -> int:
        ticks = 0
        call = asyncio.ensure_future(box.run("import time\ntime.sleep(0.5)"))
        while not call.done():
            await asyncio.sleep(0.005)
            ticks += 1
        return ticks

    assert in_box(use) > 10


def test_cancelling_a_call_ends_its_processes_and_frees_its_place() -> None:
    async def use(box: Sandbox) -> str:
        call = asyncio.ensure_future(box.run("import time\ntime.sleep(1000)", timeout=2000))
        await until_calls(box, 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until_calls(box, 0)
        return (await box.run("print('next')")).stdout

    assert in_box(use, SandboxPolicy(isolation="none", packages=(), concurrency=1)) == "next\n"


def test_leaving_the_block_ends_calls_still_running() -> None:
    async def main() -> tuple[str, Result]:
        async with Sandbox(POLICY) as box:
            call = asyncio.ensure_future(box.run("import time\ntime.sleep(1000)", timeout=2000))
            root = box._client._folder
            await until_calls(box, 1)
        return root, await call

    root, result = asyncio.run(main())
    assert result.status is Status.UNAVAILABLE and running(root) == [] and not Path(root).exists()


def test_many_timeouts_leave_no_zombie_and_no_descriptor() -> None:
    def children() -> set[int]:
        """Ids of this process's children, zombies included (other tests may keep some of their own)."""
        return {child.pid for child in psutil.Process().children()}

    async def use(box: Sandbox) -> tuple[int, int]:
        await box.run("1")
        before = len(os.listdir("/proc/self/fd"))
        await asyncio.gather(*(box.run("while True: pass", timeout=0.05) for _ in range(12)))
        await asyncio.sleep(0)
        return before, len(os.listdir("/proc/self/fd"))

    own = children()
    before, after = in_box(use)
    assert after <= before
    assert children() <= own


def test_sigkill_of_the_owner_ends_everything(tmp_path: Path) -> None:
    code = f"import os, time\nos.fork()\nopen(f'{tmp_path}/{{os.getpid()}}', 'w').close()\ntime.sleep(1000)"
    owner_code = (
        "import asyncio, sys\nfrom slime_retool.sandbox import Sandbox, SandboxPolicy\n"
        "async def main():\n"
        "    async with Sandbox(SandboxPolicy(isolation='none')) as box:\n"
        "        print(box._client._folder, flush=True)\n"
        f"        await box.run({code!r}, timeout=2000)\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).parents[1]
    owner = subprocess.Popen([sys.executable, "-c", owner_code], stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        folder = owner.stdout.readline().strip()
        assert wait_until(lambda: len(os.listdir(tmp_path)) == 2)
        code_and_fork = [int(name) for name in os.listdir(tmp_path)]
        assert set(code_and_fork) <= set(running(folder))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    assert wait_until(lambda: running(folder) == [])
    assert wait_until(lambda: not Path(folder).exists())


def test_an_interpreter_that_does_not_start_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.sys, "executable", "/does/not/exist")
    with pytest.raises(SandboxUnavailable, match="/does/not/exist"):
        run("print(1)")
    monkeypatch.setattr(client.sys, "executable", "/bin/false")
    with pytest.raises(SandboxUnavailable, match="exit code 1"):
        run("print(1)")


def test_a_machine_without_room_for_the_sandbox_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/does/not/exist")
    with pytest.raises(SandboxUnavailable, match="TMPDIR") as caught:
        run("print(1)")
    assert isinstance(caught.value, ToolUnavailable)


def test_a_policy_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="isolation must be one of namespaces, landlock, none, got 'vm'"):
        SandboxPolicy(isolation="vm")
    with pytest.raises(ConfigError, match="memory_mb must be above 0, got 0"):
        SandboxPolicy(memory_mb=0)


def test_files_input_memory_and_sessions_work_as_at_the_other_levels() -> None:
    async def use(box: Sandbox) -> None:
        code = "data = open('in.txt').read() + input()\nopen('out/b', 'w').write(data)"
        with_files = await box.run(
            code, stdin="typed\n", files={"in.txt": b"given ", "out/a": b""}, fetch_files=("out/b", "missing")
        )
        assert with_files.files == {"out/b": b"given typed"}
        assert (await box.run("x = bytearray(300 << 20)", memory_mb=100)).status is Status.MEMORY
        async with box.session("s") as session:
            await session.run("x = 40")
            assert (await session.run("x + 2")).result == "42"

    in_box(use)


def test_a_fork_that_runs_to_the_end_of_the_code_does_not_answer_for_it() -> None:
    code = "import os, time\nif os.fork():\n    time.sleep(0.3)\n    print('parent')\nos.getpid()"
    result = run(code)
    assert (result.status, result.stdout) == (Status.OK, "parent\n")


def test_code_that_kills_its_guardian_ends_with_it() -> None:
    async def use(box: Sandbox) -> tuple[Result, Result]:
        return await box.run("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(1000)"), await box.run("1")

    ended, after = in_box(use)
    assert ended.status in (Status.KILLED, Status.MEMORY) and after.result == "1"


def test_processes_that_cannot_be_set_up_are_an_outage_in_sessions_too_and_are_not_tried_for_ever() -> None:
    async def use(box: Sandbox) -> tuple[list[Result], int, int]:
        while not (await box.stats())["idle"]["plain"]:  # which makes its folder there
            await asyncio.sleep(0.02)
        shutil.rmtree(Path(box._client._folder) / "work")
        await box.run("1")  # uses up the process that was ready
        session = box.session("s")
        refused = [await asyncio.wait_for(session.run("1"), 60) for _ in range(3)]
        refused += await asyncio.wait_for(asyncio.gather(box.run("1"), session.run("1"), session.run("1")), 60)
        forks = [(await box.stats())["counts"]["forks"]]
        await asyncio.sleep(0.5)
        forks.append((await box.stats())["counts"]["forks"])
        return refused, *forks

    refused, before, after = in_box(use, replace(POLICY, prefork=1))
    assert {result.status for result in refused} == {Status.UNAVAILABLE} and after == before
    assert all("setting up the process failed" in result.error for result in refused)


@pytest.mark.parametrize("level", ["none", "landlock"])
def test_brokers_that_are_killed_while_they_start_are_replaced(level: str, monkeypatch, caplog):
    """Before, a call then closed the first broker's descriptors once more, which by then were of other files."""
    start, doomed = subprocess.Popen, [0]

    def popen(*args: object, **options: object) -> subprocess.Popen[bytes]:
        process = start(*args, **options)
        if doomed[0]:
            doomed[0] -= 1
            process.kill()
        return process

    async def use(box: Sandbox) -> list[Result]:
        monkeypatch.setattr(client.subprocess, "Popen", popen)
        results = []
        for fails in (3, 1000, 0):
            assert box._client is not None
            os.kill(box._client.broker_pid, signal.SIGKILL)
            while box._client.alive:
                await asyncio.sleep(0.01)
            doomed[0] = fails
            with tempfile.TemporaryFile() as file:  # takes the number of a descriptor that was just closed
                results += await asyncio.gather(*(box.run("print(6 * 7)") for _ in range(3)))
                os.fstat(file.fileno())
            doomed[0] = 0
            results.append(await box.run("print(6 * 7)"))
        return results

    found = in_box(use, replace(POLICY, isolation=level))
    statuses = [result.status for result in found]
    assert statuses == [Status.OK] * 4 + [Status.UNAVAILABLE] * 3 + [Status.OK] * 5
    assert {result.stdout for result in found if result.status == Status.OK} == {"42\n"}
    assert "killed by SIGKILL" in found[4].error
    assert caplog.text.count("before it was ready; another one is started") >= 3
