"""A real SGLang server behind the real router, on a tiny random Qwen3. One start for the whole file."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang_utils import engine_config, make_tiny_checkpoint, processes_with, tiny_tokenizer
from transformers import AutoModelForCausalLM

from slime_retool.engine.admin import EngineAdmin
from slime_retool.engine.checksum import tensor_checksum
from slime_retool.engine.loads import ask, counters
from slime_retool.engine.process import answers
from slime_retool.errors import EngineError, WeightUpdateError
from slime_retool.protocols import Completion
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.engine_client import RouterClient
from slime_retool.rollout.manager import RolloutManager
from slime_retool.rollout.sampling import training_sampling_params
from slime_retool.rollout.stop_tokens import StopTokens
from slime_retool.rollout.teacher import add_teacher_log_probs
from slime_retool.types import TrainSample

ROOT = Path(__file__).resolve().parents[1]
PROMPT = [258, *b"user\nsay something<", 256, 10, 258, *b"assistant\n"]

pytestmark = pytest.mark.timeout(900)


@dataclass
class Running:
    """The engine and router under test, and the process that owns them."""

    folder: Path
    parent: subprocess.Popen[str]
    mark: str
    engine: str
    router: str

    @property
    def admin(self) -> EngineAdmin:
        return EngineAdmin(self.engine, timeout=200)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("engine")
    for seed in (0, 1):
        make_tiny_checkpoint(folder / f"model_{seed}", seed=seed)
    name, value = "SLIME_RETOOL_TEST_RUN", uuid.uuid4().hex
    with open(folder / "parent.log", "w") as log:
        parent = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "engine_parent.py"), str(folder / "model_0"), str(folder)],
            env={**os.environ, name: value, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert parent.stdout is not None
        line = parent.stdout.readline()
        assert line, (folder / "parent.log").read_text()
        yield Running(folder, parent, f"{name}={value}", **json.loads(line))
    finally:
        parent.kill()
        parent.wait()


def generate(running: Running, prompts: list[list[int]], **params: object) -> list[Completion]:
    """All prompts at once through the router."""

    async def go() -> list[Completion]:
        async with RouterClient(running.router, concurrency=64, timeout=300, retries=0) as client:
            config = engine_config(running.folder, running.folder)
            sampling = {**training_sampling_params(config), **params}
            return await asyncio.gather(*(client.generate(prompt, sampling) for prompt in prompts))

    return asyncio.run(go())


def expected_log_probs(checkpoint: Path, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    """log softmax(logits / temperature) of each sampled id, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    return log_probs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_sampled_ids_at_the_sampling_temperature(running: Running, temperature: float):
    completion = generate(running, [PROMPT], temperature=temperature, max_new_tokens=40, ignore_eos=True)[0]
    assert completion.finish_reason == "length" and len(completion.ids) == 40
    assert completion.prompt_tokens == len(PROMPT) and completion.weight_version == 0
    expected = expected_log_probs(running.folder / "model_0", PROMPT, completion.ids, temperature)
    assert completion.log_probs == pytest.approx(expected, abs=1e-3)


def test_an_engine_as_teacher_scores_given_ids_whatever_it_has_cached(running: Running):
    ids = [*PROMPT, *range(60, 90)]
    samples = [TrainSample(ids, [0] + [1] * (len(ids) - 1)), TrainSample(ids[:-3], [0] + [1] * (len(ids) - 4))]
    config = engine_config(running.folder, running.folder, teacher_url=running.engine, distill_coef=1.0)

    async def go() -> None:
        context = RolloutContext(config, tokenizer=None, engine=None)
        await add_teacher_log_probs(context, samples[:1])
        await add_teacher_log_probs(context, samples)
        await context.aclose()

    asyncio.run(go())
    expected = expected_log_probs(running.folder / "model_0", PROMPT[:1], ids[1:], 1.0)
    for sample in samples:
        assert list(sample.columns["teacher_log_probs"]) == pytest.approx([0.0, *expected][: sample.length], abs=1e-3)


