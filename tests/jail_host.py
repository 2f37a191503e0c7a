"""A throw-away container around the sandbox's attack tests, and what an attacked host looks like afterwards.

`python jail_host.py LEVEL UID CASES...` makes mount, process, network and IPC namespaces where the kernel lets it,
plants secrets, becomes UID, runs the cases of JSON-lines files in one sandbox and prints a JSON object: the failures by
case.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_retool.sandbox import Result, Sandbox, SandboxPolicy, SandboxUnavailable, Status
from slime_retool.sandbox.child import namespaces
from slime_retool.sandbox.child.syscalls import MACHINE

SECRET = "hidden-f2c41b"
PORT = 45_117
HOST = Path("/mnt")
"""Where the host's secrets lie, on a tmpfs of the container."""
TEMPORARY = Path("/srv")
"""Where the sandbox keeps its files, also on a tmpfs."""
ABSTRACT = "\0jail-host-test"
_MS_BIND, _MS_REC = 4096, 16384


def enter_container(uid: int) -> None:
    """Own namespaces; the interpreter and the checkout stay reachable for `uid` although a home may be closed to it."""
    root = os.geteuid() == 0
    ids = os.getuid(), os.getgid()
    another = uid != os.getuid()  # within its own namespace this user has another number
    flags = namespaces.NEWNS | namespaces.NEWPID | namespaces.NEWNET | namespaces.NEWIPC
    namespaces.unshare(flags if root else flags | namespaces.NEWUSER)
    if not root:
        namespaces.write_maps(*ids)
    pid = os.fork()
    if pid:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    namespaces.make_private()
    mount("proc", "/proc", "proc")
    for folder in (HOST, TEMPORARY):
        mount("tmpfs", str(folder), "tmpfs", data="mode=777")
    tempfile.tempdir = str(TEMPORARY)
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    if another:
        open_paths([Path(p).resolve() for p in (sys.base_prefix, sys.prefix, Path(__file__).parents[1])])


def become(uid: int) -> None:
    """Another user; only root can."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    encoded = [text.encode() if text else None for text in (source, target, kind, data)]
    if libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]) < 0:
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}")


def open_paths(paths: list[Path]) -> None:
    """Cover folders that only root may enter with ones that all may, and bind `paths` into them."""
    closed: dict[Path, list[tuple[Path, int]]] = {}
    for path in paths:
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & 1:
                closed.setdefault(folder, []).append((path, os.open(path, os.O_PATH)))
                break
    for folder, kept in closed.items():
        mount("tmpfs", str(folder), "tmpfs")
        folder.chmod(0o755)
        for path, fd in kept:
            path.mkdir(parents=True, exist_ok=True)
            mount(f"/proc/self/fd/{fd}", str(path), None, _MS_BIND | _MS_REC)


PRELUDES = {
    # Any system call by its number (x86_64): its value, or the error's name.
    "call": """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(*arguments):
    value = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return value if value >= 0 else errno.errorcode[ctypes.get_errno()]
""",
    # An answer to the broker in place of the executor's own, by what lies in the frames that called the code.
    "forge": """
import json, os, struct, sys
frame, request = sys._getframe(), None
while frame is not None and request is None:
    request = next((v for v in frame.f_locals.values() if isinstance(v, dict) and 'nonce' in v), None)
    frame = frame.f_back
answer = {'nonce': request['nonce'], 'error': None, 'limit': None, 'result': 'mine', 'max_rss': 0}
answer |= {'written': [0, 0], 'files': [], 'exit_code': None}
def packed(**fields):
    data = json.dumps(answer | fields).encode()
    return struct.pack('<I', len(data)) + data
def forge(**fields):
    os.write(3, packed(**fields))
