"""One SGLang server as a supervised process: flags from the configuration, start, health, end."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import slime_retool
from megatron_bridge.lora_spec import hf_targets
from slime_retool.config import Config
from slime_retool.config.engines import check_server_flags
from slime_retool.engine.adapter_checksum import ADAPTERS_LOADER
from slime_retool.engine.admin import EngineAdmin
from slime_retool.engine.bucket_loader import BUCKET_LOADER
from slime_retool.engine.checksum import REPORT_LOADER
from slime_retool.engine.kernel_cache import kernel_cache_environment, make_kernel_cache
from slime_retool.engine.process import Server
from slime_retool.engine.weight_copies import REFRESH_LOADER
from slime_retool.errors import ConfigError

Flags = dict[str, list[str]]

# A CPU serves any model in float32 with torch's own attention (measured with SGLang 0.5.15.post1).
CPU_FLAGS: Flags = {
    "--device": ["cpu"],
    "--dtype": ["float32"],
    "--attention-backend": ["torch_native"],
    "--sampling-backend": ["pytorch"],
    "--disable-overlap-schedule": [],
    "--skip-server-warmup": [],
    "--sleep-on-idle": [],  # an idle scheduler otherwise polls with a whole core, which trainers and tests need
    "--mem-fraction-static": ["0.1"],
}
# Turns end one at a time. Prefilling each at once stops decoding dozens of times a second (docs/performance.md).
GATHER_PREFILLS: Flags = {
    "--enable-prefill-delayer": [],
    "--prefill-delayer-queue-min-ratio": ["0.08"],
    "--prefill-delayer-max-delay-ms": ["250"],
}
CPU_KV_TOKENS = 65_536
"""Bound of the default KV cache on a CPU; more requests than fit wait their turn."""
ADAPTER_SLOTS = 2
"""Adapters that one batch may use: the policy's, and none, as a question whether the engine lives has."""
RETURN_EXPERTS = "--enable-return-routed-experts"
STOP_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL: SGLang has nothing to save, looks for the signal every 5 s, and then kills its
own processes."""
KEEP_ALIVE_SECONDS = 600
"""An idle connection to an engine lives this long; SGLang's default is 5. The router keeps idle ones for 50 s and
sends nothing twice, so a rollout's first requests would meet connections that the engine is closing (HTTP 500)."""
SPARE_CONTEXT = 8
"""SGLang keeps a position or two of the context for itself."""


def engine_workers(config: Config) -> int:
    """Tensor-parallel workers of one engine. One that this run starts on a CPU has one; external ones are elsewhere."""
    return config.rollout_num_gpus_per_engine if config.on_cuda or config.rollout_external_urls else 1


def server_flags(config: Config, *, rank: int = 0) -> Flags:
    """Flags of `sglang.launch_server` except host and port; undeclared `--sglang-*` flags replace our defaults.

    ConfigError for an undeclared flag that collides with a value of the run, and without --hf-checkpoint.
    """
    check_server_flags(config)
    if config.hf_checkpoint is None:
        raise ConfigError("an engine needs --hf-checkpoint: weights, tokenizer and config to start from")
    flags: Flags = {} if config.on_cuda else dict(CPU_FLAGS)
    if _gathers_prefills(config):
        flags |= GATHER_PREFILLS
    if config.serves_adapters and not config.on_cuda:
        flags["--lora-backend"] = ["torch_native"]
    if config.num_experts is not None and config.on_cuda and "--quantization" not in config.sglang_server_flags:
        flags["--moe-runner-backend"] = ["triton"]  # SGLang's own choice may be one of SHUFFLING_BACKENDS
    flags |= config.sglang_server_flags
    flags |= {
        "--model-path": [config.hf_checkpoint],
        "--tp-size": [str(engine_workers(config))],
        "--random-seed": [str(config.seed + rank)],
        "--weight-version": ["0"],
        "--custom-weight-loader": [REPORT_LOADER, BUCKET_LOADER, REFRESH_LOADER],
    }
    if config.offloads_rollout and config.on_cuda:
        flags["--enable-memory-saver"] = []
    if config.serves_adapters:
        flags |= adapter_flags(config)
        flags["--custom-weight-loader"] += [ADAPTERS_LOADER]
    if config.use_rollout_routing_replay:
        flags[RETURN_EXPERTS] = []
    if config.sglang_mem_fraction_static is not None:
        flags["--mem-fraction-static"] = [str(config.sglang_mem_fraction_static)]
    if config.rollout_max_context_len is not None:
        flags["--context-length"] = [str(_context_length(config.rollout_max_context_len, config.hf_checkpoint))]
    if (tokens := kv_tokens(config)) is not None:
        flags["--max-total-tokens"] = [str(tokens)]
    return flags


