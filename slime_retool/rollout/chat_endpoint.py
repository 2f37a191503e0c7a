"""The client of an OpenAI-compatible `/chat/completions` endpoint, for evaluating models that we do not serve."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from slime_retool.errors import EngineError
from slime_retool.protocols import ChatReply
from slime_retool.rollout.json_client import JsonClient
from slime_retool.types import Message, ToolSchema

BACKOFF_SECONDS, BACKOFF_LIMIT_SECONDS = 1.0, 60.0


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
        return _parse(await self.post("/chat/completions", body))


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
            finish_reason=choice.get("finish_reason") or "stop",
            completion_tokens=int((reply.get("usage") or {}).get("completion_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"the endpoint's reply cannot be used: {type(error).__name__}: {error}") from error
