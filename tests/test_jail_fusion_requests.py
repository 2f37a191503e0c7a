"""What SandboxFusion answers to forty requests, and that `slime-retool sandbox serve` answers the same.

SandboxFusion's own `run_python` (bytedance/SandboxFusion, sandbox/runners) writes the code into a file of a fresh
folder, runs `python FILE` there from a shell with standard input closed after `stdin`, and reads what was piped: so is
the second opinion made here that the table is held to. Where the server is stricter on purpose: docs/sandbox.md.
"""

from __future__ import annotations

import asyncio
import base64
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from test_jail import LEVELS
from test_jail_server import POLICY, post, serving

from slime_retool.sandbox.host.server import make_app


@dataclass
class Request:
    """And its answer: status of the request and of the run, return code, stdout, fetched files, part of stderr."""

    code: str
    stdout: str = ""
    return_code: int | None = 0
    stderr: str = ""
    stdin: str | None = None
    files: dict[str, bytes | None] = field(default_factory=dict)
    fetched: dict[str, bytes | None] = field(default_factory=dict)
    seconds: float = 60.0
    memory: int = -1

    @property
    def status(self) -> tuple[str, str]:
        if self.return_code is None:
            return "Failed", "TimeLimitExceeded"
        return "Success" if self.return_code == 0 else "Failed", "Finished"

    @property
    def body(self) -> dict[str, object]:
        files = {name: None if data is None else base64.b64encode(data).decode() for name, data in self.files.items()}
        return {
            "code": self.code,
            "language": "python",
            "compile_timeout": 10,
            "run_timeout": self.seconds,
            "memory_limit_MB": self.memory,
            "stdin": self.stdin,
            "files": files,
            "fetch_files": list(self.fetched),
        }


BINARY = bytes(range(256))
REQUESTS = {
    "a print": Request("print(6 * 7)", "42\n"),
    "a last expression is not echoed": Request("x = 3\nx ** 2"),
    "nor its value asked for": Request("class A:\n    def __repr__(self): 1 / 0\nA()"),
    "a write without a newline": Request("import sys\nsys.stdout.write('x')", "x"),
    "unicode": Request("print('∑ 中文 😀')", "∑ 中文 😀\n"),
    "50,000 characters": Request("print('x' * 50_000)", "x" * 50_000 + "\n"),
    "warnings go to stderr": Request("import warnings\nwarnings.warn('odd')\nprint(1)", "1\n", 0, "odd"),
    "nothing": Request(""),
    "main": Request("print(__name__)", "__main__\n"),
    "arguments": Request("import sys\nprint(len(sys.argv))", "1\n"),
    "an exception": Request("print('x')\n1 / 0", "x\n", 1, "ZeroDivisionError: division by zero"),
    "a syntax error": Request("def f(:", "", 1, "SyntaxError"),
    "endless recursion": Request("def f(): f()\nf()", "", 1, "RecursionError"),
    "an assertion": Request("assert 1 == 2, 'not equal'", "", 1, "AssertionError: not equal"),
    "a module that is not there": Request("import no_such_module", "", 1, "ModuleNotFoundError"),
    "an exception of a thread": Request(
        "import threading\nthreading.Thread(target=lambda: 1 / 0).start()", "", 0, "ZeroDivisionError"
    ),
    "threads are waited for": Request(
        "import threading\nsaid = threading.Event()\n"
        "threading.Thread(target=lambda: (said.wait(), print('late'))).start()\nprint('early')\nsaid.set()",
        "early\nlate\n",
    ),
    "exit functions": Request("import atexit\natexit.register(print, 'bye')\nprint('hi')", "hi\nbye\n"),
    "exit code 3": Request("import sys\nprint('x')\nsys.exit(3)", "x\n", 3),
    "exit code 0": Request("import sys\nsys.exit(0)"),
    "exit without a code": Request("exit()"),
    "quit": Request("quit(4)", "", 4),
    "exit with a text": Request("import sys\nsys.exit('bye')", "", 1, "bye\n"),
    "exit code 256": Request("import sys\nsys.exit(256)"),
    "exit code -1": Request("import sys\nsys.exit(-1)", "", 255),
    "a raised exit": Request("raise SystemExit(True)", "", 1),
    "_exit": Request("import os\nprint('x', flush=True)\nos._exit(7)", "x\n", 7),
    "_exit with 0": Request("import os\nos._exit(0)"),
    "a crash": Request("import ctypes\nprint('x', flush=True)\nctypes.string_at(0)", "x\n", -11),
    "an endless loop": Request("while True: pass", "", None, seconds=1.0),
    "a sleep after output": Request(
        "import time\nprint('early', flush=True)\ntime.sleep(600)", "early\n", None, seconds=20.0
    ),
    "too much memory": Request("x = bytearray(1 << 30)", "", 1, "MemoryError", memory=256),
    "memory within the limit": Request("x = bytearray(100 << 20)\nprint(len(x))", "104857600\n", memory=400),
    "no input": Request("import sys\nprint(repr(sys.stdin.read()))", "''\n"),
    "input that is not there": Request("input()", "", 1, "EOFError: EOF when reading a line"),
    "input": Request("print(int(input()) + int(input()))", "5\n", stdin="2\n3\n"),
    "unicode input": Request("import sys\nprint(sys.stdin.read()[::-1])", "é😀\n", stdin="😀é"),
    "input by lines": Request("import sys\nprint([line for line in sys.stdin])", "['a\\n', 'b']\n", stdin="a\nb"),
    "a file": Request("print(open('a').read())", "text\n", files={"a": b"text"}),
    "a file in folders": Request("print(open('a/b/c.txt').read())", "text\n", files={"a/b/c.txt": b"text"}),
    "a module": Request("import helper\nprint(helper.v)", "4\n", files={"helper.py": b"v = 4"}),
    "a file without content": Request("import os\nprint(os.path.exists('a'))", "False\n", files={"a": None}),
    "a file comes back": Request("open('b', 'w').write('out')", fetched={"b": b"out", "missing": None}),
    "bytes come back": Request(
        "open('b', 'wb').write(open('a', 'rb').read()[::-1])",
        files={"a": BINARY},
        fetched={"b": BINARY[::-1], "a": BINARY},
    ),
    "a file in a folder comes back": Request(
        "import os\nos.makedirs('d/e')\nopen('d/e/f', 'w').write('x')", fetched={"d/e/f": b"x", "d": None}
    ),
    "a file comes back after an exception": Request(
        "open('b', 'w').write('out')\n1 / 0", "", 1, "ZeroDivisionError", fetched={"b": b"out"}
    ),
}


