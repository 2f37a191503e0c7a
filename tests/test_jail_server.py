"""The HTTP server speaks SandboxFusion's `/run_code`, and the client gives the same results as the jail itself."""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.compression_utils import ZLibDecompressor
from test_jail import LEVELS

from benchmarks import sandbox_soak
from slime_retool.config import Config
from slime_retool.errors import ConfigError, ToolUnavailable
from slime_retool.recipes.retool.tool_sandbox import make_tools
from slime_retool.sandbox import Sandbox, SandboxPolicy, Status
from slime_retool.sandbox.host import server
from slime_retool.sandbox.host.fusion_client import FusionSandbox, from_response
from slime_retool.sandbox.host.policy import read_token
from slime_retool.sandbox.host.server import Access, BadRequest, _Server, make_app
from slime_retool.tool_use.calls import ToolCall

# A level that this machine has; the refusal of the others is tested where the levels are.
LEVEL = (*LEVELS, "none")[0]
POLICY = SandboxPolicy(isolation=LEVEL, packages=("numpy",))


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await runner.cleanup()


async def post(url: str, **body: object) -> tuple[int, dict]:
    async with aiohttp.ClientSession() as http, http.post(f"{url}/run_code", json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("level", dict.fromkeys((*LEVELS, "none")))
async def test_requests_and_responses_have_the_documented_fields(level: str) -> None:
    async with serving(make_app(replace(POLICY, isolation=level))) as url:
        status, answer = await post(
            url,
            code="print(input(), open('a').read())\nopen('b', 'w').write('out')",
            language="python",
            run_timeout=60,
            compile_timeout=5,
            memory_limit_MB=-1,
            stdin="in",
            files={"a": base64.b64encode(b"file").decode()},
            fetch_files=["b", "missing"],
        )
        failed = (await post(url, code="print('x')\n1/0"))[1]
        slow = (await post(url, code="while True: pass", run_timeout=0.3))[1]
    assert status == 200
    assert set(answer) == {"status", "message", "compile_result", "run_result", "executor_pod_name", "files"}
    assert set(answer["run_result"]) == {"status", "execution_time", "return_code", "stdout", "stderr"}
    assert (answer["status"], answer["run_result"]["status"], answer["run_result"]["return_code"]) == (
        "Success",
        "Finished",
        0,
    )
    assert answer["run_result"]["stdout"] == "in file\n"
    assert answer["files"] == {"b": base64.b64encode(b"out").decode()}
    assert (failed["status"], failed["run_result"]["stdout"], failed["run_result"]["return_code"]) == (
        "Failed",
        "x\n",
        1,
    )
    assert "ZeroDivisionError" in failed["run_result"]["stderr"]
    assert (slow["status"], slow["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "`code`"),
        ({"code": "1", "language": "cpp"}, "language must be 'python', got 'cpp'"),
        ({"code": "1", "run_timeout": -1}, "run_timeout"),
        ({"code": "1", "run_timeout": float("inf")}, "run_timeout"),
        ({"code": "1", "run_timeout": float("nan")}, "run_timeout"),
        ({"code": "1", "run_timeout": 0}, "run_timeout"),
        ({"code": "1", "run_timeout": 10**400}, "run_timeout"),
        ({"code": "1", "run_timeout": 301}, "at most this server's 300 (its --max-timeout), got 301"),
        ({"code": "1", "run_timeout": "5"}, "run_timeout must be a number of seconds, got '5'"),
        ({"code": "1", "run_timeout": True}, "run_timeout"),
        ({"code": 1}, "code"),
        ({"code": None}, "`code`"),
        ({"code": "1", "language": None, "memory_limit_MB": 10**400}, "memory_limit_MB"),
        ({"code": "1", "memory_limit_MB": 1.5}, "memory_limit_MB must be an integer, got 1.5"),
        ({"code": "1", "fetch_files": ["a"] * 2000}, "fetch_files may be at most 1024, got 2000"),
        ({"code": "1", "fetch_files": [[]]}, "fetch_files"),
        ({"code": "1", "stdin": "\ud83d"}, "JSON"),
        ({"code": "1", "stdin": 5}, "stdin must be text, got 5"),
        ({"code": "1", "fetch_files": "a"}, "fetch_files must be a list of paths, got 'a'"),
        ({"code": "1", "fetch_files": 5}, "fetch_files must be a list of paths, got 5"),
        ({"code": "1", "files": {"a": "é"}}, "files must map paths to base64"),
        ({"code": "1", "memory_limit_MB": 10**6}, "at most this server's 512"),
        ({"code": "1", "files": {"a": "not base64!"}}, "base64"),
        ({"code": "1", "fetch": []}, "unknown fields fetch"),
    ],
)
async def test_a_request_that_cannot_be_served_says_why(body: dict, says: str) -> None:
    async with serving(make_app(POLICY)) as url:
        status, answer = await post(url, **body)
    assert status == 422 and says in answer["detail"]


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (b"[]", {}, (422, "object")),
        (b"5", {}, (422, "object")),
        (b"", {}, (422, "JSON")),
        (b"{", {}, (422, "JSON")),
        (b"\xff\xfe{", {}, (422, "JSON")),
        (b'{"code": "\xff"}', {}, (422, "code must be text")),
        (b'{"code": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, (422, "depth")),
        (b'{"code": "1", "run_timeout": 1' + b"0" * 400 + b"}", {}, (422, "run_timeout")),
        (b'{"code": "1", "memory_limit_MB": 1' + b"0" * 9000 + b"}", {}, (422, "memory_limit_MB")),
        (b'{"code": "1"}', {"Content-Type": "application/json; charset=klingon"}, (422, "UTF-8, got klingon")),
        ('{"code": "1"}'.encode("utf-16"), {"Content-Type": "application/json; charset=utf-16"}, (422, "UTF-8")),
        (b'{"code": "1"}', {"Content-Type": "text/plain"}, (415, "application/json, got text/plain")),
        (b"code=1", {"Content-Type": "application/x-www-form-urlencoded"}, (415, "application/json")),
        (b'{"code": "1"}', {"Content-Type": ""}, (415, "application/json")),
        (b"no zip", {"Content-Encoding": "deflate"}, (415, "compressed")),
        (b"no zip", {"Content-Encoding": "gzip"}, (415, "compressed")),
        (b'{"code": "1"}', {"Expect": "the \udce9"}, (417, "100-continue")),
        (b'{"code": ""}', {"Expect": "100-continue", "Origin": "null"}, (403, "web pages")),
        (b'{"code": "1"}', {"Origin": "http://evil.example"}, (403, "web pages")),
        (b'{"code": "1"}', {"Origin": "null"}, (403, "web pages")),
        (b'{"code": "1"}', {"Sec-Fetch-Site": "same-origin"}, (403, "web pages")),
        (b'{"code": "1"}', {"Host": "rebound.example"}, (403, "Host header")),
        (b'{"code": "1"}', {"Host": "rebound.example:80"}, (403, "Host header")),
        (b'{"code": "1"}', {"Host": ""}, (403, "Host header")),
        (b"x" * (40 << 20), {}, (413, "")),
    ],
)
async def test_a_request_that_no_client_of_code_sends_is_refused(
    body: bytes, headers: dict[str, str], expected: tuple[int, str]
) -> None:
    headers = {"Content-Type": "application/json"} | headers
    async with serving(make_app(POLICY)) as url, aiohttp.ClientSession() as http:
        async with http.post(f"{url}/run_code", data=body, headers=headers) as response:
            status, says = expected
            assert response.status == status and says in (await response.json())["detail"]


