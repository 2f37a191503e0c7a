"""Token ids in, token ids and their log-probs out: the HTTP client of the router (or of one SGLang server).

Nothing is decoded and encoded again, and nothing is made up: a reply without a finite log-prob for each id is an
EngineError.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from slime_retool.engine.upkeep import EngineService
from slime_retool.errors import EngineError
from slime_retool.protocols import CachingEngine, Completion
from slime_retool.rollout.json_client import JsonClient
from slime_retool.rollout.routing import RouterShape
from slime_retool.types import RoutedExperts, Span, timed

UNNAMED_VERSION = "default"
"""What a server that others started reports before the first weight update; 0 here."""
ROUTING_HEADER = "X-SMG-Routing-Key"
"""Names the sample to sglang-router, whose `manual` policy then keeps its turns on one engine."""


SERVING_POLL_SECONDS = 0.2
NONE_SERVES = -1
"""In the place of a count of faults: the last engine had left already, so that a request fails for that."""


class RouterClient(JsonClient):
    """`GenerationEngine` over HTTP. `url` is the router's, or a server's.

    With a `service` whose engines are replaced when they die, what one of them had not answered is asked again of
    the others, with the same ids, and as often as that happens; while none serves, requests wait. Such a request
    fails only as the service does: with ServerError, or TrainerDied where no engine can get weights.
    """

    def __init__(
        self,
        url: str,
        *,
        service: EngineService | None = None,
        experts: RouterShape | None = None,
        adapter: str | None = None,
        **limits: Any,
    ) -> None:
        """`experts`: have the engine return which it chose; `url` is then a server's, where there is no `service`.

        `adapter`: the LoRA adapter that the engine is to apply. `limits`: those of `JsonClient`.
        """
        super().__init__(url, **limits)
        self._service, self._experts = service, experts
        self._body: dict[str, Any] = {"return_logprob": True, "stream": False}
        """Part of every request."""
        if adapter is not None:
            self._body["lora_path"] = adapter
        self._unnamed = count()
        self.waiting = 0
        """Requests that are at no engine: none serves, or they wait for a look at the engines."""
        self._one_look = asyncio.Lock()
        self._looked = -math.inf

    def _base(self) -> str:
        return self._url if self._service is None else self._service.url

    def _faults(self) -> int:
        if self._service is None:
            return 0
        return self._service.faults if self._service.serving else NONE_SERVES

    async def _fault_since(self, faults: int) -> bool:
        if self._service is None:
            return False
        self.waiting += 1  # a look waits for the end of an update, which waits for the requests that run
        try:
            await self._look()
        finally:
            self.waiting -= 1
        await self._until_serving()
        moved = self._service.faults != faults
        self._stats.moved += moved
        return moved

    async def _until_serving(self) -> None:
        assert self._service is not None
        self.waiting += 1
        try:
            while not self._service.serving:
                await asyncio.sleep(SERVING_POLL_SECONDS)
                await self._look()
        finally:
            self.waiting -= 1

    async def _engine_of(self, session: str | None) -> str:
        """The engine for a request that asks for experts: sglang-router 0.3.2 takes that out of a request.

        As with the router a sample stays with its engine, and samples are shared out evenly: they take turns, by their
        number. Where an engine does not serve, the next one takes its samples until it does again.
        """
        if self._service is None:
            return self._url
        number = int(session) if session is not None and session.isdecimal() else next(self._unnamed)
        while True:
            addresses = self._service.addresses
            own = number % len(addresses)
            for address in (*addresses[own:], *addresses[:own]):
                if address is not None:
                    return address
            await self._until_serving()

    async def _look(self) -> None:
        """Let the service look at its processes once more; one look is for all requests that failed before it began."""
        assert self._service is not None
        asked = time.monotonic()
        async with self._one_look:
            if self._looked <= asked:
                self._looked = time.monotonic()
                await asyncio.to_thread(self._service.look)

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        *,
        session: str | None = None,
        cache_key: str | None = None,
        routed_from: int | None = 0,
    ) -> Completion:
        """Continue `input_ids`; `sampling_params` are SGLang's. Raises EngineError, see the class and the module.

        `routed_from`: the first token of which the chosen experts are wanted, where they are returned; None: of none.
        """
        body = self._body | {"input_ids": input_ids, "sampling_params": sampling_params}
        if cache_key is not None:
            body["extra_key"] = cache_key
        base = None
        if self._experts is not None and routed_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routed_from}
            base = partial(self._engine_of, session)
        headers = {} if session is None else {ROUTING_HEADER: session}
        spans: list[Span] = []
        with timed("request", spans) as span:
            reply = await self.post("/generate", body, headers, base)
        completion = replace(parse_completion(reply), spans=spans)
        if self._experts is not None and routed_from is not None:
            routed = parse_routed_experts(reply, self._experts, len(input_ids), routed_from, len(completion.ids))
            completion = replace(completion, routed_experts=routed, routed_from=routed_from)
        span |= {
            "status": "interrupted" if completion.finish_reason == "abort" else "ok",
            "tokens": len(completion.ids),
            "prompt_tokens": completion.prompt_tokens,
            "cached_tokens": completion.cached_tokens,
        }
        self._stats.prompt_tokens += completion.prompt_tokens
        self._stats.cached_tokens += completion.cached_tokens
        self._stats.completion_tokens += len(completion.ids)
        return completion

    async def prompt_log_probs(self, input_ids: list[int]) -> list[float]:
        """Log-probs of the given tokens at temperature 1, 0.0 for the first, without generating. Raises EngineError."""
        body = self._body | {
            "input_ids": input_ids,
            "sampling_params": {"max_new_tokens": 0},
            "logprob_start_len": 0,
        }
        return parse_prompt_log_probs(await self.post("/generate", body), input_ids)


@dataclass(frozen=True, slots=True)
class WithoutRouting:
    """The engine as evaluation sees it: it returns no experts."""

    engine: CachingEngine

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None, **options: Any
    ) -> Completion:
        """See `CachingEngine.generate`."""
        return await self.engine.generate(
            input_ids, sampling_params, session=session, **options | {"routed_from": None}
        )


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
    if finish == "abort":  # ended between a token and its log-prob, perhaps: what has both counts
        entries, ids = entries[: len(ids)], ids[: len(entries)]
    if [entry[1] for entry in entries] != ids:
        raise EngineError(f"the engine returned {len(ids)} tokens but log-probs of {len(entries)}, or of other tokens")
    return Completion(
        ids=ids,
        log_probs=_finite([entry[0] for entry in entries], ids),
        finish_reason=finish,
        weight_version=version,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
    )


def parse_routed_experts(
    reply: dict[str, Any], shape: RouterShape, num_input: int, start: int, num_ids: int
) -> RoutedExperts | None:
    """The experts chosen for the tokens from `start` on, of a reply that `parse_completion` has taken `num_ids` from.

    None for a request that ended before it ran, or in the queue after it was retracted: there are none then. Raises
    EngineError when they are missing otherwise, or not as many as the tokens.
    """
    text, aborted = reply["meta_info"].get("routed_experts"), reply["meta_info"]["finish_reason"]["type"] == "abort"
    if aborted and (text is None or not num_ids):
        return None
    # Of the last token there is nothing: it was never read.
    routed = shape.parse(text, num_input + len(reply["output_ids"]) - 1 - start)
    return routed[: num_input + num_ids - 1 - start]


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
    return [0.0, *_finite(values, input_ids[1:])]


def _finite(log_probs: list[Any], ids: list[int]) -> list[float]:
    for token, value in zip(ids, log_probs, strict=True):
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise EngineError(f"the engine returned the log-prob {value!r} for token {token}; it must be finite")
    return [float(value) for value in log_probs]
