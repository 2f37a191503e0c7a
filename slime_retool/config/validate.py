"""Everything a configuration can get wrong, refused before any process starts or device is touched.

`validate` reads small files (config.json) and imports hooks; it starts nothing and imports no torch. Every
refusal is a ConfigError of one line: the rule, the value seen, the fix.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from urllib.parse import urlsplit

from megatron_bridge.hf_config import check_against_hf, model_args_from_hf, read_hf_config
from megatron_bridge.lora_spec import TARGET_MODULES
from megatron_bridge.model_config import ModelArgs, nearest_divisor, required
from slime_retool.config.config import Config
from slime_retool.config.groups import CriticArgs, LoraArgs
from slime_retool.config.parallel import check_parallel, check_world_size
from slime_retool.data.readers import split_slice
from slime_retool.errors import ConfigError
from slime_retool.plugins import load_function

logger = logging.getLogger(__name__)

SFT_ROLLOUT = "slime_retool.rollout.sft_rollout.generate_rollout"


def validate(config: Config) -> None:
    """Check `config` and fill in what follows from the checkpoint (model flags when none were given).

    Raises:
        ConfigError: at the first rule that is broken.
    """
    _check_model(config)
    check_parallel(config)
    _check_data(config)
    _check_batches(config)
    _check_algorithm(config)
    _check_checkpoints(config)
    _check_lora(config)
    _check_optimizer(config)
    _check_precision(config)
    _check_engines(config)
    _check_hooks(config)


def validate_evaluation(config: Config) -> None:
    """What `slime-retool eval` needs beyond (or, with an endpoint, instead of) `validate`. Raises ConfigError."""
    _require(bool(config.eval_prompt_data), "--eval-prompt-data NAME FILE is required: the sets to measure on")
    _check_data(config)
    _require(
        config.n_samples_per_eval_prompt >= 1,
        f"--n-samples-per-eval-prompt must be at least 1, got {config.n_samples_per_eval_prompt}",
    )
    if config.eval_endpoint_url is not None:
        _require(
            config.eval_endpoint_url.startswith(("http://", "https://")),
            f"--eval-endpoint-url must start with http:// or https://, got {config.eval_endpoint_url}",
        )
        _require(config.eval_endpoint_model is not None, "--eval-endpoint-url needs --eval-endpoint-model NAME")
        _require(
            config.eval_endpoint_concurrency >= 1,
            f"--eval-endpoint-concurrency must be at least 1, got {config.eval_endpoint_concurrency}",
        )
        _check_hooks(config)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _require_file(path: str, flag: str) -> None:
    path, _ = split_slice(path)
    _require(os.path.isfile(path), f"{flag}: no such file: {path}")


def _require_folder(path: str, flag: str, holds: str) -> None:
    _require(os.path.isdir(path), f"{flag}: no such folder: {path}")
    _require(os.path.exists(os.path.join(path, holds)), f"{flag}: {path} has no {holds}")


def _check_model(config: Config) -> None:
    _require(config.hf_checkpoint is not None, "--hf-checkpoint is required: a Hugging Face checkpoint folder")
    _require_folder(config.hf_checkpoint, "--hf-checkpoint", "config.json")
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
    _require(bool(config.prompt_data), "--prompt-data is required: a .jsonl or .parquet file")
    for data_set in config.prompt_sets:
        _require_file(data_set.file, "--prompt-data")
    _require(
        len(config.eval_prompt_data) % 2 == 0,
        f"--eval-prompt-data takes pairs NAME FILE, got {len(config.eval_prompt_data)} values: "
        f"{' '.join(config.eval_prompt_data)}",
    )
    for _, file in config.eval_sets:
        _require_file(file, "--eval-prompt-data")
    names = [name for name, _ in config.eval_sets]
    _require(len(set(names)) == len(names), f"--eval-prompt-data: set names must differ, got {' '.join(names)}")
    if config.eval_interval is not None:
        _require(config.eval_interval >= 1, f"--eval-interval must be at least 1, got {config.eval_interval}")
        _require(bool(config.eval_sets), "--eval-interval needs --eval-prompt-data NAME FILE")


def _check_batches(config: Config) -> None:
    _require(
        config.rollout_batch_size is not None and config.rollout_batch_size >= 1,
        f"--rollout-batch-size is required and at least 1, got {config.rollout_batch_size}",
    )
    _require(
        config.n_samples_per_prompt >= 1,
        f"--n-samples-per-prompt must be at least 1, got {config.n_samples_per_prompt}",
    )
    _require(
        (config.num_rollout is None) != (config.num_epoch is None),
        f"give one of --num-rollout and --num-epoch, got {config.num_rollout} and {config.num_epoch}",
    )
    total, step = config.samples_per_rollout, config.global_batch_size
    if step is not None and (step < 1 or total % step):
        raise ConfigError(
            f"--rollout-batch-size {config.rollout_batch_size} x --n-samples-per-prompt {config.n_samples_per_prompt} "
            f"= {total} samples must be a multiple of --global-batch-size {step}; "
            f"the nearest size that divides is {nearest_divisor(total, max(step, 1))}"
        )
    size, dp = step or total, config.data_parallel_size
    if size % dp:
        raise ConfigError(
            f"a batch of {size} samples (--global-batch-size) must be a multiple of the {dp} data-parallel ranks; "
            f"use {max(dp, round(size / dp) * dp)}"
        )
    if config.use_dynamic_batch_size:
        _require(
            config.max_tokens_per_gpu is not None and config.max_tokens_per_gpu >= 1,
            f"--use-dynamic-batch-size needs --max-tokens-per-gpu of at least 1, got {config.max_tokens_per_gpu}",
        )
    _require(config.micro_batch_size >= 1, f"--micro-batch-size must be at least 1, got {config.micro_batch_size}")
    over = config.over_sampling_batch_size
    _require(
        over is None or over >= config.rollout_batch_size,
        f"--over-sampling-batch-size must be at least --rollout-batch-size {config.rollout_batch_size}, got {over}",
    )
    for flag, value in (
        ("--rollout-max-response-len", config.rollout_max_response_len),
        ("--max-turns", config.max_turns),
        ("--tool-concurrency", config.tool_concurrency),
        ("--tool-memory-mb", config.tool_memory_mb),
        ("--max-observation-tokens", config.max_observation_tokens),
        ("--sglang-server-concurrency", config.sglang_server_concurrency),
    ):
        _require(value >= 1, f"{flag} must be at least 1, got {value}")
    for flag, value in (
        ("--tool-timeout", config.tool_timeout),
        ("--reward-timeout", config.reward_timeout),
        ("--rollout-request-timeout", config.rollout_request_timeout),
        ("--sglang-startup-timeout", config.sglang_startup_timeout),
        ("--distributed-timeout-minutes", config.distributed_timeout_minutes),
    ):
        _require(value > 0, f"{flag} must be above 0, got {value}")
    url = config.sandbox_url
    _require(
        url is None or url.startswith(("http://", "https://")),
        f"--sandbox-url must start with http:// or https://, got {url}",
    )
    window = config.max_position_embeddings
    context = config.rollout_max_context_len
    _require(
        context is None or window is None or context <= window,
        f"--rollout-max-context-len {context} is longer than the model's {window} positions",
    )


def _check_algorithm(config: Config) -> None:
    sft = config.loss_type == "sft_loss"
    if sft:
        _require(
            config.rollout_function_path == SFT_ROLLOUT or config.debug_train_only,
            f"--loss-type sft_loss trains on conversations: add --rollout-function-path {SFT_ROLLOUT}",
        )
        _require(
            config.debug_train_only,
            "--loss-type sft_loss needs no engines: add --debug-train-only",
        )
        _require(
            config.n_samples_per_prompt == 1,
            f"--loss-type sft_loss takes each row once: --n-samples-per-prompt must be 1, "
            f"got {config.n_samples_per_prompt}",
        )
    elif not config.debug_rollout_only:
        _require(
            not config.debug_train_only and config.rollout_function_path != SFT_ROLLOUT,
            "--loss-type policy_loss needs generated samples: drop --debug-train-only and the SFT rollout function, "
            "or use --loss-type sft_loss",
        )
        _require(
            config.n_samples_per_prompt >= 2 or config.advantage_estimator in ("ppo", "reinforce_plus_plus"),
            f"--advantage-estimator {config.advantage_estimator} compares responses to one prompt: "
            f"--n-samples-per-prompt must be at least 2, got {config.n_samples_per_prompt}; ppo and "
            "reinforce_plus_plus need no group",
        )
        _require(
            not config.disable_compute_advantages_and_returns,
            "--disable-compute-advantages-and-returns is for --loss-type sft_loss; policy_loss needs advantages",
        )
    _require(
        not (config.debug_train_only and config.debug_rollout_only),
        "--debug-train-only and --debug-rollout-only exclude each other",
    )
    _check_overlong(config)
    _require(
        config.rollout_temperature > 0,
        f"--rollout-temperature must be above 0 (the trainer divides logits by it), got {config.rollout_temperature}",
    )
    for flag, value in (("--rollout-top-p", config.rollout_top_p), ("--eval-top-p", config.eval_top_p)):
        _require(value is None or 0 < value <= 1, f"{flag} must be in (0, 1], got {value}")
    for flag, value in (("--rollout-top-k", config.rollout_top_k), ("--eval-top-k", config.eval_top_k)):
        _require(value is None or value == -1 or value >= 1, f"{flag} must be -1 (off) or at least 1, got {value}")
    _require(
        config.eval_temperature is None or config.eval_temperature >= 0,
        f"--eval-temperature must be 0 (greedy) or above, got {config.eval_temperature}",
    )
    _check_loss(config)
    _check_kl(config)
    _check_off_policy(config)
    _check_distillation(config)
    _check_critic(config)


def _check_loss(config: Config) -> None:
    cispo = config.advantage_estimator == "cispo"
    low, high = config.eps_clip, config.eps_clip_high
    _require(
        0 < low < 1 or (cispo and low == 1),
        f"--eps-clip must be between 0 and 1 (with cispo also 1: no lower bound), got {low}",
    )
    # In CISPO the two bounds are independent; elsewhere a smaller upper one is a mistake.
    _require(
        high is None or high >= low or (cispo and high > 0),
        f"--eps-clip-high must be at least --eps-clip {low}, got {high}",
    )
    _require(
        config.eps_clip_c is None or config.eps_clip_c > 1, f"--eps-clip-c must be above 1, got {config.eps_clip_c}"
    )
    _require(
        config.eps_clip_c is None or not cispo,
        "--eps-clip-c bounds a loss that --advantage-estimator cispo does not have; drop it",
    )
    length = config.loss_constant_length
    _require(length is None or length >= 1, f"--loss-constant-length must be at least 1, got {length}")
    _require(
        length is None or not config.calculate_per_token_loss,
        f"--loss-constant-length {length} and --calculate-per-token-loss are two divisors of one loss; drop one",
    )
    for flag, value in (("--gamma", config.gamma), ("--lambd", config.lambd)):
        _require(0 <= value <= 1, f"{flag} must be in [0, 1], got {value}")


def _check_kl(config: Config) -> None:
    if config.kl_loss_coef != 0:
        _require(
            config.use_kl_loss,
            f"--kl-loss-coef {config.kl_loss_coef} has no effect without --use-kl-loss; add it or drop the coefficient",
        )
    _require(
        config.kl_loss_coef == 0 or config.kl_coef == 0,
        f"--kl-loss-coef {config.kl_loss_coef} and --kl-coef {config.kl_coef} count the same KL twice; drop one",
    )
    wants_reference = config.use_kl_loss or config.kl_coef != 0
    if wants_reference and config.loss_type == "policy_loss" and not config.debug_rollout_only:
        flag = "--use-kl-loss" if config.use_kl_loss else "--kl-coef"
        _require(config.ref_load is not None, f"{flag} needs the reference model: add --ref-load DIR")
    if config.use_kl_loss and config.kl_loss_coef != 0 and config.kl_loss_type == "k1":
        logger.warning("--kl-loss-type k1 in the loss does not pull to the reference: use low_var_kl, or --kl-coef")


def _check_off_policy(config: Config) -> None:
    if config.use_tis:
        _require(
            not config.use_rollout_logprobs,
            "--use-tis weighs the engine's log-probs against the trainer's, which --use-rollout-logprobs never "
            "computes; drop one",
        )
        _require(config.loss_type == "policy_loss", "--use-tis corrects a policy's samples; drop it for sft_loss")
        _require(
            0 <= config.tis_clip_low < config.tis_clip,
            f"--tis-clip-low must be at least 0 and below --tis-clip {config.tis_clip}, got {config.tis_clip_low}",
        )
    if config.loss_type == "policy_loss" and (config.rollout_top_p < 1 or config.rollout_top_k != -1):
        logger.warning(
            "--rollout-top-p %s --rollout-top-k %s: the engine samples from a cut distribution, the trainer's "
            "log-probs are of the whole one; ratios and mismatch figures compare the two",
            config.rollout_top_p, config.rollout_top_k,
        )  # fmt: skip


def _check_distillation(config: Config) -> None:
    url, weight = config.teacher_url, config.distill_coef
    _require(weight >= 0, f"--distill-coef must be at least 0, got {weight}")
    _require((weight > 0) == (url is not None), f"--teacher-url and --distill-coef go together, got {url} and {weight}")
    _require(
        url is None or url.startswith(("http://", "https://")),
        f"--teacher-url must start with http:// or https://, got {url}",
    )
    _require(
        weight == 0 or config.rollout_temperature == 1,
        "--distill-coef compares with the teacher's log-probs, which are at temperature 1: --rollout-temperature must "
        f"be 1, got {config.rollout_temperature}",
    )
    _require(
        weight == 0 or config.loss_type == "policy_loss",
        "--distill-coef learns from generated samples; drop it for --loss-type sft_loss",
    )


def _check_critic(config: Config) -> None:
    """Also fills in the critic's folders."""
    if not config.uses_critic:
        for field in dataclasses.fields(CriticArgs):
            _require(
                config.__dict__[field.name] == field.default,
                f"--{field.name.replace('_', '-')} is of a critic, which only --advantage-estimator ppo has; drop it",
            )
        return
    if config.critic_save is None and config.save is not None:
        config.critic_save = os.path.join(config.save, "critic")
    if config.critic_load is None and config.load is not None:
        config.critic_load = os.path.join(config.load, "critic")
    for flag, own, actors in (
        ("--critic-save", config.critic_save, config.save),
        ("--critic-load", config.critic_load, config.load),
    ):
        _require(own is None or own != actors, f"{flag} must be another folder than the actor's, got {own}")
    _require(config.critic_lr is None or config.critic_lr > 0, f"--critic-lr must be above 0, got {config.critic_lr}")
    for flag, value in (
        ("--critic-lr-warmup-iters", config.critic_lr_warmup_iters),
        ("--num-critic-only-steps", config.num_critic_only_steps),
        ("--value-clip", config.value_clip),
    ):
        _require(value >= 0, f"{flag} must be at least 0, got {value}")
    if not config.critic_apart:
        return
    for flag, count in (
        ("--critic-num-nodes", config.critic_num_nodes),
        ("--critic-num-gpus-per-node", config.critic_num_gpus_per_node),
    ):
        _require(count is None or count >= 1, f"{flag} must be at least 1, got {count}")
    world, size = config.critic_world_size, config.model_parallel_size
    _require(
        world % size == 0,
        f"the critic's {world} processes (--critic-num-nodes x --critic-num-gpus-per-node) must be a multiple of "
        f"tensor x pipeline x context parallel size {size}; use {max(1, round(world / size)) * size}",
    )
    check_world_size(config, world, f"{world} processes of the critic")


