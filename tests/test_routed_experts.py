"""The engine's choice of experts, from its reply to the train sample (--use-rollout-routing-replay)."""

from __future__ import annotations

import base64
import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rollout_hooks import CharTokenizer
from sglang_utils import engine_config
from stream_engine import Model, steps
from test_rollout_client import reply, served
from test_stream import Rows, length_by, make_config
from trainer_utils import keep_batch

from slime_retool.engine.server import server_flags
from slime_retool.errors import DataError, EngineError
from slime_retool.protocols import Completion
from slime_retool.rollout.context import RolloutContext, use_context
from slime_retool.rollout.engine_client import ROUTING_HEADER, RouterClient, WithoutRouting, parse_routed_experts
from slime_retool.rollout.open_turns import Aside, OpenTurns, Record
from slime_retool.rollout.replay import batch_path, read_batch
from slime_retool.rollout.routing import RouterShape, routed_share
from slime_retool.rollout.stream import Stream
from slime_retool.rollout.transcripts import dump_samples, sample_of
from slime_retool.tool_use.calls import ToolCall, Turn
from slime_retool.tool_use.loop import LoopBudgets, run_tool_loop
from slime_retool.tool_use.registry import Tool, ToolRegistry
from slime_retool.types import RolloutBatch, RoutedExperts, Sample, TrainSample

L, K = 2, 3  # layers with experts, experts per token


def routed(*tokens: int, typecode: str = "B") -> RoutedExperts:
    """One token each, whose L x K entries count up from the number."""
    return RoutedExperts(array(typecode, [n + i for n in tokens for i in range(L * K)]), L, K)


# The type


@pytest.mark.parametrize(("experts", "typecode"), [(4, "B"), (255, "B"), (256, "H"), (65535, "H")])
def test_the_largest_value_of_the_type_is_no_experts_id(experts, typecode):
    found = RoutedExperts.typecode(experts)
    nobody = RoutedExperts.unrouted(2, L, K, found)
    assert found == typecode and set(nobody.ids) == {nobody.mark}
    assert experts - 1 < nobody.mark == 256**nobody.ids.itemsize - 1
    assert len(nobody) == 2 and nobody.num_routed == 0


def test_more_experts_than_16_bits_hold_are_refused():
    with pytest.raises(ValueError, match="at most 65535 experts, got 65536"):
        RoutedExperts.typecode(65536)


@pytest.mark.parametrize("typecode", ["B", "H"])
def test_tokens_are_cut_out_put_in_and_filled_up(typecode):
    some = routed(0, 10, 20, typecode=typecode)
    assert some[1:] == routed(10, 20, typecode=typecode) and some[:-1] == routed(0, 10, typecode=typecode)
    assert len(some[2:1]) == 0
    some.resize(5)
    assert len(some) == 5 and some.num_routed == 3 and some[:3] == routed(0, 10, 20, typecode=typecode)
    some.put(2, routed(30, 40, typecode=typecode))
    some.resize(4)
    assert some == routed(0, 10, 30, 40, typecode=typecode) and some.num_routed == 4
    part = some[:1]
    part.put(0, routed(50, typecode=typecode))
    assert some[:1] == routed(0, typecode=typecode), "a slice is a copy"


@pytest.mark.parametrize(
    ("start", "other"),
    [
        (-1, routed(1)),
        (2, routed(1, 2)),
        (0, routed(1, typecode="H")),
        (0, RoutedExperts(array("B", range(6)), K, L)),
    ],
)
def test_what_does_not_fit_is_not_put_in(start, other):
    some = routed(0, 10, 20)
    with pytest.raises(ValueError, match="cannot stand from token"):
        some.put(start, other)
    assert some == routed(0, 10, 20)


@pytest.mark.parametrize("ids", [array("B", range(7)), array("i", range(6))])
def test_entries_that_are_no_whole_tokens_are_refused(ids):
    with pytest.raises(ValueError, match="2 layers x top 3"):
        RoutedExperts(ids, L, K)


# On a sample


def test_a_sample_has_one_entry_per_token_and_what_is_appended_is_unrouted():
    sample = Sample(prompt="p", tokens=[1, 2])
    sample.append([3, 4], log_probs=[-1.0, -2.0])
    sample.put_routed_experts(0, routed(0, 10, 20))
    assert len(sample.routed_experts) == 4 and sample.routed_experts.num_routed == 3
    sample.append([5], log_probs=None)
    sample.put_routed_experts(3, routed(30))
    assert sample.routed_experts[:4] == routed(0, 10, 20, 30) and sample.routed_experts.num_routed == 4
    train = TrainSample.from_sample(sample, reward=1.0)
    assert train.routed_experts == sample.routed_experts and len(train.routed_experts) == train.length == 5
    sample.reset()
    assert sample.routed_experts is None


