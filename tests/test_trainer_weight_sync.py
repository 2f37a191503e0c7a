"""Weights travel from a trainer split over two processes into a real SGLang engine."""

from __future__ import annotations

import base64
import io
import json
import pickle
import socket
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dist_utils import run_distributed
from sglang_utils import engine_config, make_tiny_checkpoint
from trainer_utils import VOCAB_SIZE, make_trainer, random_samples, tiny_config

from slime_retool.config import Config
from slime_retool.engine.bucket_loader import BUCKET_LOADER, load_bucket
from slime_retool.engine.server import EngineProcess
from slime_retool.trainer.weight_sync import broadcast, disk
from slime_retool.trainer.weight_sync import sync as sync_module
from slime_retool.trainer.weight_sync.buckets import Bucket, buckets
from slime_retool.trainer.weight_sync.disk import DiskTransport
from slime_retool.trainer.weight_sync.ipc import export, payload
from slime_retool.trainer.weight_sync.transport import Peers
from slime_retool.types import RolloutBatch

MODEL = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 16, "vocab_size": 259, "max_position_embeddings": 1024, "rotary_base": 10000,
}  # fmt: skip
PROMPT = list(range(40, 60))
TIMEOUT_MINUTES = 5.0


TRANSPORTS = ("broadcast", "ipc", "disk")


def _filled(tensors: Iterable[tuple[str, torch.Tensor]], nbytes: int) -> list[list[tuple[str, torch.Tensor]]]:
    buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]
    return [[(name, tensor.clone()) for name, tensor in bucket.tensors()] for bucket in buckets(tensors, buffers)]


def test_buckets_keep_order_and_size() -> None:
    tensors = [(str(i), torch.full((n,), float(i))) for i, n in enumerate([2, 2, 4, 1, 1, 1])]
    result = _filled(tensors, 16)
    assert [[name for name, _ in bucket] for bucket in result] == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert all(torch.equal(tensor, dict(tensors)[name]) for bucket in result for name, tensor in bucket)
    assert _filled([], 16) == []


def test_a_bucket_holds_one_dtype() -> None:
    tensors = [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.ones(2)), ("c", torch.full((2, 1), 2.0))]
    result = _filled(tensors, 100)
    assert [[(name, tensor.dtype, tensor.shape) for name, tensor in bucket] for bucket in result] == [
        [("a", torch.bfloat16, (3,))],
        [("b", torch.float32, (2,)), ("c", torch.float32, (2, 1))],
    ]


def test_a_bucket_is_valid_while_the_next_one_is_filled() -> None:
    buffers = [torch.empty(4, dtype=torch.uint8) for _ in range(2)]
    shared = torch.zeros(1)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for value in range(3):  # memory that is reused, as gathered tensors are
            yield str(value), shared.fill_(value)

    seen: list[float] = []
    before: Bucket | None = None
    for bucket in buckets(stream(), buffers):
        if before is not None:
            seen.append(float(next(before.tensors())[1]))
        before = bucket
    assert seen == [0, 1]


