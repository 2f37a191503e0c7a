"""Random input at every border of the sandbox: nothing raises, hangs or leaks. `make fuzz-sandbox` does it for long.

python tests/fuzz_sandbox.py --seconds 600 --seed 1

Borders: messages on the wire, a child's answer and output, its own bytes on the socket, programs, bodies and bytes of
HTTP requests, and replies of a server. A seed makes the same examples again; what failed is kept in `.hypothesis` and
tried first the next time. `FOUND` lists the seeds that found a fault, which `test_sandbox_fuzz.py` tries each time.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime_retool.sandbox import Result, Sandbox, SandboxPolicy, Status, wire
from slime_retool.sandbox.broker import exchange, output, records, verdict
from slime_retool.sandbox.child import executor
from slime_retool.sandbox.host import fusion_client, server
from slime_retool.sandbox.host.sandbox import _result, check_arguments, refusal

T = TypeVar("T")

FOUND: dict[str, tuple[int, ...]] = {"programs": (1, 80), "bytes over HTTP": (57, 400)}
"""Seeds by property."""
SECONDS_TO_ANSWER = 300.0
"""For one example with a real process, on a loaded machine: a hang and nothing else takes longer."""
LIMITS = {"max_output_bytes": 99, "memory_mb": 7, "max_disk_mb": 1, "max_inodes": 9}

# Text as programs, people and attackers write it; any JSON, and JSON near what is expected.
texts = st.text(max_size=60) | st.sampled_from(["", "\0", "\ud800", "é" * 50, "x" * 5000, "n", "YQ==", "a", "/etc/x"])
numbers = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.sampled_from([0, 1, -1, 255, 256, 1 << 62, 1 << 64, 10**400, 1e308])
)
scalars = st.none() | numbers | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)


ODD = values | numbers | st.sampled_from(
    [float("nan"), float("inf"), 10**400, -1, [-1], [1, 1, 1], [10**30], {"a": "a"}, ["a", "b"], [None] * 9, "y" * 9000]
)


def near(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with these fields, of the right kind but for one or two of them, which are odd or missing."""

    def change(right: dict[str, Any], odd: dict[str, Any], missing: list[str]) -> dict[str, Any]:
        return {name: value for name, value in (right | odd).items() if name not in missing}

    names = st.sampled_from(list(fields))
    right, none = st.fixed_dictionaries(fields), st.just({})
    odd = none | none | st.dictionaries(names, ODD, min_size=1, max_size=2) | st.dictionaries(texts, values, max_size=1)
    missing = st.just([]) | st.just([]) | st.just([]) | st.lists(names, max_size=1)
    return st.builds(change, right, odd, missing)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def mutated(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """As it is, cut, or with a few bytes changed."""

    def change(original: bytes, places: list[tuple[int, int]], end: int) -> bytes:
        changed = bytearray(original)
        for place, byte in places if changed else ():
            changed[place % len(changed)] = byte
        return bytes(changed[: end or None])

    place = st.tuples(st.integers(0, 10_000), st.integers(0, 255))
    return data | st.builds(change, data, st.lists(place, max_size=3), st.integers(0, 200))


ANSWERS = near(
    nonce=st.just("n"),
    error=st.none() | texts,
    limit=st.none() | st.sampled_from(["memory", "disk", "x"]),
    result=st.none() | texts,
    exit_code=st.none() | st.integers(-1, 256),
    max_rss=st.integers(0, 1 << 40),
    written=st.lists(st.none() | st.integers(0, 1 << 40), min_size=2, max_size=2),
    files=st.lists(st.none() | st.integers(0, 30), max_size=2),
)


def with_its_files(answer: dict[str, Any], more: int) -> tuple[bytes, bytes]:
    """An answer's body, and as many bytes after it as it says, but for a few."""
    sizes = answer.get("files")
    known = [size for size in sizes if type(size) is int and 0 < size < 99] if isinstance(sizes, list) else []
    return encoded(answer), b"f" * max(0, sum(known) + more)


WITH_FILES = st.builds(with_its_files, ANSWERS, st.sampled_from([0, 0, 0, 0, 1, -1]))
DEEP = st.sampled_from([b"[" * 20_000, b'{"nonce": ' * 4000, b'{"nonce": "n", "max_rss": 1' + b"0" * 500 + b"}"])


@dataclass
class Border:
    """A property and the examples it holds for."""

    strategy: st.SearchStrategy[Any]
    holds: Callable[[Any], None]
    examples: int = 200


# Messages on the wire.


def messages_are_the_same_whatever_the_pieces(example: tuple[list[dict[str, Any]], list[int]]) -> None:
    messages, sizes = example
    stream, frames, found = b"".join(map(wire.pack, messages)), wire.Frames(), []
    while stream:
        size = sizes[len(stream) % len(sizes)]
        frames.feed(stream[:size])
        stream = stream[size:]
        while (message := frames.take()) is not None:
            found.append(message)
    assert encoded(found) == encoded(messages)


# A child's answer.


def answer_in_pieces(data: bytes, size: int) -> dict[str, Any] | None:
    job = records.Job(1, {"fetch": ["a", "b"], "cpu": 1.0, "timeout": 1.0}, None, 0.0, nonce="n")
    received = bytearray()
    for start in range(0, len(data), size):
        received += data[start : start + size]
        answer = exchange.answer(received, job, LIMITS)
        if answer is not None:
            return answer
    return None


def an_answer_is_checked_or_a_violation(example: tuple[bytes, bytes, int]) -> None:
    """The same whether its bytes come together or not; then it becomes a result of the caller's."""
    body, after, size = example
    data = wire.LENGTH.pack(len(body)) + body + after
    outcomes = []
    for length in (len(data), size):
        try:
            outcomes.append(answer_in_pieces(data, length))
        except exchange.ProtocolViolation:
            outcomes.append({})
    answer, in_pieces = outcomes
    # In pieces it may be complete before what makes it wrong has come.
    assert encoded(answer) == encoded(in_pieces) or answer == {}
    if not answer:
        return
    given = sum(len(base64.b64decode(data)) for data in answer["files"].values())
    assert given == len(after) and answer["max_rss"] < 1 << 62
    child: Any = SimpleNamespace(out=os.memfd_create("out"), err=os.memfd_create("err"), cpu_seconds=lambda: 0.0)
    try:
        job = records.Job(1, {"fetch": ["a", "b"]}, None, 0.0, nonce="n")
        result = verdict.completed(child, job, answer, LIMITS)
    finally:
        os.close(child.out)
        os.close(child.err)
    frames = wire.Frames()
    frames.feed(wire.pack(result | {"id": 1}))
    message = frames.take()
    assert message is not None
    checked = _result(message)
    assert set(checked.files) <= {"a", "b"}
    encoded_text(checked)


def encoded_text(result: Result) -> bytes:
    return "".join(text or "" for text in (result.stdout, result.stderr, result.error, result.result)).encode()


# What it leaves as output.


def output_is_bounded_text(example: tuple[int, bool, list[tuple[str, Any]]]) -> None:
    limit, told, operations = example
    fd = os.memfd_create("out")
    try:
        writer = executor._RingWriter(fd, limit)
        for operation, argument in operations:
            with contextlib.suppress(OSError):
                if operation == "print":
                    writer.write(argument)
                elif operation == "write":
                    os.write(fd, argument)
                else:
                    {"cut": os.ftruncate, "seek": lambda fd, to: os.lseek(fd, to, 0)}[operation](fd, argument)
        text, _ = output.take(fd, limit, writer.total if told else None)
        assert len(text.encode()) <= 3 * limit + 100  # of a byte that is none of UTF-8, three are made
        assert os.fstat(fd).st_size == 0 or not text
    finally:
        os.close(fd)


pieces = st.binary(max_size=90) | st.text(max_size=20).map(lambda text: text.encode("utf-8", "replace"))
OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["print", "print", "print", "write"]), pieces),
    st.tuples(st.sampled_from(["cut", "seek"]), st.integers(0, 300)),
)


