"""The data that flows from prompt to gradient. Pure Python: no torch, no numpy.

Letters: T tokens of one sample (prompt and response), R tokens of its response, L layers with experts, K experts that
its router chooses for a token in each of them.

A two-turn sample, as ids (prompt 2 tokens, call 3, observation 2, answer 2):

    tokens             p p | c c c | o o | a a      T = 9
    loss_mask                1 1 1   0 0   1 1      R = 7
    rollout_log_probs        x x x   0 0   x x      R = 7
    token_versions           1 1 2  -1-1   2 2      R = 7 (the weights were updated within the call)
    routed_experts     x x   x x x   x x   x -      T = 9 (the engine never read the last token)

Model output is never decoded and encoded again: `tokens` holds the ids that the engine returned.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Message = dict[str, Any]
"""One chat message: `role`, `content` and, where used, `tool_calls`."""

ROLES = ("system", "user", "assistant", "tool")
"""Of a message."""

ToolSchema = dict[str, Any]
"""One tool in OpenAI's function-calling form: `{"type": "function", "function": {name, description, parameters}}`."""

Span = dict[str, Any]
"""Something that took time: `name`, `start` (Unix time), `seconds`, `status` ("ok", or what went wrong), and more."""


@contextmanager
def timed(name: str, spans: list[Span]) -> Iterator[Span]:
    """Add the span of what is inside to `spans`; an exception's name is its status."""
    span: Span = {"name": name, "start": round(time.time(), 6), "seconds": 0.0, "status": "ok"}
    begin = time.monotonic()
    try:
        yield span
    except BaseException as error:
        span["status"] = type(error).__name__
        raise
    finally:
        span["seconds"] = round(time.monotonic() - begin, 6)
        spans.append(span)


NO_VERSION = -1
"""Weight version of a token that no engine wrote, or that a hook appended without one."""


OPEN_THOUGHT = "<think>"
STALENESS = "staleness"
"""Column of a train sample: updates between the weights that wrote a token and those it trains (--max-staleness)."""


@dataclass(slots=True)
class RoutedExperts:
    """The experts that the engine's router chose for T tokens, when it read them.

    An unrouted token (one that no engine read, or of which no choice came back) has the largest value of the type
    in all its L x K places.
    """

    ids: array[int]  # [T, L, K], row-major: array("B"), or array("H") beyond 255 experts
    layers: int
    """L: layers with experts, in the model's order; dense ones are left out."""
    top_k: int
    """K."""

    def __post_init__(self) -> None:
        if self.layers < 1 or self.top_k < 1 or self.ids.typecode not in "BH" or len(self.ids) % self.width:
            raise ValueError(
                f"routed experts must be bytes or 16-bit numbers, as many for each token as {self.layers} layers x "
                f"top {self.top_k}, got {len(self.ids)} of type {self.ids.typecode!r}"
            )

    @staticmethod
    def typecode(num_experts: int) -> str:
        """The type that holds the ids of this many experts and the mark of unrouted tokens. ValueError beyond it."""
        if num_experts > 65535:
            raise ValueError(f"routed experts are kept for at most 65535 experts, got {num_experts}")
        return "B" if num_experts <= 255 else "H"

    @classmethod
    def unrouted(cls, tokens: int, layers: int, top_k: int, typecode: str) -> RoutedExperts:
        """This many unrouted tokens."""
        ids = array(typecode, b"\xff" * (tokens * layers * top_k * array(typecode).itemsize))
        return cls(ids, layers, top_k)

    @property
    def width(self) -> int:
        """Entries of one token, L x K."""
        return self.layers * self.top_k

    @property
    def mark(self) -> int:
        """The value of every entry of an unrouted token; no expert has this id."""
        return 255 if self.ids.typecode == "B" else 65535

    @property
    def num_routed(self) -> int:
        """How many tokens the engine's choice is known of."""
        return len(self) - self.ids[:: self.width].count(self.mark)

    @property
    def first_unrouted(self) -> int:
        """The first token without the engine's choice; T where there is none."""
        firsts = self.ids[:: self.width]
        return firsts.index(self.mark) if self.mark in firsts else len(firsts)

    def __len__(self) -> int:
        """T."""
        return len(self.ids) // self.width

    def __getitem__(self, tokens: slice) -> RoutedExperts:
        """A copy of these tokens' entries."""
        start, stop, step = tokens.indices(len(self))
        if step != 1:
            raise ValueError(f"routed experts are sliced in steps of 1, got {step}")
        return RoutedExperts(self.ids[start * self.width : max(start, stop) * self.width], self.layers, self.top_k)

    def put(self, start: int, other: RoutedExperts) -> None:
        """Replace the entries from token `start` on by the `other`'s. ValueError where it has no place for them."""
        shapes = [(part.layers, part.top_k, part.ids.typecode) for part in (self, other)]
        if shapes[0] != shapes[1] or not 0 <= start <= len(self) - len(other):
            raise ValueError(
                f"routed experts of {len(other)} tokens (layers, top k, type: {shapes[1]}) cannot stand from token "
                f"{start} on in those of {len(self)} ({shapes[0]})"
            )
        self.ids[start * self.width : (start + len(other)) * self.width] = other.ids

    def resize(self, tokens: int) -> None:
        """Cut to this many tokens, or fill up with unrouted ones."""
        del self.ids[tokens * self.width :]
        self.ids += RoutedExperts.unrouted(tokens - len(self), self.layers, self.top_k, self.ids.typecode).ids