def _check_overlong(config: Config) -> None:
    buffer, limit, factor = config.overlong_buffer_len, config.rollout_max_response_len, config.overlong_penalty_factor
    _require(
        buffer is None or 1 <= buffer <= limit,
        f"--overlong-buffer-len must be between 1 and --rollout-max-response-len {limit}, got {buffer}",
    )
    _require(factor > 0, f"--overlong-penalty-factor must be above 0, got {factor}")
    _require(
        factor == 1 or buffer is not None,
        f"--overlong-penalty-factor {factor} has no effect without --overlong-buffer-len; add it or drop the factor",
    )
    _require(
        config.loss_type != "sft_loss" or not (config.overlong_filtering or buffer),
        "--overlong-filtering and --overlong-buffer-len are of generated responses; drop them for --loss-type sft_loss",
    )


def _check_checkpoints(config: Config) -> None:
    if config.debug_rollout_only:
        return
    tracker = "latest_checkpointed_iteration.txt"
    if config.ref_load is not None:
        _require_folder(config.ref_load, "--ref-load", tracker)
    resumable = config.load is not None and os.path.exists(os.path.join(config.load, tracker))
    _require(
        config.ref_load is not None or resumable,
        "no weights to start from: give --ref-load DIR (made by tools/convert_hf_to_torch_dist.py), or --load DIR "
        f"with a checkpoint in it (got {config.load})",
    )
    if config.save_interval is not None:
        _require(config.save_interval >= 1, f"--save-interval must be at least 1, got {config.save_interval}")
        _require(config.save is not None, "--save-interval needs --save DIR")
    if config.save_hf is not None:
        _require(config.save is not None, "--save-hf is written from the last checkpoint: it needs --save DIR")
        _require(
            not (os.path.isdir(config.save_hf) and os.listdir(config.save_hf)),
            f"--save-hf: the folder {config.save_hf} is not empty; name a new one",
        )