# Requests to the server and replies to its client.

BODIES = near(
    code=texts,
    language=st.none() | st.sampled_from(["python", "cpp"]),
    run_timeout=st.none() | st.floats(0.1, 400),
    compile_timeout=st.none() | st.integers(0, 10),
    memory_limit_MB=st.none() | st.integers(-1, 600),
    stdin=st.none() | texts,
    files=st.none() | st.dictionaries(texts, st.none() | texts, max_size=3),
    fetch_files=st.none() | st.lists(texts, max_size=3),
)
ODD_BODIES = st.sampled_from(
    [
        b"",
        b"[" * 100_000,
        b'{"code": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"code": "1", "run_timeout": 1' + b"0" * 5000 + b"}",
        b'{"code": "1", "memory_limit_MB": -1' + b"0" * 5000 + b"}",
        b'{"code": "1", "run_timeout": NaN}',
        b'{"code": "1", "stdin": "\\ud800"}',
        b'{"code": "1"}' * 2,
        b'\xef\xbb\xbf{"code": "1"}',
        b'{"code": "\xed\xa0\x80"}',
    ]
)
BODY_BYTES = mutated(BODIES.map(encoded)) | ODD_BODIES | st.binary(max_size=200)
SERVER = server._Server(SandboxPolicy(packages=(), max_inodes=9), server.MAX_TIMEOUT, server.Access())


