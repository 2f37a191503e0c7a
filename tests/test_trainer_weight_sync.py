"""Weights travel from a trainer split over two processes into a real SGLang engine."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_utils import run_distributed
from sglang_utils import engine_config, make_tiny_checkpoint
from trainer_utils import make_trainer, random_samples, tiny_config

from slime_retool.engine.server import EngineProcess
from slime_retool.trainer.weight_sync import buckets
from slime_retool.types import RolloutBatch

MODEL = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 16, "vocab_size": 259, "max_position_embeddings": 1024, "rotary_base": 10000,
}  # fmt: skip
PROMPT = list(range(40, 60))
TIMEOUT_MINUTES = 1.0


def test_buckets_keep_order_and_size() -> None:
    tensors = [(str(i), torch.full((n,), float(i))) for i, n in enumerate([2, 2, 9, 1, 1, 1])]
    result = list(buckets(iter(tensors), 16))
    assert [[name for name, _ in bucket] for bucket in result] == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert list(buckets(iter([]), 16)) == []


def test_buckets_hold_copies() -> None:
    shared = torch.zeros(1)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for value in range(3):
            yield str(value), shared.fill_(value)

    assert [float(t) for bucket in buckets(stream(), 100) for _, t in bucket] == [0, 1, 2]


def _generate(url: str, ids: list[int]) -> tuple[list[float], list[int]]:
    """The engine's log-probs of `ids[1:]`, and eight greedy tokens after them."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.loads(reply.read())
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]], answer["output_ids"]


def _both_layouts(rank: int, world_size: int, url: str, root: str) -> list[dict[str, Any]]:
    """TP2 with sequence parallelism, then PP2, into the same engine one after the other."""
    layouts = [{"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}]
    return [_work(rank, world_size, layout, url, 10 * number, root) for number, layout in enumerate(layouts)]


def _work(rank: int, world_size: int, layout: dict[str, Any], url: str, first: int, root: str) -> dict[str, Any]:
    """Three updates with train steps between them, the last through files; both sides' log-probs and checksums."""
    from slime_retool.engine.admin import EngineAdmin
    from slime_retool.errors import WeightUpdateError
    from slime_retool.trainer.weight_sync import WeightSync
    from slime_retool.types import TrainSample

    config = tiny_config(
        **MODEL, **layout, seed=first, lr=1e-2, max_tokens_per_gpu=64, output_dir=root,
        distributed_timeout_minutes=TIMEOUT_MINUTES,
    )  # fmt: skip
    trainer = make_trainer(rank, world_size, config)
    sync = WeightSync(trainer, [url], bucket_bytes=20_000, weight_version=first)
    probe = TrainSample(PROMPT, [0] + [1] * (len(PROMPT) - 1))
    out: dict[str, Any] = {"rounds": []}
    for step in range(3):
        sync.through_files = step == 2  # what --colocate does on GPUs
        version = sync.update()
        mine = sync.weight_checksums()
        log_probs = trainer.log_probs([probe]).tolist()[1:]
        if rank == 0:
            admin = EngineAdmin(url)
            engine_log_probs, greedy = _generate(url, PROMPT)
            out["rounds"].append(
                {
                    "version": version, "reported": admin.weight_version(), "mine": mine,
                    "theirs": admin.weight_checksums(), "log_probs": (log_probs, engine_log_probs), "greedy": greedy,
                }
            )  # fmt: skip
        trainer.train(RolloutBatch(random_samples(seed=step)), step)
    sync.close()
    sync.through_files = False
    sync.set_engines(["http://127.0.0.1:9"])
    try:
        sync.update()
        out["dead engine"] = "accepted"
    except WeightUpdateError as error:
        out["dead engine"] = str(error)
    out["version after failure"] = sync.weight_version
    trainer.shutdown()
    return out


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root: Path = tmp_path_factory.mktemp("engine")
    config = engine_config(make_tiny_checkpoint(root / "hf"), root / "out")
    with EngineProcess(config) as engine:
        yield engine.url


@pytest.fixture(scope="module")
def results(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """[TP2 rank 0, PP2 rank 0, TP2 rank 1, PP2 rank 1]."""
    return sum(run_distributed(_both_layouts, 2, engine_url, str(tmp_path_factory.mktemp("sync"))), [])


def test_engine_weights_equal_the_trainers_by_checksum(results: list[dict[str, Any]]) -> None:
    for result in results[:2]:
        for r in result["rounds"]:
            assert r["mine"] == r["theirs"] and len(r["mine"]) == 24
        sums = [tuple(r["mine"].values()) for r in result["rounds"]]
        assert len(set(sums)) == 3


def test_engine_and_trainer_log_probs_agree_after_each_update(results: list[dict[str, Any]]) -> None:
    for result in results[:2]:
        for r in result["rounds"]:
            mine, theirs = r["log_probs"]
            assert theirs == pytest.approx(mine, abs=1e-4)
        assert result["rounds"][0]["log_probs"][1] != pytest.approx(result["rounds"][1]["log_probs"][1], abs=1e-3)


def test_weight_version_counts_up_and_reaches_the_engine(results: list[dict[str, Any]]) -> None:
    assert [(r["version"], r["reported"]) for r in results[0]["rounds"]] == [(n, str(n)) for n in (1, 2, 3)]
    assert [(r["version"], r["reported"]) for r in results[1]["rounds"]] == [(n, str(n)) for n in (11, 12, 13)]


def test_a_dead_engine_is_an_error_on_every_rank(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "http://127.0.0.1:9" in result["dead engine"] and "failed" in result["dead engine"]
    assert results[0]["version after failure"] == 3
