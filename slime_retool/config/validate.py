"""Everything a configuration can get wrong, refused before any process starts or device is touched.

What one flag allows stands on the flag; the rules here name several. `validate` reads small files (config.json) and
imports hooks; it changes and starts nothing and imports no torch. Every refusal is a ConfigError of one line: the rule,
the value seen, the fix.
"""

from __future__ import annotations

import math
import os
from importlib import metadata
from importlib.util import find_spec

from megatron_bridge import flags
from megatron_bridge.arithmetic import GIB
from megatron_bridge.checkpoint import (
    LATEST_FILE,
    checkpoint_name,
    exists,
    holds_checkpoints,
    is_checkpoint,
    latest_rollout,
    what_it_is,
)
from megatron_bridge.hf_config import check_against_hf, check_tokenizer
from megatron_bridge.model_config import nearest_divisor
from slime_retool.config.algorithm import check_algorithm
from slime_retool.config.config import HOOK_PATHS, Config
from slime_retool.config.engines import check_engines, warn_of_graphs
from slime_retool.config.lora import check_lora
from slime_retool.config.parallel import check_parallel
from slime_retool.config.require import (
    as_config_error,
    refuse_unused,
    require,
    require_file,
    require_folder,
    require_writable,
)
from slime_retool.config.resolve import read_checkpoint
from slime_retool.config.schedule import check_profiled, check_schedule
from slime_retool.dumps import FOLDER
from slime_retool.errors import ConfigError
from slime_retool.protocols import load_function
from slime_retool.run_folder import free_bytes, nearest_existing


def validate(config: Config) -> None:
    """Check a resolved configuration.

    Raises:
        ConfigError: at the first rule that is broken.
    """
    check_values(config)
    with as_config_error():
        check_against_hf(config, read_checkpoint(config))
        assert config.hf_checkpoint is not None
        check_tokenizer(config.hf_checkpoint)
    check_parallel(config)
    _check_data(config)
    require(
        (config.num_rollout is None) != (config.num_epoch is None),
        f"give one of --num-rollout and --num-epoch, got {config.num_rollout} and {config.num_epoch}",
    )
    check_profiled(config)
    check_batches(config)
    require_writable(config.output_dir, "--output-dir")
    check_algorithm(config)
    _check_replay(config)
    _check_checkpoints(config)
    check_lora(config)
    _check_optimizer(config)
    check_precision(config)
    check_engines(config)
    warn_of_graphs(config)
    _check_tools(config)
    _check_hooks(config)
    _check_packages(config)
    _check_room(config)


def validate_evaluation(config: Config) -> None:
    """What `slime-retool eval` needs beyond (or, with an endpoint, instead of) `validate`. Raises ConfigError."""
    require(bool(config.eval_prompt_data), "--eval-prompt-data NAME FILE is required: the sets to measure on")
    _check_data(config)
    if config.eval_endpoint_url is not None:
        check_values(config)
        require(config.eval_endpoint_model is not None, "--eval-endpoint-url needs --eval-endpoint-model NAME")
        require_writable(config.output_dir, "--output-dir")
        _check_tools(config)
        _check_hooks(config)
        _check_packages(config)


def check_values(config: Config) -> None:
    """ConfigError for a value, of the product's flags or a hook's, that its own flag does not allow."""
    for mistake in flags.mistakes_in(config, *config.hook_args):
        raise ConfigError(mistake)


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
    if not config.eval_sets:
        refuse_unused(config, ("eval_interval",), "--eval-prompt-data NAME FILE")


def _check_tools(config: Config) -> None:
    require(
        config.tool_state == "call" or config.sandbox_url is None,
        f"--tool-state {config.tool_state} needs a sandbox of this run's own: the protocol of --sandbox-url keeps no "
        "state; drop one",
    )
    if config.sandbox_url is None:
        refuse_unused(config, ("sandbox_token_file",), "--sandbox-url")
    elif config.sandbox_token_file is not None:
        require_file(config.sandbox_token_file, "--sandbox-token-file")


