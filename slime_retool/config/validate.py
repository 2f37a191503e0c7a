"""Everything a configuration can get wrong, refused before any process starts or device is touched.

`validate` reads small files (config.json) and imports hooks; it starts nothing and imports no torch. Every
refusal is a ConfigError of one line: the rule, the value seen, the fix.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

from megatron_bridge.arithmetic import GIB
from megatron_bridge.checkpoint import LATEST_FILE, exists
from megatron_bridge.hf_config import check_against_hf, model_args_from_hf, read_hf_config
from megatron_bridge.lora_spec import TARGET_MODULES
from megatron_bridge.model_config import ModelArgs, nearest_divisor, required
from slime_retool.config.algorithm import check_algorithm
from slime_retool.config.config import Config
from slime_retool.config.engines import check_engines
from slime_retool.config.groups import LoraArgs
from slime_retool.config.parallel import check_parallel
from slime_retool.config.require import require, require_file, require_folder, require_writable
from slime_retool.config.schedule import check_schedule
from slime_retool.errors import ConfigError
from slime_retool.protocols import load_function
from slime_retool.run_folder import free_bytes, nearest_existing


def validate(config: Config) -> None:
    """Check `config` and fill in what follows from the checkpoint (model flags when none were given).

    Raises:
        ConfigError: at the first rule that is broken.
    """
    _check_model(config)
    check_parallel(config)
    _check_data(config)
    require(
        (config.num_rollout is None) != (config.num_epoch is None),
        f"give one of --num-rollout and --num-epoch, got {config.num_rollout} and {config.num_epoch}",
    )
    check_batches(config)
    check_limits(config)
    require_writable(config.output_dir, "--output-dir")
    check_algorithm(config)
    _check_checkpoints(config)
    _check_lora(config)
    _check_optimizer(config)
    check_precision(config)
    check_engines(config)
    _check_hooks(config)
    _check_room(config)


def validate_evaluation(config: Config) -> None:
    """What `slime-retool eval` needs beyond (or, with an endpoint, instead of) `validate`. Raises ConfigError."""
    require(bool(config.eval_prompt_data), "--eval-prompt-data NAME FILE is required: the sets to measure on")
    _check_data(config)
    if config.eval_endpoint_url is not None:
        require(
            config.eval_endpoint_url.startswith(("http://", "https://")),
            f"--eval-endpoint-url must start with http:// or https://, got {config.eval_endpoint_url}",
        )
        require(config.eval_endpoint_model is not None, "--eval-endpoint-url needs --eval-endpoint-model NAME")
        require(
            config.eval_endpoint_concurrency >= 1,
            f"--eval-endpoint-concurrency must be at least 1, got {config.eval_endpoint_concurrency}",
        )
        check_limits(config)
        require_writable(config.output_dir, "--output-dir")
        _check_hooks(config)


def _check_model(config: Config) -> None:
    require(config.hf_checkpoint is not None, "--hf-checkpoint is required: a Hugging Face checkpoint folder")
    require_folder(config.hf_checkpoint, "--hf-checkpoint", "config.json")
    given = ModelArgs(**{f.name: config.__dict__[f.name] for f in dataclasses.fields(ModelArgs)})
    try:
        hf = read_hf_config(config.hf_checkpoint)
        if given == ModelArgs():
            for name, value in dataclasses.asdict(model_args_from_hf(hf)).items():
                setattr(config, name, value)
        else:
            check_against_hf(given, hf)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.max_position_embeddings is None:
        config.max_position_embeddings = hf.get("max_position_embeddings")


def _check_data(config: Config) -> None:
    require(bool(config.prompt_data), "--prompt-data is required: a .jsonl or .parquet file")
    for data_set in config.prompt_sets:
        require_file(data_set.file, "--prompt-data")
    require(
        len(config.eval_prompt_data) % 2 == 0,
        f"--eval-prompt-data takes pairs NAME FILE, got {len(config.eval_prompt_data)} values: "
        f"{' '.join(config.eval_prompt_data)}",
    )
    for _, file in config.eval_sets:
        require_file(file, "--eval-prompt-data")
    names = [name for name, _ in config.eval_sets]
    require(len(set(names)) == len(names), f"--eval-prompt-data: set names must differ, got {' '.join(names)}")
    if config.eval_interval is not None:
        require(config.eval_interval >= 1, f"--eval-interval must be at least 1, got {config.eval_interval}")
        require(bool(config.eval_sets), "--eval-interval needs --eval-prompt-data NAME FILE")


def check_batches(config: Config) -> None:
    """Sizes of rollouts, steps and micro-batches that fit each other. ConfigError at the first rule that is broken."""
    require(
        config.rollout_batch_size is not None and config.rollout_batch_size >= 1,
        f"--rollout-batch-size is required and at least 1, got {config.rollout_batch_size}",
    )
    require(
        config.n_samples_per_prompt >= 1,
        f"--n-samples-per-prompt must be at least 1, got {config.n_samples_per_prompt}",
    )
    total, step = config.samples_per_rollout, config.global_batch_size
    if step is not None and (step < 1 or total % step):
        raise ConfigError(
            f"--rollout-batch-size {config.rollout_batch_size} x --n-samples-per-prompt {config.n_samples_per_prompt} "
            f"= {total} samples must be a multiple of --global-batch-size {step}; "
            f"the nearest size that divides is {nearest_divisor(total, max(step, 1))}"
        )
    size, dp = step or total, config.data_parallel_size
    if size % dp and not config.debug_rollout_only:
        if total % dp:
            rows = dp // math.gcd(dp, config.n_samples_per_prompt)
            fix = f"--rollout-batch-size {max(1, round(config.rollout_batch_size / rows)) * rows}"
        else:
            fix = f"--global-batch-size {dp * nearest_divisor(total // dp, max(1, round(size / dp)))}"
        raise ConfigError(
            f"a batch of {size} samples (--global-batch-size) must be a multiple of the {dp} data-parallel ranks; "
            f"use {fix}"
        )
    if config.use_dynamic_batch_size:
        require(
            config.max_tokens_per_gpu is not None and config.max_tokens_per_gpu >= 1,
            f"--use-dynamic-batch-size needs --max-tokens-per-gpu of at least 1, got {config.max_tokens_per_gpu}",
        )
    else:
        require(
            config.max_tokens_per_gpu is None,
            f"--max-tokens-per-gpu {config.max_tokens_per_gpu} has no effect without --use-dynamic-batch-size; add it "
            "or drop the limit",
        )
    require(config.micro_batch_size >= 1, f"--micro-batch-size must be at least 1, got {config.micro_batch_size}")
    over = config.over_sampling_batch_size
    require(
        over is None or over >= config.rollout_batch_size,
        f"--over-sampling-batch-size must be at least --rollout-batch-size {config.rollout_batch_size}, got {over}",
    )
    window = config.max_position_embeddings
    context = config.rollout_max_context_len
    require(
        context is None or window is None or context <= window,
        f"--rollout-max-context-len {context} is longer than the model's {window} positions",
    )


def check_limits(config: Config) -> None:
    """Values that are one number with a least one: what an evaluation has as well. ConfigError for one below it."""
    for flag, value in (
        ("--num-epoch", config.num_epoch),
        ("--max-sampling-rounds", config.max_sampling_rounds),
        ("--n-samples-per-eval-prompt", config.n_samples_per_eval_prompt),
        ("--rollout-max-prompt-len", config.rollout_max_prompt_len),
        ("--rollout-max-context-len", config.rollout_max_context_len),
        ("--rollout-max-response-len", config.rollout_max_response_len),
        ("--eval-max-response-len", config.eval_max_response_len),
        ("--max-turns", config.max_turns),
        ("--tool-concurrency", config.tool_concurrency),
        ("--tool-memory-mb", config.tool_memory_mb),
        ("--max-observation-tokens", config.max_observation_tokens),
        ("--sglang-server-concurrency", config.sglang_server_concurrency),
        ("--sglang-max-total-tokens", config.sglang_max_total_tokens),
    ):
        require(value is None or value >= 1, f"{flag} must be at least 1, got {value}")
    for flag, value in (
        ("--num-rollout", config.num_rollout),
        ("--max-tool-calls", config.max_tool_calls),
        ("--tool-retries", config.tool_retries),
        ("--rollout-request-retries", config.rollout_request_retries),
    ):
        require(value is None or value >= 0, f"{flag} must be at least 0, got {value}")
    for flag, value in (
        ("--tool-timeout", config.tool_timeout),
        ("--reward-timeout", config.reward_timeout),
        ("--rollout-request-timeout", config.rollout_request_timeout),
        ("--sglang-startup-timeout", config.sglang_startup_timeout),
        ("--distributed-timeout-minutes", config.distributed_timeout_minutes),
    ):
        require(value > 0, f"{flag} must be above 0, got {value}")
    require(
        config.tool_state == "call" or config.sandbox_url is None,
        f"--tool-state {config.tool_state} needs a sandbox of this run's own: the protocol of --sandbox-url keeps no "
        "state; drop one",
    )
    url = config.sandbox_url
    require(
        url is None or url.startswith(("http://", "https://")),
        f"--sandbox-url must start with http:// or https://, got {url}",
    )


def _check_checkpoints(config: Config) -> None:
    if config.debug_rollout_only:
        return
    if config.ref_load is not None:
        require_folder(config.ref_load, "--ref-load", LATEST_FILE)
    resumable = config.load is not None and exists(config.load)
    require(
        config.ref_load is not None or resumable,
        "no weights to start from: give --ref-load DIR (made by tools/convert_hf_to_torch_dist.py), or --load DIR "
        f"with a checkpoint in it (got {config.load})",
    )
    if config.save_interval is not None:
        require(config.save_interval >= 1, f"--save-interval must be at least 1, got {config.save_interval}")
        require(config.save is not None, "--save-interval needs --save DIR")
    if config.save_keep is not None:
        require(config.save_keep >= 1, f"--save-keep must be at least 1, got {config.save_keep}")
        require(config.save is not None, "--save-keep needs --save DIR")
    require(
        config.save is None or config.ref_load is None or not _same_place(config.save, config.ref_load),
        f"--save {config.save} is --ref-load: the first checkpoint would take the reference's place; "
        "name another folder",
    )
    for flag, folder in config.save_folders.items():
        require_writable(folder, flag)
    if config.save_hf is not None:
        require_writable(config.save_hf, "--save-hf")
        require(config.save is not None, "--save-hf is written from the last checkpoint: it needs --save DIR")
        require(
            not (os.path.isdir(config.save_hf) and os.listdir(config.save_hf)),
            f"--save-hf: the folder {config.save_hf} is not empty; name a new one",
        )


def _check_room(config: Config) -> None:
    """There is room for the first checkpoint: better known now than when it is due."""
    if config.debug_rollout_only:
        return
    needed: dict[int, tuple[str, int]] = {}
    for role in config.roles:
        flag, folder = role.flag("--save"), role.config.save
        if folder is None:
            continue
        disk = os.stat(nearest_existing(folder)).st_dev
        place, before = needed.get(disk, (f"{flag} {folder}", 0))
        needed[disk] = (place, before + role.checkpoint_bytes)
        free, size = free_bytes(folder), needed[disk][1]
        require(
            size <= free,
            f"{place}: a checkpoint takes {size / GIB:.1f} GiB and {free / GIB:.1f} GiB are free on that disk; "
            "make room or name a folder on another disk",
        )


def _same_place(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _check_lora(config: Config) -> None:
    if config.lora_rank is None:
        defaults = LoraArgs()
        for flag, value, default in (
            ("--lora-alpha", config.lora_alpha, defaults.lora_alpha),
            ("--lora-target-modules", config.lora_target_modules, defaults.lora_target_modules),
        ):
            require(value == default, f"{flag} is of adapters, which only --lora-rank makes: add it, or drop {flag}")
        return
    rank, alpha, targets = config.lora_rank, config.lora_alpha, config.lora_target_modules
    widest = required(config, "hidden_size")
    require(
        1 <= rank <= widest,
        f"--lora-rank must be between 1 and the hidden size {widest}, got {rank}; without the flag all weights train",
    )
    require(alpha is None or alpha > 0, f"--lora-alpha must be above 0, got {alpha}")
    known = " ".join(TARGET_MODULES)
    unknown = [target for target in targets if target not in TARGET_MODULES]
    require(not unknown, f"--lora-target-modules takes {known}, got {' '.join(unknown)}")
    require(bool(targets), f"--lora-target-modules needs at least one of {known}")
    mlp = [target for target in targets if target.startswith("linear_fc")]
    require(
        config.num_experts is None or not mlp,
        f"--lora-target-modules {' '.join(mlp)}: experts take no adapters; use linear_qkv linear_proj",
    )
    require(len(set(targets)) == len(targets), f"--lora-target-modules names one twice: {' '.join(targets)}")
    require(
        config.ref_load is not None or config.debug_rollout_only,
        "--lora-rank needs the frozen weights, which checkpoints of adapters leave out: add --ref-load DIR",
    )


def _check_optimizer(config: Config) -> None:
    require(config.lr > 0, f"--lr must be above 0, got {config.lr}")
    require(0 <= config.min_lr <= config.lr, f"--min-lr must be between 0 and --lr {config.lr}, got {config.min_lr}")
    require(config.lr_warmup_iters >= 0, f"--lr-warmup-iters must be at least 0, got {config.lr_warmup_iters}")
    fraction = config.lr_warmup_fraction
    require(fraction is None or 0 <= fraction < 1, f"--lr-warmup-fraction must be in [0, 1), got {fraction}")
    require(
        fraction is None or config.lr_warmup_iters == 0,
        f"give one of --lr-warmup-iters and --lr-warmup-fraction, got {config.lr_warmup_iters} and {fraction}",
    )
    for flag, value in (("--adam-beta1", config.adam_beta1), ("--adam-beta2", config.adam_beta2)):
        require(0 <= value < 1, f"{flag} must be in [0, 1), got {value}")
    require(config.clip_grad >= 0, f"--clip-grad must be at least 0, got {config.clip_grad}")
    require(config.weight_decay >= 0, f"--weight-decay must be at least 0, got {config.weight_decay}")
    require(config.adam_eps > 0, f"--adam-eps must be above 0, got {config.adam_eps}")
    steps = config.lr_decay_iters
    require(steps is None or steps >= 1, f"--lr-decay-iters must be at least 1, got {steps}")
    check_schedule(config)


def check_precision(config: Config) -> None:
    """Precision, recomputation and the optimizer's place. ConfigError at the first rule that is broken."""
    if config.device == "cpu":
        require(config.precision != "bf16", "--precision bf16 needs GPUs; on the CPU use fp32")
        require(
            config.transformer_impl != "transformer_engine",
            "--transformer-impl transformer_engine needs GPUs; on the CPU use local",
        )
    require(config.keep_logits_gib >= 0, f"--keep-logits-gib must be at least 0, got {config.keep_logits_gib}")
    for flag, value in (
        ("--attention-dropout", config.attention_dropout),
        ("--hidden-dropout", config.hidden_dropout),
    ):
        require(value == 0, f"{flag} must be 0 (with dropout log-probs are not the policy's), got {value}")
    if config.recompute_granularity == "full":
        require(
            config.recompute_method is not None and config.recompute_num_layers is not None,
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
        )
    layers = config.recompute_num_layers
    require(layers is None or layers >= 1, f"--recompute-num-layers must be at least 1, got {layers}")
    require(
        config.recompute_granularity != "selective" or layers is None,
        f"--recompute-num-layers {layers} is of --recompute-granularity full; drop it",
    )
    require(
        not config.recompute_modules or config.recompute_granularity == "selective",
        f"--recompute-modules {' '.join(config.recompute_modules)} needs --recompute-granularity selective",
    )
    for flag, value in (
        ("--overlap-param-gather", config.overlap_param_gather),
        ("--use-precision-aware-optimizer", config.use_precision_aware_optimizer),
        ("--optimizer-cpu-offload", config.optimizer_cpu_offload),
    ):
        require(
            not value or (config.device != "cpu" and config.use_distributed_optimizer),
            f"{flag} needs GPUs and --use-distributed-optimizer; leave it out",
        )
    fraction = config.optimizer_offload_fraction
    require(0 < fraction <= 1, f"--optimizer-offload-fraction must be above 0 and at most 1, got {fraction}")


def _check_hooks(config: Config) -> None:
    load_function(config.rollout_function_path, "--rollout-function-path")
    for flag, path in (
        ("--custom-generate-function-path", config.custom_generate_function_path),
        ("--custom-rm-path", config.custom_rm_path),
        ("--dynamic-sampling-filter-path", config.dynamic_sampling_filter_path),
    ):
        if path is not None:
            load_function(path, flag)


def resolve_device(config: Config) -> None:
    """Turn `--device auto` into cuda or cpu: cuda when this host shows an NVIDIA device and does not hide it.

    `CUDA_VISIBLE_DEVICES` hides all where it is empty or begins with -1.
    """
    if config.device == "auto":
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1")
        present = any(Path("/dev").glob("nvidia[0-9]*"))
        config.device = "cuda" if present and not hidden else "cpu"