def a_body_is_arguments_or_a_bad_request(body: bytes) -> None:
    try:
        arguments = SERVER._arguments(body)
    except server.BadRequest as error:
        assert len(str(error).encode()) < 2000
        return
    check = {name: arguments[name] for name in ("code", "stdin", "files", "fetch_files")}
    check_arguments(**check, seed=None, policy=SERVER._policy)
    refusal(arguments["code"], arguments["stdin"], arguments["files"], SERVER._policy)
    assert 0 < arguments["timeout"] <= server.MAX_TIMEOUT
    assert arguments["memory_mb"] is None or 0 < arguments["memory_mb"] <= SERVER._policy.memory_mb


ODD_REPORTS = st.sampled_from(["", "{", "[" * 100_000, '{"error": 1' + "0" * 5000 + "}"])
REPORTS = (ANSWERS | values).map(json.dumps) | ODD_REPORTS
RUNS = near(
    status=st.sampled_from(["Finished", "Error", "TimeLimitExceeded"]),
    execution_time=st.none() | st.floats(),
    return_code=st.none() | st.integers(-80, 300),
    stdout=st.none() | texts,
    stderr=st.none() | texts | st.builds("{}n0nce{}".format, texts, REPORTS),
)
REPLIES = near(
    status=st.sampled_from(["Success", "Failed", "SandboxError"]),
    message=texts,
    run_result=RUNS,
    files=st.none() | st.dictionaries(st.sampled_from(["a", "b", "c"]), texts, max_size=2),
)


def a_reply_is_a_result_or_an_outage(reply: Any) -> None:
    try:
        result = fusion_client.from_response(reply, "n0nce", 0.0, 1.0, ("a",))
    except fusion_client._FAULTS:
        return
    assert set(result.files) <= {"a"} and isinstance(result.status, Status)
    encoded_text(result)


# With real processes.


