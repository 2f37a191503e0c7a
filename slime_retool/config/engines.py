"""Rules about engines: their GPUs, running servers, and how weights reach them."""

from __future__ import annotations

import logging

from megatron_bridge.model_config import nearest_divisor, query_groups, required
from slime_retool.config.config import Config
from slime_retool.config.groups import TRANSPORTS
from slime_retool.config.require import require
from slime_retool.errors import ConfigError
from slime_retool.protocols import load_function

logger = logging.getLogger(__name__)

# Flags of a server that hold a value of the run; the right-hand side says where to set it instead.
OWNED_FLAGS = {
    "--model-path": "--hf-checkpoint",
    "--model": "--hf-checkpoint",
    "--host": "the engine's own address",
    "--port": "a free port, chosen at start",
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size", "--tp"), "--rollout-num-gpus-per-engine"),
    "--device": "--device",
    "--random-seed": "--seed",
    "--context-length": "--rollout-max-context-len",
    "--api-key": "nothing (the run's own requests carry no key)",
    "--admin-api-key": "nothing (the run's own requests carry no key)",
    "--weight-version": "the count of weight updates",
    "--custom-weight-loader": "the loader that computes checksums",
    "--mem-fraction-static": "--sglang-mem-fraction-static",
    "--max-total-tokens": "--sglang-max-total-tokens",
    **dict.fromkeys(("--enable-lora", "--lora-paths", "--max-loras-per-batch"), "--lora-weight-update adapters"),
    "--max-lora-rank": "--lora-rank",
    "--lora-target-modules": "--lora-target-modules",
    "--enable-return-routed-experts": "--use-rollout-routing-replay",
    "--base-gpu-id": "the GPUs that the run gives to the engine",
    "--gpu-id-step": "the GPUs that the run gives to the engine",
    "--config": "the command line: give each flag as --sglang-FLAG VALUE",
}
GRAPH_FLAGS = {"--cuda-graph-max-bs", "--cuda-graph-max-bs-decode", "--cuda-graph-bs", "--cuda-graph-bs-decode"}
MORE_ENGINES = "for more throughput start more engines (--rollout-num-gpus)"
LARGER_ENGINES = "spread a model over more GPUs by --rollout-num-gpus-per-engine"
ONE_HOST = f"an engine runs on one host; {LARGER_ENGINES}"
# Flags that make a server's world another than --rollout-num-gpus-per-engine tensor-parallel workers, above these.
WORLD_FLAGS = {
    **dict.fromkeys(("--dp-size", "--data-parallel-size", "--dp"), (1, f"replicas take none; {MORE_ENGINES}")),
    **dict.fromkeys(("--pp-size", "--pipeline-parallel-size", "--pp"), (1, f"stages take none; {LARGER_ENGINES}")),
    "--nnodes": (1, ONE_HOST),
    "--node-rank": (0, ONE_HOST),
}

SHUFFLING_BACKENDS = ("flashinfer_trtllm", "flashinfer_trtllm_routed")
"""SGLang lays experts out anew for these kernels when it starts, and not after a weight update."""
EXPERT_PLACEMENT = ("--enable-eplb", "--ep-num-redundant-experts", "--init-expert-location")
"""Flags with which an engine holds experts in places of its own."""


def check_server_flags(config: Config) -> None:
    """Raise ConfigError for an undeclared flag that collides with a value of the run, or with its weight updates."""
    backend = " ".join(config.sglang_server_flags.get("--moe-runner-backend", []))
    require(
        config.num_experts is None or backend not in SHUFFLING_BACKENDS,
        f"--sglang-moe-runner-backend {backend} shuffles experts at the start, and would compute with unshuffled ones "
        "after a weight update; use triton",
    )
    for name, values in config.sglang_server_flags.items():
        flag = f"--sglang-{name.removeprefix('--')}"
        if name in OWNED_FLAGS:
            raise ConfigError(f"{flag} cannot be passed through: {name} is set from {OWNED_FLAGS[name]}")
        most, instead = WORLD_FLAGS.get(name, (0, ""))
        require(
            not instead or not (values and values[0].isdecimal()) or int(values[0]) <= most,
            f"{flag} must be at most {most}, got {' '.join(values)}: weight updates go to an engine's tensor-parallel "
            f"workers, {instead}",
        )


def warn_of_graphs(config: Config) -> None:
    """Say where an engine decodes more requests at once than its CUDA graphs hold: two to three times slower."""
    if config.debug_train_only:
        return
    given = {
        name: [int(value) for value in values if value.isdecimal()]
        for name, values in config.sglang_server_flags.items()
        if name in GRAPH_FLAGS or name == "--max-running-requests"
    }
    most = given.pop("--max-running-requests", [])
    running = min(config.requests_per_engine, config.sglang_server_concurrency, *most)
    for name, sizes in given.items():
        if sizes and max(sizes) < running:
            logger.warning(
                "--sglang-%s %d is below the %d requests that each engine gets at once: larger batches decode without "
                "CUDA graphs, two to three times slower; raise it to %d, or lower --sglang-server-concurrency to %d",
                name.removeprefix("--"), max(sizes), running, running, max(sizes),
            )  # fmt: skip