def adapter_flags(config: Config) -> Flags:
    """What lets a server take the adapters of weight updates."""
    assert config.lora is not None
    return {
        "--enable-lora": [],
        "--max-lora-rank": [str(config.lora.rank)],
        "--lora-target-modules": hf_targets(config.lora.targets, config),
        "--max-loras-per-batch": [str(ADAPTER_SLOTS)],
    }


def server_module(config: Config) -> str:
    """What starts the server: SGLang's launcher, without a GPU in a wrapping of ours."""
    return "sglang.launch_server" if config.on_cuda else "slime_retool.engine.cpu_main"


def _gathers_prefills(config: Config) -> bool:
    """Whether SGLang's delayer may hold prefills back: it is part of overlapped scheduling.

    It also holds them back while fewer requests may join than its largest prefill had, however long that lasts. With
    the 2,048 that may run by default and no more than half as many in flight this never happens.
    """
    given = config.sglang_server_flags
    return (
        config.on_cuda
        and config.sglang_gather_prefills
        and config.sglang_server_concurrency <= 1024
        and not {"--disable-overlap-schedule", "--max-running-requests"} & given.keys()
    )


def kv_tokens(config: Config) -> int | None:
    """Tokens in one engine's KV cache; None leaves it to SGLang (what the memory holds)."""
    if config.sglang_max_total_tokens is not None or config.on_cuda:
        return config.sglang_max_total_tokens
    response = max(config.rollout_max_response_len, config.eval_max_response_len or 0)
    longest = config.rollout_max_context_len or (config.rollout_max_prompt_len or 1024) + response
    return max(longest + 2 * SPARE_CONTEXT, min(config.requests_per_engine * longest, CPU_KV_TOKENS))


def _context_length(wanted: int, model_path: str) -> int:
    """Room for `wanted` tokens, but no more than the model's positions (SGLang would refuse to start)."""
    path = Path(model_path) / "config.json"
    model = json.loads(path.read_text()) if path.is_file() else {}
    positions = model.get("max_position_embeddings")
    scaled = bool(model.get("rope_scaling"))
    return wanted + SPARE_CONTEXT if positions is None or scaled else min(wanted + SPARE_CONTEXT, positions)


def server_environment(config: Config, devices: Sequence[int | str] | None) -> dict[str, str]:
    """The server's whole environment: this process's, with the device settled."""
    environment = dict(os.environ)
    # Schedulers import the weight loaders, also when the package is not installed but run from its folder.
    root = str(Path(slime_retool.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    # /health answers at once, also while generation is paused for a weight update or the engine is saturated.
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    environment["SGLANG_TIMEOUT_KEEP_ALIVE"] = str(KEEP_ALIVE_SECONDS)
    environment["SGLANG_HEALTH_CHECK_TIMEOUT"] = str(math.ceil(config.engine_hang_timeout))  # of /health_generate
    if not config.on_cuda:
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        return environment
    environment |= kernel_cache_environment(config.kernel_cache_dir)
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    if config.offloads_rollout:
        # The memory saver is preloaded, before torch could say where the CUDA runtime that it needs is.
        folders = [environment.get("LD_LIBRARY_PATH"), *_cuda_runtime_folders()]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return environment


def _cuda_runtime_folders() -> list[str]:
    """Folders with libcudart: of the wheels that torch depends on, and of a CUDA installation."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    folders = [folder for root in roots for folder in sorted(Path(root).glob("*/lib"))] + [
        Path("/usr/local/cuda/lib64")
    ]
    return [str(folder) for folder in folders if any(folder.glob("libcudart.so.*"))]


class EngineProcess(Server):
    """One running SGLang server. Constructing it starts the process and waits until it is healthy."""

    def __init__(
        self,
        config: Config,
        *,
        rank: int = 0,
        devices: Sequence[int | str] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """Start engine number `rank` on GPUs `devices`, as CUDA_VISIBLE_DEVICES names them (None: this process's).

        Raises ConfigError for flags that cannot work, ServerError (with the log's end) when the server dies or is not
        healthy within --sglang-startup-timeout.
        """
        flags = server_flags(config, rank=rank)
        if config.on_cuda:
            make_kernel_cache(config.kernel_cache_dir)
        command = [sys.executable, "-m", server_module(config), "--host", host]
        command += [word for name, values in flags.items() for word in (name, *values)]
        self._start(
            f"SGLang engine {rank}",
            lambda ports: [*command, "--port", str(ports[0])],
            host=host,
            health_path="/health",
            timeout=config.sglang_startup_timeout,
            log_path=Path(config.output_dir) / "logs" / f"engine_{rank}.log",
            environment=server_environment(config, devices),
            grace=STOP_GRACE,
        )

    def admin(self, *, timeout: float = 300.0) -> EngineAdmin:
        """A client of the control endpoints."""
        return EngineAdmin(self.url, timeout=timeout)