def test_the_token_that_ends_the_turn_is_returned_with_its_log_prob(running: Running):
    end = set(range(0, 258, 2))  # half of the vocabulary, the end-of-turn token 256 included
    completion = generate(running, [PROMPT], stop_token_ids=sorted(end), max_new_tokens=64)[0]
    assert completion.finish_reason == "stop"
    assert completion.ids[-1] in end and not end & set(completion.ids[:-1])
    expected = expected_log_probs(running.folder / "model_0", PROMPT, completion.ids, 1.0)
    assert completion.log_probs == pytest.approx(expected, abs=1e-3)


def test_the_engine_keeps_connections_open_that_were_idle_between_two_rollouts(running: Running):
    address = urllib.parse.urlsplit(running.engine)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    connection.connect()
    connection.auto_open = False  # a connection that the engine has closed must not be replaced
    for pause in (0.0, 6.0):  # SGLang's own limit is 5 s
        time.sleep(pause)
        connection.request("GET", "/health")
        assert connection.getresponse().read() is not None
    connection.close()


def test_many_requests_at_once_each_get_their_own_answer(running: Running):
    prompts = [[*PROMPT, 48 + i] for i in range(32)]
    together = generate(running, prompts, temperature=0.0, max_new_tokens=4)
    alone = [generate(running, [prompt], temperature=0.0, max_new_tokens=4)[0].ids for prompt in prompts[::8]]
    assert [completion.ids for completion in together[::8]] == alone
    assert len({tuple(completion.ids) for completion in together}) > 1


def test_a_prompt_longer_than_the_context_is_refused_in_the_servers_words(running: Running):
    with pytest.raises(EngineError, match="HTTP 400.*context length"):
        generate(running, [PROMPT * 20], max_new_tokens=4)


def test_flushing_forgets_cached_prefixes(running: Running):
    generate(running, [PROMPT], max_new_tokens=1)
    assert generate(running, [PROMPT], max_new_tokens=1)[0].cached_tokens > 0
    running.admin.flush_cache()
    assert generate(running, [PROMPT], max_new_tokens=1)[0].cached_tokens == 0


def test_a_paused_engine_is_healthy_and_answers_after_it_is_resumed(running: Running):
    admin = running.admin
    admin.pause()
    results: list[Completion] = []
    asking = threading.Thread(target=lambda: results.extend(generate(running, [PROMPT], max_new_tokens=2)))
    asking.start()
    try:
        asking.join(1.0)
        assert asking.is_alive() and not results
        assert answers(f"{admin.url}/health", 60)
    finally:
        admin.resume()
        asking.join(200)
    assert len(results[0].ids) == 2


def test_pausing_ends_running_requests_with_the_reason_abort(running: Running):
    admin = running.admin
    results: list[Completion] = []
    prompts = [[*PROMPT, 60 + i] for i in range(16)]
    asking = threading.Thread(
        target=lambda: results.extend(generate(running, prompts, max_new_tokens=450, ignore_eos=True))
    )
    log = running.folder / "logs" / "engine_0.log"
    before = log.stat().st_size
    asking.start()
    while b"#running-req: 16" not in log.read_bytes()[before:]:  # it is written every 40 tokens
        assert asking.is_alive()
        time.sleep(0.02)
    admin.pause()
    asking.join(200)
    admin.resume()
    assert [r.finish_reason for r in results] == ["abort"] * 16
    assert all(len(r.ids) == len(r.log_probs) for r in results) and any(r.ids for r in results)


