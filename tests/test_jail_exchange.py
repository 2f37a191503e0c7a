"""What a child answers, what it leaves as output and what a caller asks for: checked, bounded and never a crash."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from typing import Any

import pytest
from test_jail import LEVELS, in_box

from slime_retool.errors import ConfigError
from slime_retool.sandbox import Result, Sandbox, SandboxPolicy, Status, wire
from slime_retool.sandbox.broker import exchange, output, records
from slime_retool.sandbox.child import executor, semantics
from slime_retool.sandbox.host.sandbox import _result

LIMITS = {"max_output_bytes": 99, "memory_mb": 7}
ANSWER = {"nonce": "n", "error": None, "limit": None, "result": None, "exit_code": None}
ANSWER |= {"max_rss": 4096, "written": [3, 0], "files": []}


def a_job(fetch: list[str]) -> records.Job:
    return records.Job(1, {"fetch": fetch}, None, 0.0, nonce="n")


def accepted(message: object, fetch: tuple[str, ...] = (), after: bytes = b"") -> dict[str, Any] | None:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return exchange.answer(bytearray(wire.LENGTH.pack(len(body)) + body + after), a_job([*fetch]), LIMITS)


def test_an_answer_is_complete_with_the_last_byte_of_its_files() -> None:
    job = a_job(["a", "missing", "b"])
    data = wire.pack(ANSWER | {"files": [2, None, 3]}) + b"12345"
    for end in range(len(data)):
        assert exchange.answer(bytearray(data[:end]), job, LIMITS) is None
    files = {"a": base64.b64encode(b"12").decode(), "b": base64.b64encode(b"345").decode()}
    expected = {key: value for key, value in ANSWER.items() if key != "nonce"} | {"files": files}
    assert exchange.answer(bytearray(data), job, LIMITS) == expected


WRONG = {
    "no object": [],
    "a number": 5,
    "not JSON": b"{",
    "nothing": b"",
    "more after it": json.dumps(ANSWER).encode() + b" 1",
    "not UTF-8": b"\xff\xfe",
    "deep": b"[" * 900,
    "another call's": ANSWER | {"nonce": "m"},
    "a nonce that is no text": ANSWER | {"nonce": [[]]},
    "a nonce beyond ASCII": ANSWER | {"nonce": "é"},
    "no memory": {key: value for key, value in ANSWER.items() if key != "max_rss"},
    "memory of 400 digits": ANSWER | {"max_rss": 10**400},
    "memory that is no number": ANSWER | {"max_rss": float("nan")},
    "endless memory": ANSWER | {"max_rss": float("inf")},
    "negative memory": ANSWER | {"max_rss": -1},
    "a text as memory": ANSWER | {"max_rss": "1"},
    "a limit without an error": ANSWER | {"limit": "memory"},
    "a failed exit without an error": ANSWER | {"exit_code": 7},
    "a long result": ANSWER | {"result": "x" * (99 + exchange._NOTE + 1)},
    "a long error": ANSWER | {"error": "x" * 5000},
    "a list as error": ANSWER | {"error": []},
    "huge memory": ANSWER | {"max_rss": 1 << 70},
    "written by one stream": ANSWER | {"written": [1]},
    "true bytes": ANSWER | {"written": [True, 0]},
    "a signal as exit code": ANSWER | {"exit_code": -9},
    "an exit code of no process": ANSWER | {"exit_code": 256},
    "files by name": ANSWER | {"files": {"f": "YQ=="}},
    "more files than asked for": ANSWER | {"files": [1, 1]},
    "a negative size": ANSWER | {"files": [-1]},
    "a size that is no number": ANSWER | {"files": ["1"]},
    "more bytes than may be fetched": ANSWER | {"files": [executor.MAX_FETCHED + 1]},
}


@pytest.mark.parametrize("message", WRONG.values(), ids=WRONG.keys())
def test_an_answer_that_the_executor_would_not_send_is_a_violation(message: object) -> None:
    """And no other error, which would end the broker with all calls."""
    assert accepted(ANSWER, ("f",)) is not None
    with pytest.raises(exchange.ProtocolViolation):
        accepted(message, ("f",))


def test_halves_of_surrogate_pairs_count_as_the_characters_that_callers_get() -> None:
    """A program may have a short text of them, and a long one is cut, as any other."""
    assert accepted(ANSWER | {"result": "\ud800" * 9})["result"] == r"\ud800" * 9
    for field, most in (("result", 99), ("error", semantics.MAX_ERROR)):
        text = accepted(ANSWER | {field: "\ud800" * most})[field]
        assert text.startswith(r"\ud800" * (most // 6)) and len(text) <= most + exchange._NOTE


def test_a_frame_longer_than_any_answer_is_a_violation_before_it_has_arrived() -> None:
    with pytest.raises(exchange.ProtocolViolation):
        exchange.answer(bytearray(wire.LENGTH.pack(60 << 20)), a_job(["f"]), LIMITS)
    with pytest.raises(exchange.ProtocolViolation):
        accepted(ANSWER, (), b"more")


def test_the_largest_answer_that_the_executor_makes_is_accepted() -> None:
    result = "\U0001f600" * (LIMITS["max_output_bytes"] // 2)
    result = f"{result} ... [{10**9} characters omitted] ... {result}"
    error = "\U0001f600" * 4000 + "\n(the memory limit is 4294967295 MB)"
    assert accepted(ANSWER | {"result": result, "error": error})["result"] == result


FORGE = """
import json, os, struct, sys
f, request = sys._getframe(), None
while request is None:
    f = f.f_back
    request = f.f_locals.get('request')
