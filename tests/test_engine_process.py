"""Supervision and flags of servers, without starting SGLang."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
from sglang_utils import engine_config, processes_with

from slime_retool.config import Config, parse_config
from slime_retool.config.engines import check_engines, warn_of_graphs
from slime_retool.engine import flag_check
from slime_retool.engine.adapter_checksum import ADAPTERS_LOADER
from slime_retool.engine.admin import EngineAdmin
from slime_retool.engine.bucket_loader import BUCKET_LOADER
from slime_retool.engine.checksum import REPORT_LOADER
from slime_retool.engine.flag_check import ServerFlagCheck
from slime_retool.engine.process import Server, ServerError, SupervisedProcess, answers, held_ports, port_was_taken
from slime_retool.engine.server import GATHER_PREFILLS, server_environment, server_flags, server_module
from slime_retool.engine.weight_copies import REFRESH_LOADER
from slime_retool.errors import ConfigError, WeightUpdateError

ROOT = Path(__file__).resolve().parents[1]
# A server with a child, and a grandchild in a session of its own; says so, then lives on.
FAMILY = """
import subprocess, sys, time
child = "import subprocess, sys, time; " \\
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); " \\
    "print('ready', flush=True); time.sleep(600)"
{prelude}
subprocess.Popen([sys.executable, "-c", child])
time.sleep(600)
"""
OWNER = """
import os, sys, time
from pathlib import Path
from slime_retool.engine.process import SupervisedProcess
process = SupervisedProcess([sys.executable, "-c", sys.argv[2]], log_path=Path(sys.argv[1]), environment=os.environ)
process.wait_until_ready(lambda: "ready" in process.log_tail(), 120, "the family")
print("ready", flush=True)
time.sleep(600)
"""
SLOW_WEB_SERVER = """
import http.server, sys, time
time.sleep(float(sys.argv[2]))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def environment(mark: str) -> dict[str, str]:
    name, value = mark.split("=")
    return {**os.environ, name: value, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def new_mark() -> str:
    return f"SLIME_RETOOL_TEST_RUN={uuid.uuid4().hex}"


def wait_until_gone(mark: str) -> dict[int, str]:
    deadline = time.monotonic() + 120
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def start(tmp_path: Path, mark: str, code: str, grace: float = 5.0) -> SupervisedProcess:
    return SupervisedProcess(
        [sys.executable, "-c", code], log_path=tmp_path / "log.txt", environment=environment(mark), grace=grace
    )


def wait_for_family(process: SupervisedProcess) -> None:
    process.wait_until_ready(lambda: "ready" in process.log_tail(), 120, "the family")


@pytest.mark.parametrize(("prelude", "grace"), [("", 5.0), (STUBBORN, 0.5)])
def test_stop_ends_the_server_with_all_its_descendants(prelude: str, grace: float, tmp_path: Path):
    mark = new_mark()
    process = start(tmp_path, mark, FAMILY.format(prelude=prelude), grace)
    wait_for_family(process)
    assert len(processes_with(mark)) == 4  # supervisor, server, child, grandchild
    process.stop()
    assert processes_with(mark) == {} and not process.alive
    process.stop()  # again does nothing


def test_descendants_end_when_the_server_dies_by_itself(tmp_path: Path):
    mark = new_mark()
    process = start(tmp_path, mark, FAMILY.format(prelude=""), 0.5)
    wait_for_family(process)
    server = next(pid for pid in processes_with(mark) if psutil.Process(pid).ppid() == process._process.pid)
    os.kill(server, signal.SIGKILL)
    assert wait_until_gone(mark) == {}
    assert process.wait(60) is not None  # a process loses its environment, by which it is found, before it is dead
    process.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_an_owner_that_is_killed(number: signal.Signals, tmp_path: Path):
    mark = new_mark()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log.txt"), FAMILY.format(prelude="")],
        env=environment(mark), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None and owner.stdout.readline().strip() == "ready"
    owner.send_signal(number)
    owner.wait()
    assert wait_until_gone(mark) == {}


def test_a_server_started_from_a_thread_outlives_the_thread(tmp_path: Path):
    started: list[SupervisedProcess] = []
    sleeper = "import time; time.sleep(600)"
    thread = threading.Thread(target=lambda: started.append(start(tmp_path, new_mark(), sleeper)))
    thread.start()
    thread.join()
    time.sleep(0.5)
    assert started[0].alive
    started[0].stop()


def test_a_server_that_dies_while_starting_shows_the_end_of_its_log(tmp_path: Path):
    with start(tmp_path, new_mark(), "print('no such model'); raise SystemExit(3)") as process:
        with pytest.raises(ServerError, match="ended with status 3 while starting(.|\n)*no such model"):
            process.wait_until_ready(lambda: False, 120, "the server")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_that_ended_a_server_is_named(number: signal.Signals, tmp_path: Path):
    with start(tmp_path, new_mark(), f"import os; os.kill(os.getpid(), {int(number)})") as process:
        with pytest.raises(ServerError, match=f"the server was ended by {number.name} while starting"):
            process.wait_until_ready(lambda: False, 120, "the server")


def test_the_log_of_an_earlier_server_says_nothing_about_this_one(tmp_path: Path):
    """Else a line about a taken port would have a server that cannot start started four times."""
    (tmp_path / "log.txt").write_text("Address already in use\n")
    with start(tmp_path, new_mark(), "print('no such model'); raise SystemExit(3)") as process:
        with pytest.raises(ServerError) as caught:
            process.wait_until_ready(lambda: False, 120, "the server")
    assert "no such model" in str(caught.value) and not port_was_taken(caught.value)


def test_a_server_that_never_becomes_ready_is_an_error(tmp_path: Path):
    with start(tmp_path, new_mark(), "import time; print('loading', flush=True); time.sleep(600)") as process:
        with pytest.raises(ServerError, match="not ready after 0.5 s"):
            process.wait_until_ready(lambda: False, 0.5, "the server")


def test_held_ports_are_different_and_not_those_of_outgoing_connections():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with held_ports(20) as ports:
        assert len(set(ports)) == 20 and not any(low <= port <= high for port in ports)


@pytest.fixture
def drawn_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for ports tries the same ones in the same order."""
    monkeypatch.setattr(random.SystemRandom, "sample", lambda self, population, k: list(population)[:k])


@pytest.mark.usefixtures("drawn_in_order")
def test_a_held_port_is_nobody_elses_and_the_servers_it_is_meant_for():
    with held_ports(2) as mine, held_ports(2) as others:
        assert not set(mine) & set(others)
        with socket.create_server(("127.0.0.1", mine[0])) as server:
            with socket.create_connection(("127.0.0.1", mine[0]), timeout=60):
                server.accept()[0].close()


class WebServer(Server):
    """Serves a folder, `delay` seconds after its start, as an engine that loads a model first."""

    def __init__(self, folder: Path, delay: float = 0, before: Callable[[int], None] = lambda port: None) -> None:
        """`before(port)` is called when the port has been chosen."""

        def command(ports: list[int]) -> list[str]:
            before(ports[0])
            return [sys.executable, "-c", SLOW_WEB_SERVER, str(ports[0]), str(delay)]

        self._start(
            "web server", command, host="127.0.0.1", health_path="/", timeout=120, log_path=folder / "log.txt",
            environment=os.environ, grace=1.0,
        )  # fmt: skip


@pytest.mark.usefixtures("drawn_in_order")
def test_servers_that_start_at_once_are_told_apart(tmp_path: Path):
    """With the same port, the slower one would take the other one's answers for its own."""
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(WebServer, tmp_path / name, delay) for name, delay in (("fast", 1), ("slow", 3))]
        with starts[0].result() as one, starts[1].result() as two:
            assert one.port != two.port


