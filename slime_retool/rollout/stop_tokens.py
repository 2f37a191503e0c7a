"""Stop texts, found here instead of by the engine.

SGLang decodes the last tokens of every request in every step to look for them: half of what its scheduler does with a
batch. Asked to stop at the few tokens in which such a text can end, it only compares numbers. Where the text is not
there after all (a ">" that closes nothing), the request goes on from the ids that it has. Each such request keeps the
whole batch waiting for its prefill, so an answer that repeats such a token is left to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from slime_retool.chat import TextCodec
from slime_retool.protocols import CachingEngine, Completion

MOST_TOKENS = 1000
"""More stop tokens than this are not sent with every request: the text ends like a good part of the vocabulary."""
FIRST_REQUESTS = 64
"""After so many, texts that cost more than one continued request each are left to the engine again."""
MOST_CONTINUED = 4
"""An answer that has gone on so often is left to the engine."""
ENGINE_ONLY = ("ignore_eos", "min_new_tokens")
"""With these SGLang does not stop at tokens, or keeps them from being sampled."""


@dataclass(slots=True)
class _Use:
    """How one set of stop texts has fared."""

    tokens: frozenset[int]
    requests: int = 0
    continued: int = 0

    @property
    def pays(self) -> bool:
        return self.requests < FIRST_REQUESTS or self.continued <= self.requests


class StopTokens:
    """A `CachingEngine` over another one; see the module. Byte-level tokenizers only: of others it changes nothing."""

    def __init__(self, engine: CachingEngine, tokenizer: Any) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._uses: dict[tuple[str, ...], _Use | None] = {}

    @cached_property
    def _codec(self) -> TextCodec:
        return TextCodec(self._tokenizer)

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None, **options: Any
    ) -> Completion:
        """See `CachingEngine.generate`. Ends after the token that completes one of `sampling_params["stop"]`."""
        texts = sampling_params.get("stop") or ()
        texts = (texts,) if isinstance(texts, str) else tuple(texts)
        use = self._use(texts) if texts and not any(map(sampling_params.get, ENGINE_ONLY)) else None
        if use is None or not use.pays:
            return await self._engine.generate(input_ids, sampling_params, session=session, **options)
        use.requests += 1
        given, limit = sampling_params.get("stop_token_ids") or [], sampling_params["max_new_tokens"]
        params = {name: value for name, value in sampling_params.items() if name != "stop"}
        params["stop_token_ids"] = [*given, *use.tokens.difference(given)]
        whole: Completion | None = None
        continued = 0
        while True:
            ids = [] if whole is None else whole.ids
            # The engine knows only what it writes itself, so no text may have begun before.
            by_engine = continued >= MOST_CONTINUED and not self._has_begun(ids, texts)
            rest = {**(sampling_params if by_engine else params), "max_new_tokens": limit - len(ids)}
            part = await self._engine.generate([*input_ids, *ids], rest, session=session, **options)
            whole = part if whole is None else _joined(whole, part)
            if by_engine:
                return whole
            last = part.ids[-1] if part.finish_reason == "stop" and part.ids else None
            if last not in use.tokens or last in given or self._ends_with(whole.ids, texts):
                return whole
            if len(whole.ids) >= limit:
                return replace(whole, finish_reason="length")
            use.continued += 1
            continued += 1

    def _use(self, texts: tuple[str, ...]) -> _Use | None:
        if texts not in self._uses:
            tokens = self._codec.tokens_that_end(texts)
            self._uses[texts] = None if tokens is None or len(tokens) > MOST_TOKENS else _Use(tokens)
        return self._uses[texts]

    def _ends_with(self, ids: Sequence[int], texts: Sequence[str]) -> bool:
        """Whether the last id completes one of the texts."""
        tail = self._tail(ids, texts)
        return any(text.encode() in tail for text in texts)

    def _has_begun(self, ids: Sequence[int], texts: Sequence[str]) -> bool:
        """Whether the end of `ids` is the beginning of one of the texts."""
        tail = self._tail(ids, texts)
        return any(tail.endswith(text.encode()[:size]) for text in texts for size in range(1, len(text.encode())))

    def _tail(self, ids: Sequence[int], texts: Sequence[str]) -> bytes:
        """The end of `ids`, with at least as many bytes as the longest text, where there are so many."""
        return self._codec.bytes_of(ids[-max(len(text.encode()) for text in texts) :])  # no id is without a byte


def _joined(first: Completion, second: Completion) -> Completion:
    """Two answers, of which the second goes on where the first ended."""
    plain = first.versions is second.versions is None and first.weight_version == second.weight_version
    return replace(
        second,
        ids=first.ids + second.ids,
        log_probs=first.log_probs + second.log_probs,
        versions=None if plain else first.token_versions + second.token_versions,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        spans=first.spans + second.spans,
    )
