"""The client of an OpenAI-compatible `/chat/completions` endpoint, for evaluating models that we do not serve."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp

from slime_retool.errors import EngineError
from slime_retool.protocols import ChatReply
from slime_retool.types import Message, ToolSchema

BACKOFF_SECONDS, BACKOFF_LIMIT_SECONDS = 1.0, 60.0


class ChatEndpoint:
    """`tool_use.chat_loop.ChatEngine` over HTTP. Make it inside the event loop that uses it, and `aclose` it there."""

    def __init__(
        self, url: str, model: str, *, api_key: str | None, concurrency: int, timeout: float, retries: int
    ) -> None:
        """
        Args:
            url: up to and with the version, e.g. "https://api.example.com/v1".
            model: the endpoint's name of it.
            retries: further tries after a connection error, HTTP 429 or 5xx; waits grow, `Retry-After` is kept.
        """
        self._url = url.rstrip("/") + "/chat/completions"
        self._model, self._retries, self._timeout = model, retries, timeout
        self._places = asyncio.Semaphore(concurrency)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # `concurrency` is the limit
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout),
        )

    async def chat(
        self, messages: list[Message], sampling_params: dict[str, Any], tools: list[ToolSchema]
    ) -> ChatReply:
        """See `ChatEngine.chat`. Of the sampling parameters those that the API knows are sent."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "temperature": sampling_params["temperature"],
            "top_p": sampling_params["top_p"],
            "max_tokens": sampling_params["max_new_tokens"],
        }
        if tools:
            body["tools"] = tools
        if sampling_params.get("stop"):
            body["stop"] = sampling_params["stop"]
        async with self._places:
            return _parse(await self._post(body))

    async def aclose(self) -> None:
        await self._session.close()

    async def _post(self, body: dict[str, Any]) -> Any:
        wait = BACKOFF_SECONDS
        for attempt in range(self._retries + 1):
            asked = 0.0
            try:
                async with self._session.post(self._url, json=body) as response:
                    if response.status == 200:
                        return await response.json(content_type=None)
                    problem = f"HTTP {response.status}: {(await response.text())[:500].strip()}"
                    if response.status != 429 and response.status < 500:
                        raise EngineError(f"{self._url} refused the request: {problem}")
                    after = response.headers.get("Retry-After", "")
                    asked = float(after) if after.isdigit() else 0.0
            except asyncio.TimeoutError as error:
                raise EngineError(f"{self._url} did not answer within {self._timeout:g} s") from error
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            except ValueError as error:
                raise EngineError(f"{self._url} answered with something that is not JSON: {error}") from error
            if attempt < self._retries:
                await asyncio.sleep(max(asked, min(wait, BACKOFF_LIMIT_SECONDS) * random.uniform(0.5, 1.0)))
                wait *= 2
        raise EngineError(f"{self._url} failed {self._retries + 1} times, the last with {problem}")


def _parse(reply: Any) -> ChatReply:
    try:
        choice = reply["choices"][0]
        message = choice["message"]
        content, calls = message.get("content") or "", list(message.get("tool_calls") or [])
        if not isinstance(content, str) or not all(isinstance(call["function"], dict) for call in calls):
            raise TypeError("content must be text, and every tool call must hold a function")
        return ChatReply(
            content=content,
            tool_calls=calls,
            finish_reason=choice.get("finish_reason") or "stop",
            completion_tokens=int((reply.get("usage") or {}).get("completion_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"the endpoint's reply cannot be used: {type(error).__name__}: {error}") from error