def test_a_sample_with_fewer_entries_than_tokens_is_refused():
    sample = Sample(prompt="p", tokens=[1, 2, 3], routed_experts=routed(0, 10))
    with pytest.raises(ValueError, match="one entry per token, got 2 of 3 tokens"):
        TrainSample.from_sample(sample, reward=1.0)
    with pytest.raises(ValueError, match="one entry per token"):
        TrainSample(tokens=[1, 2, 3], loss_mask=[0, 1, 1], routed_experts=routed(0, 10))


# From the engine's reply

SHAPE = RouterShape(moe_layers=(False, True, True), top_k=3, num_experts=8)


def encoded(rows: Sequence[Sequence[int]]) -> str:
    """As SGLang returns them: int32, layer after layer of each token."""
    return base64.b64encode(array("i", [each for row in rows for each in row]).tobytes()).decode()


def test_a_reply_is_read_without_its_dense_layers():
    rows = [[0, 0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 7, 6, 5, 0, 1, 2]]
    assert SHAPE.parse(encoded(rows), 2) == RoutedExperts(array("B", [1, 2, 3, 4, 5, 6, 7, 6, 5, 0, 1, 2]), 2, 3)
    many = RouterShape((True,), 2, 300)
    assert many.parse(encoded([[299, 0], [255, 256]]), 2) == RoutedExperts(array("H", [299, 0, 255, 256]), 1, 2)
    assert len(SHAPE.parse("", 0)) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "start it with --enable-return-routed-experts"),
        (encoded([[1] * 9]), r"not of \(2, 3, 3\)"),
        (encoded([[1] * 9] * 3), r"not of \(2, 3, 3\)"),
        (encoded([[1] * 9] * 2)[:-4], r"not of \(2, 3, 3\)"),
        ("not base64!", r"not of \(2, 3, 3\)"),
        (7, r"not of \(2, 3, 3\)"),
        (encoded([[1] * 9, [1] * 8 + [8]]), "chose experts 1 to 8, the model has 8"),
        (encoded([[1] * 9, [1] * 8 + [-1]]), "chose experts -1 to 1, the model has 8"),
    ],
)
def test_a_damaged_reply_is_refused(text: object, message: str):
    with pytest.raises(EngineError, match=message):
        SHAPE.parse(text, 2)


def test_what_an_interrupted_request_lacks_is_left_open():
    def parse(ids: list[int], text: str | None, finish: str = "abort") -> RoutedExperts | None:
        meta = {} if text is None else {"routed_experts": text}
        whole = reply(ids, finish_reason={"type": finish}, **meta)
        return parse_routed_experts(whole, SHAPE, 4, 1, len(ids))

    assert parse([], None) is None and parse([5], None) is None  # in the queue: before it ran, or after a retraction
    assert parse([], encoded([[1] * 9])) is None  # while its prompt was read
    found = parse([5, 6], encoded([[n] * 9 for n in range(4)]))
    assert found is not None and list(found.ids[::6]) == [0, 1, 2, 3]
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        parse([5], None, finish="stop")
    # It ended between a token and its log-prob: what has no log-prob is left out, and so are its experts.
    cut = reply([5, 6], finish_reason={"type": "abort"}, routed_experts=encoded([[n] * 9 for n in range(4)]))
    short = parse_routed_experts(cut, SHAPE, 4, 1, 1)
    assert short is not None and list(short.ids[::6]) == [0, 1, 2]


async def test_a_request_asks_for_the_experts_of_new_tokens_only_and_evaluation_for_none():
    seen: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.json())
        start = seen[-1].get("routed_experts_start_len", 0)
        rows = [[n] * 9 for n in range(start, len(seen[-1]["input_ids"]) + 2)]
        return web.json_response(reply(routed_experts=encoded(rows)))

    async with served(answer, experts=SHAPE) as client:
        first = await client.generate([1, 2, 3], {})
        later = await client.generate([1, 2, 3, 4], {}, routed_from=2)
        evaluated = await WithoutRouting(client).generate([1, 2, 3], {}, session="0", cache_key="5")
    assert [body.get("routed_experts_start_len") for body in seen] == [0, 2, None]
    assert [body.get("return_routed_experts") for body in seen] == [True, True, None]
    assert seen[2]["extra_key"] == "5" and evaluated.routed_experts is None
    assert first.routed_experts is not None and list(first.routed_experts.ids[::6]) == [0, 1, 2, 3, 4]
    assert later.routed_experts is not None and list(later.routed_experts.ids[::6]) == [2, 3, 4, 5]
    assert (first.routed_from, later.routed_from) == (0, 2)
    async with served(answer) as plain:
        assert (await plain.generate([1, 2, 3], {})).routed_experts is None
    assert "return_routed_experts" not in seen[-1]