def _check_lora(config: Config) -> None:
    if config.lora_rank is None:
        defaults = LoraArgs()
        for flag, value, default in (
            ("--lora-alpha", config.lora_alpha, defaults.lora_alpha),
            ("--lora-target-modules", config.lora_target_modules, defaults.lora_target_modules),
        ):
            _require(value == default, f"{flag} is of adapters, which only --lora-rank makes: add it, or drop {flag}")
        return
    rank, alpha, targets = config.lora_rank, config.lora_alpha, config.lora_target_modules
    widest = required(config, "hidden_size")
    _require(
        1 <= rank <= widest,
        f"--lora-rank must be between 1 and the hidden size {widest}, got {rank}; without the flag all weights train",
    )
    _require(alpha is None or alpha > 0, f"--lora-alpha must be above 0, got {alpha}")
    known = " ".join(TARGET_MODULES)
    unknown = [target for target in targets if target not in TARGET_MODULES]
    _require(not unknown, f"--lora-target-modules takes {known}, got {' '.join(unknown)}")
    _require(bool(targets), f"--lora-target-modules needs at least one of {known}")
    mlp = [target for target in targets if target.startswith("linear_fc")]
    _require(
        config.num_experts is None or not mlp,
        f"--lora-target-modules {' '.join(mlp)}: experts take no adapters; use linear_qkv linear_proj",
    )
    _require(len(set(targets)) == len(targets), f"--lora-target-modules names one twice: {' '.join(targets)}")
    _require(
        config.ref_load is not None or config.debug_rollout_only,
        "--lora-rank needs the frozen weights, which checkpoints of adapters leave out: add --ref-load DIR",
    )


