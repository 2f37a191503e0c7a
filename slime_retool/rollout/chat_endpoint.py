"""The client of an OpenAI-compatible `/chat/completions` endpoint, for evaluating models that we do not serve."""

from __future__ import annotations

import logging
import re
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from slime_retool.errors import EngineError
from slime_retool.protocols import ChatReply
from slime_retool.rollout.json_client import JsonClient, Refused
from slime_retool.types import Message, ToolSchema

logger = logging.getLogger(__name__)

BACKOFF_SECONDS, BACKOFF_LIMIT_SECONDS = 1.0, 60.0
CONTEXT_FULL = re.compile(
    r"context[_ ](length|window|size|limit)|(prompt|input)\b.{0,60}too (long|large)|number of tokens allowed",
    re.IGNORECASE | re.DOTALL,
)
"""What servers say of a conversation that leaves no room for a reply of the length asked for."""
REASONING = ("reasoning_content", "reasoning", "reasoning_details")
"""Where a message holds the model's thoughts, which some APIs want to have back with its tool calls."""


class ChatEndpoint(JsonClient):
    """`protocols.ChatEngine` over HTTP."""

    def __init__(
        self, url: str, model: str, *, api_key: str | None, concurrency: int, timeout: float, retries: int
    ) -> None:
        """`url`: up to and with the version, e.g. "https://api.example.com/v1". `model`: the endpoint's name of it.
        The others are `JsonClient`'s."""
        super().__init__(
            url,
            concurrency=concurrency,
            timeout=timeout,
            retries=retries,
            backoff=BACKOFF_SECONDS,
            backoff_limit=BACKOFF_LIMIT_SECONDS,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            use_proxies=not _is_near(url),
        )
        self._model = model
        self._limit_name = "max_tokens"
        """What this endpoint calls the bound of a reply's tokens."""

    async def chat(
        self, messages: list[Message], sampling_params: dict[str, Any], tools: list[ToolSchema]
    ) -> ChatReply:
        """See `ChatEngine.chat`. Of the sampling parameters those that such APIs know are sent; top_k and
        stop_token_ids, which OpenAI's own does not know, where they are set."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "temperature": sampling_params["temperature"],
            "top_p": sampling_params["top_p"],
        }
        if sampling_params.get("top_k", -1) > 0:
            body["top_k"] = sampling_params["top_k"]
        if tools:
            body["tools"] = tools
        body |= {name: sampling_params[name] for name in ("stop", "stop_token_ids") if sampling_params.get(name)}
        try:
            try:
                return _parse(await self._ask(body, sampling_params["max_new_tokens"]))
            except Refused as error:
                if not CONTEXT_FULL.search(str(error)):
                    raise
                # Less than what was asked for may still fit: as much as there is.
                return _parse(await self.post("/chat/completions", body))
        except Refused as error:
            if not CONTEXT_FULL.search(str(error)):
                raise
            logger.info("a full context ends an answer of %s: %s", self._model, error)
            return ChatReply(content="", finish_reason="length")

    async def _ask(self, body: dict[str, Any], limit: int) -> Any:
        """The reply, of at most `limit` tokens. Newer models know that bound by another name, which is remembered."""
        name, newer = self._limit_name, "max_completion_tokens"
        try:
            return await self.post("/chat/completions", body | {name: limit})
        except Refused as error:
            if name == newer or newer not in str(error) or CONTEXT_FULL.search(str(error)):
                raise
            self._limit_name = newer
        return await self.post("/chat/completions", body | {newer: limit})


def _is_near(url: str) -> bool:
    """Whether a server is on this host or network, which a proxy would not reach: a private address, a bare name."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_private
    except ValueError:
        return "." not in host


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
            reasoning={name: message[name] for name in REASONING if message.get(name)},
            finish_reason=choice.get("finish_reason") or "stop",
            completion_tokens=int((reply.get("usage") or {}).get("completion_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"the endpoint's reply cannot be used: {type(error).__name__}: {error}") from error