async def test_samples_take_turns_at_the_engines_and_go_on_elsewhere_while_theirs_is_away():
    """The router would drop what is asked for, so the client chooses: each sample keeps its engine."""
    asked: list[tuple[str, str]] = []

    class Service:
        url, faults, serving = "http://router.invalid", 0, True
        addresses: list[str | None] = ["http://a", "http://b", "http://c"]

        def look(self) -> None:
            self.serving, self.addresses = True, ["http://a", None, None]

    service = Service()
    async with RouterClient("http://unused", service=service, experts=SHAPE, concurrency=8, timeout=5, retries=0) as c:

        async def post(path: str, body: object, headers: dict[str, str], base: Any) -> dict[str, Any]:
            asked.append((headers.get(ROUTING_HEADER, "-"), await base()))
            return reply(routed_experts=encoded([[1] * 9] * 4))

        c.post = post
        for session in ("6", "7", "8", "7", None, None, "9"):
            await c.generate([1, 2], {}, session=session)
        assert [url[-1] for _, url in asked] == ["a", "b", "c", "b", "a", "b", "a"]
        asked.clear()
        service.addresses = ["http://a", None, "http://c"]
        for session in ("6", "7", "8"):
            await c.generate([1, 2], {}, session=session)
        assert [url[-1] for _, url in asked] == ["a", "c", "c"]
        asked.clear()
        service.addresses, service.serving = [None, None, None], False  # until it is looked at
        await c.generate([1, 2], {}, session="7")
        assert [url[-1] for _, url in asked] == ["a"]


# Through conversations


def choice(tokens: Sequence[int], place: int) -> list[int]:
    """What the scripted engines choose for a token: it depends on all tokens up to it."""
    return [(sum(tokens[: place + 1]) * 7 + place * 3 + each) % 251 for each in range(L * K)]


def assert_chosen(tokens: Sequence[int], known: RoutedExperts | None, unrouted: Sequence[int]) -> None:
    assert known is not None and len(known) == len(tokens)
    for place in range(len(tokens)):
        expected = [known.mark] * (L * K) if place in unrouted else choice(tokens, place)
        assert known[place : place + 1].ids.tolist() == expected, place


class Choosing:
    """Writes as many tokens as the script says, with the reason; "lost" is an abort that returns no experts."""

    def __init__(self, *script: tuple[int, str]) -> None:
        self.script, self.asked = list(script), []

    async def generate(self, input_ids, sampling_params, *, session=None, cache_key=None, routed_from=0):
        self.asked.append(routed_from)
        count, finish = self.script.pop(0)
        tokens = [*input_ids, *(ord("a") + (len(input_ids) + n) % 26 for n in range(count))]
        read = None
        if finish != "lost" and routed_from is not None:
            read = [each for place in range(routed_from, len(tokens) - 1) for each in choice(tokens, place)]
        return Completion(
            tokens[len(input_ids) :], [-1.0] * count, "abort" if finish == "lost" else finish, 1, len(input_ids), 0,
            routed_experts=None if read is None else RoutedExperts(array("B", read), L, K),
            routed_from=routed_from or 0,
        )  # fmt: skip


class Asking:
    """Takes each turn but the third for a call."""

    stop = ()

    def __init__(self) -> None:
        self.turns = 0

    def prompt_ids(self, prompt: object) -> list[int]:
        return [1, 2, 3]

    def text(self, ids: Sequence[int]) -> str:
        return ""

    def read_turn(self, ids: Sequence[int]) -> Turn:
        self.turns += 1
        return Turn("", [ToolCall("tool", {})] if self.turns < 3 else [])

    def fit_observation(self, text: str, max_tokens: int) -> str:
        return text

    def observation_ids(self, observations: Sequence[str], turn: Turn) -> list[int]:
        return [7] * 4


async def run_tools(engine: Any) -> Sample:
    async def answer(arguments: dict[str, Any]) -> str:
        return ""

    registry = ToolRegistry([Tool("tool", "", {"type": "object", "properties": {}}, answer)])
    budgets = LoopBudgets(max_response_tokens=100)
    return await run_tool_loop(engine, Asking(), registry, Sample(prompt=""), {}, budgets)


