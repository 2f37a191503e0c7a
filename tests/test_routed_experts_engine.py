"""Experts that a real SGLang server chose, against transformers' router and through a whole step of a run.

One server and one trainer for the whole file.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from dist_utils import run_distributed
from sglang_utils import engine_config, tiny_tokenizer
from trainer_utils import make_trainer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_bridge.convert import convert_hf_to_torch_dist
from megatron_bridge.hf_config import model_args_from_hf, read_hf_config
from slime_retool.cluster.cluster import Cluster
from slime_retool.config import Config, resolve
from slime_retool.engine.admin import EngineAdmin
from slime_retool.rollout.engine_client import RouterClient
from slime_retool.rollout.manager import RolloutManager
from slime_retool.rollout.open_turns import OpenTurns, Record
from slime_retool.rollout.replay import read_batch
from slime_retool.rollout.routing import RouterShape
from slime_retool.tool_use.calls import ToolCall, Turn
from slime_retool.tool_use.loop import LoopBudgets, run_tool_loop
from slime_retool.tool_use.registry import Tool, ToolRegistry
from slime_retool.types import RolloutBatch, RoutedExperts, Sample, SampleStatus, TrainSample

pytestmark = pytest.mark.timeout(900)

LAYERS = 3  # all of them with experts, as SGLang takes Qwen3-MoE's to be
EXPERTS, TOP_K = 6, 3
CHUNK = 64  # tokens of one prefill: longer prompts are read in several
PROMPT = [258, *b"user\n", *bytes(range(65, 123)) * 2, 256, 10, 258, *b"assistant\n"]
SAMPLING = {"temperature": 1.0, "no_stop_trim": True, "skip_special_tokens": False}


@dataclass
class Running:
    """The engine under test, the run that it is of, and the same model in transformers."""

    config: Config
    engine: str
    cluster: Cluster
    model: Qwen3MoeForCausalLM

    def client(self) -> RouterClient:
        shape = RouterShape.of(self.config)
        return RouterClient(self.engine, experts=shape, concurrency=64, timeout=300, retries=0)

    @contextmanager
    def weights(self, folder: Path) -> Iterator[None]:
        """The engine has those of a Hugging Face folder inside."""
        admin = EngineAdmin(self.engine, timeout=200)
        try:
            admin.flush_cache()
            admin.update_weights_from_disk(str(folder))
            yield
        finally:
            admin.flush_cache()
            admin.update_weights_from_disk(self.config.hf_checkpoint)

    def chosen(self, tokens: list[int]) -> torch.Tensor:
        """[T, layers with experts, top k] by transformers, each set of experts in ascending order."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens]), output_router_logits=True).router_logits
        return torch.stack([each.softmax(-1).topk(TOP_K).indices.sort().values for each in logits], dim=1)

    def assert_as_chosen(self, tokens: list[int], routed: RoutedExperts | None, unrouted: Sequence[int]) -> None:
        """`routed` is the model's choice for all `tokens` but those at the places `unrouted`, which it leaves open."""
        assert routed is not None and len(routed) == len(tokens)
        found = torch.tensor(routed.ids.tolist()).view(len(tokens), -1, TOP_K).sort().values
        expected = self.chosen(tokens)
        assert found.shape == expected.shape == (len(tokens), LAYERS, TOP_K)
        open_places = (found == routed.mark).all(-1).all(-1)
        assert open_places.nonzero().flatten().tolist() == list(unrouted)
        assert torch.equal(found[~open_places], expected[~open_places])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("experts")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(5)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS,
            num_experts_per_tok=TOP_K, moe_intermediate_size=48, norm_topk_prob=True,
            max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32",
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    described = model_args_from_hf(read_hf_config(folder / "model"))
    convert_hf_to_torch_dist(described, folder / "model", folder / "torch_dist", progress=False)
    rows = [{"prompt": "say " + letter * 40, "label": letter} for letter in "abcd"]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = resolve(
        engine_config(
            folder / "model",
            folder,
            use_rollout_routing_replay=True,
            sglang_server_flags={"--chunked-prefill-size": [str(CHUNK)]},
            ref_load=str(folder / "torch_dist"),
            prompt_data=[str(folder / "data.jsonl")],
            apply_chat_template=True,
            num_rollout=1,
            n_samples_per_prompt=2,
            rollout_max_response_len=24,
            rollout_max_context_len=None,
            dump_rollouts=True,
            custom_rm_path="rollout_hooks.length_reward",
        )
    )
    with Cluster(config) as cluster:
        cluster.trainers.start(1)
        (engine,) = cluster.engines.start()
        cluster.engines.start_router([engine])
        yield Running(config, engine, cluster, model.eval())