def forge(after=b'', **fields):
    message = dict(nonce=request['nonce'], error=None, limit=None, result='mine', exit_code=None, max_rss=0,
                   written=[0, 0], files=[])
    message.update(fields)
    data = json.dumps(message).encode()
    os.write(3, struct.pack('<I', len(data)) + data + after)
"""
FORGED = {
    "names": "forge(files={'../../x': 'YQ=='})",
    "bad base64": "forge(files={'asked': 'a'})",
    "more files": "forge(files=[1, 1], after=b'xx')",
    "digits": "forge(max_rss=10**400)",
    "a limit and no error": "forge(limit='memory')",
    "a huge text": "forge(error='x' * 100_000)",
    "a huge frame": "os.write(3, struct.pack('<I', 60 << 20))",
    "half an answer and its end": "os.write(3, b'\\x05'); os._exit(0)",
}


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_child_forges_hurts_only_its_own_call(level: str) -> None:
    async def use(box: Sandbox) -> tuple[list[Result], Result]:
        codes = [f"{FORGE}{end}\nwhile True: pass" for end in FORGED.values()]
        calls = (box.run(code, fetch_files=("asked",), timeout=60) for code in codes)
        results = list(await asyncio.gather(*calls))
        return results, await box.run("6 * 7")

    results, after = in_box(level, use)
    for name, result in zip(FORGED, results, strict=True):
        expected = Status.OK if name == "half an answer and its end" else Status.KILLED
        assert (name, result.status, result.files) == (name, expected, {}), result
    assert after.result == "42"


@pytest.mark.parametrize("level", LEVELS[:1])
def test_wall_time_is_the_brokers_whatever_a_call_says(level: str) -> None:
    async def use(box: Sandbox) -> Result:
        return await box.run(FORGE + "import time\ntime.sleep(0.3)\nforge(wall=0.0)\ntime.sleep(60)")

    result = in_box(level, use)
    assert (result.status, result.result) == (Status.OK, "mine") and result.wall_s >= 0.3


LEAVES = {
    "by its exit": ("forge(result=TEXT); os._exit(0)", "the process ended with exit code 0"),
    "by a code": ("forge(result=TEXT); os._exit(7)", "the program ended with exit code 7"),
    "by a crash": ("import ctypes\nforge(result=TEXT); ctypes.string_at(0)", "the process was ended by SIGSEGV"),
    "by more than an answer": ("forge(result=TEXT); os.write(3, b'x'); os._exit(0)", ""),
}


@pytest.mark.parametrize("level", LEVELS)
def test_code_cannot_make_its_later_cells_an_outage(level: str) -> None:
    """An outage drops the sample. The long text keeps the broker busy before it stops the process."""

    async def use(box: Sandbox) -> dict[str, list[Result]]:
        found = {}
        for name, (end, _) in LEAVES.items():
            session = box.session(name)
            cells = ["x = 1", FORGE + end.replace("TEXT", r"'\U0001f600' * 60_000")]
            found[name] = [await session.run(cell) for cell in (*cells, "x", "x = 2", "x")]
        return found

    for name, results in in_box(level, use, without=("freeze",)).items():
        _, _, next_one, *later = results
        assert Status.UNAVAILABLE not in [result.status for result in results], (name, results)
        assert "The session was restarted" in results[1].error if results[1].error else next_one.error
        assert LEAVES[name][1] in (results[1].error or next_one.error)
        assert [result.result for result in later][-1] == "2"


@pytest.mark.parametrize("level", LEVELS)
def test_files_that_cannot_be_fetched_or_put_are_an_answer(level: str) -> None:
    async def use(box: Sandbox) -> list[Result]:
        code = "open('b', 'wb').write(bytes(range(256)))\n'done'"
        names = ("a\0b", "b", "\ud800", "", ".", "/", "x" * 9999, "b")
        full = "open('b', 'wb').write(b'0' * (15 << 20))\nk = []\ntry:\n    while True: k.append(bytearray(999))\n"
        none_left = "open('b', 'wb').write(b'0' * (15 << 20))\nimport resource\nresource.setrlimit(9, (4096, 4096))"
        return [
            await box.run(code, fetch_files=names),
            await box.run(full + "except MemoryError: 'kept'", fetch_files=("b",)),
            await box.run(none_left, fetch_files=("b",)),
            await box.run("1", files={"a\0b": b""}),
            await box.run("1", stdin="a\ud83d\udc80"),
        ]

    odd, full, none_left, put, stdin = in_box(level, use, memory_mb=64, max_disk_mb=40)
    assert (odd.status, odd.result, odd.files) == (Status.OK, "'done'", {"b": bytes(range(256))})
    assert (full.status, full.files) == (Status.OK, {"b": b"0" * (15 << 20)})
    assert (none_left.status, none_left.files) == (Status.MEMORY, {}) and "MemoryError" in none_left.error
    assert (put.status, put.limit) == (Status.ERROR, None) and "null" in put.error
    assert (stdin.status, stdin.result) == (Status.OK, "1")


@pytest.mark.parametrize("level", LEVELS[:1])
def test_a_call_that_is_too_large_is_an_error_that_nobody_looks_at(level: str) -> None:
    async def use(box: Sandbox) -> tuple[list[Result], dict[str, Any]]:
        large = "#" + "x" * (1 << 20)
        return [
            await box.run(large),
            await box.session("s").run("'" + "é" * (1 << 19) + "'"),
            await box.run("1", stdin="x" * (9 << 20), files={"f": b"0" * (9 << 20)}),
            await box.run("1", files={str(number): b"" for number in range(2000)}),
            await box.run(large[:-1]),
        ], await box.stats()

    (code, wide, data, many, fits), stats = in_box(level, use)
    assert [each.status for each in (code, wide, data, many)] == [Status.ERROR] * 4 and fits.status is Status.OK
    assert "the code has 1048577 bytes; at most 1048576 are run" in code.error and "1048578" in wide.error
    assert data.limit == many.limit == "disk" and "at most 16777216 and 1024 files" in data.error
    assert stats["counts"]["ok"] == 1 and "error" not in stats["counts"]


BAD_ARGUMENTS: list[dict[str, Any]] = [
    *({"timeout": value} for value in (float("nan"), float("inf"), 0, -1, 10**400, "1", True)),
    *({"memory_mb": value} for value in (0, -5, 10**400, 1.5, float("nan"))),
    {"seed": "x"},
    {"seed": 10**5000},
    {"stdin": b"x"},
    {"files": {"a": "text"}},
    {"files": {1: b""}},
    {"fetch_files": "name"},
    {"fetch_files": (1,)},
    {"fetch_files": ("x",) * 5000},
]


async def test_arguments_that_no_call_can_have_are_refused_and_hurt_no_other_call() -> None:
    async with Sandbox(SandboxPolicy(LEVELS[0], packages=())) as box:
        other = asyncio.ensure_future(box.run("while True: pass", timeout=1.5))
        for arguments in BAD_ARGUMENTS:
            with pytest.raises(ConfigError, match="sandbox"):
                await box.run("1", **arguments)
        with pytest.raises(ConfigError, match="must be text"):
            await box.run(b"1")
        with pytest.raises(ConfigError, match="must be text"):
            box.session(("a", "b"))
        assert (await other).limit == "wall"
        assert (await box.run("6 * 7")).result == "42"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 0, 10**400, "9", True, None])
def test_a_limit_that_is_no_number_of_the_kind_is_refused(value: Any) -> None:
    for name in ("timeout", "session_idle", "memory_mb", "max_output_bytes", "concurrency"):
        with pytest.raises(ConfigError, match=f"sandbox {name} must be above 0"):
            SandboxPolicy(**{name: value})
    with pytest.raises(ConfigError, match="a whole number"):
        SandboxPolicy(memory_mb=1.5)


@pytest.mark.parametrize("level", LEVELS)
def test_a_cells_own_memory_limit_is_named_and_does_not_bind_the_next(level: str) -> None:
    take = "x = bytearray(100 << 20)\nlen(x)"

    async def use(box: Sandbox) -> list[Result]:
        session = box.session("s")
        once = await box.run(take, memory_mb=50)
        return [once] + [await session.run(take, memory_mb=most) for most in (50, 300, None)]

    once, small, larger, free = in_box(level, use, memory_mb=400)
    assert [each.limit for each in (once, small)] == ["memory"] * 2
    assert all("the memory limit is 50 MB" in each.error for each in (once, small))
    assert [each.result for each in (larger, free)] == [str(100 << 20)] * 2


# Output.


def kept(parts: list[bytes], limit: int, told: bool = True) -> tuple[str, bool]:
    """What the broker reads of what a child writes in these parts."""
    fd = os.memfd_create("out")
    try:
        writer = executor._RingWriter(fd, limit)
        for part in parts:
            writer.write(part)
        return output.take(fd, limit, writer.total if told else None)
    finally:
        os.close(fd)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("total", [*range(1, 40), 64, 96, 97, 127, 128, 129, 160, 1000])
def test_output_is_whole_or_has_a_mark(total: int, told: bool) -> None:
    """Also where the ring ends exactly at the limit; 32 bytes are kept."""
    data = bytes(97 + number % 26 for number in range(total))
    for step in (1, 7, 16, total):
        text, truncated = kept([data[start : start + step] for start in range(0, total, step)], 32, told)
        if total <= 32:
            assert (text, truncated) == (data.decode(), False)
        else:
            head, mark, tail = text.partition("... [")
            assert truncated and mark and data.startswith(head.encode()) and "omitted] ..." in tail
            assert data.endswith(tail.rpartition(" ...")[2].encode())


@pytest.mark.parametrize("told", [True, False])
def test_a_cut_leaves_whole_lines(told: bool) -> None:
    lines = [f"{number} {number**9}\n".encode() for number in range(20_000)]
    for limit in (1000, 1001, 4000):
        text, truncated = kept(lines, limit, told)
        shown = text.splitlines()
        mark = next(number for number, line in enumerate(shown) if "omitted] ..." in line)
        whole = {line.decode().rstrip() for line in lines}
        assert truncated and 0 < mark < len(shown) - 1 and len(text) <= limit + 60
        assert all(line in whole for number, line in enumerate(shown) if number != mark)
        assert shown[0] == "0 0" and shown[-1] == lines[-1].decode().rstrip()


def test_output_that_code_wrote_to_the_descriptor_itself_is_cut_alike() -> None:
    data = b"".join(b"%d\n" % number for number in range(1000))
    for told in (None, 0, len(data)):
        fd = os.memfd_create("out")
        try:
            os.write(fd, data)
            text, truncated = output.take(fd, 200, told)
        finally:
            os.close(fd)
        head, _, tail = text.partition("... [")
        omitted, _, tail = tail.partition(" bytes of output omitted] ...\n")
        assert truncated and data.startswith(head.encode()) and data.endswith(tail.encode())
        assert int(omitted) == len(data) - len(head) - len(tail) and min(len(head), len(tail)) > 90


def test_no_more_than_a_quarter_of_either_side_is_given_up_for_whole_lines() -> None:
    for place, given_up in ((10, True), (24, True), (26, False), (60, False)):
        first, last = b"a" * (99 - place) + b"\n" + b"b" * place, b"c" * place + b"\n" + b"d" * (99 - place)
        text, _ = kept([first + b"x" * 500 + last], 200)
        head, tail = text.split("... [")[0], text.split("] ...")[1].lstrip("\n")
        assert (len(head), len(tail)) == ((100 - place, 99 - place) if given_up else (100, 100))


def test_a_mark_inside_a_long_number_stands_between_its_digits() -> None:
    text, _ = kept([b"7" * 1000], 100)
    assert text == "7" * 50 + "... [900 bytes of output omitted] ..." + "7" * 50


def test_a_cut_leaves_whole_characters() -> None:
    for shift in range(4):
        text, truncated = kept([b"x" * shift + "😀".encode() * 500], 100)
        assert truncated and "\ufffd" not in text
        assert set(text.partition("...")[0]) <= {"x", "😀"} and text.endswith("😀")


@pytest.mark.parametrize("level", LEVELS)
def test_an_unfinished_line_survives_a_kill(level: str) -> None:
    codes = {
        "print('a', end='')\nprint('b', end='')": "ab",
        "import sys\nsys.stdout.write('x = ')": "x = ",
        "import sys\nsys.stdout.buffer.write(b'raw')": "raw",
        "print('line')\nprint('unfinished', end='', file=__import__('sys').stdout)": "line\nunfinished",
    }

    async def use(box: Sandbox) -> list[Result]:
        session = box.session("s")
        await session.run("1")
        calls = [box.run(code + "\nwhile True: pass", timeout=5) for code in codes]
        calls.append(session.run("print('cell', end='')\nwhile True: pass", timeout=5))
        return list(await asyncio.gather(*calls))

    assert [result.stdout for result in in_box(level, use)] == [*codes.values(), "cell"]


def test_every_result_that_the_broker_can_give_becomes_one_of_the_callers() -> None:
    answer = {"id": 1, "status": "ok", "stdout": "", "stderr": "", "files": {"f": "YQ=="}, "result": "\ud800"}
    result = _result(answer)
    assert (result.files, result.result) == ({"f": b"a"}, "\\ud800")