async def test_a_turn_brings_what_was_not_known_before_it_observations_included():
    engine = Choosing((5, "stop"), (6, "stop"), (2, "stop"))
    sample = await run_tools(engine)
    # prompt 3, turn 5, observation 4, turn 6, observation 4, turn 2
    assert engine.asked == [0, 7, 17] and len(sample.tokens) == 24
    assert_chosen(sample.tokens, sample.routed_experts, unrouted=[23])


async def test_an_observation_that_ends_a_sample_is_open():
    engine = Choosing((5, "stop"), (6, "stop"), (2, "stop"))
    sample = await run_tools(engine)
    sample.append([8, 8], log_probs=None)  # a hook's own
    assert_chosen(sample.tokens, sample.routed_experts, unrouted=[23, 24, 25])


async def test_a_hook_that_keeps_part_of_a_turn_keeps_the_experts_of_that_part():
    completion = await Choosing((5, "stop")).generate([1, 2, 3], {})
    for kept, unrouted in ((5, [7]), (4, []), (2, [])):
        sample = Sample(prompt="", tokens=[1, 2, 3])
        sample.append(completion.ids[:kept], log_probs=completion.log_probs[:kept])
        sample.put_routed_experts(completion.routed_from, completion.routed_experts)
        assert_chosen(sample.tokens, sample.routed_experts, unrouted=unrouted)


def open_turns(engine: Any) -> OpenTurns:
    return OpenTurns(engine, concurrency=4, tokenizer=CharTokenizer(), keeps_cache=False, returns_experts=True)


async def test_an_interrupted_turn_keeps_its_experts_and_asks_for_further_ones_only():
    engine = Choosing((0, "lost"), (5, "abort"), (0, "lost"), (3, "lost"), (4, "abort"), (2, "stop"), (6, "stop"))
    turns = open_turns(engine)
    first = await turns.generate([1, 2, 3], {"max_new_tokens": 50}, session="0")
    tokens = [1, 2, 3, *first.ids]
    # What is lost is asked for again: it is read again anyway.
    assert engine.asked == [0, 0, 7, 7, 7, 14] and len(tokens) == 3 + 5 + 3 + 4 + 2
    assert_chosen(tokens, first.routed_experts, unrouted=[16])
    tokens += [7, 7]
    second = await turns.generate(tokens, {"max_new_tokens": 50}, session="0", routed_from=16)
    tokens += second.ids
    record = turns.record("0")
    assert engine.asked[6:] == [16] and record is not None
    assert_chosen(tokens, record.routed_experts, unrouted=[24])
    assert second.routed_experts == record.routed_experts[16:] and second.routed_from == 16


async def test_a_conversation_of_a_checkpoint_has_its_experts():
    engine = Choosing((5, "stop"), (6, "stop"), (2, "stop"))
    turns = open_turns(engine)
    before = await run_tools(turns)
    record = turns.record("0")
    assert record is not None
    again = open_turns(Choosing())  # which answers nothing itself
    again.restore("0", Record.from_state(json.loads(json.dumps(record.state_dict()))))
    after = await run_tools(again)
    assert after.routed_experts == before.routed_experts and after.tokens == before.tokens
    assert_chosen(after.tokens, after.routed_experts, unrouted=[23])


async def test_a_conversation_that_a_hook_rewrites_starts_anew():
    turns = open_turns(Choosing((5, "stop"), (6, "stop")))
    await turns.generate([1, 2, 3], {"max_new_tokens": 50}, session="0")
    other = await turns.generate([1, 9, 3, 4], {"max_new_tokens": 50}, session="0")
    assert_chosen([1, 9, 3, 4, *other.ids], other.routed_experts, unrouted=[9])


async def test_a_turn_that_is_cut_at_a_stop_text_keeps_the_experts_of_what_stays():
    engine = Choosing((5, "abort"), (6, "stop"))
    params = {"max_new_tokens": 50, "stop": ["hi"]}  # written: defgh|ijklmn
    completion = await open_turns(engine).generate([1, 2, 3], params, session="0")
    assert "".join(map(chr, completion.ids)) == "defghi"
    assert_chosen([1, 2, 3, *completion.ids], completion.routed_experts, unrouted=[])


async def test_evaluation_beside_open_turns_asks_for_no_experts():
    engine = Choosing((5, "abort"), (6, "stop"))
    completion = await Aside(open_turns(engine)).generate([1, 2, 3], {"max_new_tokens": 50}, session="0")
    assert engine.asked == [None, None] and completion.routed_experts is None