class Asking:
    """A tool format that takes each of the first `calls` turns for a call, whatever the model wrote."""

    stop = ()

    def __init__(self, calls: int, prompt: Sequence[int]) -> None:
        self.calls, self.prompt = calls, prompt

    def prompt_ids(self, prompt: object) -> list[int]:
        return list(self.prompt)

    def text(self, ids: Sequence[int]) -> str:
        return ""

    def read_turn(self, ids: Sequence[int]) -> Turn:
        self.calls -= 1
        return Turn("", [ToolCall("tool", {})] if self.calls >= 0 else [])

    def fit_observation(self, text: str, max_tokens: int) -> str:
        return text

    def observation_ids(self, observations: Sequence[str], turn: Turn) -> list[int]:
        return [10, *observations[0].encode(), 10]


async def one_answer(arguments: dict[str, object]) -> str:
    return "the tool's answer"


REGISTRY = ToolRegistry([Tool("tool", "", {"type": "object", "properties": {}}, one_answer)])
STOPS = {**SAMPLING, "stop_token_ids": list(range(0, 258, 8))}  # a turn of about eight tokens


async def conversation(engine: object, index: int, prompt: Sequence[int] = PROMPT) -> Sample:
    sample = Sample(prompt="", index=index)
    budgets = LoopBudgets(max_response_tokens=400)
    return await run_tool_loop(engine, Asking(2, prompt), REGISTRY, sample, STOPS, budgets)