def _loaded(opened: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What an engine's own loader gets out of a payload."""
    loaded: dict[str, torch.Tensor] = {}
    model = SimpleNamespace(load_weights=lambda named: loaded.update((name, value.clone()) for name, value in named))
    load_bucket(model, opened)
    return loaded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_payload_names_only_what_sglang_loads_and_opens_the_same_memory(dtype: torch.dtype) -> None:
    """SGLang's unpickler allows modules by prefix; torch's storage loader, which Megatron replaces, is not needed."""
    shared = torch.empty(64, dtype=torch.uint8)
    tensors = [("a", torch.randn(2, 3).to(dtype)), ("b", torch.randn(1).to(dtype))]
    bucket = next(buckets(tensors, [shared]))
    found: set[str] = set()

    class Recording(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add(f"{module}.{name}")
            return super().find_class(module, name)

    for _ in range(3):  # every bucket has a handle of its own
        opened = Recording(io.BytesIO(base64.b64decode(payload(export(shared), bucket)))).load()
        flat, metadata = opened["flattened_tensor"], opened["metadata"]
        for (name, tensor), meta in zip(tensors, metadata, strict=True):
            assert meta.name == name
            assert torch.equal(flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape), tensor)
        shared.fill_(7)
        assert int(flat[0]) == 7
        next(buckets(tensors, [shared]))
        del flat, opened
    assert all(name.startswith(("torch.", "types.")) for name in found)


def test_files_go_to_memory_only_where_the_whole_model_fits_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of it this rank holds: with expert parallelism a small one."""
    config = tiny_config(
        num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24, expert_model_parallel_size=4,
        actor_num_gpus_per_node=4, output_dir=str(tmp_path),
    )  # fmt: skip
    trainer = SimpleNamespace(config=config, actor=SimpleNamespace(dtype=torch.float32), module=torch.nn.Linear(2, 2))
    transport = DiskTransport(SimpleNamespace(trainer=trainer))  # type: ignore[arg-type]
    experts, rest = 3 * 4 * 24 * 32, 2 * 32 + 4 * 32 + (32 + 2 * 16 + 32) * 32 + 2 * 8
    whole = 4 * (VOCAB_SIZE * 32 + 32 + 2 * (experts + rest))
    for free, root in ((2 * whole + 2**14, "/dev/shm"), (2 * whole - 2**14, str(tmp_path))):
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert transport._root() == root


class _Recorder(BaseHTTPRequestHandler):
    """Stands in for an engine: opens every worker's payload and keeps what is in it."""

    received: list[list[dict[str, torch.Tensor]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        workers = [_loaded(pickle.loads(base64.b64decode(text))) for text in body["serialized_named_tensors"]]
        self.received.append(workers)
        reply = json.dumps({"success": body["load_format"] == BUCKET_LOADER, "message": "wrong format"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: Any) -> None: ...


def _two_workers(rank: int, world_size: int) -> list[str]:
    """Each rank's report of how a two-worker engine was served by the two ranks that share its devices."""
    from slime_retool.engine.admin import EngineAdmin
    from slime_retool.trainer.gather import hf_named_tensors
    from slime_retool.trainer.weight_sync import ipc
    from slime_retool.trainer.weight_sync.transport import Peers

    made: list[int] = []
    ipc.export = lambda data: made.append(id(data)) or export(data)
    trainer = make_trainer(rank, world_size, tiny_config(tensor_model_parallel_size=2))
    expected = {name: tensor.clone() for name, tensor in hf_named_tensors(trainer.module, trainer.config)}
    _Recorder.received = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine = EngineAdmin(f"http://127.0.0.1:{server.server_port}", timeout=300)
    total = sum(tensor.nbytes for tensor in expected.values())
    sizes = torch.tensor([total // 5])
    torch.distributed.broadcast(sizes, src=0)
    ipc.IpcTransport(Peers(trainer, [engine], 2, "127.0.0.1", int(sizes), 300)).send()
    server.shutdown()
    problems = []
    if rank == 0:
        for worker in range(2):
            got = {name: t for bucket in _Recorder.received for name, t in bucket[worker].items()}
            if list(got) != list(expected) or not all(torch.equal(got[name], expected[name]) for name in expected):
                problems.append(f"worker {worker} got other weights")
    elif _Recorder.received:
        problems.append("the second rank posted as well")
    posts = torch.tensor([len(_Recorder.received)])
    torch.distributed.broadcast(posts, src=0)
    # Torch counts a handle's one opening: one that served two buckets would keep a card's memory for good.
    if len(made) != int(posts) or len(made) <= 2 or len(set(made)) != 2:
        problems.append(f"{int(posts)} buckets in {len(set(made))} buffers, {len(made)} handles")
    trainer.shutdown()
    return problems


def test_every_worker_of_an_engine_gets_the_memory_of_the_rank_it_shares_a_device_with() -> None:
    assert run_distributed(_two_workers, 2) == [[], []]


class _Joining:
    """Stands in for an engine that is asked to join the weight-update group."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.joined: list[tuple[Any, ...]] = []

    def init_weights_update_group(self, *args: Any) -> None:
        with pytest.raises(OSError, match="in use"):
            socket.create_server(args[:2]).close()  # else another process could take the port before the trainer does
        self.joined.append(args)


def test_every_worker_of_every_engine_has_a_rank_of_its_own_in_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of two workers: rank 0 sends, 1 and 2 are the first engine's, 3 and 4 the second's."""
    groups: list[tuple[Any, ...]] = []
    monkeypatch.setattr(broadcast, "_process_group", lambda *args: groups.append(args) or object())
    engines: Any = [_Joining("http://10.0.0.2:1"), _Joining("http://10.0.0.3:1")]
    trainer: Any = SimpleNamespace(config=Config(device="cuda"))
    transport = broadcast.BroadcastTransport(Peers(trainer, engines, 2, "127.0.0.1", 1, 30))
    transport._join()
    transport._join()  # once is enough
    ((backend, address, world_size, name, _),) = groups
    port = int(address.removeprefix("tcp://127.0.0.1:"))
    assert (backend, world_size) == ("nccl", 5)
    joined = [engine.joined for engine in engines]
    assert joined == [[("127.0.0.1", port, first, 5, name, "nccl")] for first in (1, 3)]
    assert sorted([0, *(args[2] + worker for (args,) in joined for worker in range(2))]) == list(range(world_size))
    again = broadcast.BroadcastTransport(Peers(trainer, engines, 2, "127.0.0.1", 1, 30))
    again._join()
    assert groups[1][3] != name  # engines may still hold the group of a trainer that was killed


def _generate(url: str, ids: list[int]) -> tuple[list[float], list[int]]:
    """The engine's log-probs of `ids[1:]`, and eight greedy tokens after them."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer = json.loads(reply.read())
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]], answer["output_ids"]


def _both_layouts(rank: int, world_size: int, url: str, root: str) -> list[dict[str, Any]]:
    """TP2 with sequence parallelism, then PP2, into the same engine one after the other."""
    layouts = [{"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}]
    return [_work(rank, world_size, layout, url, 10 * number, root) for number, layout in enumerate(layouts)]


def _work(rank: int, world_size: int, layout: dict[str, Any], url: str, first: int, root: str) -> dict[str, Any]:
    """One update by each transport with train steps between them; both sides' log-probs and checksums."""
    from slime_retool.engine.admin import EngineAdmin
    from slime_retool.errors import WeightUpdateError
    from slime_retool.trainer.weight_sync import WeightSync
    from slime_retool.types import TrainSample

    config = tiny_config(
        **MODEL, **layout, seed=first, lr=1e-2, max_tokens_per_gpu=64, output_dir=root,
        distributed_timeout_minutes=TIMEOUT_MINUTES, update_weight_buffer_size=20_000,
    )  # fmt: skip
    trainer = make_trainer(rank, world_size, config)
    probe = TrainSample(PROMPT, [0] + [1] * (len(PROMPT) - 1))
    out: dict[str, Any] = {"rounds": []}
    for step, transport in enumerate(TRANSPORTS):
        sync = WeightSync(trainer, [url], transport=transport)
        sync.weight_version = first + step
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
        sync.close()
        trainer.train(RolloutBatch(random_samples(seed=step)), step)
    out["refused"] = {}
    for transport, urls in (("broadcast", ["http://127.0.0.1:9"]), ("ipc", ["http://127.0.0.1:9"])):
        sync = WeightSync(trainer, urls, transport=transport)
        sync.weight_version = 7
        try:
            sync.update()
            out["refused"][transport] = "accepted"
        except WeightUpdateError as error:
            out["refused"][transport] = str(error)
        assert sync.weight_version == 7
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
        assert set(result["refused"]) == {"broadcast", "ipc"}
        assert all("http://127.0.0.1:9" in text and "failed" in text for text in result["refused"].values())


@pytest.mark.parametrize(("keeps", "asleep"), [(False, False), (True, False), (True, True)])
def test_the_first_update_empties_a_cache_that_is_kept_over_updates(keeps: bool, asleep: bool, monkeypatch) -> None:
    """Another run on the same engines, or the trainers before, counted the same versions of other weights."""
    asked: list[str] = []
    engine = SimpleNamespace(
        pause=lambda: asked.append("pause"), flush_cache=lambda: asked.append("flush"),
        set_weight_version=lambda version: asked.append(f"version {version}"), resume=lambda: asked.append("resume"),
    )  # fmt: skip
    sync: Any = sync_module.WeightSync.__new__(sync_module.WeightSync)
    config = SimpleNamespace(keeps_cache=keeps, moe_router_enable_expert_bias=False)
    sync._trainer = SimpleNamespace(rank=0, config=config)
    sync._peers = SimpleNamespace(engines=[engine])
    sync._transport = SimpleNamespace(send=lambda: asked.append("send"), reset=lambda: None)
    sync.weight_version, sync._begun = 4, False
    monkeypatch.setattr(sync_module, "together", lambda step: step())
    sync.update(asleep=asleep)
    sync.update(asleep=asleep)
    begin, end = ([], []) if asleep else (["pause"], ["resume"])
    again = [] if keeps else ["flush"]
    assert asked == [*begin, "flush", "send", "version 5", *end, *begin, *again, "send", "version 6", *end]