def _check_optimizer(config: Config) -> None:
    _require(config.lr > 0, f"--lr must be above 0, got {config.lr}")
    _require(0 <= config.min_lr <= config.lr, f"--min-lr must be between 0 and --lr {config.lr}, got {config.min_lr}")
    _require(config.lr_warmup_iters >= 0, f"--lr-warmup-iters must be at least 0, got {config.lr_warmup_iters}")
    fraction = config.lr_warmup_fraction
    _require(fraction is None or 0 <= fraction < 1, f"--lr-warmup-fraction must be in [0, 1), got {fraction}")
    _require(
        fraction is None or config.lr_warmup_iters == 0,
        f"give one of --lr-warmup-iters and --lr-warmup-fraction, got {config.lr_warmup_iters} and {fraction}",
    )
    for flag, value in (("--adam-beta1", config.adam_beta1), ("--adam-beta2", config.adam_beta2)):
        _require(0 <= value < 1, f"{flag} must be in [0, 1), got {value}")
    _require(config.clip_grad >= 0, f"--clip-grad must be at least 0, got {config.clip_grad}")


def _check_precision(config: Config) -> None:
    if config.device == "cpu":
        _require(config.precision != "bf16", "--precision bf16 needs GPUs; on the CPU use fp32")
        _require(
            config.transformer_impl != "transformer_engine",
            "--transformer-impl transformer_engine needs GPUs; on the CPU use local",
        )
    _require(config.keep_logits_gib >= 0, f"--keep-logits-gib must be at least 0, got {config.keep_logits_gib}")
    for flag, value in (
        ("--attention-dropout", config.attention_dropout),
        ("--hidden-dropout", config.hidden_dropout),
    ):
        _require(value == 0, f"{flag} must be 0 (with dropout log-probs are not the policy's), got {value}")
    if config.recompute_granularity == "full":
        _require(
            config.recompute_method is not None and config.recompute_num_layers is not None,
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
        )
    _require(
        not config.recompute_modules or config.recompute_granularity == "selective",
        f"--recompute-modules {' '.join(config.recompute_modules)} needs --recompute-granularity selective",
    )
    for flag, value in (
        ("--overlap-param-gather", config.overlap_param_gather),
        ("--use-precision-aware-optimizer", config.use_precision_aware_optimizer),
        ("--optimizer-cpu-offload", config.optimizer_cpu_offload),
    ):
        _require(
            not value or (config.device != "cpu" and config.use_distributed_optimizer),
            f"{flag} needs GPUs and --use-distributed-optimizer; leave it out",
        )
    fraction = config.optimizer_offload_fraction
    _require(0 < fraction <= 1, f"--optimizer-offload-fraction must be above 0 and at most 1, got {fraction}")