class Running:
    """A sandbox and a server over it, in an event loop of their own."""

    def __init__(self, level: str) -> None:
        self.policy = SandboxPolicy(level, packages=(), concurrency=4, max_output_bytes=4000, memory_mb=128)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.box = Sandbox(self.policy)
        self.runner = web.AppRunner(server.make_app(self.policy, 5.0), handler_cancellation=True)
        self.errors = Errors()
        self.port = 0
        self.sessions = 0

    def __enter__(self) -> Running:
        self.thread.start()
        logging.getLogger("aiohttp.server").addHandler(self.errors)
        self.do(self.box.__aenter__())
        self.do(self.runner.setup())
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        self.do(site.start())
        self.port = self.runner.addresses[0][1]
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self.runner.cleanup())
        self.do(self.box.__aexit__())
        logging.getLogger("aiohttp.server").removeHandler(self.errors)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS_TO_ANSWER)

    def borders(self) -> dict[str, Border]:
        programs = st.lists(st.sampled_from(FRAGMENTS) | texts, max_size=6)
        few_frames, few_programs = (st.lists(each, min_size=1, max_size=3) for each in (FRAMES, programs))
        return {
            "bytes of a child": Border(
                st.tuples(few_frames, st.lists(texts, max_size=3)), self.forged_bytes_hurt_nobody_else, 60
            ),
            "programs": Border(few_programs, self.a_program_has_a_result, 60),
            "bytes over HTTP": Border(HTTP_REQUESTS, self.http_bytes_get_an_answer_or_an_end, 40),
        }

    def forged_bytes_hurt_nobody_else(self, example: tuple[list[bytes], list[str]]) -> None:
        frames, names = example

        async def use() -> list[Result]:
            codes = [FORGE.format(frame=base64.b64encode(frame).decode()) for frame in frames]
            calls = [self.box.run(code, fetch_files=("a", "b"), timeout=20) for code in codes]
            calls.append(self.box.run("6 * 7", fetch_files=tuple(names), timeout=SECONDS_TO_ANSWER))
            return list(await asyncio.gather(*calls))

        *forged, other = self.do(use())
        assert (other.result, other.status) == ("42", Status.OK), other
        assert all(result.status is not Status.UNAVAILABLE for result in forged), forged

    def a_program_has_a_result(self, programs: list[list[str]]) -> None:
        async def use() -> list[Result]:
            self.sessions += 1
            async with self.box.session(str(self.sessions)) as session:
                codes = ["\n".join(lines) for lines in programs]
                calls = [self.box.run(code, timeout=2, stdin="1\n2") for code in codes]
                cells = [session.run(code, timeout=2) for code in codes]
                return list(await asyncio.gather(*calls, *cells))

        for result in self.do(use()):
            assert result.status is not Status.UNAVAILABLE, result
            assert len(encoded_text(result)) < 60_000 and "setting up" not in f"{result.error}{result.stderr}", result

    def http_bytes_get_an_answer_or_an_end(self, request: bytes) -> None:
        async def use() -> tuple[bytes, bytes]:
            return await self.exchange(request), await self.exchange(PING)

        answer, pong = self.do(use())
        assert b"200 OK" in pong and pong.endswith(b'"pong"'), pong
        assert answer == b"" or (answer.startswith(b"HTTP/1.") and not answer.split()[1].startswith(b"5")), answer
        assert self.errors.seen == [], self.errors.seen

    async def exchange(self, request: bytes) -> bytes:
        """What came before the end, or before nothing came for a while: half a request waits for its other half."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        answer = b""
        try:
            writer.write(request)
            with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
                while data := await asyncio.wait_for(reader.read(1 << 16), 60 if request is PING else 0.3):
                    answer += data
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        return answer

    def leaks(self) -> list[str]:
        """Calls and processes that are left, once all has been answered."""
        for _ in range(200):
            stats = self.do(self.box.stats())
            ready = sum(stats["idle"].values())
            if not (stats["running"] or stats["queued"] or stats["sessions"] or stats["children"] != ready):
                return []
            time.sleep(0.1)
        return [f"calls or processes are left: {stats}"]


@dataclass
class Errors(logging.Handler):
    """What the server's log says of requests that its code did not handle."""

    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(logging.ERROR)

    def emit(self, record: logging.LogRecord) -> None:
        kind = record.exc_info[0] if record.exc_info else None
        # Of bytes that are no HTTP aiohttp says so in its log, also after they were refused.
        if kind is None or not issubclass(kind, (HttpProcessingError, web.RequestPayloadError)):
            self.seen.append(f"{record.getMessage()} {record.exc_info}")

    __hash__ = object.__hash__


FORGE = """
import base64, os, struct, sys
f, request = sys._getframe(), None
while request is None:
    f = f.f_back
    request = f.f_locals.get('request')
data = base64.b64decode('{frame}').replace(b'"n"', b'"' + request['nonce'].encode() + b'"')
try:
    os.write(3, struct.pack('<I', len(data)) + data)
    os.write(3, data[:20])
except OSError:
    pass
"""
FRAGMENTS = [
    "x = 1",
    "x",
    "1 / 0",
    "def f(n):\n    return f(n + 1)\nf(0)",
    "raise SystemExit('bye')",
    "import sys\nsys.stdout = None",
    "import sys\nsys.stdout.close()",
    "import os\nos.close(1)",
    "import os\nos.closerange(0, 3)",
    "import os\nos.close(3)",
    "import os\nos.ftruncate(1, 1 << 20)",
    "print('x' * 9000)",
    "print('y', end='')",
    "print(input())",
    "import builtins\nbuiltins.print = builtins.len = builtins.repr = None",
    "import sys\nsys.settrace(lambda *_: 1 / 0)",
    "import sys\nsys.setrecursionlimit(5)",
    "import sys\nsys.modules.clear()",
    "import gc\ngc.disable()",
    "k = bytearray(1 << 30)",
    "import threading\nthreading.Thread(target=print, args=('t',)).start()",
    "import atexit\natexit.register(lambda: 1 / 0)",
    "class A:\n    def __repr__(self): raise KeyboardInterrupt\nA()",
    "class E(Exception):\n    def __str__(self): return 'e' * 10**6\nraise E",
    "import ctypes\nctypes.string_at(0)",
    "import os\nos._exit(5)",
    "import signal, os\nsignal.alarm(1)",
    "globals().clear()",
    "__builtins__ = None",
    "+".join(["1"] * 1200),
    "(" * 90,
]
PING = b"GET /v1/ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
HEADERS = st.sampled_from(
    [
        b"Content-Type: application/json",
        b"Content-Type: application/json; charset=utf-16",
        b"Content-Type: application/json; charset=\xff",
        b"Content-Type: \x00",
        b"Content-Type: text/html",
        b"Content-Encoding: gzip",
        b"Content-Encoding: deflate",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"Expect: \xe9",
        b"Host: evil.example",
        b"Host: [::1]:80",
        b"Host: [",
        b"Origin: null",
        b"Authorization: Bearer \xff",
        b"Upgrade: websocket\r\nConnection: upgrade",
        b"X: " + b"y" * 9000,
    ]
)