def grown(
    known: RoutedExperts | None, tokens: int, start: int = 0, read: RoutedExperts | None = None
) -> RoutedExperts | None:
    """What is `known` of a sequence, changed in place for the length that it has now, and with what was `read` since.

    `read` is of the tokens from `start` on; what is beyond the sequence's end is left out. None: nothing came back.
    """
    if known is None and read is not None:
        known = RoutedExperts.unrouted(0, read.layers, read.top_k, read.ids.typecode)
    if known is not None:
        known.resize(tokens)
        if read is not None:
            known.put(start, read[: max(0, tokens - start)])
    return known


class SampleStatus(str, Enum):
    """How a sample's generation ended."""

    PENDING = "pending"
    """Not generated yet."""
    COMPLETED = "completed"
    """The model ended its answer itself."""
    TRUNCATED = "truncated"
    """A budget in tokens, turns or tool calls ended it; it is scored and trained on."""
    ABORTED = "aborted"
    """Stopped from outside (enough samples, weight update). Generated again, it restarts from its prompt."""
    FAILED = "failed"
    """An outage (engine, tool, reward): counted, never trained on."""


@dataclass(slots=True)
class Sample:
    """One prompt and, once generated, one response to it. Hooks (`generate`, `reward_func`) fill it in."""

    prompt: list[Message] | str
    """Chat messages, or text that is already rendered."""
    label: str | None = None
    """The ground truth handed to the reward function."""
    index: int = 0
    """Unique within the run."""
    group_index: int = 0
    """Shared by the n samples of one prompt."""
    row: int = 0
    """Its row, counted over all training data."""
    source: str = ""
    """Name of the data set it is from, where `--prompt-data` gives one."""
    tools: list[ToolSchema] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever else the data row holds (`metadata` column) and whatever a hook wants to keep."""

    tokens: list[int] = field(default_factory=list)  # [T]
    response_length: int = 0  # R
    response: str = ""
    """Text of the response, observations included: for reading and scoring, never re-encoded."""
    begins_in_thought: bool = False
    """Whether the prompt ends with an open `<think>`, as some chat templates do: the response goes on with it."""
    loss_mask: list[int] = field(default_factory=list)  # [R] 1 = written by the model
    rollout_log_probs: list[float] = field(default_factory=list)  # [R] 0.0 where loss_mask is 0
    weight_versions: list[int] = field(default_factory=list)
    """Weight version of the engine at the end of each turn."""
    token_versions: list[int] = field(default_factory=list)  # [R] weight version that wrote it, or NO_VERSION
    routed_experts: RoutedExperts | None = None
    """[T] the experts chosen where the engine read token t (--use-rollout-routing-replay)."""
    num_turns: int = 0
    """Assistant turns."""
    num_tool_calls: int = 0
    """Executed tool calls."""
    num_tool_errors: int = 0
    """Executed calls whose observation reports an error."""
    num_malformed_calls: int = 0
    """Attempts to call that could not be executed: unreadable, an unknown tool, wrong arguments."""
    reward: float | dict[str, Any] | None = None
    status: SampleStatus = SampleStatus.PENDING
    error: str | None = None
    """For a FAILED sample: which boundary failed, and how. For one of an evaluation without a response: why."""
    spans: list[Span] = field(default_factory=list, compare=False)
    """generate, reward, and within generate each request to the engine and each tool call, with its `turn` (from 1)."""

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    def reset(self) -> None:
        """Forget any earlier attempt, so that a retry starts from the prompt alone."""
        self.tokens, self.loss_mask, self.rollout_log_probs = [], [], []
        self.weight_versions, self.token_versions = [], []
        self.routed_experts = None
        self.spans = []
        self.response_length = self.num_turns = 0
        self.num_tool_calls = self.num_tool_errors = self.num_malformed_calls = 0
        self.response, self.reward, self.error = "", None, None
        self.status = SampleStatus.PENDING

    def append(
        self, ids: list[int], *, log_probs: list[float] | None, versions: Sequence[int] | None = None
    ) -> None:
        """Append response tokens: the model's own (with their log-probs) or an observation's (`None`).

        `versions`: the weight version that wrote each token, where it is known.
        """
        for what, values in (("log-probs", log_probs), ("versions", versions)):
            if values is not None and len(values) != len(ids):
                raise ValueError(f"{len(ids)} tokens came with {len(values)} {what}; they must be as many")
        self.tokens += ids
        self.response_length += len(ids)
        self.loss_mask += [int(log_probs is not None)] * len(ids)
        self.rollout_log_probs += log_probs if log_probs is not None else [0.0] * len(ids)
        self.token_versions += versions if versions is not None else [NO_VERSION] * len(ids)
        self.routed_experts = grown(self.routed_experts, len(self.tokens))

    def put_routed_experts(self, start: int, routed: RoutedExperts | None) -> None:
        """Note the experts chosen for the tokens from `start` on, if any came back (`Completion.routed_experts`)."""
        self.routed_experts = grown(self.routed_experts, len(self.tokens), start, routed)

    def check(self) -> None:
        """Raise ValueError when lengths of tokens, mask, log-probs and routed experts disagree."""
        lengths = (self.response_length, len(self.loss_mask), len(self.rollout_log_probs))
        if len(set(lengths)) != 1 or self.response_length > len(self.tokens):
            raise ValueError(
                f"sample {self.index}: response length, loss mask and log-probs must agree, got {lengths} "
                f"of {len(self.tokens)} tokens"
            )
        if self.routed_experts is not None and len(self.routed_experts) != len(self.tokens):
            raise ValueError(
                f"sample {self.index}: routed experts need one entry per token, got {len(self.routed_experts)} of "
                f"{len(self.tokens)} tokens"
            )

    @property
    def scored_text(self) -> str:
        """The response, with the `<think>` in front that the prompt opened: for scoring."""
        return f"{OPEN_THOUGHT}{self.response}" if self.begins_in_thought else self.response

    def reward_value(self, key: str | None = None) -> float:
        """The scalar reward: the number itself, or entry `key` (default "score") of a dict."""
        if isinstance(self.reward, dict):
            if (key or "score") not in self.reward:
                raise ValueError(
                    f"the reward has no entry {key or 'score'!r}, only {sorted(self.reward)}; set --reward-key"
                )
            return float(self.reward[key or "score"])
        if self.reward is None:
            raise ValueError(f"sample {self.index} has no reward yet")
        return float(self.reward)


@dataclass(slots=True)
class TrainSample:
    """What the trainer needs of one sample; every sequence has one entry per token (T entries).

    `loss_mask[t] = 1` says that token t is learned: its log-prob is taken from the logits at t - 1, so
    position 0 is always 0. A sample that learns nothing (all 0) still counts in its group's baseline.

    Sequences are stored as compact arrays, so that a batch of millions of tokens travels between processes as a few
    copies of memory.
    """

    tokens: Sequence[int]  # [T] array("i")
    loss_mask: Sequence[int]  # [T] array("b")
    rollout_log_probs: Sequence[float] | None = None  # [T] array("f"), 0.0 where not generated; None in SFT
    reward: float = 0.0
    index: int = 0
    group_index: int = 0
    columns: dict[str, Sequence[float]] = field(default_factory=dict)  # [T] array("f") each
    """What a loss reads beside the above, by name (`algo.algorithms.LossTerm.needs`)."""
    routed_experts: RoutedExperts | None = None
    """[T] the experts to repeat where token t is read (--use-rollout-routing-replay); None: all are routed anew."""

    def __post_init__(self) -> None:
        self.tokens, self.loss_mask = array("i", self.tokens), array("b", self.loss_mask)
        lengths = [len(self.tokens), len(self.loss_mask)]
        if self.rollout_log_probs is not None:
            self.rollout_log_probs = array("f", self.rollout_log_probs)
            lengths.append(len(self.rollout_log_probs))
        self.columns = {name: array("f", values) for name, values in self.columns.items()}
        lengths += map(len, self.columns.values())
        if self.routed_experts is not None:
            lengths.append(len(self.routed_experts))
        if len(set(lengths)) != 1 or not self.tokens or self.loss_mask[0]:
            raise ValueError(
                f"train sample {self.index}: tokens, loss mask and log-probs must have one entry per token and the "
                f"first token is never learned; got {len(self.tokens)} tokens, {lengths[1:]} entries of the others"
            )
        if not math.isfinite(self.reward):
            raise ValueError(
                f"train sample {self.index}: a reward must be a finite number, got {self.reward}; check the reward "
                "function"
            )

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_loss_tokens(self) -> int:
        return sum(self.loss_mask)

    @classmethod
    def from_sample(cls, sample: Sample, *, reward: float) -> TrainSample:
        """Lay a generated sample's response arrays out over all its tokens."""
        sample.check()
        before = sample.prompt_length
        return cls(
            tokens=sample.tokens,
            loss_mask=[0] * before + sample.loss_mask,
            rollout_log_probs=[0.0] * before + sample.rollout_log_probs,
            reward=reward,
            index=sample.index,
            group_index=sample.group_index,
            routed_experts=sample.routed_experts,
        )


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One sample as a tracker's table has it; its texts are bounded."""

    index: int
    group: int
    prompt: str
    response: str
    reward: float | None
    turns: int
    status: str


@dataclass(slots=True)
class RolloutBatch:
    """One rollout's training samples and the metrics that describe it."""

    samples: list[TrainSample]
    metrics: dict[str, float] = field(default_factory=dict)
    shown: list[ShownSample] = field(default_factory=list, compare=False)
    """A few samples for the tables of trackers, of a rollout that is dumped."""
