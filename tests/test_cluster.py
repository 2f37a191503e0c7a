"""What a run refuses before it starts: Ray clusters and external engines that are not as the flags say."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import ray

from slime_retool.cluster.cluster import Cluster
from slime_retool.cluster.connection import connect
from slime_retool.cluster.engines import Engines
from slime_retool.config import Config
from slime_retool.engine.admin import EngineAdmin
from slime_retool.engine.process import answers, held_ports
from slime_retool.errors import ConfigError, WeightUpdateError


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_ray_cluster_that_does_not_answer_is_an_error_at_once(by_variable: bool, monkeypatch) -> None:
    with held_ports(1) as (port,):
        address = f"127.0.0.1:{port}"
        if by_variable:
            monkeypatch.setenv("RAY_ADDRESS", address)
        config = Config(device="cpu", ray_address=None if by_variable else address)
        refused = pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}.*ray start --head")
        with refused, Cluster(config):
            pass


def test_a_private_ray_that_starts_too_slowly_is_started_again_and_other_errors_are_raised(monkeypatch) -> None:
    slow = Exception("The current node timed out during startup. This could happen because ...")
    outcomes: list[Exception | None] = [slow, None, slow, slow, slow, RuntimeError("no room")]

    def init(**options: object) -> None:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    connect(Config(device="cpu"))
    assert len(outcomes) == 4
    with pytest.raises(Exception, match="timed out during startup"):
        connect(Config(device="cpu"))
    with pytest.raises(RuntimeError, match="no room"):
        connect(Config(device="cpu"))
    assert outcomes == []


def known(monkeypatch: pytest.MonkeyPatch, workers: int, *, device: str = "cuda", **values: object) -> list[str]:
    monkeypatch.setattr(EngineAdmin, "tensor_parallel_size", lambda self: workers)
    config = Config(device=device, rollout_external_urls=["http://10.0.0.2:1/", "http://10.0.0.3:1"], **values)
    return Engines(config).start()


@pytest.mark.parametrize("device", ["cuda", "cpu"])  # of this run, whatever the servers have
def test_external_engines_have_the_size_that_ranks_are_counted_by(device: str, monkeypatch) -> None:
    sized = partial(known, monkeypatch, device=device)
    assert sized(2, rollout_num_gpus_per_engine=2) == ["http://10.0.0.2:1", "http://10.0.0.3:1"]
    assert sized(4, update_weight_disk_dir="/shared") != []  # files do not count workers
    assert sized(4, debug_rollout_only=True) != []  # nothing is sent to them
    with pytest.raises(ConfigError, match="10.0.0.2:1 has 4 tensor-parallel workers, the flags say 1.*per-engine 4"):
        sized(4)


@pytest.mark.parametrize(("rank", "taken"), [(0, False), (3, False), (4, True)])
def test_external_engines_take_the_adapters_of_updates(rank: int, taken: bool, monkeypatch) -> None:
    monkeypatch.setattr(EngineAdmin, "tensor_parallel_size", lambda engine: 1)
    monkeypatch.setattr(EngineAdmin, "adapter_rank", lambda engine: rank)
    values = {"lora_rank": 4, "lora_target_modules": ["linear_proj"], "lora_weight_update": "adapters"}
    engines = Engines(Config(device="cpu", rollout_external_urls=["http://10.0.0.2:1"], **values))
    if taken:
        assert engines.start() == ["http://10.0.0.2:1"]
        return
    needed = "--enable-lora --max-lora-rank 4 --lora-target-modules o_proj --max-loras-per-batch 2"
    with pytest.raises(ConfigError, match=f"takes adapters up to rank {rank}: start it with {needed}, or use"):
        engines.start()


def test_an_external_engine_without_experts_is_refused_where_they_are_needed(monkeypatch) -> None:
    for returns in (True, False):
        monkeypatch.setattr(EngineAdmin, "returns_experts", lambda self, returns=returns: returns)
        assert known(monkeypatch, 1) != []
        if returns:
            assert known(monkeypatch, 1, use_rollout_routing_replay=True) != []
    with pytest.raises(ConfigError, match="10.0.0.2:1 .*no experts; start it with --enable-return-routed-experts"):
        known(monkeypatch, 1, use_rollout_routing_replay=True)


def test_an_external_engine_that_does_not_answer_is_an_error() -> None:
    with held_ports(1) as (port,):
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"--rollout-external-urls: no SGLang server answers there: {url}"):
            Engines(Config(device="cpu", rollout_external_urls=[url])).start()


@contextmanager
def server_that_says(reply: bytes) -> Iterator[str]:
    """A server that answers every connection with these bytes. Gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed: the test is over
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):  # closing on unread input would reset the connection
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


