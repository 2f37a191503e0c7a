"""The real sglang-router between the client and two scripted engines."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from test_rollout_client import reply

from slime_retool.config import Config
from slime_retool.engine import router as router_module
from slime_retool.engine.router import RouterProcess
from slime_retool.rollout.engine_client import ROUTING_HEADER, RouterClient


@asynccontextmanager
async def scripted_engine(name: str, asked: dict[str, list[str]], delay: float = 0) -> AsyncIterator[str]:
    """Answers anything; notes under each routing key that this engine was asked. Yields its URL.

    delay: seconds until a question about itself is answered.
    """

    async def generate(request: web.Request) -> web.Response:
        asked[request.headers[ROUTING_HEADER]].append(name)
        await asyncio.sleep(0.01 + 0.0005 * int(request.headers[ROUTING_HEADER]))
        return web.json_response(reply([len(asked), 6, 7]))

    async def about(request: web.Request) -> web.Response:
        await asyncio.sleep(delay)
        return web.json_response({"model_path": "scripted"})

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get("/{path:.*}", about)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


async def test_all_turns_of_a_sample_go_to_one_engine_and_samples_are_shared_out_evenly(tmp_path: Path):
    """Also where every prompt begins with the same long system message."""
    asked: dict[str, list[str]] = defaultdict(list)
    num_samples, num_turns, system = 200, 4, [9] * 400

    async def sample(client: RouterClient, index: int) -> None:
        ids = [*system, index, index]
        for _ in range(num_turns):
            completion = await client.generate(ids, {"max_new_tokens": 8}, session=str(index))
            ids = [*ids, *completion.ids, 1, 2]

    async with scripted_engine("a", asked) as first, scripted_engine("b", asked) as second:
        config = Config(output_dir=str(tmp_path))
        router = await asyncio.to_thread(RouterProcess, config, [first, second])
        try:
            async with RouterClient(router.url, concurrency=1000, timeout=30, retries=0) as client:
                await asyncio.gather(*(sample(client, index) for index in range(num_samples)))
        finally:
            await asyncio.to_thread(router.stop)
    assert len(asked) == num_samples and all(len(engines) == num_turns for engines in asked.values())
    assert [key for key, engines in asked.items() if len(set(engines)) > 1] == []
    assert 80 <= sum(engines[0] == "a" for engines in asked.values()) <= 120


async def test_a_router_begins_with_all_engines_and_does_not_wait_long_for_one_that_says_nothing(
    tmp_path: Path, monkeypatch, caplog
):
    """Samples that begin while one engine is known would stay there, all of them."""
    asked: dict[str, list[str]] = defaultdict(list)

    async def joined(*urls: str) -> set[str]:
        router = await asyncio.to_thread(RouterProcess, Config(output_dir=str(tmp_path)), urls)
        try:
            return set(await asyncio.to_thread(router._workers))
        finally:
            await asyncio.to_thread(router.stop)

    async with (
        scripted_engine("a", asked) as first,
        scripted_engine("b", asked, delay=0.5) as late,
        scripted_engine("c", asked, delay=600) as silent,
    ):
        assert await joined(first, late) == {first, late} and "all engines" not in caplog.text
        monkeypatch.setattr(router_module, "ADMIN_SECONDS", 4.0)
        assert await joined(first, silent) == {first}
    assert "the router has not taken all engines in within 4 s" in caplog.text