@pytest.mark.parametrize("token", [None, "s3cret"])
async def test_a_compressed_body_is_refused_and_never_decompressed(token: str | None, monkeypatch) -> None:
    """Not even to have it out of the way: 4 MB of it would make 4 GB in the event loop."""
    unpacked = []

    def decompress(*_: object, **__: object) -> bytes:
        unpacked.append(1)
        raise ValueError("decompressed")

    monkeypatch.setattr(ZLibDecompressor, "decompress_sync", decompress)
    body = gzip.compress(bytes(1 << 20))
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with serving(make_app(POLICY, access=Access(token=token))) as url, aiohttp.ClientSession() as http:
        async with http.post(f"{url}/run_code", data=body, headers=headers) as response:
            assert response.status == (415 if token is None else 401)
            await response.read()
        async with http.get(f"{url}/v1/ping") as response:
            assert await response.json() == "pong"
    assert unpacked == []


async def test_bodies_that_are_held_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """By bytes, and not by how many wait; what has ended no longer counts."""
    policy = replace(POLICY, max_code_bytes=2000, max_disk_mb=1)
    monkeypatch.setattr(server, "_MAX_HELD", 0)
    head = b"POST /run_code HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 2000000\r\n\r\n"
    async with serving(make_app(policy)) as url:
        async def answered(status: int) -> None:
            while (await post(url, code="print(1)", stdin="x" * 500_000))[0] != status:
                await asyncio.sleep(0.02)

        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(head + bytes(1_900_000))
        await asyncio.wait_for(answered(503), 60)
        writer.close()
        await asyncio.wait_for(answered(200), 60)