def check_batches(config: Config) -> None:
    """Sizes of rollouts, steps and micro-batches that fit each other. ConfigError at the first rule that is broken."""
    if config.rollout_batch_size is None:
        raise ConfigError("--rollout-batch-size is required: prompts per rollout")
    _check_step(config)
    if config.use_dynamic_batch_size:
        require(config.max_tokens_per_gpu is not None, "--use-dynamic-batch-size needs --max-tokens-per-gpu")
    else:
        refuse_unused(config, ("max_tokens_per_gpu",), "--use-dynamic-batch-size")
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


def _check_step(config: Config) -> None:
    """Samples of a rollout divide into optimizer steps, and a step's into data-parallel ranks."""
    total, step = config.samples_per_rollout, config.global_batch_size
    if step is not None and total % step:
        raise ConfigError(
            f"--rollout-batch-size {config.rollout_batch_size} x --n-samples-per-prompt {config.n_samples_per_prompt} "
            f"= {total} samples must be a multiple of --global-batch-size {step}; "
            f"the nearest size that divides is {nearest_divisor(total, step)}"
        )
    size, dp = step or total, config.data_parallel_size
    if size % dp and not config.debug_rollout_only:
        if total % dp:
            assert config.rollout_batch_size is not None
            rows = dp // math.gcd(dp, config.n_samples_per_prompt)
            fix = f"--rollout-batch-size {max(1, round(config.rollout_batch_size / rows)) * rows}"
        else:
            fix = f"--global-batch-size {dp * nearest_divisor(total // dp, max(1, round(size / dp)))}"
        raise ConfigError(
            f"a batch of {size} samples (--global-batch-size) must be a multiple of the {dp} data-parallel ranks; "
            f"use {fix}"
        )


def _check_replay(config: Config) -> None:
    folder = config.replay_rollouts
    if folder is None:
        return
    require(os.path.isdir(folder), f"--replay-rollouts: no such folder: {folder}")
    # A run that resumes nothing sets aside what it finds in --output-dir.
    require(
        not any(_same_place(os.path.join(config.output_dir, part), folder) for part in ("", FOLDER)),
        f"--replay-rollouts {folder} is in this run's own --output-dir: name another --output-dir",
    )


def _check_checkpoints(config: Config) -> None:
    if config.debug_rollout_only:
        return
    if config.ref_load is not None and not is_checkpoint(config.ref_load):
        require_folder(config.ref_load, "--ref-load", LATEST_FILE)
    resumable = config.load is not None and exists(config.load)
    for flag, source in config.load_folders.items():
        require(
            flag == "--ref-load" or not is_checkpoint(source),
            f"{flag} {source} is one checkpoint: give the folder that it is in, whose newest is taken",
        )
        with as_config_error():
            latest_rollout(source)
        other = "" if exists(source) else what_it_is(source)
        require(not other or not os.path.isdir(source), f"{flag}: {source} has no {LATEST_FILE}{other}")
    require(
        config.ref_load is not None or resumable,
        "no weights to start from: give --ref-load DIR (made by `slime-retool convert to-megatron`), or --load DIR "
        f"with a checkpoint in it (got {config.load})",
    )
    if config.save is None:
        refuse_unused(
            config, ("save_interval", "save_seconds", "save_keep", "save_hf", "no_async_save"), "--save DIR"
        )
    for save_flag, saved_to in config.save_folders.items():
        require(
            not config.halves_master_weights or config.no_save_optim,
            f"{save_flag} {saved_to}: --use-precision-aware-optimizer keeps 16 bits beside each bf16 weight, which a "
            "checkpoint cannot hold; add --no-save-optim (a resumed run starts Adam anew) or leave it out",
        )
    require(
        not _same_place(config.save, config.ref_load),
        f"--save {config.save} is --ref-load: the first checkpoint would take the reference's place; "
        "name another folder",
    )
    require(
        config.save_keep is None
        or config.ref_load is None
        or not is_checkpoint(config.ref_load)
        or not _same_place(config.save, os.path.dirname(os.path.realpath(config.ref_load))),
        f"--save-keep would delete --ref-load {config.ref_load}, which is in --save {config.save}: leave it out, or "
        "name another folder",
    )
    for role in config.roles:
        load, save, flag = role.config.load, role.config.save, role.flag("--save")
        require(
            save is None
            or _same_place(load, save)
            or _holds_the_critic(config, save)
            or not holds_checkpoints(save),
            f"{flag} {save} holds the checkpoints of an earlier run, which this one would mix with its own: add "
            f"{role.flag('--load')} {save} to go on from them, or name another folder",
        )
    for flag, folder in (config.save_folders | {"--save-hf": config.save_hf}).items():
        if folder is not None:
            require_writable(folder, flag)
    require(
        config.save_hf is None or not (os.path.isdir(config.save_hf) and os.listdir(config.save_hf)),
        f"--save-hf: the folder {config.save_hf} is not empty; name a new one",
    )


