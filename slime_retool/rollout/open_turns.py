"""An engine whose weights may change within a turn: what an update interrupts goes on by itself.

An update ends running requests (finish reason "abort"). Each comes back with the ids and log-probs it has; once the
engine has its new weights, prompt and ids are sent again, and the hook that asked is answered when the turn is whole.
So hooks know nothing of updates, and every token keeps the log-prob and the weight version it was sampled with.

The engine also keeps a record of each conversation (`session`), which a checkpoint holds. After a resume the hook runs
from the start again: requests that its record knows are answered from there, and its tool calls, which run once more,
find the same variables. From the first request that differs (a tool that answered otherwise) the engine writes anew.
"""

from __future__ import annotations

import base64
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from slime_retool.protocols import CachingEngine, Completion
from slime_retool.rollout.places import Places
from slime_retool.rollout.routing import pack_experts, unpack_experts
from slime_retool.types import NO_VERSION, RoutedExperts, Span, grown

MOST_URGENT = -1
"""Priority of what a whole run waits for: evaluation."""


@dataclass(slots=True)
class Turn:
    """One turn in the tokens of its conversation."""

    start: int
    """Tokens before it."""
    end: int
    finish_reason: str = ""
    """"" while it is being written."""


@dataclass(slots=True)
class Record:
    """What the engine wrote of one conversation. Its lists have one entry per token, those of the prompt included."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # 0.0 where the engine wrote nothing
    versions: list[int] = field(default_factory=list)  # NO_VERSION where the engine wrote nothing
    routed_experts: RoutedExperts | None = None
    """Where the engine returns them. What is read again after an update keeps its first experts."""
    turns: list[Turn] = field(default_factory=list)
    replayed: int = 0
    """Turns that the hook has been given; further ones are from a checkpoint."""
    interruptions: int = 0
    spans: list[Span] = field(default_factory=list)
    """Of the turn that is being written, until its hook is answered."""

    @property
    def oldest(self) -> int | None:
        """The weight version that wrote its first token; None before that."""
        return self.versions[self.turns[0].start] if self.turns and self.turns[0].end > self.turns[0].start else None

    def open_turn(self, input_ids: list[int]) -> Turn:
        """The turn that continues `input_ids`: the next one of the record, where it does, else a new one."""
        if self.replayed < len(self.turns):
            turn = self.turns[self.replayed]
            if turn.start == len(input_ids) and self.tokens[: turn.start] == input_ids:
                self.replayed += 1
                return turn
            del self.turns[self.replayed :]
        known = self.turns[-1].end if self.turns else 0
        if self.tokens[:known] != input_ids[:known]:  # a hook that rewrites its conversation
            self.turns, known = [], 0
        self.tokens[known:] = input_ids[known:]
        self.log_probs[known:] = [0.0] * (len(input_ids) - known)
        self.versions[known:] = [NO_VERSION] * (len(input_ids) - known)
        if self.routed_experts is not None:
            self.routed_experts.resize(known)
            self.routed_experts.resize(len(input_ids))
        turn = Turn(len(input_ids), len(input_ids))
        self.turns.append(turn)
        self.replayed = len(self.turns)
        return turn

    def append(self, turn: Turn, completion: Completion, keep: int | None = None) -> None:
        """Add what came back to the turn that is being written; of it and before it only `keep` tokens of the turn."""
        self.tokens += completion.ids
        self.log_probs += completion.log_probs
        self.versions += completion.token_versions
        self.spans += completion.spans
        if keep is not None:
            for values in (self.tokens, self.log_probs, self.versions):
                del values[turn.start + keep :]
        start, routed = completion.routed_from, completion.routed_experts
        self.routed_experts = grown(self.routed_experts, len(self.tokens), start, routed)
        turn.end = len(self.tokens)

    def completion(self, turn: Turn, prompt_tokens: int, cached_tokens: int, routed_from: int = 0) -> Completion:
        """The whole turn, as the hook is answered, with the experts of the tokens from `routed_from` on."""
        spans, self.spans = self.spans, []
        versions = self.versions[turn.start : turn.end]
        routed = None if self.routed_experts is None else self.routed_experts[routed_from : turn.end]
        return Completion(
            ids=self.tokens[turn.start : turn.end],
            log_probs=self.log_probs[turn.start : turn.end],
            finish_reason=turn.finish_reason,
            weight_version=versions[-1] if versions else 0,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            versions=versions,
            routed_experts=routed,
            routed_from=routed_from,
            spans=spans,
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; about 10 bytes a token, and the experts where they are kept."""
        return {
            "tokens": pack_ints(self.tokens),
            "log_probs": pack_floats(self.log_probs),
            "versions": runs_of(self.versions),
            "turns": [[turn.start, turn.end, turn.finish_reason] for turn in self.turns],
            "routed_experts": pack_experts(self.routed_experts),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Record:
        return cls(
            tokens=unpack_ints(state["tokens"]),
            log_probs=unpack_floats(state["log_probs"]),
            versions=values_of(state["versions"]),
            turns=[Turn(*turn) for turn in state["turns"]],
            routed_experts=unpack_experts(state.get("routed_experts")),  # a checkpoint of before may have none
        )


@dataclass(slots=True)
class UpdateCounts:
    """What updates cost since the last look."""

    interrupted: int = 0
    """Requests that an update ended."""
    continued: int = 0
    """Requests that went on after one."""
    reread_tokens: int = 0
    """Tokens that the engine read anew for those, its cache being gone."""


class OpenTurns:
    """`GenerationEngine` over another one; see the module. For one event loop."""

    def __init__(
        self,
        engine: CachingEngine,
        *,
        concurrency: int,
        tokenizer: Any,
        keeps_cache: bool,
        returns_experts: bool = False,
    ) -> None:
        """
        Args:
            concurrency: requests at once.
            tokenizer: decodes what an interruption may have cut a stop text in.
            keeps_cache: an update leaves the engine its cache. Then a conversation goes on without being read again,
                and finds what was read of it by the weights it began with, or later ones; no conversation finds what
                was read before it began.
            returns_experts: the engine returns those that it chose.
        """
        self.engine, self._keeps_cache, self._version = engine, keeps_cache, 0
        self._returns_experts = returns_experts
        self.places = Places(concurrency)
        self._tokenizer = tokenizer
        self._records: dict[str, Record] = {}
        self._counts = UpdateCounts()

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        *,
        session: str | None = None,
        routed_from: int = 0,
    ) -> Completion:
        """Continue `input_ids`, over as many updates as it takes. Conversations drawn earlier come first."""
        record = Record() if session is None else self._records.setdefault(session, Record())
        priority = int(session) if session is not None and session.isdecimal() else 0
        return await self._write(record, input_ids, sampling_params, session, priority, routed_from)

    async def generate_aside(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None
    ) -> Completion:
        """`generate` for evaluation: no record is kept, no experts are returned, and it goes before all others."""
        session = None if session is None else f"eval-{session}"
        return await self._write(Record(), input_ids, sampling_params, session, MOST_URGENT, None)

    async def _write(
        self,
        record: Record,
        input_ids: list[int],
        params: dict[str, Any],
        session: str | None,
        priority: int,
        routed_from: int | None,
    ) -> Completion:
        limit, turn = params["max_new_tokens"], record.open_turn(input_ids)
        stops = params.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        first: Completion | None = None
        while not turn.finish_reason:
            written = turn.end - turn.start
            if written >= limit:  # the update came with the last token
                turn.finish_reason = "length"
                break
            rest = {**params, "max_new_tokens": limit - written}
            async with self.places.place(priority):
                # A copy: the engine must not see ids that are appended while it still holds the request.
                tokens = record.tokens[: turn.end]
                options: dict[str, Any] = {}
                if self._keeps_cache:
                    options["cache_key"] = str(self._version if record.oldest is None else record.oldest)
                if self._returns_experts:
                    known = 0 if record.routed_experts is None else record.routed_experts.first_unrouted
                    options["routed_from"] = None if routed_from is None else known
                part = await self.engine.generate(tokens, rest, session=session, **options)
            first = first or part
            if written:
                self._counts.continued += 1
                self._counts.reread_tokens += part.prompt_tokens - part.cached_tokens
            cut = self._stop_across(record.tokens[turn.start : turn.end], part.ids, stops) if written else None
            record.append(turn, part, cut)
            if cut is not None:
                turn.finish_reason = "stop"
            elif part.finish_reason == "abort":
                self._counts.interrupted += 1
                record.interruptions += 1
            else:
                turn.finish_reason = part.finish_reason
        return record.completion(
            turn,
            first.prompt_tokens if first else len(input_ids),
            first.cached_tokens if first else len(input_ids),
            routed_from or 0,
        )

    def _stop_across(self, before: Sequence[int], ids: Sequence[int], stops: Sequence[str]) -> int | None:
        """Tokens of the turn up to a stop text that began before an interruption and ended after it; else None.

        The engine looks for stop texts within one request.
        """
        if not stops:
            return None
        longest = max(map(len, stops)) - 1  # characters, and so tokens, that it may have on either side
        start = max(0, len(before) - longest)
        tail = list(before[start:])
        for number, token in enumerate(ids[:longest], start=1):
            tail.append(token)
            text = self._tokenizer.decode(tail, skip_special_tokens=False)
            if any(stop in text for stop in stops):
                return len(before) + number
        return None

    # Updates

    def hold(self) -> None:
        """Send nothing more until `let_go`."""
        self.places.hold()

    def let_go(self, version: int) -> None:
        """The engine goes on generating, with these weights."""
        self._version = version
        self.places.let_go()

    def take_counts(self) -> UpdateCounts:
        """The counts since the last call."""
        counts, self._counts = self._counts, UpdateCounts()
        return counts

    # Records

    def record(self, session: str) -> Record | None:
        """What was written of a conversation until now."""
        return self._records.get(session)

    def restore(self, session: str, record: Record) -> None:
        """Go on with a conversation of a checkpoint."""
        self._records[session] = record

    def forget(self, session: str) -> None:
        """The conversation has ended."""
        self._records.pop(session, None)


@dataclass(frozen=True, slots=True)
class Aside:
    """The engine as evaluation sees it: see `OpenTurns.generate_aside`."""

    engine: OpenTurns

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None
    ) -> Completion:
        return await self.engine.generate_aside(input_ids, sampling_params, session=session)


def pack_ints(values: Sequence[int]) -> str:
    return _pack(array("i", values))


def pack_floats(values: Sequence[float]) -> str:
    """Log-probs, as the trainer gets them: single precision."""
    return _pack(array("f", values))


def unpack_ints(text: str) -> list[int]:
    return _unpack("i", text)


def unpack_floats(text: str) -> list[float]:
    return _unpack("f", text)


def runs_of(values: Sequence[int]) -> list[list[int]]:
    """[value, how often in a row] of a list with long runs."""
    return [[value, sum(1 for _ in run)] for value, run in groupby(values)]


def values_of(runs: Sequence[Sequence[int]]) -> list[int]:
    return [value for value, times in runs for _ in range(times)]


def _pack(values: array[Any]) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 1)).decode()


def _unpack(kind: str, text: str) -> list[Any]:
    values: array[Any] = array(kind)
    values.frombytes(zlib.decompress(base64.b64decode(text)))
    return values.tolist()