def _check_engines(config: Config) -> None:
    if config.debug_train_only:
        return
    per_engine = config.rollout_num_gpus_per_engine
    _require(per_engine >= 1, f"--rollout-num-gpus-per-engine must be at least 1, got {per_engine}")
    total = config.rollout_num_gpus or (config.world_size if config.colocate else per_engine)
    if total % per_engine:
        raise ConfigError(
            f"--rollout-num-gpus-per-engine {per_engine} does not divide the {total} GPUs used for generation; "
            f"the nearest size that does is {nearest_divisor(total, per_engine)}"
        )
    transport = config.weight_transport
    if config.colocate:
        _require(
            not config.rollout_external_urls,
            "--colocate starts engines on the trainer's GPUs; it cannot be combined with --rollout-external-urls",
        )
        _require(
            total <= config.world_size,
            f"--colocate: {total} GPUs for generation (--rollout-num-gpus) are more than the {config.world_size} "
            "training GPUs they share",
        )
        _require(
            config.actor_num_nodes == 1 or config.actor_num_gpus_per_node % per_engine == 0,
            f"--colocate: an engine of --rollout-num-gpus-per-engine {per_engine} would span hosts of "
            f"--actor-num-gpus-per-node {config.actor_num_gpus_per_node}; use a size that divides it",
        )
        _require(
            transport != "broadcast" or not config.on_cuda,
            "--update-weight-transport broadcast cannot join two processes of one GPU; with --colocate use ipc or disk",
        )
    else:
        _require(transport != "ipc", "--update-weight-transport ipc needs --colocate; engines elsewhere take broadcast")
    _require(
        config.update_weight_disk_dir is None or transport == "disk",
        f"--update-weight-disk-dir has no effect on --update-weight-transport {transport}; add "
        "--update-weight-transport disk or drop it",
    )
    _check_external_engines(config)
    _require(
        not config.check_weight_update_equal or not (config.rollout_external_urls or config.num_experts),
        "--check-weight-update-equal reads the weights of dense models in engines that the run starts; drop it with "
        "--rollout-external-urls or experts",
    )
    size = config.update_weight_buffer_size
    _require(size >= 1, f"--update-weight-buffer-size must be at least 1 byte, got {size}")
    fraction = config.sglang_mem_fraction_static
    _require(
        fraction is None or 0 < fraction < 1, f"--sglang-mem-fraction-static must be between 0 and 1, got {fraction}"
    )


def _check_external_engines(config: Config) -> None:
    urls = config.rollout_external_urls
    for url in urls:
        _require(
            url.startswith(("http://", "https://")) and bool(urlsplit(url).hostname),
            f"--rollout-external-urls takes addresses like http://HOST:PORT, got {url}",
        )
    _require(len(set(urls)) == len(urls), f"--rollout-external-urls names a server twice: {' '.join(urls)}")
    _require(
        not config.engines_elsewhere
        or config.debug_rollout_only
        or config.weight_transport != "disk"
        or config.update_weight_disk_dir is not None,
        "--update-weight-transport disk: servers on other hosts cannot read this one's memory; add "
        "--update-weight-disk-dir with a folder that they see under the same path",
    )


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
    """Turn `--device auto` into cuda or cpu: cuda when this host shows an NVIDIA device and does not hide it."""
    if config.device == "auto":
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        present = any(Path("/dev").glob("nvidia[0-9]*"))
        config.device = "cuda" if present and not hidden else "cpu"