class ChoosingModel(Model):
    """`stream_engine.Model`, which also returns its choice of experts."""

    async def generate(self, input_ids, sampling_params, *, session=None, cache_key=None, routed_from=0):
        completion = await super().generate(input_ids, sampling_params, session=session)
        tokens = [*input_ids, *completion.ids]
        read = [each for place in range(routed_from, len(tokens) - 1) for each in choice(tokens, place)]
        return replace(completion, routed_experts=RoutedExperts(array("B", read), L, K), routed_from=routed_from)


async def test_a_stream_over_updates_and_a_resume_trains_every_token_with_its_experts(tmp_path):
    config = make_config(tmp_path, use_rollout_routing_replay=True)
    model, data, state, batches = ChoosingModel(length_by(1, 60)), Rows(config.n_samples_per_prompt), None, []
    for count in (4, 4):
        turns = open_turns(model)
        context = RolloutContext(config=config, tokenizer=CharTokenizer(), engine=turns)
        async with use_context(context):
            stream = Stream(context, data, turns)
            if state is not None:
                stream.load_state_dict(state, model.version)
            stream.go_on(model.version)
            batches += await steps(stream, turns, model, count)
            turns.hold()
            model.abort()
            while not await turns.places.empty(0.01):
                pass
            state = json.loads(json.dumps(stream.state_dict()))
            await stream.aclose()
    held = [sample for group in state["groups"] for sample in group["samples"]]
    assert any("record" in sample for sample in held) and any("sample" in sample for sample in held)
    for batch in batches:
        for sample in batch.samples:
            assert_chosen(sample.tokens, sample.routed_experts, unrouted=[sample.length - 1])
        tokens = sum(sample.length for sample in batch.samples)
        assert batch.metrics["rollout/routed_token_ratio"] == pytest.approx(1 - len(batch.samples) / tokens)
    assert sum(batch.metrics["rollout/requests_interrupted"] for batch in batches) > 3


# In files


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("typecode", ["B", "H"])
def test_a_dumped_batch_has_its_experts(typecode: str, compressed: bool, tmp_path: Path):
    some = routed(0, 10, 20, typecode=typecode)
    some.resize(4)
    samples = [
        TrainSample(tokens=[1, 2, 3, 4], loss_mask=[0, 0, 1, 1], routed_experts=some),
        TrainSample(tokens=[1, 2], loss_mask=[0, 1]),
    ]
    keep_batch(str(tmp_path), 3, RolloutBatch(samples), compressed=compressed)
    assert read_batch(str(tmp_path), 3).samples == samples


def test_a_dump_with_damaged_experts_is_named(tmp_path: Path):
    some = TrainSample(tokens=[1, 2], loss_mask=[0, 1], routed_experts=routed(0, 10))
    keep_batch(str(tmp_path), 0, RolloutBatch([some]))
    path = batch_path(str(tmp_path), 0)
    for wrong in ('"typecode": "f"', '"layers": 0', '"ids": "AAAA"', '"ids": "?"'):
        text = re.sub(rf'{wrong.partition(" ")[0]} ("[^"]*"|\d+)', wrong, path.read_text(), count=1)
        assert wrong in text
        damaged = tmp_path / "damaged"
        damaged.mkdir(exist_ok=True)
        (damaged / path.name).write_text(text)
        with pytest.raises(DataError, match="cannot be read"):
            read_batch(str(damaged), 0)


def test_a_transcript_leaves_experts_out(tmp_path: Path):
    sample = Sample(prompt="p", tokens=[1, 2, 3], routed_experts=routed(0, 10, 20))
    dump_samples(tmp_path / "samples.jsonl", [(sample, {"rollout_id": 0})])
    row = json.loads((tmp_path / "samples.jsonl").read_text())
    assert "routed_experts" not in row and sample.routed_experts is not None
    assert sample_of(row) == replace(sample, routed_experts=None)


def test_the_share_of_tokens_with_the_engines_choice_counts_those_of_hooks_without():
    known = routed(0, 10, 20)
    known.resize(5)
    samples = [
        TrainSample(tokens=[1] * 5, loss_mask=[0] * 5, routed_experts=known),
        TrainSample(tokens=[1] * 4, loss_mask=[0] * 4),
    ]
    assert routed_share(samples) == pytest.approx(3 / 9) and routed_share([]) == 0


# Servers


def test_servers_return_experts_where_they_are_asked_for(tmp_path: Path):
    config = engine_config(tmp_path, tmp_path)
    replaying = replace(config, use_rollout_routing_replay=True)
    assert "--enable-return-routed-experts" not in server_flags(config)
    assert server_flags(replaying)["--enable-return-routed-experts"] == []