""",
}


class AttackedHost:
    """Secrets to find, files to change and listeners to reach. `damage` tells what was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        (folder / "secret").write_text(SECRET)
        (folder / "open" / "file").write_text("original")
        (folder / "open" / "file").chmod(0o666)
        os.environ["HOST_API_KEY"] = SECRET
        self.reached: list[str] = []
        self.listen(socket.AF_INET, ("127.0.0.1", PORT))
        self.listen(socket.AF_UNIX, str(folder / "open" / "socket"))
        self.listen(socket.AF_UNIX, ABSTRACT)
        (folder / "open" / "socket").chmod(0o777)
        self.before = self.files()

    def listen(self, family: int, address: Any) -> None:
        server = socket.socket(family)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()

        def accept() -> None:
            while True:
                server.accept()[0].close()
                self.reached.append(str(address))

        threading.Thread(target=accept, daemon=True).start()

    def files(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for folder, _, names in os.walk(self.folder):
            for name in (".", *names):
                status = os.lstat(os.path.join(folder, name))
                found[os.path.join(folder, name)] = (status.st_size, status.st_mtime_ns, status.st_mode)
        return found

    def damage(self) -> list[str]:
        now, found = self.files(), []
        if now != self.before:
            found.append(
                "files changed: " + ", ".join(p for p in now | self.before if now.get(p) != self.before.get(p))
            )
        if self.reached:
            found.append("reached " + ", ".join(self.reached))
            self.reached.clear()
        self.before = now
        return found


def processes(words: str) -> list[int]:
    """Ids of processes, zombies among them, whose command line holds `words`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if words in (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " "):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def zombies() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def cpu_ticks(pids: Iterable[int]) -> int:
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total


def text_of(result: Result) -> str:
    return "\n".join(part for part in (result.stdout, result.result, result.stderr, result.error) if part)


async def judge(box: Sandbox, case: dict[str, Any]) -> list[str]:
    """What is wrong with the outcome of one case."""
    if "before" in case:
        await box.session("victim").run(case["before"])
    started = time.monotonic()
    code = PRELUDES[case["prelude"]] if "prelude" in case else ""
    code += case["code"].replace("$HOST", str(HOST)).replace("$PORT", str(PORT))
    if case.get("session"):
        result = await box.session(case["session"]).run(code, timeout=case.get("timeout"))
    else:
        result = await box.run(code, timeout=case.get("timeout"))
    took = time.monotonic() - started - result.queue_s
    text, wrong = text_of(result), []
    if result.status is Status.UNAVAILABLE or ("status" in case and result.status.value not in case["status"]):
        wrong.append(f"status {result.status.value}: {text[:200]}")
    if result.files:
        wrong.append(f"files that nobody asked for: {list(result.files)}")
    if SECRET in text:
        wrong.append(f"the secret leaked: {text[:200]}")
    wrong += [f"{word!r} in the output: {text[:200]}" for word in case.get("never", ()) if word in text]
    wrong += [f"{word!r} not in the output: {text[:300]}" for word in case.get("shows", ()) if word not in text]
    if "any" in case and not any(word in text for word in case["any"]):
        wrong.append(f"none of {case['any']} in the output: {text[:300]}")
    seen = {"stdout": result.stdout, "result": result.result}
    wrong += [f"{name} {value!r}, not {case[name]!r}" for name, value in seen.items() if case.get(name, value) != value]
    if "timeout" in case and took > case["timeout"] + 10:
        wrong.append(f"took {took:.1f} s")
    if len(text) > 200_000:
        wrong.append(f"{len(text)} characters of output")
    if "idle" in case:
        before = cpu_ticks(processes("boot.py"))
        await asyncio.sleep(0.5)
        if (used := cpu_ticks(processes("boot.py")) - before) > 10:
            wrong.append(f"{used} ticks of CPU after the call")
    if "then" in case:
        later = await box.run(case["then"])
        if case["then_shows"] not in text_of(later):
            wrong.append(f"the next call was affected: {text_of(later)[:200]}")
    return wrong


async def attack(cases: list[dict[str, Any]], level: str) -> dict[str, list[str]]:
    host = AttackedHost(HOST)
    failures: dict[str, list[str]] = {}
    async with Sandbox(SandboxPolicy(isolation=level, packages=("numpy", "sympy"), concurrency=4)) as box:
        await box.run("1")
        quick = [case for case in cases if "timeout" not in case and "stdout" not in case]
        harmless = [case for case in cases if "stdout" in case]
        slow = [case for case in cases if "timeout" in case]
        for case in quick:
            failures[case["id"]] = await judge(box, case) + host.damage()
            if (await box.run("6 * 7")).result != "42":
                failures[case["id"]].append("the next call was wrong")
        for group in (harmless, slow):
            for case, wrong in zip(group, await asyncio.gather(*(judge(box, case) for case in group)), strict=True):
                failures[case["id"]] = wrong
        failures["all slow cases"] = host.damage()
        if (await box.run("6 * 7")).result != "42":
            failures["all slow cases"].append("the next call was wrong")
        for _ in range(100):  # what has ended is noticed a little later
            stats = await box.stats()
            ready = sum(stats["idle"].values()) + stats["sessions"]
            if not (stats["running"] or stats["queued"] or stats["children"] != ready):
                break
            await asyncio.sleep(0.1)
        else:
            failures["processes"] = [f"calls or processes are left: {stats}"]
    failures["afterwards"] = [f"left: {processes('boot.py')}"] if processes("boot.py") else []
    failures["files afterwards"] = list(map(str, TEMPORARY.iterdir()))
    failures["zombies"] = [f"{zombies()}"] if zombies() else []
    return {name: wrong for name, wrong in failures.items() if wrong}


_FOR_THE_TOOL_LAYER = {"forged_tags", "surrogates_nul"}
"""Of the collection: what a model sees of the text is not the sandbox's to say (see `tool_use.observation`)."""


def load(path: Path) -> list[dict[str, Any]]:
    """Cases of a file. Of harmless ones, everything is expected that they do not mention to be nothing.

    Also those of a developers' collection beside the checkout, whose expectations are under `check`.
    """
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    cases = [case for case in cases if case["id"] not in _FOR_THE_TOOL_LAYER]
    for case in cases:
        check = case.get("check", {})
        names = {"out_any": "any", "out_not": "never", "timeout": "timeout", "pre": "before", "then": "then"}
        case |= {ours: check[theirs] for theirs, ours in names.items() if theirs in check}
        if "then_any" in check:
            case["then_shows"] = check["then_any"][0]
        case |= {"session": check["session"]} if "session" in check else {}
    if path.name == "jail_harmless.jsonl":
        cases = [{"status": ["ok"], "stdout": "", "result": None} | case for case in cases]
        for case in cases:
            case["status"] = [case["status"]] if isinstance(case["status"], str) else case["status"]
            case["shows"] = [case["error"]] if "error" in case else []
    return cases if MACHINE == "x86_64" else [case for case in cases if case.get("prelude") != "call"]


def main() -> None:
    level, uid = sys.argv[1], int(sys.argv[2])
    cases = [case for path in sys.argv[3:] for case in load(Path(path))]
    another = uid != os.getuid()
    enter_container(uid)
    if another:
        become(uid)
    try:
        failures = asyncio.run(attack(cases, level))
    except SandboxUnavailable as error:
        print(json.dumps({"unavailable": str(error)}))
        return
    print(json.dumps({"cases": len(cases), "failures": failures}))


if __name__ == "__main__":
    main()
