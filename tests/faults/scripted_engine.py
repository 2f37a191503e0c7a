"""A server that answers as SGLang does, with tokens that follow from the ids it is sent: `scripted_engine.py PORT`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from aiohttp import web

SECONDS_PER_TOKEN = 0.02


def continuation(ids: list[int], count: int) -> list[int]:
    """The tokens that every engine writes after these."""
    return [(sum(ids) + position) % 250 for position in range(count)]


async def generate(request: web.Request) -> web.Response:
    body: dict[str, Any] = await request.json()
    count = body["sampling_params"]["max_new_tokens"]
    await asyncio.sleep(SECONDS_PER_TOKEN * count)
    ids = continuation(body["input_ids"], count)
    meta = {
        "finish_reason": {"type": "length"}, "weight_version": "1", "prompt_tokens": len(body["input_ids"]),
        "cached_tokens": 0, "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }  # fmt: skip
    return web.json_response({"output_ids": ids, "meta_info": meta})


async def about(request: web.Request) -> web.Response:
    return web.json_response({"model_path": "scripted"})


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get("/{path:.*}", about)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