OTHER_SERVERS = {
    "a web page": b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
    "other JSON": b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"ok": 1}',
    "a list": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
    "a reply that is cut off": b'HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"tp_size"',
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
}


@pytest.mark.parametrize("name", OTHER_SERVERS)
def test_an_address_where_something_else_answers_is_an_error(name: str) -> None:
    with server_that_says(OTHER_SERVERS[name]) as url:
        with pytest.raises(ConfigError, match=f"--rollout-external-urls: no SGLang server answers there: {url}"):
            Engines(Config(device="cpu", rollout_external_urls=[url])).start()


def test_what_a_server_does_not_say_is_not_made_up_and_raises_what_is_documented() -> None:
    with server_that_says(OTHER_SERVERS["no HTTP"]) as url:
        assert not answers(url)
    with server_that_says(OTHER_SERVERS["other JSON"]) as url:
        assert EngineAdmin(url).memory() == {}
    with server_that_says(OTHER_SERVERS["a reply that is cut off"]) as url:
        with pytest.raises(WeightUpdateError, match="IncompleteRead"):
            EngineAdmin(url).set_weight_version(1)


@pytest.mark.parametrize(("staleness", "before"), [(0, ["pause", "settle", "flush_cache"]), (1, ["pause", "settle"])])
def test_engines_that_keep_their_cache_give_back_their_weights(staleness, before, monkeypatch):
    """What they have read goes with the weights that read it, unless conversations go on over the update."""
    config = Config(
        device="cpu", colocate=True, offload_rollout=True, offload_rollout_cache=False, max_staleness=staleness
    )
    engine = mock.Mock()
    engines = Engines(config)
    monkeypatch.setattr(Engines, "_admins", [engine])
    engines.release("weights", "kv_cache")
    engines.release("weights", "kv_cache")
    engines.resume_memory("weights")
    engines.resume_memory("kv_cache")
    calls = [(call[0], *call[1]) for call in engine.method_calls]
    assert calls == [*((name,) for name in before), ("release_memory", ["weights"]), ("resume_memory", ["weights"])]


@pytest.mark.parametrize(("update", "given_back"), [("merged", ["kv_cache", "weights"]), ("adapters", ["kv_cache"])])
def test_engines_that_are_sent_adapters_alone_keep_their_weights(update, given_back, monkeypatch):
    config = Config(device="cpu", colocate=True, offload_rollout=True, lora_rank=4, lora_weight_update=update)
    engine = mock.Mock()
    engines = Engines(config)
    monkeypatch.setattr(Engines, "_admins", [engine])
    engines.release("weights", "kv_cache")
    assert [sorted(call.args[0]) for call in engine.release_memory.call_args_list] == [given_back]
    engines.resume_memory("weights")
    assert engine.resume_memory.call_count == ("weights" in given_back)


@pytest.mark.parametrize(
    ("started", "sent"), [("auto", {}), ("dummy", {"load_format": "auto"}), ("flash_rl", {}), ("bitsandbytes", {})]
)
def test_a_folder_of_weights_is_read_whatever_format_a_server_started_with(started, sent, monkeypatch) -> None:
    """SGLang reads one with the loader of the request's format, else of --load-format; it has none for "dummy"."""
    asked = []

    def request(self: EngineAdmin, path: str, body: dict[str, object] | None) -> str:
        if body is None:
            return json.dumps({"load_format": started})
        asked.append((path, body))
        return json.dumps({"success": True})

    monkeypatch.setattr(EngineAdmin, "_request", request)
    EngineAdmin("http://10.0.0.2:1").update_weights_from_disk("/weights")
    assert asked == [("/update_weights_from_disk", {"model_path": "/weights", "flush_cache": False} | sent)]