async def test_a_body_that_breaks_off_is_a_bad_request() -> None:
    head = b"POST /run_code HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    async with serving(make_app(POLICY)) as url:
        answers = []
        for chunks in (b"zz\r\n", b"3\r\n{}{}\r\n0\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
            answers.append((await reader.read()).split()[1])
            writer.close()
    assert all(answer in (b"400", b"422") for answer in answers), answers


async def test_a_server_for_other_hosts_takes_any_name_of_its_own_and_asks_for_its_token() -> None:
    access = Access("0.0.0.0", token="s3cret")
    async with serving(make_app(POLICY, access=access)) as url, aiohttp.ClientSession() as http:
        answers = []
        for given in (None, "Bearer s3cret", "Bearer s3cre", "s3cret", "Bearer \xe9"):
            headers = {"Host": "sandbox.cluster:8080"} | ({} if given is None else {"Authorization": given})
            async with http.post(f"{url}/run_code", json={"code": "print(1)"}, headers=headers) as response:
                answers.append((response.status, (await response.json()).get("status")))
        async with FusionSandbox(url, POLICY, token="s3cret") as known, FusionSandbox(url, POLICY) as stranger:
            results = await known.run("6 * 7"), await stranger.run("6 * 7")
    assert answers == [(401, None), (200, "Success"), (401, None), (401, None), (401, None)]
    assert results[0].result == "42" and results[1].status is Status.UNAVAILABLE and "401" in results[1].error


async def test_a_call_ends_when_its_client_leaves() -> None:
    slow = {"code": "while True: pass", "run_timeout": 250}
    async with serving(make_app(replace(POLICY, concurrency=1))) as url, aiohttp.ClientSession() as http:
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await http.post(f"{url}/run_code", json=slow, timeout=aiohttp.ClientTimeout(total=0.5))
        answer = (await post(url, code="print('next')", run_timeout=100))[1]
    assert answer["run_result"]["stdout"] == "next\n"


def test_sigterm_ends_the_server_and_its_calls() -> None:
    command = [sys.executable, "-m", "slime_retool.cli", "sandbox", "serve", "--port", "0", "--isolation", LEVEL]
    program = (
        "import sys\nfrom aiohttp import web\nfrom slime_retool import cli\n"
        "site = web.TCPSite.start\n"
        "async def start(self):\n    await site(self)\n"
        "    print(self._server.sockets[0].getsockname()[1], flush=True)\n"
        "web.TCPSite.start = start\nsys.exit(cli.main(sys.argv[1:]))"
    )
    command[1:3] = ["-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"

        async def call_and_end() -> list[object]:
            slow = {"code": "import time\ntime.sleep(250)", "run_timeout": 250}
            calls = [asyncio.ensure_future(post(url, **slow)) for _ in range(20)]
            await asyncio.sleep(1.5)
            members = list(sandbox_soak.family(server.pid))
            server.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait, 40)
            return members, await asyncio.gather(*calls, return_exceptions=True)

        members, answers = asyncio.run(call_and_end())
    deadline = time.monotonic() + 60
    while (left := [pid for pid in members if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(members) >= 4 and left == []
    assert all(isinstance(answer, aiohttp.ClientError) for answer in answers)


async def test_a_large_body_is_refused_before_it_holds_up_others() -> None:
    """By what was built of it: as many lists as there are in it take seconds and gigabytes."""
    body = b'{"code": [' + b"[]," * 10_000_000 + b"1]}"
    before = len(gc.get_objects())
    with pytest.raises(BadRequest, match="code must be text"):
        _Server(POLICY, 300.0, Access())._arguments(body)
    assert len(gc.get_objects()) < before + 1000


CONTROL = "class A:\n    def __repr__(self): return '\\0' * 100_000\nA()"


async def test_the_client_gives_the_results_of_the_jail() -> None:
    codes = [
        "print(1)",
        "x = 3\nx ** 2",
        "'a'",
        "print('x')\n1 / 0",
        "def f(:",
        "import sys\nsys.exit('bye')",
        "exit()",
        "from __future__ import annotations\n'''doc'''\n5",
        "x = 'a' * 10**12",
        "import os\nos._exit(7)",
        "print('\ud83d')",
        "import random\nrandom.random()",
        "input()",
        "# only a comment",
        "",
    ]
    async with (
        serving(make_app(POLICY)) as url,
        FusionSandbox(url, POLICY) as remote,
        Sandbox(POLICY) as local,
    ):
        for code in codes:
            ours, theirs = await local.run(code, seed=5), await remote.run(code, seed=5)
            for field in ("status", "stdout", "result", "error", "limit"):
                assert getattr(theirs, field) == getattr(ours, field), (code, field, theirs)
        assert (await remote.run("print(input())", stdin="said\n")).stdout == "said\n"
        flood = "import sys\nsys.stderr.write('e' * 200_000)\n"
        for code in ("'é' * 100_000", "'\\U0001f600' * 100_000", "'\\x00' * 100_000", CONTROL):
            ours, theirs = await local.run(code), await remote.run(flood + code)
            assert theirs.status is ours.status is Status.OK and theirs.result[:100] == ours.result[:100]
            assert "characters omitted" in theirs.result and theirs.result[-100:] == ours.result[-100:]
        last = await remote.run("import atexit, sys\natexit.register(print, 'late', file=sys.stderr)\n1 / 0")
        assert (last.status, last.stderr) == (Status.ERROR, "late\n") and "ZeroDivisionError" in last.error
        slow = await remote.run("print('early')\nwhile True: pass", timeout=3)
    assert (slow.status, slow.stdout, slow.limit) == (Status.TIMEOUT, "early\n", "wall")


async def test_as_many_calls_reach_a_deployment_at_once_as_the_policy_allows() -> None:
    count, arrived, all_there = 120, 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal arrived
        arrived += 1
        if arrived == count:
            all_there.set()
        await all_there.wait()
        return web.json_response({"status": "Success", "run_result": {"status": "Finished", "return_code": 0}})

    app = web.Application()
    app.router.add_post("/run_code", answer)
    async with serving(app) as url, FusionSandbox(url, SandboxPolicy(concurrency=count)) as box:
        calls = [asyncio.ensure_future(box.run("1")) for _ in range(count)]
        await asyncio.wait(calls, timeout=120)
        together = all_there.is_set()
        all_there.set()
        assert together and {result.status for result in await asyncio.gather(*calls)} == {Status.OK}


async def test_outages_of_a_deployment_are_unavailable_and_never_an_observation() -> None:
    answers = {
        "/500/run_code": lambda: web.Response(status=500, text="overloaded"),
        "/html/run_code": lambda: web.Response(text="<html>proxy</html>"),
        "/sandbox/run_code": lambda: web.json_response(
            {"status": "SandboxError", "message": "no pod", "run_result": None}
        ),
        "/empty/run_code": lambda: web.json_response({}),
    }

    async def answer(request: web.Request) -> web.Response:
        return answers[request.path]()

    app = web.Application()
    for path in answers:
        app.router.add_post(path, answer)
    async with serving(app) as url:
        results = []
        for path in answers:
            async with FusionSandbox(url + path, POLICY) as box:
                results.append(await box.run("1"))
    async with FusionSandbox("http://127.0.0.1:9", POLICY) as box:
        results.append(await box.run("1"))
    assert [result.status for result in results] == [Status.UNAVAILABLE] * 5
    assert "500: overloaded" in results[0].error and "no pod" in results[2].error
    with pytest.raises(ConfigError, match="must start with http"):
        FusionSandbox("sandbox:8080")


async def test_concurrent_requests_share_the_limit_of_calls() -> None:
    async with serving(make_app(POLICY)) as url, FusionSandbox(url, POLICY) as box:
        results = await asyncio.gather(*(box.run(f"print({i} ** 2)") for i in range(40)))
    assert [result.stdout for result in results] == [f"{i**2}\n" for i in range(40)]


NONCE = "n0nce"
FORGED_REPORTS = [
    "",
    "garbage",
    "{",
    "5",
    "[]",
    "null",
    "[null, null, null]",
    '{"error": 5, "limit": null, "result": null, "exit_code": null}',
    '{"error": null, "limit": [], "result": null, "exit_code": null}',
    '{"error": null, "limit": null, "result": {}, "exit_code": null}',
    '{"error": null, "limit": null, "result": null, "exit_code": "1"}',
    '{"error": null, "other": 1}',
    "[" * 100_000,
    '{"error": 1' + "0" * 5000 + "}",
    f'{NONCE}{{"error": null}}',
]


@pytest.mark.parametrize("report", FORGED_REPORTS, ids=range(len(FORGED_REPORTS)))
def test_a_report_that_the_program_forged_is_an_error_of_its_own(report: str) -> None:
    """An outage is dropped, so a program that could make one could drop what it did badly."""
    run = {"status": "Finished", "return_code": 0, "stdout": "x", "stderr": f"before{NONCE}{report}"}
    result = from_response({"status": "Success", "run_result": run}, NONCE, 0.0, 1.0)
    assert (result.status, result.stdout, result.stderr) == (Status.ERROR, "x", "before")
    assert "interfered with the report" in result.error


BROKEN_REPLIES = [
    [],
    5,
    {},
    {"status": "Success"},
    {"status": "Success", "run_result": []},
    {"status": "Success", "run_result": {}},
    {"status": "Success", "run_result": {"status": "Finished", "stderr": 5}},
    {"status": "Success", "run_result": {"status": "Finished", "stdout": []}},
    {"status": "Success", "run_result": {"status": "Finished", "return_code": "0"}},
    {"status": "Success", "run_result": {"status": "Finished", "execution_time": "long"}},
    {"status": "Success", "run_result": {"status": "Finished", "execution_time": 10**400}},
    {"status": "Success", "run_result": {"status": "Finished"}, "files": {"f": "not base64!"}},
    {"status": "Success", "run_result": {"status": "Finished"}, "files": {"f": 5}},
    {"status": "Success", "run_result": {"status": "Finished"}, "files": ["f"]},
]


async def test_a_server_that_does_not_speak_the_protocol_is_an_outage_and_a_flood_is_none() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/deep/run_code":
            return web.Response(text="[" * 100_000)
        if request.path == "/flood/run_code":
            return web.Response(body=b" " * (65 << 20))
        return web.json_response(BROKEN_REPLIES[int(request.path.split("/")[1])])

    app = web.Application()
    app.router.add_post("/{which}/run_code", answer)
    async with serving(app) as url:
        results = {}
        for which in ("deep", "flood", *range(len(BROKEN_REPLIES))):
            async with FusionSandbox(f"{url}/{which}", POLICY) as box:
                results[which] = await box.run("1", fetch_files=("f",))
    flood = results.pop("flood")
    assert (flood.status, flood.limit) == (Status.ERROR, "output") and "more than 64 MB" in flood.error
    assert {result.status for result in results.values()} == {Status.UNAVAILABLE}, results


def test_a_reply_holds_only_files_that_were_asked_for_and_the_codes_of_processes() -> None:
    run = {"status": "Finished", "return_code": -11, "stdout": None, "stderr": None, "execution_time": float("nan")}
    body = {"status": "Failed", "run_result": run, "files": {"a": "YQ==", "../../b": "YQ=="}}
    crashed = from_response(body, NONCE, 0.0, 1.0, ("a", "c"))
    assert (crashed.status, crashed.exit_code, crashed.files, crashed.wall_s) == (Status.KILLED, -11, {"a": b"a"}, 0.0)
    assert "SIGSEGV" in crashed.error
    run["return_code"] = 3
    left = from_response(body, NONCE, 0.0, 1.0)
    assert (left.status, left.exit_code, left.files) == (Status.ERROR, 3, {})


async def test_the_clients_limits_and_arguments_are_those_of_the_jail() -> None:
    async with FusionSandbox("http://127.0.0.1:9", POLICY) as box:
        for arguments in ({"timeout": float("nan")}, {"timeout": -1}, {"seed": "x"}, {"files": {"a": "text"}}):
            with pytest.raises(ConfigError):
                await box.run("1", **arguments)
        large = await box.run("#" * (2 << 20))
        odd = await box.run("1", stdin="\ud83d")
    assert large.status is Status.ERROR and "at most 1048576 are run" in large.error
    assert odd.status is Status.UNAVAILABLE  # of the address; the text could be sent


async def test_the_recipes_tool_sends_its_token_to_a_server_of_another_host(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    token = read_token(tmp_path / "token")
    call = ToolCall("code_interpreter", {"code": "print(6 * 7)"})
    async with serving(make_app(POLICY, access=Access(token=token))) as url:
        known, stranger = (
            Config(sandbox_url=url, sandbox_token_file=file, tool_retries=0) for file in (str(tmp_path / "token"), None)
        )
        async with make_tools(known) as registry:
            assert (await registry.execute(call)).text == "42"
        async with make_tools(stranger) as registry:
            with pytest.raises(ToolUnavailable, match="401"):
                await registry.execute(call)


@pytest.mark.parametrize("content", [b"", b" \n", b"two\nlines", "é".encode(), b"\xff", b"\0"])
def test_a_token_that_no_header_can_hold_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match="token file"):
        read_token(tmp_path / "token")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "missing")