def by_python_itself(request: Request, folder: Path) -> tuple[object, ...]:
    for name, data in request.files.items():
        if data is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    (folder / "tmp_code.py").write_text(request.code)

    def limit_memory() -> None:
        if request.memory > 0:
            resource.setrlimit(resource.RLIMIT_AS, (request.memory << 20,) * 2)

    process = subprocess.Popen(
        ["/bin/bash", "-c", f"{sys.executable} {folder}/tmp_code.py"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, preexec_fn=limit_memory,
    )  # fmt: skip
    try:
        out, _ = process.communicate((request.stdin or "").encode(), timeout=request.seconds)
        status, code = "Finished", process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        status, code = "TimeLimitExceeded", None
    files = {name: (folder / name).read_bytes() for name in request.fetched if (folder / name).is_file()}
    return ("Success" if code == 0 else "Failed", status), code, out.decode(), files


def expected(request: Request) -> tuple[object, ...]:
    files = {name: data for name, data in request.fetched.items() if data is not None}
    return request.status, request.return_code, request.stdout, files


@pytest.mark.parametrize("name", REQUESTS)
def test_the_table_holds_what_python_itself_does(name: str, tmp_path: Path) -> None:
    assert by_python_itself(REQUESTS[name], tmp_path) == expected(REQUESTS[name])


@pytest.mark.parametrize("level", LEVELS)
async def test_the_server_answers_as_sandbox_fusion(level: str) -> None:
    assert len(REQUESTS) >= 40
    async with serving(make_app(POLICY.__class__(level, packages=("numpy",), concurrency=4))) as url:
        answers = await asyncio.gather(*(post(url, **request.body) for request in REQUESTS.values()))
    for (name, request), (http_status, answer) in zip(REQUESTS.items(), answers, strict=True):
        run = answer["run_result"]
        files = {path: base64.b64decode(data) for path, data in answer["files"].items()}
        seen = (answer["status"], run["status"]), run["return_code"], run["stdout"], files
        assert (name, http_status, *seen) == (name, 200, *expected(request)), run
        assert request.stderr in run["stderr"] and (answer["compile_result"], answer["message"]) == (None, "")
        if not request.stderr and request.return_code is not None and request.return_code >= 0:
            assert (name, run["stderr"]) == (name, "")
