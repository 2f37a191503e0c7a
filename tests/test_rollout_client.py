"""The router client against a small HTTP server that behaves well, badly, or not at all."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from slime_retool.engine.process import ServerError
from slime_retool.errors import EngineError
from slime_retool.rollout.engine_client import (
    ROUTING_HEADER,
    RouterClient,
    parse_completion,
    parse_prompt_log_probs,
)

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def reply(ids: list[int] = (5, 6, 7), log_probs: list[Any] | None = None, **meta: Any) -> dict[str, Any]:
    """A reply as SGLang writes it."""
    values = [-0.1 * (i + 1) for i in range(len(ids))] if log_probs is None else log_probs
    return {
        "text": "not looked at",
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 7},
            "weight_version": "4",
            "prompt_tokens": 3,
            "cached_tokens": 2,
            "output_token_logprobs": [[value, token, None] for value, token in zip(values, ids, strict=False)],
            **meta,
        },
    }


@asynccontextmanager
async def served(answer: Answer, **options: Any) -> AsyncIterator[RouterClient]:
    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    settings = {"concurrency": 8, "timeout": 60.0, "retries": 2, "backoff": 0.001, **options}
    try:
        async with RouterClient(f"http://127.0.0.1:{port}", **settings) as client:
            yield client
    finally:
        await runner.cleanup()


async def test_a_request_carries_ids_and_asks_for_log_probs():
    seen: list[tuple[dict[str, Any], str | None]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((await request.json(), request.headers.get(ROUTING_HEADER)))
        return web.json_response(reply())

    async with served(answer) as client:
        completion = await client.generate([1, 2, 3], {"max_new_tokens": 9, "temperature": 0.5}, session="41")
    body, key = seen[0]
    assert body["input_ids"] == [1, 2, 3] and "text" not in body
    assert body["sampling_params"] == {"max_new_tokens": 9, "temperature": 0.5}
    assert body["return_logprob"] is True and key == "41"
    assert completion.ids == [5, 6, 7] and completion.log_probs == pytest.approx([-0.1, -0.2, -0.3])
    assert (completion.finish_reason, completion.weight_version) == ("stop", 4)
    assert (completion.prompt_tokens, completion.cached_tokens) == (3, 2)


@pytest.mark.parametrize(("finish", "status"), [("stop", "ok"), ("length", "ok"), ("abort", "interrupted")])
async def test_a_request_is_a_span_with_its_tokens(finish: str, status: str):
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(reply(finish_reason={"type": finish}))

    before = time.time()
    async with served(answer) as client:
        (span,) = (await client.generate([1, 2, 3], {})).spans
    assert (span.pop("name"), span.pop("status")) == ("request", status)
    assert before - 0.001 <= span["start"] and span.pop("start") + span.pop("seconds") <= time.time() + 0.001
    assert span == {"tokens": 3, "prompt_tokens": 3, "cached_tokens": 2}


async def test_server_errors_are_tried_again_and_counted():
    calls = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.json_response(reply()) if calls == 3 else web.Response(status=503, text="busy")

    async with served(answer) as client:
        assert (await client.generate([1], {})).ids == [5, 6, 7]
        stats = client.take_stats()
        assert (stats.requests, stats.retries, stats.cached_tokens, stats.completion_tokens) == (1, 2, 2, 3)
        assert client.take_stats().requests == 0


async def test_retries_are_bounded_and_the_servers_words_are_kept():
    calls = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.Response(status=500, text="out of memory")

    async with served(answer) as client:
        with pytest.raises(EngineError, match="failed 3 times, the last with HTTP 500: out of memory"):
            await client.generate([1], {})
    assert calls == 3


async def test_a_refused_request_is_not_tried_again():
    calls = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.Response(status=400, text="too long")

    async with served(answer) as client:
        with pytest.raises(EngineError, match="HTTP 400: too long"):
            await client.generate([1], {})
    assert calls == 1


async def test_a_server_that_is_not_there_is_an_engine_error():
    async with RouterClient("http://127.0.0.1:9", concurrency=1, timeout=5, retries=1, backoff=0.001) as client:
        with pytest.raises(EngineError, match="failed 2 times"):
            await client.generate([1], {})


@pytest.mark.timeout(200)
async def test_a_server_that_never_replies_is_an_engine_error():
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        raise AssertionError

    async with served(answer, timeout=0.2) as client:
        with pytest.raises(EngineError, match="did not answer within 0.2 s"):
            await client.generate([1], {})


async def test_a_reply_that_is_not_json_is_an_engine_error():
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async with served(answer) as client:
        with pytest.raises(EngineError, match="not JSON"):
            await client.generate([1], {})


async def test_no_more_requests_are_in_flight_than_allowed():
    now = most = 0
    three = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        if now == 3:
            three.set()
        await three.wait()
        await asyncio.sleep(0.01)
        now -= 1
        return web.json_response(reply())

    async with served(answer, concurrency=3) as client:
        await asyncio.gather(*(client.generate([1], {}) for _ in range(20)))
    assert most == 3


@pytest.mark.parametrize("charset", ["utf-8", "utf-16"])
@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, -0.25, null, true], "b": "\\u00e9 \\ud83d\\ude42 é"}',
        '{"a": NaN}', "[Infinity, -Infinity, 1e400]", '"a lone \\ud83d, cut from its pair"', '{"a": 1, "a": 2}',
    ],
)  # fmt: skip
async def test_a_reply_is_read_as_python_reads_json(text: str, charset: str):
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=text.encode(charset), content_type="application/json", charset=charset)

    async with served(answer) as client:
        assert repr(await client.post("/generate", {})) == repr(json.loads(text))


@pytest.mark.parametrize("body", [b"", b" ", b"{", b"[1,]", b'"\xff"', b"\xef\xbb\xbf1"])
async def test_a_reply_that_is_not_json_gives_nothing(body: bytes):
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    async with served(answer) as client:
        with pytest.raises(EngineError, match="not JSON|cannot be used"):
            await client.generate([1], {})


async def test_log_probs_come_back_to_the_last_bit():
    values = [-(2.0**-k) / 3 for k in range(60)]

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(reply([*range(60)], values))

    async with served(answer) as client:
        assert (await client.generate([1], {})).log_probs == values


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (reply(output_token_logprobs=None), "no log-probs"),
        (reply(log_probs=[-0.1, -0.2]), "3 tokens but log-probs of 2"),
        (reply(output_token_logprobs=[[-0.1, 5, None], [-0.1, 6, None], [-0.1, 8, None]]), "of other tokens"),
        (reply(log_probs=[-0.1, None, -0.3]), "None for token 6"),
        (reply(log_probs=[-0.1, float("nan"), -0.3]), "nan for token 6"),
        (reply(finish_reason={"type": "weird"}), "unknown reason 'weird'"),
        (reply(weight_version="new"), "cannot be used"),
        ({"text": "only"}, "cannot be used: KeyError"),
        ([], "cannot be used: TypeError"),
    ],
)
def test_nothing_is_made_up_for_an_incomplete_reply(bad: Any, message: str):
    with pytest.raises(EngineError, match=message):
        parse_completion(bad)


async def test_a_teacher_reads_the_ids_and_generates_nothing():
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"meta_info": {"input_token_logprobs": [[None, 7, None], [-0.5, 8, None]]}})

    async with served(answer) as client:
        assert await client.prompt_log_probs([7, 8]) == [0.0, -0.5]
    assert seen[0]["input_ids"] == [7, 8] and seen[0]["sampling_params"]["max_new_tokens"] == 0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([[None, 7, None]], "2 tokens were sent, log-probs of 1"),
        ([[None, 7, None], [-0.5, 9, None]], "of other tokens"),
        ([[None, 7, None], [None, 8, None]], "None for token 8"),
        (None, "cannot be used"),
    ],
)
def test_a_teacher_of_other_tokens_is_refused(entries: Any, message: str):
    with pytest.raises(EngineError, match=message):
        parse_prompt_log_probs({"meta_info": {"input_token_logprobs": entries}}, [7, 8])


@pytest.mark.parametrize(("ids", "log_probs"), [([5, 6, 7], [-0.1, -0.2]), ([5, 6], [-0.1, -0.2, -0.3])])
def test_of_an_aborted_request_what_has_both_id_and_log_prob_counts(ids: list[int], log_probs: list[float]):
    aborted = reply(finish_reason={"type": "abort"})
    aborted["output_ids"] = ids
    entries = zip(log_probs, (5, 6, 7), strict=False)
    aborted["meta_info"]["output_token_logprobs"] = [[value, token, None] for value, token in entries]
    completion = parse_completion(aborted)
    assert (completion.ids, completion.log_probs) == ([5, 6], [-0.1, -0.2])
    aborted["meta_info"]["finish_reason"] = {"type": "length"}
    with pytest.raises(EngineError, match="log-probs of"):
        parse_completion(aborted)


async def test_requests_of_one_cache_key_are_told_apart_from_others():
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response(reply())

    async with served(answer) as client:
        await client.generate([1], {}, cache_key="3")
        await client.generate([1], {})
    assert asked[0]["extra_key"] == "3" and "extra_key" not in asked[1]


def test_an_aborted_request_may_come_back_empty():
    aborted = reply(ids=[], finish_reason={"type": "abort", "message": "Abort in waiting queue"})
    del aborted["meta_info"]["prompt_tokens"], aborted["meta_info"]["cached_tokens"]  # as SGLang 0.5.15 leaves them out
    completion = parse_completion(aborted)
    assert (completion.ids, completion.finish_reason) == ([], "abort")
    completed = reply()
    del completed["meta_info"]["cached_tokens"]
    with pytest.raises(EngineError, match="cached_tokens"):
        parse_completion(completed)


class Service:
    """Stands for an `EngineService`: `finds` says what each look finds, `looks` counts them."""

    def __init__(self, url: str, finds: Callable[[Service], None]) -> None:
        self.url, self.finds = url, finds
        self.faults = self.looks = 0
        self.serving = True

    def look(self) -> None:
        self.looks += 1
        self.finds(self)


@asynccontextmanager
async def kept(answers: list[Answer], finds: Callable[[Service], None]) -> AsyncIterator[tuple[RouterClient, Service]]:
    """A client without retries of a service whose first requests are answered so, all further ones well."""
    seen: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        return await (answers.pop(0) if answers else well)(request)

    async def well(_: web.Request) -> web.StreamResponse:
        assert len({tuple(body["input_ids"]) for body in seen}) == 1, "asked again with other ids"
        return web.json_response(reply())

    async with served(answer) as plain:
        service = Service(plain._url, finds)
        async with RouterClient(plain._url, service=service, concurrency=8, timeout=60, retries=0) as client:
            yield client, service


async def lost(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="the engine closed the connection")


async def test_a_request_whose_engine_died_is_asked_again_and_is_no_try_of_its_own():
    def died(service: Service) -> None:
        service.faults += 1

    async with kept([lost] * 5, died) as (client, service):
        assert (await client.generate([1, 2], {})).ids == [5, 6, 7]
        stats = client.take_stats()
    assert (service.looks, stats.moved, stats.retries, stats.requests) == (5, 5, 0, 1)


async def test_a_request_that_failed_where_no_engine_did_is_a_failed_try():
    async with kept([lost], lambda service: None) as (client, service):
        with pytest.raises(EngineError, match="failed 1 times"):
            await client.generate([1, 2], {})
        assert client.take_stats().moved == 0
    assert service.looks == 1


async def test_while_no_engine_serves_requests_wait_and_then_go_to_the_new_router(monkeypatch):
    monkeypatch.setattr("slime_retool.rollout.engine_client.SERVING_POLL_SECONDS", 0.01)

    def come_back_later(service: Service) -> None:
        service.serving = service.looks > 4
        if service.looks == 1:
            service.faults += 1
            service.url, service.real = "http://127.0.0.1:1", service.url
        if service.serving:
            service.url = service.real

    async with kept([lost], come_back_later) as (client, service):
        request = asyncio.create_task(client.generate([1, 2], {}))
        while service.looks < 2:
            await asyncio.sleep(0)
        assert client.waiting == 1
        assert (await request).ids == [5, 6, 7]
        assert client.waiting == 0
    assert service.looks == 5


async def test_a_request_that_waits_for_the_end_of_an_update_is_none_that_runs():
    """Else the update would wait for it, and it for the update."""
    looks, goes_on = threading.Event(), threading.Event()

    def held(service: Service) -> None:
        looks.set()
        goes_on.wait(60)

    async with kept([lost], held) as (client, service):
        service.faults = 1
        asked = asyncio.create_task(client.generate([1, 2], {}))
        await asyncio.to_thread(looks.wait, 60)
        waiting = client.waiting
        service.faults = 2
        goes_on.set()
        assert (await asked).ids == [5, 6, 7]
        assert (waiting, client.waiting) == (1, 0)


async def test_a_request_that_begins_while_no_engine_serves_waits_as_others_do(monkeypatch):
    monkeypatch.setattr("slime_retool.rollout.engine_client.SERVING_POLL_SECONDS", 0.01)

    def come_back_later(service: Service) -> None:
        service.serving = service.looks > 2

    async with kept([lost], come_back_later) as (client, service):
        service.serving, service.faults = False, 2
        assert (await client.generate([1, 2], {})).ids == [5, 6, 7]


async def test_a_request_never_goes_to_a_router_that_was_replaced_before():
    async with kept([], lambda service: None) as (client, service):
        client._url = "http://127.0.0.1:1"  # where it was when the client was made
        assert (await client.generate([1, 2], {})).ids == [5, 6, 7]
    assert service.looks == 0


async def test_the_end_of_the_service_is_an_error_of_its_own():
    def over(service: Service) -> None:
        raise ServerError("no further replacement")

    async with kept([lost], over) as (client, _):
        with pytest.raises(ServerError, match="no further replacement"):
            await client.generate([1, 2], {})


async def test_requests_that_fail_together_share_a_look():
    answers = [lost] * 8

    def died(service: Service) -> None:
        while answers:
            time.sleep(0.01)
        time.sleep(0.2)  # and have come back
        service.faults += 1

    async with kept(answers, died) as (client, service):
        await asyncio.gather(*(client.generate([1, 2], {}) for _ in range(8)))
    assert 1 <= service.looks <= 2
