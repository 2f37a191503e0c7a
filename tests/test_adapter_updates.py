"""LoRA adapters travel alone from a trainer split over two processes into a real SGLang engine, which applies them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from dist_utils import run_distributed
from sglang_utils import engine_config, make_tiny_checkpoint
from trainer_utils import make_trainer, random_samples, tiny_config, weights

from slime_retool.engine.admin import ADAPTER, EngineAdmin
from slime_retool.engine.router import RouterProcess
from slime_retool.engine.server import EngineProcess
from slime_retool.errors import WeightUpdateError
from slime_retool.rollout.engine_client import RouterClient
from slime_retool.trainer.weight_sync import adapters
from slime_retool.trainer.weight_sync.adapters import _as_bytes, _in_shared_memory
from slime_retool.trainer.weight_sync.buckets import buckets
from slime_retool.trainer.weight_sync.ipc import Handle, payload
from slime_retool.types import RolloutBatch

MODEL = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 16, "vocab_size": 259, "max_position_embeddings": 1024, "rotary_base": 10000,
}  # fmt: skip
LORA = {"lora_rank": 3, "lora_alpha": 6.0, "lora_weight_update": "adapters"}
PROMPT = list(range(40, 60))
ROUNDS = ("broadcast", "broadcast", "ipc", "disk")
"""How weights travel in each update; the frozen ones travel in the first of each kind."""


def _ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.loads(reply.read())


def _generate(url: str, adapter: str | None) -> tuple[list[float], list[int]]:
    """The engine's log-probs of the prompt after its first token, and eight greedy tokens after it."""
    sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answer = _ask(url, body | ({} if adapter is None else {"lora_path": adapter}))
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]], answer["output_ids"]


def _cached(url: str) -> int:
    """Tokens of the prompt that the engine had read already, by the adapter's newest version."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "lora_path": ADAPTER}
    return int(_ask(url, body)["meta_info"]["cached_tokens"])


def _by_transformers(state: dict[str, torch.Tensor], tokens: list[int]) -> tuple[list[float], float]:
    """The prompt's log-probs from transformers' model with these (merged) weights, and how much less likely than the
    likeliest one any of these tokens is: 0 for greedy ones, but for rounding where two are alike."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=259, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ).eval()  # fmt: skip
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor([[*PROMPT, *tokens]])).logits[0], -1)[:-1]
    chosen = log_p.gather(1, torch.tensor([*PROMPT, *tokens])[1:, None])[:, 0]
    start = len(PROMPT) - 1
    return chosen[:start].tolist(), float((log_p.max(-1).values - chosen)[start:].max())