def _holds_the_critic(config: Config, save: str) -> bool:
    """Whether an earlier start of this run saved its critic there, beside the actor's checkpoint in --load."""
    at = latest_rollout(config.load) if save in config.critic_places else None
    return at is not None and os.path.isdir(os.path.join(save, checkpoint_name(at)))


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


def _same_place(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)


def _check_optimizer(config: Config) -> None:
    require(config.min_lr <= config.lr, f"--min-lr must be at most --lr {config.lr}, got {config.min_lr}")
    fraction = config.lr_warmup_fraction
    require(
        fraction is None or config.lr_warmup_iters == 0,
        f"give one of --lr-warmup-iters and --lr-warmup-fraction, got {config.lr_warmup_iters} and {fraction}",
    )
    check_schedule(config)


def check_precision(config: Config) -> None:
    """Precision, recomputation and the optimizer's place. ConfigError at the first rule that is broken."""
    if config.device == "cpu":
        require(config.precision != "bf16", "--precision bf16 needs GPUs; on the CPU use fp32")
        require(
            config.transformer_impl != "transformer_engine",
            "--transformer-impl transformer_engine needs GPUs; on the CPU use local",
        )
    if config.recompute_granularity == "full":
        require(
            config.recompute_method is not None and config.recompute_num_layers is not None,
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
        )
    layers = config.recompute_num_layers
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


def _check_hooks(config: Config) -> None:
    for name in HOOK_PATHS:
        path = config.__dict__[name]
        if path is not None:
            load_function(path, flags.option_name(name))


def _has_old_megatron() -> bool:
    return metadata.version("megatron-core").startswith("0.16.")


def _check_packages(config: Config) -> None:
    """The packages that some flags need are there, and W&B's key."""
    te = "transformer-engine[pytorch]"
    for flag, used, package in (
        ("--rm-type math_verify", config.rm_type == "math_verify", "math-verify"),
        ("--use-tensorboard", config.use_tensorboard, "tensorboard"),
        ("--use-wandb", config.use_wandb, "wandb"),
        ("--prometheus-port", config.prometheus_port is not None, "prometheus-client"),
        ("--use-precision-aware-optimizer", config.use_precision_aware_optimizer, te),
        # Where it is missing, megatron-core 0.16 compares its version, which is None then.
        ("--optimizer-cpu-offload", config.optimizer_cpu_offload and _has_old_megatron(), te),
    ):
        there = find_spec(package.partition("[")[0].replace("-", "_")) is not None
        require(not used or there, f"{flag}: not installed; pip install {package}")
    mode = config.wandb_mode or os.environ.get("WANDB_MODE", "online")
    if config.use_wandb and mode == "online" and config.wandb_key is None:
        import wandb

        require(
            wandb.login(prompt=False, verify=False),
            "--use-wandb finds no key: run `wandb login`, set WANDB_API_KEY or give --wandb-key; --wandb-mode offline "
            "needs none",
        )
