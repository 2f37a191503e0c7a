"""A scripted engine, a data source and hooks for the rollout tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from slime_retool.config import Config
from slime_retool.errors import EngineError, RewardError
from slime_retool.protocols import Completion, DataSource
from slime_retool.rollout.context import RolloutContext, current_context
from slime_retool.types import RolloutBatch, Sample, SampleStatus


class CharTokenizer:
    """One id per character."""

    chat_template = "none of the prompts needs it"
    is_fast = False
    added_tokens_decoder: dict[int, Any] = {}
    all_special_ids: list[int] = []
    all_special_tokens: list[str] = []

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def convert_tokens_to_ids(self, token: str) -> int:
        return ord(token)

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        return "".join(message["content"] for message in messages)


class ScriptedEngine:
    """Answers with `answer(prompt text, call number)`: text, or an exception to raise."""

    def __init__(self, answer: Callable[[str, int], str | Exception], *, version: int = 3) -> None:
        self.answer, self.version, self.calls, self.requests = answer, version, 0, []

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None
    ) -> Completion:
        self.calls += 1
        self.requests.append((list(input_ids), dict(sampling_params), session))
        answer = self.answer("".join(map(chr, input_ids)), self.calls)
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        full = [ord(c) for c in answer]
        ids = full[: sampling_params["max_new_tokens"]]
        return Completion(
            ids=ids,
            log_probs=[-0.5] * len(ids),
            finish_reason="stop" if ids == full else "length",
            weight_version=self.version,
            prompt_tokens=len(input_ids),
            cached_tokens=0,
        )


class Prompts:
    """An endless data source of the texts given; remembers how many groups were drawn."""

    def __init__(self, texts: list[str], copies: int) -> None:
        self.texts, self.copies, self.drawn = texts, copies, 0
        self.returned: list[list[Sample]] = []

    def next_groups(self, count: int) -> list[list[Sample]]:
        groups = []
        for _ in range(count):
            text = self.texts[self.drawn % len(self.texts)]
            groups.append(
                [
                    Sample(prompt=text, label=text, index=self.drawn * self.copies + i, group_index=self.drawn)
                    for i in range(self.copies)
                ]
            )
            self.drawn += 1
        return groups

    def return_groups(self, groups: list[list[Sample]]) -> None:
        self.returned += groups

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def scripted_context(config: Config, answer: Callable[[str, int], str | Exception]) -> RolloutContext:
    return RolloutContext(config=config, tokenizer=CharTokenizer(), engine=ScriptedEngine(answer))


async def index_reward(args: Config, sample: Sample) -> dict[str, float]:
    """1 for the first half of a group, 0 for the rest."""
    n = args.n_samples_per_prompt
    return {"score": float(sample.index % n < n // 2)}


def length_reward(args: Config, sample: Sample) -> float:
    """A plain function is a reward too: the length of the answer."""
    return float(len(sample.response))


async def constant_reward(args: Config, sample: Sample) -> float:
    return 1.0


async def spread_only_for_b(args: Config, sample: Sample) -> float:
    """Rewards differ within a group for prompts that begin with "b" only."""
    return float(sample.index % 2) if str(sample.prompt).startswith("b") else 0.0


async def sleepy_for_z(args: Config, sample: Sample) -> float:
    """Never ends for prompts that begin with "z"."""
    if str(sample.prompt).startswith("z"):
        await asyncio.Event().wait()
    return float(sample.index % 2)


async def outage_for_odd(args: Config, sample: Sample) -> float:
    if sample.index % 2:
        raise RewardError("the judge is down")
    return float(sample.index)


async def expected_reward(args: Config, sample: Sample) -> float:
    """Whether the response is what the row's metadata expect; a label, where there is one, is to be in it, too."""
    return float(sample.response == sample.metadata["expected"] and (sample.label or "") in sample.response)


async def broken_reward(args: Config, sample: Sample) -> float:
    raise ZeroDivisionError("a mistake of the user")


async def text_reward(args: Config, sample: Sample) -> Any:
    return "very good"


async def nan_reward(args: Config, sample: Sample) -> float:
    return float("nan")


async def empty_generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """Ends without a return."""


async def text_generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    return "an answer"


async def forgetful_generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Forgets to set a status."""
    return sample


async def speechless_generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Forgets to set the response's text."""
    from slime_retool.rollout.generate import generate

    sample = await generate(args, sample, sampling_params)
    sample.response = ""
    return sample


async def promptless_generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Forgets the prompt's ids."""
    from slime_retool.rollout.generate import generate

    sample = await generate(args, sample, sampling_params)
    del sample.tokens[: sample.prompt_length]
    return sample


async def unequal_generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Loses a log-prob."""
    from slime_retool.rollout.generate import generate

    sample = await generate(args, sample, sampling_params)
    sample.rollout_log_probs.pop()
    return sample


async def noting_generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Keeps something in metadata, under a key of its own and under one that a row may have."""
    from slime_retool.rollout.generate import generate

    sample = await generate(args, sample, sampling_params)
    sample.metadata |= {"completion_tokens": 17, "mine": {1: ["noted"]}}
    return sample


async def outage_generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise EngineError("connection refused")


@asynccontextmanager
async def note_of_life(config: Config) -> AsyncIterator[None]:
    """A resource that leaves a line in `output_dir/life` when it begins and when it ends."""
    path = f"{config.output_dir}/life"
    with open(path, "a") as file:
        file.write("open\n")
    yield
    with open(path, "a") as file:
        file.write("closed\n")


async def rollout_with_resource(context: RolloutContext, data: DataSource, rollout_id: int) -> RolloutBatch:
    """Draws one group, uses one resource, makes no samples."""
    assert current_context() is context
    await asyncio.gather(*(context.resource("life", note_of_life) for _ in range(3)))
    data.next_groups(1)
    return RolloutBatch([], {"rollout/id": float(rollout_id)})


async def rollout_that_never_ends(context: RolloutContext, data: DataSource, rollout_id: int) -> RolloutBatch:
    await context.resource("life", note_of_life)
    await asyncio.Event().wait()
    raise AssertionError


async def rollout_that_fails(context: RolloutContext, data: DataSource, rollout_id: int) -> RolloutBatch:
    raise KeyError("a mistake of the user")


async def reward_by_letter(args: Config, sample: Sample) -> float:
    """By the prompt's first letter: w all wrong (0), m all wrong below 0, r all right, l too, with little (0.5), s half
    of each, o an outage, p an outage for half of them."""
    letter = str(sample.prompt)[0]
    if letter == "o" or (letter == "p" and sample.index % args.n_samples_per_prompt >= 2):
        raise RewardError("the judge is down")
    return {"w": 0.0, "m": -1.0, "r": 2.0, "l": 0.5}.get(letter, float(sample.index % 2))


async def generate_or_abort(config: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs = [1, 2], 1, [1], [-0.5]
    sample.response = "an answer"
    sample.status = SampleStatus.ABORTED if sample.prompt == "stopped" else SampleStatus.COMPLETED
    return sample


RETURNED: list[Any] = []
"""What `rollout_that_returns` gives back, one after the other."""


async def rollout_that_returns(context: RolloutContext, data: DataSource, rollout_id: int) -> Any:
    return RETURNED.pop(0)
