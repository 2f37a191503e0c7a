"""Token ids in, token ids and their log-probs out: the HTTP client of the router (or of one SGLang server).

Nothing is decoded and encoded again, and nothing is made up: a reply without a finite log-prob for each id is an
EngineError.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass
from typing import Any

import aiohttp

from slime_retool.errors import EngineError
from slime_retool.protocols import Completion

BACKOFF_SECONDS = 0.5
BACKOFF_LIMIT_SECONDS = 10.0
UNNAMED_VERSION = "default"
"""What a server that others started reports before the first weight update; 0 here."""
ROUTING_HEADER = "X-SMG-Routing-Key"
"""Names the sample to sglang-router, whose `manual` policy then keeps its turns on one engine."""


@dataclass(slots=True)
class EngineStats:
    """What a client has asked for since it was made, or since `take_stats`."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class RouterClient:
    """`GenerationEngine` over HTTP. Make it inside the event loop that uses it, and `aclose` it there."""

    def __init__(
        self, url: str, *, concurrency: int, timeout: float, retries: int, backoff: float = BACKOFF_SECONDS
    ) -> None:
        """
        Args:
            url: of the router, e.g. "http://127.0.0.1:30000".
            concurrency: requests in flight at once; further ones wait here.
            timeout: seconds one request may take, waiting for a free place not counted.
            retries: further tries after a connection error or an HTTP 5xx reply; a timeout is not tried again.
            backoff: seconds before the first further try, doubled each time (with jitter, at most 10).
        """
        self.url = url.rstrip("/")
        self._places = asyncio.Semaphore(concurrency)
        self._timeout, self._retries, self._backoff = timeout, retries, backoff
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout),
        )
        self._stats = EngineStats()

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None
    ) -> Completion:
        """Continue `input_ids`; `sampling_params` are SGLang's. Raises EngineError, see the class and the module."""
        body = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True, "stream": False}
        headers = {} if session is None else {ROUTING_HEADER: session}
        self._stats.requests += 1
        async with self._places:
            reply = await self._post("/generate", body, headers)
        completion = parse_completion(reply)
        self._stats.prompt_tokens += completion.prompt_tokens
        self._stats.cached_tokens += completion.cached_tokens
        self._stats.completion_tokens += len(completion.ids)
        return completion

    async def prompt_log_probs(self, input_ids: list[int]) -> list[float]:
        """Log-probs of the given tokens at temperature 1, 0.0 for the first, without generating. Raises EngineError."""
        body = {
            "input_ids": input_ids,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
        }
        self._stats.requests += 1
        async with self._places:
            reply = await self._post("/generate", body, {})
        return parse_prompt_log_probs(reply, input_ids)

    def take_stats(self) -> EngineStats:
        """The metrics since the last call; starts counting anew."""
        stats, self._stats = self._stats, EngineStats()
        return stats

    async def aclose(self) -> None:
        await self._session.close()

    async def __aenter__(self) -> RouterClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        for attempt in range(self._retries + 1):
            if attempt:
                self._stats.retries += 1
                delay = min(self._backoff * 2 ** (attempt - 1), BACKOFF_LIMIT_SECONDS)
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            try:
                async with self._session.post(self.url + path, json=body, headers=headers) as response:
                    if response.status == 200:
                        return await response.json(content_type=None)
                    text = (await response.text())[:500].strip()
                    problem = f"HTTP {response.status}: {text}"
                    if response.status < 500:
                        break
            except asyncio.TimeoutError as error:
                raise EngineError(
                    f"{self.url}{path} did not answer within {self._timeout:g} s; see --rollout-request-timeout"
                ) from error
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            except ValueError as error:
                raise EngineError(f"{self.url}{path} answered with something that is not JSON: {error}") from error
        raise EngineError(f"{self.url}{path} failed at try {attempt + 1} of {self._retries + 1}: {problem}")


def parse_completion(reply: Any) -> Completion:
    """Check one reply of SGLang's `/generate` and take it apart. Raises EngineError when something is missing."""
    try:
        meta = reply["meta_info"]
        ids = list(reply["output_ids"])
        finish = meta["finish_reason"]["type"]
        version = 0 if meta["weight_version"] == UNNAMED_VERSION else int(meta["weight_version"])
        # A request that is aborted before it ran comes back without these counts.
        counts = {"prompt_tokens": 0, "cached_tokens": 0, **meta} if finish == "abort" else meta
        prompt_tokens, cached_tokens = int(counts["prompt_tokens"]), int(counts["cached_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the engine's reply cannot be used: {type(error).__name__}: {error}") from error
    if finish not in ("stop", "length", "abort"):
        raise EngineError(f"the engine ended a request for an unknown reason {finish!r}")
    entries = meta.get("output_token_logprobs")
    if entries is None and ids:
        raise EngineError("the engine returned no log-probs although return_logprob was set")
    entries = entries or []
    if [entry[1] for entry in entries] != ids:
        raise EngineError(f"the engine returned {len(ids)} tokens but log-probs of {len(entries)}, or of other tokens")
    log_probs = [entry[0] for entry in entries]
    for token, value in zip(ids, log_probs, strict=True):
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise EngineError(f"the engine returned the log-prob {value!r} for token {token}; it must be finite")
    return Completion(
        ids=ids,
        log_probs=[float(value) for value in log_probs],
        finish_reason=finish,
        weight_version=version,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
    )


def parse_prompt_log_probs(reply: Any, input_ids: list[int]) -> list[float]:
    """Log-probs of `input_ids` from a reply of `/generate`, 0.0 for the first. Raises EngineError when some lack."""
    try:
        entries = [(entry[0], entry[1]) for entry in reply["meta_info"]["input_token_logprobs"]]
    except (KeyError, TypeError, IndexError) as error:
        raise EngineError(f"the engine's reply cannot be used: {type(error).__name__}: {error}") from error
    # SGLang reports the vocabulary's last id, and any beyond, as 0.
    same = len(entries) == len(input_ids) and all(
        got in (sent, 0) for (_, got), sent in zip(entries, input_ids, strict=True)
    )
    if not same:
        raise EngineError(
            f"{len(input_ids)} tokens were sent, log-probs of {len(entries)} or of other tokens came back"
        )
    values = [value for value, _ in entries[1:]]  # nothing precedes the first
    for token, value in zip(input_ids[1:], values, strict=True):
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise EngineError(f"the engine returned the log-prob {value!r} for token {token}; it must be finite")
    return [0.0, *map(float, values)]