def http_request(method: str, path: str, headers: list[bytes], body: bytes, length: int | None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: localhost", b"Connection: close", *headers]
    if length is not None:
        lines.append(b"Content-Length: %d" % (len(body) + length))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


HTTP_REQUESTS = st.one_of(
    st.builds(
        http_request,
        st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "OPTIONS", "HEAD", "X"]),
        st.sampled_from(["/run_code", "/run_code", "/run_code", "/v1/ping", "/", "//", "/%00", "*", "/run_code?a=%ff"]),
        st.lists(HEADERS, max_size=3) | st.just([b"Content-Type: application/json"]),
        BODY_BYTES,
        st.sampled_from([0, 0, 0, None, -1, 5]),
    ),
    st.binary(max_size=300),
)

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=5)
FRAMES = mutated(ANSWERS.map(encoded)) | DEEP | st.binary(max_size=60)
BORDERS = {
    "wire": Border(
        st.tuples(st.lists(st.dictionaries(texts, scalars, max_size=3), max_size=4), SIZES),
        messages_are_the_same_whatever_the_pieces,
        100,
    ),
    "answers": Border(
        st.builds(lambda pair, size: (*pair, size), WITH_FILES | st.tuples(FRAMES, st.just(b"")), st.integers(1, 80)),
        an_answer_is_checked_or_a_violation,
        400,
    ),
    "output": Border(
        st.tuples(st.integers(2, 120), st.booleans(), st.lists(OPERATIONS, max_size=8)), output_is_bounded_text
    ),
    "bodies": Border(BODY_BYTES, a_body_is_arguments_or_a_bad_request),
    "replies": Border(REPLIES | values, a_reply_is_a_result_or_an_outage),
}


def try_border(border: Border, number: int, examples: int, database: Path | None) -> None:
    """Raises what an example raised, which hypothesis has made as small as it can."""
    chosen = settings(
        max_examples=examples,
        deadline=None,
        database=None if database is None else DirectoryBasedExampleDatabase(database),
        suppress_health_check=list(HealthCheck),
    )
    seed(number)(chosen(given(border.strategy)(border.holds)))()


def rounds(seconds: float, first: int, level: str, database: Path) -> Iterator[str]:
    """One line a round, until the time is over."""
    end, count = time.monotonic() + seconds, 0
    with Running(level) as running:
        descriptors = len(os.listdir("/proc/self/fd"))
        while time.monotonic() < end:
            number = first + count
            for name, border in (BORDERS | running.borders()).items():
                try:
                    try_border(border, number, border.examples, database)
                except Exception as error:
                    raise SystemExit(f"{name}, seed {number}: {type(error).__name__}: {error}") from error
            leaks = running.leaks()
            more = len(os.listdir("/proc/self/fd")) - descriptors
            if leaks or more > 10:
                raise SystemExit(f"seed {number}: {leaks}, {more} descriptors more than before")
            count += 1
            yield f"seed {number}: nothing found; {max(0, end - time.monotonic()):.0f} s left"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first round (default: %(default)s)")
    parser.add_argument("--isolation", default="namespaces", help="level of the real processes (default: %(default)s)")
    args = parser.parse_args()
    for line in rounds(args.seconds, args.seed, args.isolation, Path(".hypothesis") / "sandbox"):
        print(line, flush=True)


if __name__ == "__main__":
    main()