def test_a_server_whose_port_is_taken_meanwhile_starts_on_another(tmp_path: Path):
    tried: list[int] = []
    with ExitStack() as stack:

        def take_the_first(port: int) -> None:
            if not tried:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            tried.append(port)

        with WebServer(tmp_path, before=take_the_first) as server:
            assert len(tried) == 2 and server.port == tried[1] != tried[0]
            assert answers(f"{server.url}/")


ASKS_ITSELF = """
import sys, threading, urllib.request
from http.server import HTTPServer, SimpleHTTPRequestHandler
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler)
thread = threading.Thread(target=server.serve_forever)
thread.start()
with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/") as reply:
    print("reached itself", reply.status, flush=True)
thread.join()
"""


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "HTTPS_PROXY"])
def test_servers_of_a_run_and_their_health_checks_go_past_a_proxy(name: str, tmp_path: Path, monkeypatch):
    for each in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(each, raising=False)
        monkeypatch.delenv(each.upper(), raising=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nothing listens: whoever goes there fails at once
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr("test_engine_process.SLOW_WEB_SERVER", ASKS_ITSELF)
        with WebServer(tmp_path) as server:
            server.wait_until_ready(lambda: "reached itself 200" in server.log_tail(), 120, "the server")


def test_only_a_taken_port_is_worth_another_start():
    assert port_was_taken(ServerError("OSError: [Errno 98] error while attempting to bind: Address already in use"))
    assert not port_was_taken(ServerError("CUDA out of memory"))


LAUNCHER = """
import multiprocessing
import sys

import torch

made = None


def report():
    print([(tuple(each.shape), str(each.dtype), each.tolist()) for each in made], sys.argv[1:])
    print(torch.ones(10**7).sum().item(), torch.get_num_threads())


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn", force=True)
    print(torch.ones(10**7).sum().item(), flush=True)
    made = [
        torch.zeros((2, 3), dtype=torch.int32, device="cpu", pin_memory=True),
        torch.ones(2).pin_memory(),
        torch.tensor([1.5], pin_memory=True),
        torch.arange(3, pin_memory=False),
    ]
    child = multiprocessing.Process(target=report)
    child.start()
    child.join(60)
    if child.is_alive():
        print("hangs")
        child.kill()
"""


def test_without_a_gpu_the_launcher_pins_no_memory_and_its_processes_import_nothing_anew(tmp_path: Path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(LAUNCHER)
    path = f"{tmp_path}:{Path(__file__).parents[1]}"
    done = subprocess.run(
        [sys.executable, "-m", "slime_retool.engine.cpu_main", "--port", "7"],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    made = [
        ((2, 3), "torch.int32", [[0] * 3] * 2),
        ((2,), "torch.float32", [1.0, 1.0]),
        ((1,), "torch.float32", [1.5]),
        ((3,), "torch.int64", [0, 1, 2]),
    ]
    launcher, made_there, child = done.stdout.splitlines()
    assert made_there == f"{made} ['--port', '7']"  # a spawned process would have made nothing
    # Both compute: OpenMP's threads of a launcher would be missing in the processes that it forks.
    assert launcher == "10000000.0" and child == f"10000000.0 {min(2, len(os.sched_getaffinity(0)))}"


def test_an_engine_that_serves_adapters_is_started_for_them(tmp_path: Path):
    values = {"lora_rank": 8, "lora_target_modules": ["linear_qkv", "linear_fc2"], "lora_weight_update": "adapters"}
    config = engine_config(tmp_path, tmp_path, **values)
    flags = server_flags(config)
    assert flags["--enable-lora"] == [] and flags["--max-lora-rank"] == ["8"]
    assert flags["--lora-target-modules"] == ["q_proj", "k_proj", "v_proj", "down_proj"]
    assert flags["--lora-backend"] == ["torch_native"] and flags["--max-loras-per-batch"] == ["2"]
    assert flags["--custom-weight-loader"] == [REPORT_LOADER, BUCKET_LOADER, REFRESH_LOADER, ADAPTERS_LOADER]
    on_gpu = engine_config(tmp_path, tmp_path, device="cuda", **values)
    assert "--lora-backend" not in server_flags(on_gpu)
    merged = engine_config(tmp_path, tmp_path, **values | {"lora_weight_update": "merged"})
    assert "--enable-lora" not in server_flags(merged)


def test_a_cpu_engine_gets_the_flags_that_sglang_needs_there(tmp_path: Path):
    config = engine_config(tmp_path, tmp_path, seed=7)
    flags = server_flags(config, rank=2)
    assert flags["--device"] == ["cpu"] and flags["--dtype"] == ["float32"]
    assert flags["--attention-backend"] == ["torch_native"] and flags["--skip-server-warmup"] == []
    assert server_module(config) == "slime_retool.engine.cpu_main"
    assert server_module(replace(config, device="cuda")) == "sglang.launch_server"
    assert flags["--random-seed"] == ["9"] and flags["--weight-version"] == ["0"]
    assert flags["--max-total-tokens"] == ["16384"] and flags["--context-length"] == ["520"]
    assert flags["--custom-weight-loader"] == [REPORT_LOADER, BUCKET_LOADER, REFRESH_LOADER]
    assert "--enable-lora" not in flags
    env = server_environment(config, None)
    assert env["SGLANG_USE_CPU_ENGINE"] == "1" and env["CUDA_VISIBLE_DEVICES"] == ""


def test_a_gpu_engine_leaves_backends_to_sglang_and_takes_the_devices_given(tmp_path: Path):
    config = Config(
        device="cuda", hf_checkpoint=str(tmp_path), rollout_num_gpus_per_engine=2, sglang_mem_fraction_static=0.7
    )
    flags = server_flags(config)
    assert flags["--tp-size"] == ["2"] and flags["--mem-fraction-static"] == ["0.7"]
    assert not {"--device", "--attention-backend", "--dtype", "--max-total-tokens"} & set(flags)
    assert server_environment(config, [4, 5])["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_gpu_engines_gather_prefills_unless_told_otherwise(tmp_path: Path):
    def flags(**values: object) -> dict[str, list[str]]:
        return server_flags(Config(device="cuda", **values, hf_checkpoint=str(tmp_path)))

    assert flags().items() >= GATHER_PREFILLS.items()
    given = {"--prefill-delayer-max-delay-ms": ["100"]}
    assert flags(sglang_server_flags=given)["--prefill-delayer-max-delay-ms"] == ["100"]
    for off in (
        {"sglang_gather_prefills": False},
        {"sglang_server_concurrency": 2048},
        {"sglang_server_flags": {"--disable-overlap-schedule": []}},
        {"sglang_server_flags": {"--max-running-requests": ["64"]}},
    ):
        assert not GATHER_PREFILLS.keys() & flags(**off).keys()
    assert not GATHER_PREFILLS.keys() & server_flags(Config(device="cpu", hf_checkpoint=str(tmp_path))).keys()


def test_kernels_that_keep_experts_as_they_are_loaded_are_taken_and_others_refused(tmp_path: Path):
    """SGLang's own choice on some GPUs is flashinfer_trtllm, which would misread what a weight update writes."""

    def backend(**given: list[str]) -> list[str] | None:
        named = {f"--{name.replace('_', '-')}": values for name, values in given.items()}
        config = Config(device="cuda", hf_checkpoint=str(tmp_path), num_experts=4, sglang_server_flags=named)
        return server_flags(config).get("--moe-runner-backend")

    assert backend() == ["triton"] and backend(moe_runner_backend=["deep_gemm"]) == ["deep_gemm"]
    assert backend(quantization=["fp8"]) is None
    assert "--moe-runner-backend" not in server_flags(Config(device="cuda", hf_checkpoint=str(tmp_path)))
    with pytest.raises(ConfigError, match="--sglang-moe-runner-backend flashinfer_trtllm shuffles experts.*use triton"):
        backend(moe_runner_backend=["flashinfer_trtllm"])


def test_weights_are_compared_only_where_experts_are_in_their_places():
    model = {"num_experts": 4, "untie_embeddings_and_output_weights": True}
    check_engines(Config(**model, check_weight_update_equal=True))
    placed = {"--enable-eplb": []}
    with pytest.raises(ConfigError, match="compares experts.*drop it, or --sglang-enable-eplb"):
        check_engines(Config(**model, check_weight_update_equal=True, sglang_server_flags=placed))
    check_engines(Config(**model, sglang_server_flags=placed))


def test_the_context_is_never_longer_than_the_models_positions(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    config = engine_config(tmp_path, tmp_path, rollout_max_context_len=512)
    assert server_flags(config)["--context-length"] == ["512"]


def test_undeclared_flags_are_passed_through_and_replace_defaults(tmp_path: Path):
    flags = {"--attention-backend": ["intel_amx"], "--enable-metrics": []}
    config = engine_config(tmp_path, tmp_path, sglang_server_flags=flags)
    assert flags.items() <= server_flags(config).items()


@pytest.mark.parametrize("name", ["--port", "--model-path", "--tp-size", "--random-seed", "--context-length"])
def test_a_flag_that_holds_a_value_of_the_run_cannot_be_passed_through(name: str, tmp_path: Path):
    config = engine_config(tmp_path, tmp_path, sglang_server_flags={name: ["1"]})
    for check in (ServerFlagCheck, server_flags):
        with pytest.raises(ConfigError, match=f"{name} is set from"):
            check(config)


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--sglang-dp-size 2", r"--rollout-num-gpus\)"),
        ("--sglang-data-parallel-size=2", r"--rollout-num-gpus\)"),
        ("--sglang-dp 4", r"--rollout-num-gpus\)"),
        ("--sglang-pp-size=2", "--rollout-num-gpus-per-engine"),
        ("--sglang-pipeline-parallel-size 2", "--rollout-num-gpus-per-engine"),
        ("--sglang-nnodes 2", "one host; .* --rollout-num-gpus-per-engine"),
        ("--sglang-node-rank 1", "one host; .* --rollout-num-gpus-per-engine"),
        ("--sglang-tp 2", "--rollout-num-gpus-per-engine"),
        ("--sglang-tensor-parallel-size=2", "--rollout-num-gpus-per-engine"),
        ("--sglang-base-gpu-id 1", "GPUs that the run gives"),
        ("--sglang-config server.yaml", "--sglang-FLAG VALUE"),
    ],
)
def test_engines_of_another_world_are_refused_with_what_to_use_instead(flag: str, instead: str):
    config = parse_config(flag.split())
    with pytest.raises(ConfigError, match=f"{re.split('[ =]', flag)[0]} .*{instead}"):
        check_engines(config)


def test_the_world_that_engines_have_anyway_may_be_named():
    check_engines(parse_config("--sglang-dp-size 1 --sglang-pp-size=1 --sglang-nnodes 1 --sglang-node-rank 0".split()))


# Heads and key/value heads of Qwen2.5-7B, 0.5B and 1.5B, and of Qwen3-4B; then an MLP that does not divide.
@pytest.mark.parametrize(
    ("heads", "groups", "width", "sizes", "instead"),
    [
        (28, 4, 18944, [1, 2, 4], 4),
        (14, 2, 4864, [1, 2], 2),
        (12, 2, 8960, [1, 2, 4], 4),
        (32, 8, 9728, [1, 2, 4, 8], 8),
        (32, 32, 1028, [1, 2, 4], 4),
    ],
)
def test_an_engine_has_no_more_workers_than_divide_its_model(heads, groups, width, sizes, instead):
    """As SGLang asserts: `heads % tp == 0`, and `kv_heads % tp == 0` or, beyond, `tp % kv_heads == 0`."""
    model = {"num_attention_heads": heads, "group_query_attention": groups != heads, "ffn_hidden_size": width}
    model |= {"num_query_groups": groups} if groups != heads else {}
    for workers in (1, 2, 4, 8):
        config = Config(**model, device="cuda", rollout_num_gpus=8, rollout_num_gpus_per_engine=workers)
        if workers in sizes:
            check_engines(config)
        else:
            with pytest.raises(ConfigError, match=rf"engine {workers} must divide .*\({heads}\).*; use {instead}$"):
                check_engines(config)
    urls = ["http://10.0.0.2:1"]
    check_engines(Config(**model, rollout_external_urls=urls, rollout_num_gpus_per_engine=8))  # which runs already


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ("--sglang-cuda-graph-max-bs 256", "256 is below the 512"),
        ("--sglang-cuda-graph-max-bs-decode=256 --over-sampling-batch-size 96", "256 is below the 768"),
        ("--sglang-cuda-graph-bs 8 256 64 --sglang-server-concurrency 300", "256 is below the 300"),
        ("--sglang-cuda-graph-max-bs 256 --rollout-num-gpus 2", None),
        ("--sglang-cuda-graph-max-bs 256 --sglang-server-concurrency 256", None),
        ("--sglang-cuda-graph-max-bs 256 --sglang-max-running-requests 256", None),
        ("--sglang-cuda-graph-max-bs 512", None),
        ("", None),
    ],
)
def test_graphs_smaller_than_the_requests_in_flight_are_warned_of_once_with_both_numbers(flags, numbers, caplog):
    sizes = "--rollout-batch-size 64 --n-samples-per-prompt 8 --sglang-server-concurrency 1000"
    warn_of_graphs(parse_config([*sizes.split(), *flags.split()]))
    assert len(caplog.messages) == (numbers is not None)
    assert numbers is None or numbers in caplog.text


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error": {"message": "dp_size must be 1"}}', "dp_size must be 1"),
        (b"dp_size must be 1", "dp_size must be 1"),
        (b"Internal Server Error", "end of its log"),
        (b"", "end of its log"),
    ],
)
def test_what_a_server_refuses_is_shown_with_its_reason_or_where_it_stands(body: bytes, shown: str):
    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(500)
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with pytest.raises(WeightUpdateError, match=f"HTTP 500: .*{shown}"):
                EngineAdmin(f"http://127.0.0.1:{server.server_port}", timeout=60).pause()
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    "values",
    [{"sglang_server_flags": {}}, {"debug_train_only": True}, {"rollout_external_urls": ["http://127.0.0.1:1"]}],
)
def test_sglang_is_asked_nothing_without_flags_or_engines_of_the_run(values: dict, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(flag_check, "SupervisedProcess", None)  # not to be called
    given = {"sglang_server_flags": {"--attention-backend": ["triton"]}} | values
    with ServerFlagCheck(engine_config(tmp_path, tmp_path, **given)) as check:
        check.wait()
    with pytest.raises(TypeError):
        ServerFlagCheck(engine_config(tmp_path, tmp_path, sglang_server_flags={"--attention-backend": ["triton"]}))


def test_only_engines_that_give_back_memory_get_the_memory_saver(tmp_path: Path):
    def saves(**values: object) -> bool:
        return "--enable-memory-saver" in server_flags(Config(device="cuda", **values, hf_checkpoint=str(tmp_path)))

    assert saves(colocate=True) and saves(offload_rollout=True)
    assert not saves() and not saves(colocate=True, offload_rollout=False)


def test_the_default_cache_on_a_cpu_holds_the_batch_within_a_bound():
    def tokens(**values: object) -> int:
        config = Config(
            device="cpu", hf_checkpoint="/none", rollout_max_context_len=1000, n_samples_per_prompt=4, **values
        )
        return int(server_flags(config)["--max-total-tokens"][0])

    assert tokens(rollout_batch_size=2) == 8 * 1000
    assert tokens(rollout_batch_size=1000) == 65_536