def check_engines(config: Config) -> None:
    """Engines, their GPUs and how weights reach them. ConfigError at the first rule that is broken."""
    if config.debug_train_only:
        return
    check_server_flags(config)
    per_engine = config.rollout_num_gpus_per_engine
    total = config.generation_gpus
    if total % per_engine:
        raise ConfigError(
            f"--rollout-num-gpus-per-engine {per_engine} does not divide the {total} GPUs used for generation; "
            f"the nearest size that does is {nearest_divisor(total, per_engine)}"
        )
    if config.num_attention_heads is not None and not config.rollout_external_urls:
        _check_workers(config, total)
    transport = config.weight_transport
    if transport not in TRANSPORTS:
        known = f"auto, {', '.join(TRANSPORTS)}, or the dotted path of a Transport"
        require("." in transport, f"--update-weight-transport must be one of {known}, got {transport}")
        load_function(transport, "--update-weight-transport")
    if config.colocate:
        _check_colocated(config, total)
    else:
        require(transport != "ipc", "--update-weight-transport ipc needs --colocate; engines elsewhere take broadcast")
    require(
        config.update_weight_disk_dir is None or transport == "disk",
        f"--update-weight-disk-dir has no effect on --update-weight-transport {transport}; add "
        "--update-weight-transport disk or drop it",
    )
    _check_external_engines(config)
    require(
        config.num_experts is None or config.untie_embeddings_and_output_weights,
        "SGLang serves no mixture of experts with tied embeddings (its output layer would stay empty): untie them in "
        "the checkpoint and add --untie-embeddings-and-output-weights",
    )
    require(
        not config.rollout_external_urls or not config.moe_router_enable_expert_bias,
        "--rollout-external-urls: SGLang keeps a copy of this model's routers, which only engines that the run starts "
        "renew at an update; drop it",
    )
    require(
        not config.check_weight_update_equal or not config.rollout_external_urls,
        "--check-weight-update-equal reads the weights of engines that the run starts; drop it with "
        "--rollout-external-urls",
    )
    placed = [f"--sglang-{name.removeprefix('--')}" for name in EXPERT_PLACEMENT if name in config.sglang_server_flags]
    require(
        not config.check_weight_update_equal or not placed,
        "--check-weight-update-equal compares experts where they are in the checkpoint; drop it, or "
        f"{', '.join(placed)}",
    )


def _check_workers(config: Config, total: int) -> None:
    """SGLang gives every worker of an engine as many heads, and as much of a dense MLP; it asserts that they divide."""
    heads, groups = required(config, "num_attention_heads"), query_groups(config)
    # Mixtures have flags of SGLang's own for how their MLPs are laid out.
    width = 0 if config.num_experts is not None else config.ffn_hidden_size or 0

    def divides(workers: int) -> bool:
        # A key/value head may be on several workers.
        return not (heads % workers or (groups % workers and workers % groups) or width % workers)

    workers = config.rollout_num_gpus_per_engine
    sizes = [size for size in range(1, total + 1) if total % size == 0 and divides(size)]
    of_width = f", and divide its --ffn-hidden-size ({width})" if width else ""
    require(
        divides(workers),
        f"--rollout-num-gpus-per-engine {workers} must divide the model's query heads ({heads}), divide its key/value "
        f"heads ({groups}) or be a multiple of them{of_width}; use {min(sizes, key=lambda size: abs(size - workers))}",
    )


def _check_colocated(config: Config, total: int) -> None:
    """Engines of `total` GPUs in all fit on those of the trainer."""
    require(
        not config.rollout_external_urls,
        "--colocate starts engines on the trainer's GPUs; it cannot be combined with --rollout-external-urls",
    )
    require(
        total <= config.world_size,
        f"--colocate: {total} GPUs for generation (--rollout-num-gpus) are more than the {config.world_size} "
        "training GPUs they share",
    )
    per_engine, per_host = config.rollout_num_gpus_per_engine, config.actor_num_gpus_per_node
    require(
        config.actor_num_nodes == 1 or per_host % per_engine == 0,
        f"--colocate: an engine of --rollout-num-gpus-per-engine {per_engine} would span hosts of "
        f"--actor-num-gpus-per-node {per_host}; use a size that divides it",
    )
    require(
        config.weight_transport != "broadcast" or not config.on_cuda,
        "--update-weight-transport broadcast cannot join two processes of one GPU; with --colocate use ipc or disk",
    )


def _check_external_engines(config: Config) -> None:
    urls = config.rollout_external_urls
    require(len(set(urls)) == len(urls), f"--rollout-external-urls names a server twice: {' '.join(urls)}")
    require(
        not config.engines_elsewhere
        or config.debug_rollout_only
        or config.weight_transport != "disk"
        or config.update_weight_disk_dir is not None,
        "--update-weight-transport disk: servers on other hosts cannot read this one's memory; add "
        "--update-weight-disk-dir with a folder that they see under the same path",
    )