def _both_layouts(rank: int, world_size: int, url: str, root: str) -> list[dict[str, Any]]:
    layouts = [{"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}]
    return [_work(rank, world_size, layout, url, 10 * number, root) for number, layout in enumerate(layouts)]


def _work(rank: int, world_size: int, layout: dict[str, Any], url: str, first: int, root: str) -> dict[str, Any]:
    """Updates with train steps between them; what the engine then answers and holds."""
    from slime_retool.engine.adapter_checksum import ADAPTERS_LOADER
    from slime_retool.trainer.weight_sync import WeightSync

    config = tiny_config(
        **MODEL, **layout, **LORA, seed=first, lr=2e-2, max_tokens_per_gpu=64, output_dir=root, ref_load=root,
        distributed_timeout_minutes=5.0, update_weight_buffer_size=20_000, max_staleness=1,
    )  # fmt: skip
    trainer = make_trainer(rank, world_size, config)
    with torch.no_grad():
        for parameter in trainer.module.parameters():  # sharper than the first weights, so that log-probs differ
            parameter.mul_(6.0) if parameter.dim() > 1 else None
    trainer.actor.optimizer.reload_model_params()
    admin, out, syncs = EngineAdmin(url), {"rounds": []}, {}
    base = weights(trainer)
    for step, transport in enumerate(ROUNDS):
        trainer.train(RolloutBatch(random_samples(seed=step)), step)
        sync = syncs.setdefault(transport, WeightSync(trainer, [url], transport=transport))
        sync.weight_version = first + step
        before = _cached(url) if rank == 0 and step else 0
        with mock.patch.object(sync._transport._whole, "send", side_effect=sync._transport._whole.send) as whole:
            version = sync.update()
        mine, merged = sync.weight_checksums(), weights(trainer)
        if rank == 0:
            cached = (before, _cached(url), _cached(url))
            (engine, tokens), (bare, bare_tokens) = _generate(url, ADAPTER), _generate(url, None)
            out["rounds"].append(
                {
                    "version": version, "reported": admin.weight_version(),
                    "adapters": (admin.adapters(), admin.adapter_rank()),
                    "whole": whole.call_count, "mine": mine, "theirs": admin.weight_checksums(loader=ADAPTERS_LOADER),
                    "cached": cached, "engine": engine, "merged": _by_transformers(merged, tokens), "bare": bare,
                    "base": _by_transformers(base, bare_tokens),
                }
            )  # fmt: skip
    if rank == 0:
        running = _Running(url)
    sync.update()
    if rank == 0:
        out["interrupted"] = running.answer()
    refused = WeightSync(trainer, ["http://127.0.0.1:9"], transport="ipc")
    with pytest.raises(WeightUpdateError) as error:
        refused.update()
    out["refused"] = str(error.value)
    for sync in syncs.values():
        sync.close()
    trainer.shutdown()
    return out


class _Running:
    """A long answer that is under way."""

    def __init__(self, url: str) -> None:
        self._url, self._got = url, threading.Event()
        self._answer: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._got.wait(300)

    def _run(self) -> None:
        sampling = {"temperature": 1.0, "max_new_tokens": 450, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "lora_path": ADAPTER, "stream": True}
        request = urllib.request.Request(
            f"{self._url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    self._answer = json.loads(line[6:])
                    self._got.set()

    def answer(self) -> dict[str, Any]:
        self._thread.join(300)
        return self._answer["meta_info"]


def test_adapters_travel_as_bytes_or_as_memory_that_every_worker_opens() -> None:
    """SGLang's unpickler allows modules by prefix; what is opened stays when the file has gone."""
    tensors = [("a", torch.randn(2, 3)), ("b", torch.randn(4))]
    bucket = next(buckets(tensors, [torch.empty(64, dtype=torch.uint8)]))
    found: set[str] = set()

    class Recording(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add(module)
            return super().find_class(module, name)

    def opened(handle: Handle) -> dict[str, Any]:
        return Recording(io.BytesIO(base64.b64decode(payload(handle, bucket)))).load()

    with _in_shared_memory(bucket) as handle:
        path = Path(handle.args[0])
        received = [opened(_as_bytes(bucket)), opened(handle), opened(handle)]
    assert not path.exists()
    for content in received:
        flat = content["flattened_tensor"]
        for (name, tensor), meta in zip(tensors, content["metadata"], strict=True):
            assert meta.name == name
            assert torch.equal(flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape), tensor)
    assert {module.split(".")[0] for module in found} <= {"torch", "builtins", "functools", "types"}


def test_a_host_without_room_for_adapters_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters.os, "posix_fallocate", mock.Mock(side_effect=OSError(28, "No space left on device")))
    bucket = next(buckets([("a", torch.ones(2))], [torch.empty(8, dtype=torch.uint8)]))
    with pytest.raises(WeightUpdateError, match="no room for 8 bytes of adapters .No space left.*merged"):
        with _in_shared_memory(bucket):
            pass


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root: Path = tmp_path_factory.mktemp("engine")
    with EngineProcess(engine_config(make_tiny_checkpoint(root / "hf"), root / "out", **LORA)) as engine:
        yield engine.url


@pytest.fixture(scope="module")
def results(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """[TP2, PP2], by rank 0."""
    return run_distributed(_both_layouts, 2, engine_url, str(tmp_path_factory.mktemp("sync")))[0]


def test_an_update_by_adapters_equals_merging(results: list[dict[str, Any]]) -> None:
    """Log-probs and greedy tokens of the engine's base and adapter are those of the merged model in transformers."""
    for result in results:
        for r in result["rounds"]:
            log_probs, behind = r["merged"]
            assert r["engine"] == pytest.approx(log_probs, abs=1e-4) and behind < 1e-3
        seen = [r["engine"] for r in result["rounds"]]
        assert all(one != pytest.approx(other, abs=1e-3) for one, other in zip(seen, seen[1:], strict=False))


def test_the_frozen_weights_travel_once_and_stay(results: list[dict[str, Any]]) -> None:
    """Requests without the adapter are answered by them, and by no prefix that the engine read with others before."""
    for result in results:
        assert [r["whole"] for r in result["rounds"]] == [1, 0, 1, 1]
        for r in result["rounds"]:
            log_probs, behind = r["base"]
            assert r["bare"] == pytest.approx(log_probs, abs=1e-4) and behind < 1e-3
            assert r["bare"] != pytest.approx(r["engine"], abs=1e-3)


def test_the_engine_holds_one_adapter_and_its_checksums_are_the_trainers(results: list[dict[str, Any]]) -> None:
    for result in results:
        for r in result["rounds"]:
            assert r["adapters"] == ([ADAPTER], 3)
            assert (
                r["mine"] == r["theirs"] and len(r["mine"]) == 24 + 2 * 7 * 2
            )  # weights; layers, projections, A and B
        b = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
        assert len({r["mine"][b] for r in result["rounds"]}) == len(ROUNDS)


def test_versions_count_and_a_cached_prefix_is_of_its_own_version(results: list[dict[str, Any]]) -> None:
    """Adapters alone flush no cache here (--max-staleness)."""
    for number, result in enumerate(results):
        versions = [10 * number + n for n in range(1, len(ROUNDS) + 1)]
        assert [(r["version"], r["reported"]) for r in result["rounds"]] == [(v, str(v)) for v in versions]
        for step, r in enumerate(result["rounds"]):
            old, new, again = r["cached"]
            assert new == 0 and again > 0 and (old > 0 or not step)


def test_an_update_ends_running_requests_and_waits_for_none(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["interrupted"]["finish_reason"]["type"] == "abort"


def test_the_router_hands_on_which_adapter_a_request_wants(
    engine_url: str, results: list[dict[str, Any]], tmp_path: Path
) -> None:
    async def ask(url: str) -> list[float]:
        async with RouterClient(url, adapter=ADAPTER, concurrency=1, timeout=300, retries=0) as client:
            return await client.prompt_log_probs(PROMPT)

    with RouterProcess(engine_config(tmp_path, tmp_path), [engine_url]) as router:
        got = asyncio.run(ask(router.url))
    assert got[1:] == pytest.approx(results[-1]["rounds"][-1]["engine"], abs=1e-5)


def test_an_engine_that_is_not_there_is_an_error(results: list[dict[str, Any]]) -> None:
    assert all("http://127.0.0.1:9" in result["refused"] for result in results)
