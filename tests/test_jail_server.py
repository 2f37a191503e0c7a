"""The HTTP server speaks SandboxFusion's `/run_code`, and the client gives the same results as the jail itself."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web
from test_jail import LEVELS

from slime_retool.errors import ConfigError
from slime_retool.sandbox import Sandbox, SandboxPolicy, Status
from slime_retool.sandbox.host.fusion_client import FusionSandbox
from slime_retool.sandbox.host.server import make_app

# A level that this machine has; the refusal of the others is tested where the levels are.
LEVEL = (*LEVELS, "none")[0]
POLICY = SandboxPolicy(isolation=LEVEL, packages=("numpy",))


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
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
    assert answer["run_result"]["stdout"] == "in file\n3\n"
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
        await asyncio.wait(calls, timeout=10)
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