def test_stop_texts_found_by_their_tokens(running: Running):
    """Random bytes: now and then one ends a text that is not there; the request then goes on as if nothing was."""
    tokenizer = tiny_tokenizer()

    async def go(stop: str) -> tuple[list[Completion], int]:
        async with RouterClient(running.router, concurrency=16, timeout=300, retries=0) as client:
            asked = {"temperature": 1.0, "max_new_tokens": 200, "stop": [stop], "no_stop_trim": True}
            stops = StopTokens(client, tokenizer)
            found = await asyncio.gather(*(stops.generate(PROMPT, asked) for _ in range(16)))
            return found, client.take_stats().requests

    ended, requests = asyncio.run(go("e"))
    assert requests == 16
    letter = tokenizer.encode("e")[0]
    for completion in ended:
        assert (completion.finish_reason == "stop") == (completion.ids[-1] in (letter, *tokenizer.all_special_ids))
        assert letter not in completion.ids[:-1]
    gone_on, requests = asyncio.run(go("ae"))
    assert requests > 16
    for completion in gone_on:
        assert "ae" not in tokenizer.decode(completion.ids[:-1])
        assert completion.finish_reason == "stop" or len(completion.ids) == 200
        expected = expected_log_probs(running.folder / "model_0", PROMPT, completion.ids, 1.0)
        assert completion.log_probs == pytest.approx(expected, abs=1e-3)


