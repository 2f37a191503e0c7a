"""JSON over HTTP with further tries: what the clients of engines and of chat endpoints share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import orjson

from slime_retool.errors import EngineError

C = TypeVar("C", bound="JsonClient")


class Refused(EngineError):
    """The server does not take this request, however often it is sent: HTTP 4xx, but 429."""


@dataclass(slots=True)
class EngineStats:
    """What a client has asked for since it was made, or since `take_stats`."""

    requests: int = 0
    retries: int = 0
    moved: int = 0
    """Requests asked again because an engine or the router was replaced."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class JsonClient:
    """Make it inside the event loop that uses it, and `aclose` it there, or use it as an async context manager."""

    def __init__(
        self,
        url: str,
        *,
        concurrency: int,
        timeout: float,
        retries: int,
        backoff: float = 0.5,
        backoff_limit: float = 10.0,
        headers: dict[str, str] | None = None,
        use_proxies: bool = False,
    ) -> None:
        """
        Args:
            url: what paths are below, e.g. "http://127.0.0.1:30000".
            concurrency: requests in flight at once; further ones wait here.
            timeout: seconds one request may take, waiting for a free place not counted.
            retries: further tries after a connection error, HTTP 429 or 5xx; a timeout is not tried again.
            backoff: seconds before the first further try, doubled each time (with jitter, at most `backoff_limit`). A
                longer `Retry-After` is kept.
            use_proxies: go by the proxies that the environment names, and by its no_proxy.
        """
        self._url = url.rstrip("/")
        self.concurrency = concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._timeout, self._retries = timeout, retries
        self._backoff, self._backoff_limit = backoff, backoff_limit
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # `concurrency` is the limit
            headers=headers,
            trust_env=use_proxies,
            timeout=aiohttp.ClientTimeout(total=timeout),
        )
        self._stats = EngineStats()

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str] | None = None,
        base: Callable[[], Awaitable[str]] | None = None,
    ) -> Any:
        """The reply's JSON. Raises EngineError when there is none after all tries, Refused when more would not help.

        `base`: asked before each try what the path is below; without it the client's own `_base`.
        """
        url, problem, asked, attempt = "", "", 0.0, 0
        self._stats.requests += 1
        async with self._places:
            while attempt <= self._retries:
                if attempt:
                    self._stats.retries += 1
                    delay = min(self._backoff * 2 ** (attempt - 1), self._backoff_limit) * random.uniform(0.5, 1.0)
                    await asyncio.sleep(max(asked, delay))
                asked, before = 0.0, self._faults()
                url = (self._base() if base is None else await base()) + path
                try:
                    async with self._session.post(url, json=body, headers=headers) as response:
                        if response.status == 200:
                            return await _json_of(response)
                        problem = f"HTTP {response.status}: {(await response.text())[:500].strip()}"
                        if response.status != 429 and response.status < 500:
                            raise Refused(f"{url} refused the request: {problem}")
                        after = response.headers.get("Retry-After", "")
                        asked = float(after) if after.isdigit() else 0.0
                except asyncio.TimeoutError as error:
                    raise EngineError(
                        f"{url} did not answer within {self._timeout:g} s; see --rollout-request-timeout"
                    ) from error
                except aiohttp.ClientError as error:
                    problem = f"{type(error).__name__}: {error}"
                except ValueError as error:
                    raise EngineError(f"{url} answered with something that is not JSON: {error}") from error
                if await self._fault_since(before):
                    attempt = 0
                else:
                    attempt += 1
            raise EngineError(f"{url} failed {self._retries + 1} times, the last with {problem}")

    def _base(self) -> str:
        """What paths are below now."""
        return self._url

    def _faults(self) -> int:
        """How many servers have been replaced so far."""
        return 0

    async def _fault_since(self, faults: int) -> bool:
        """Whether a request that failed did so because its server is being replaced; then it is no try of its own."""
        return False

    def take_stats(self) -> EngineStats:
        """The counts since the last call; starts counting anew."""
        stats, self._stats = self._stats, EngineStats()
        return stats

    async def aclose(self) -> None:
        await self._session.close()

    async def __aenter__(self: C) -> C:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


async def _json_of(response: aiohttp.ClientResponse) -> Any:
    """Log-probs of thousands of tokens, by the parser that takes a third of the time of Python's. Python's reads what
    that one does not: NaN, Infinity, lone surrogates, other encodings. ValueError when neither does."""
    try:
        return orjson.loads(await response.read())
    except orjson.JSONDecodeError:
        return await response.json(content_type=None)