def test_experts_of_a_conversation_with_tools_are_those_of_transformers_router(running: Running):
    """Three turns, read in chunks and from the prefix cache: only the last token, which nobody read, is open."""

    async def go() -> list[Sample]:
        async with running.client() as client:
            first = await conversation(client, 0)
            return [first, *await asyncio.gather(*(conversation(client, index) for index in range(1, 4)))]

    samples = asyncio.run(go())
    assert len(PROMPT) > 2 * CHUNK
    for sample in samples:
        assert sample.num_turns == 3 and sample.num_tool_calls == 2 and sample.status is SampleStatus.COMPLETED
        running.assert_as_chosen(sample.tokens, sample.routed_experts, unrouted=[len(sample.tokens) - 1])
    cached = [[span["cached_tokens"] for span in s.spans if span["name"] == "request"] for s in samples]
    assert all(turns[1] > len(PROMPT) // 2 and turns[2] > turns[1] for turns in cached)
    assert all(turns[0] > len(PROMPT) // 2 for turns in cached[1:])  # the prompt was read by another sample's request


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_an_interrupted_turn_goes_on_with_its_experts(running: Running, keeps_cache: bool):
    """Ended in its midst, read again (or not) and continued; and once more from what a checkpoint keeps of it."""
    admin = EngineAdmin(running.engine, timeout=200)
    params = {**SAMPLING, "max_new_tokens": 400, "ignore_eos": True}

    async def interrupted(turns: OpenTurns) -> tuple[list[int], RoutedExperts | None]:
        asked = asyncio.create_task(turns.generate(list(PROMPT), params, session="7"))
        pause = 0.05
        while not asked.done():
            await asyncio.sleep(pause)
            pause *= 1.5  # until a machine of any speed has read the prompt in it
            record = turns.record("7")
            if len(record.tokens) == len(PROMPT):  # nothing came back yet
                turns.hold()
                while not await turns.places.empty(0):
                    await asyncio.to_thread(admin.abort)
                    await asyncio.sleep(0.02)
                if not keeps_cache:
                    await asyncio.to_thread(admin.flush_cache)
                turns.let_go(1)
        completion = await asked
        assert [span["status"] for span in completion.spans if span["tokens"]][:2] == ["interrupted", "ok"]
        assert len(completion.ids) == 400
        return PROMPT + completion.ids, completion.routed_experts

    async def go() -> None:
        async with running.client() as client:
            options = {"concurrency": 4, "tokenizer": tiny_tokenizer(), "keeps_cache": keeps_cache}
            turns = OpenTurns(client, **options, returns_experts=True)
            tokens, routed = await interrupted(turns)
            running.assert_as_chosen(tokens, routed, unrouted=[len(tokens) - 1])
            resumed = OpenTurns(client, **options, returns_experts=True)
            state = json.loads(json.dumps(turns.record("7").state_dict()))
            resumed.restore("7", Record.from_state(state))
            again = await resumed.generate(list(PROMPT), params, session="7")
            assert PROMPT + again.ids == tokens and again.routed_experts == routed and again.spans == []
            # The next turn reads the last token, and an observation.
            further = await resumed.generate(
                [*tokens, *b"\nso?"], {**params, "max_new_tokens": 3}, session="7", routed_from=len(tokens) - 1
            )
            tokens += [*b"\nso?", *further.ids]
            whole = resumed.record("7").routed_experts
            running.assert_as_chosen(tokens, whole, unrouted=[len(tokens) - 1])
            assert further.routed_from + len(further.routed_experts) == len(tokens)
            assert further.routed_experts == whole[further.routed_from :]

    asyncio.run(go())


def test_a_step_trains_on_the_engines_choice_and_finds_its_log_probs(running: Running):
    with RolloutManager(running.config) as manager:
        manager.connect(running.cluster.engines.service)
        batch = manager.generate(0)
        metrics = running.cluster.trainers.train(batch, 0)
    assert len(batch.samples) == 4
    for sample in batch.samples:
        running.assert_as_chosen(list(sample.tokens), sample.routed_experts, unrouted=[sample.length - 1])
    tokens = sum(sample.length for sample in batch.samples)
    assert batch.metrics["rollout/routed_token_ratio"] == pytest.approx((tokens - 4) / tokens)
    assert read_batch(running.config.output_dir, 0).samples == batch.samples
    assert metrics["mismatch/experts_replayed"] == 1
    assert metrics["train/logprob_abs_diff"] < 1e-6


def test_the_trainer_repeats_the_engines_choice(running: Running, tmp_path: Path):
    """Experts come in pairs with nearly the same row in the router: which of them is taken is decided by rounding.

    With replay the trainer's log-probs are the engine's to 1e-6, over turns with observations between them.
    """
    model = _paired_experts(running.model)
    model.save_pretrained(tmp_path / "hf")
    convert_hf_to_torch_dist(running.config, tmp_path / "hf", tmp_path / "torch_dist", progress=False)

    async def talk() -> list[Sample]:
        # Prompts of their own: see docs/moe.md for the last token of one that several samples share.
        prompts = [[PROMPT[0], *b"user ", *str(index).encode(), *PROMPT[6:]] for index in range(4)]
        async with running.client() as client:
            return await asyncio.gather(*(conversation(client, index, own) for index, own in enumerate(prompts)))

    with running.weights(tmp_path / "hf"):
        generated = asyncio.run(talk())
    samples = [TrainSample.from_sample(sample, reward=float(sample.index)) for sample in generated]
    config = replace(
        running.config, ref_load=str(tmp_path / "torch_dist"), use_dynamic_batch_size=True, max_tokens_per_gpu=512
    )
    [(replayed, anew)] = run_distributed(_train_with_and_without, 1, config, samples)
    assert _share_of_the_engine(samples, replayed.chosen) == 1.0
    assert _share_of_the_engine(samples, anew.chosen) < 0.95
    metrics = replayed.metrics
    assert metrics["mismatch/experts_replayed"] == 1.0
    assert metrics["mismatch/experts_differ"] > 0.05
    assert metrics["mismatch/abs_diff"] <= 1e-6 and metrics["mismatch/abs_diff_max"] < 1e-5
    assert anew.metrics["mismatch/abs_diff"] > 1e-2


@dataclass
class Trained:
    """By one trainer."""

    metrics: dict[str, float]
    chosen: list[torch.Tensor]
    """Of each sample [T, layers, experts]: where its routers sent tokens."""


def _share_of_the_engine(samples: list[TrainSample], chosen: list[torch.Tensor]) -> float:
    """Share of the choices, but those of last tokens, that are the engine's."""
    equal = []
    for sample, sent in zip(samples, chosen, strict=True):
        assert sample.routed_experts is not None
        ids = torch.tensor(sample.routed_experts.ids.tolist()).view(sample.length, LAYERS, TOP_K)[:-1]
        given = torch.zeros(*ids.shape[:2], EXPERTS, dtype=torch.bool).scatter(2, ids, True)
        equal.append((given == sent[:-1]).all(-1).flatten())
    return float(torch.cat(equal).float().mean())


def _paired_experts(model: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    paired = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in paired.model.layers:
            rows = layer.mlp.gate.weight
            rows[1::2] = rows[::2] * (1 + 3e-7 * torch.randn_like(rows[::2]))
    return paired


def _train_with_and_without(rank: int, world_size: int, config: Config, samples: list[TrainSample]) -> list[Trained]:
    return [_train(rank, world_size, replace(config, use_rollout_routing_replay=on), samples) for on in (True, False)]


def _train(rank: int, world_size: int, config: Config, samples: list[TrainSample]) -> Trained:
    from megatron.core.transformer.moe.router import TopKRouter

    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    maps: list[torch.Tensor] = []
    for module in trainer.module.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda router, inputs, output: maps.append(output[1]))
    chosen = []
    for sample in samples:
        maps.clear()
        trainer.log_probs([sample])
        chosen.append(torch.stack([each[: sample.length] for each in maps], dim=1))
    metrics = trainer.train(RolloutBatch(samples), 0)
    trainer.shutdown()
    return Trained(metrics, chosen)