def test_a_rollout_and_an_evaluation_through_the_manager(running: Running, tmp_path: Path):
    rows = [{"prompt": f"{i} + 1 = ?", "label": str(i + 1)} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = engine_config(
        running.folder / "model_0", tmp_path, prompt_data=str(tmp_path / "rows.jsonl"), apply_chat_template=True,
        custom_rm_path="rollout_hooks.index_reward", eval_prompt_data=["five", str(tmp_path / "rows.jsonl")],
        eval_max_response_len=4,
    )  # fmt: skip
    with RolloutManager(config) as manager:
        manager.connect(running.router)
        assert manager.data.num_rows == 5
        batch = manager.generate(0)
        assert len(batch.samples) == 4 and {s.reward for s in batch.samples} == {0.0, 1.0}
        assert batch.metrics["rollout/engine_requests"] == 4
        assert batch.metrics["rollout/weight_version_min"] == 0
        sample = batch.samples[0]
        start = list(sample.loss_mask).index(1)
        assert (
            list(sample.tokens[:start])
            == manager._context.tokenizer("<|im_start|>user\n0 + 1 = ?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        )
        ids = list(sample.tokens)
        expected = expected_log_probs(running.folder / "model_0", ids[:start], ids[start:], 1.0)
        assert sample.rollout_log_probs is not None
        assert list(sample.rollout_log_probs[start:]) == pytest.approx(expected, abs=1e-3)
        figures = manager.evaluate(0)
        assert figures["eval/five/samples"] == 5 and figures["eval/five/response_length"] <= 4
        state = manager.state_dict()
        next_groups = [s.group_index for s in manager.generate(1).samples]
        manager.load_state_dict(state)
        assert [s.group_index for s in manager.generate(1).samples] == next_groups


def test_the_eval_command_measures_running_engines(running: Running, tmp_path: Path):
    rows = [{"prompt": f"{i} + 1 = ?", "label": str(i + 1)} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        sys.executable, "-m", "slime_retool.cli", "eval", "--device", "cpu",
        "--hf-checkpoint", str(running.folder / "model_0"), "--rollout-external-urls", running.engine,
        "--eval-prompt-data", "three", str(tmp_path / "rows.jsonl"), "--apply-chat-template",
        "--n-samples-per-eval-prompt", "2", "--rollout-max-response-len", "8", "--no-progress",
        "--output-dir", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "mean@2" in done.stdout and "three" in done.stdout
    figures = json.loads((tmp_path / "out" / "eval" / "figures.json").read_text())
    assert figures["eval/three/samples"] == 6 and figures["val-aux/three/num_turns/mean"] == 2


def test_checksums_are_those_of_the_checkpoint_under_its_own_names(running: Running):
    weights = load_file(running.folder / "model_0" / "model.safetensors")
    assert running.admin.weight_checksums() == {name: tensor_checksum(tensor) for name, tensor in weights.items()}


def test_new_weights_are_counted_and_used(running: Running):
    admin, new = running.admin, running.folder / "model_1"
    generate(running, [PROMPT], max_new_tokens=1)  # leaves a prefix of the old weights in the cache
    try:
        admin.pause()
        admin.flush_cache()
        admin.update_weights_from_disk(str(new))
        admin.set_weight_version(5)
        admin.flush_cache()
        admin.resume()
        weights = load_file(new / "model.safetensors")
        assert admin.weight_checksums() == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
        assert admin.weight_version() == "5"
        completion = generate(running, [PROMPT], max_new_tokens=20, ignore_eos=True)[0]
        assert (completion.weight_version, completion.cached_tokens) == (5, 0)
        expected = expected_log_probs(new, PROMPT, completion.ids, 1.0)
        assert completion.log_probs == pytest.approx(expected, abs=1e-3)
    finally:
        admin.update_weights_from_disk(str(running.folder / "model_0"))
        admin.set_weight_version(0)
        admin.flush_cache()


def test_an_engine_answers_after_it_gave_back_its_memory_and_took_it_again(running: Running):
    """The calls and their order; on a CPU nothing is freed."""
    admin = running.admin
    before = generate(running, [PROMPT], temperature=0.0, max_new_tokens=8, ignore_eos=True)[0]
    admin.pause()
    admin.settle()
    admin.release_memory(["weights", "kv_cache"])
    assert answers(f"{admin.url}/health", 60)
    admin.resume_memory(["weights"])
    admin.update_weights_from_disk(str(running.folder / "model_0"))
    admin.flush_cache()
    admin.resume_memory(["kv_cache"])
    admin.resume()
    after = generate(running, [PROMPT], temperature=0.0, max_new_tokens=8, ignore_eos=True)[0]
    assert after.ids == before.ids and after.cached_tokens == 0


def test_an_engine_that_keeps_its_cache_gives_back_its_weights_as_soon_as_requests_have_ended(running: Running):
    """SGLang ends itself when it is asked while a batch is still there, which an answer's arrival does not tell."""
    admin, prompt = running.admin, [*PROMPT, 7]
    admin.flush_cache()
    for _ in range(5):
        with ThreadPoolExecutor(1) as pool:
            running_request = pool.submit(generate, running, [prompt] * 4, max_new_tokens=450, ignore_eos=True)
            while not running_request.done() and counters(ask(admin.url)).get("running requests", 0) < 4:
                time.sleep(0.01)
            admin.pause()
            admin.settle()
            admin.release_memory(["weights"])
            cut = running_request.result()
        assert all(completion.finish_reason == "abort" for completion in cut)
        admin.resume_memory(["weights"])
        admin.resume()
    longest = max(cut, key=lambda completion: len(completion.ids))
    again = generate(running, [prompt + longest.ids], max_new_tokens=1)[0]
    assert again.cached_tokens >= len(prompt + longest.ids) - 2


def test_a_refused_update_raises_with_the_servers_words(running: Running):
    with pytest.raises(WeightUpdateError, match="update_weights_from_disk answered HTTP 400: .+"):
        running.admin.update_weights_from_disk(str(running.folder / "nothing"))
    with pytest.raises(WeightUpdateError, match="does not exist"):
        running.admin.destroy_weights_update_group("nothing")
    assert answers(f"{running.admin.url}/health", 60)


def test_an_engine_that_cannot_be_reached_raises():
    admin = EngineAdmin("http://127.0.0.1:9", timeout=5)
    assert not answers(f"{admin.url}/health", 60)
    with pytest.raises(WeightUpdateError, match="cannot be reached"):
        admin.pause()


# Last, because it ends the engine.


def test_no_process_is_left_when_the_owner_is_killed(running: Running):
    commands = " ".join(processes_with(running.mark).values())
    assert "slime_retool.engine.cpu_main" in commands and "router_main.py" in commands
    running.parent.kill()
    running.parent.wait()
    deadline = time.monotonic() + 200
    while (left := processes_with(running.mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == {}
