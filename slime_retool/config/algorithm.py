"""Rules about what is optimized and how samples are drawn."""

from __future__ import annotations

import dataclasses
import logging

from megatron_bridge import flags
from slime_retool.algo.algorithms import SFT_LOSS, names_where
from slime_retool.config.config import Config
from slime_retool.config.groups import REPLAY_ROLLOUT, RL_ROLLOUT, SFT_ROLLOUT, CriticArgs
from slime_retool.config.parallel import check_world_size
from slime_retool.config.require import refuse_unused, require
from slime_retool.config.resolve import read_checkpoint
from slime_retool.errors import ConfigError

logger = logging.getLogger(__name__)

WITHOUT_ROUTING = ("mixtral",)
"""Families whose server ends itself at the first request when it is to return experts."""


def check_algorithm(config: Config) -> None:
    """Loss, advantages, critic and sampling. ConfigError at the first rule that is broken."""
    require(
        not (config.debug_train_only and config.debug_rollout_only),
        "--debug-train-only and --debug-rollout-only exclude each other",
    )
    if config.loss.supervised:
        _check_supervised(config)
    elif not config.debug_rollout_only:
        _check_policy(config)
    _check_overlong(config)
    _check_loss(config)
    _check_kl(config)
    _check_off_policy(config)
    _check_routing_replay(config)
    _check_staleness(config)
    _check_distillation(config)
    _check_critic(config)


def _check_supervised(config: Config) -> None:
    loss = f"--loss-type {config.loss_type}"
    require(
        config.debug_train_only, f"{loss} trains on conversations and generates nothing: drop --debug-rollout-only"
    )
    require(
        config.n_samples_per_prompt == 1,
        f"{loss} takes each row once: --n-samples-per-prompt must be 1, got {config.n_samples_per_prompt}",
    )


def _check_policy(config: Config) -> None:
    require(
        config.replay_rollouts is not None
        or (not config.debug_train_only and config.rollout_function_path != SFT_ROLLOUT),
        f"--loss-type {config.loss_type} needs generated samples: drop --debug-train-only and the SFT rollout "
        f"function, or use --loss-type {SFT_LOSS.name}",
    )
    require(
        config.n_samples_per_prompt >= 2 or not config.algorithm.needs_group,
        f"--advantage-estimator {config.advantage_estimator} compares responses to one prompt: "
        f"--n-samples-per-prompt must be at least 2, got {config.n_samples_per_prompt}; "
        f"{names_where(lambda algorithm: not algorithm.needs_group)} need no group",
    )
    require(
        not config.disable_compute_advantages_and_returns,
        f"--disable-compute-advantages-and-returns is for --loss-type {SFT_LOSS.name}; {config.loss_type} needs "
        "advantages",
    )


def _check_loss(config: Config) -> None:
    loss, low, high = config.loss, config.eps_clip, config.eps_clip_high
    require(
        low < 1 or loss.independent_clips,
        f"--eps-clip must be below 1, got {low:g}: only "
        f"{names_where(lambda algorithm: algorithm.loss.independent_clips)} can do without a lower bound",
    )
    # Where the two bounds are not independent, a smaller upper one is a mistake.
    require(
        high is None or high >= low or loss.independent_clips,
        f"--eps-clip-high must be at least --eps-clip {low}, got {high}",
    )
    for name in flags.changed(config, loss.forbids):
        flag = flags.option_name(name)
        raise ConfigError(
            f"{flag} is of no use to {loss.flag} (--advantage-estimator {config.advantage_estimator}); drop it"
        )
    length = config.loss_constant_length
    require(
        length is None or not config.calculate_per_token_loss,
        f"--loss-constant-length {length} and --calculate-per-token-loss are two divisors of one loss; drop one",
    )


def _check_kl(config: Config) -> None:
    if not config.use_kl_loss:
        refuse_unused(config, ("kl_loss_coef",), "--use-kl-loss")
    require(
        config.kl_loss_coef == 0 or config.kl_coef == 0,
        f"--kl-loss-coef {config.kl_loss_coef} and --kl-coef {config.kl_coef} count the same KL twice; drop one",
    )
    if config.needs_reference and not config.debug_rollout_only:
        flags = [term.flag for term, _ in config.loss_terms if "ref_log_probs" in term.needs] or ["--kl-coef"]
        require(config.ref_load is not None, f"{flags[0]} needs the reference model: add --ref-load DIR")
    if config.use_kl_loss and config.kl_loss_coef != 0 and config.kl_loss_type == "k1":
        logger.warning("--kl-loss-type k1 in the loss does not pull to the reference: use low_var_kl, or --kl-coef")


def _check_off_policy(config: Config) -> None:
    if config.use_tis:
        require(
            not config.use_rollout_logprobs,
            "--use-tis weighs the engine's log-probs against the trainer's, which --use-rollout-logprobs never "
            "computes; drop one",
        )
        require(
            not config.loss.supervised, f"--use-tis corrects a policy's samples; drop it for {config.loss_type}"
        )
        require(
            config.tis_clip_low < config.tis_clip,
            f"--tis-clip-low must be below --tis-clip {config.tis_clip}, got {config.tis_clip_low}",
        )
    else:
        refuse_unused(config, ("tis_level", "tis_mode", "tis_clip", "tis_clip_low"), "--use-tis")
    if not config.loss.supervised and (config.rollout_top_p < 1 or config.rollout_top_k != -1):
        logger.warning(
            "--rollout-top-p %s --rollout-top-k %s: the engine samples from a cut distribution, the trainer's "
            "log-probs are of the whole one; ratios and mismatch figures compare the two",
            config.rollout_top_p, config.rollout_top_k,
        )  # fmt: skip


def _check_routing_replay(config: Config) -> None:
    if not config.use_rollout_routing_replay:
        return
    flag = "--use-rollout-routing-replay repeats the engine's choice of experts"
    require(not config.loss.supervised, f"{flag}; drop it for {config.loss_type}, which has no engine")
    require(config.num_experts is not None, f"{flag}, and this model is dense (no --num-experts); drop it")
    require(
        config.num_experts is None or config.num_experts <= 65535,
        f"{flag}, kept in 16 bits: at most 65535 of --num-experts, got {config.num_experts}",
    )
    kind = read_checkpoint(config).get("model_type")
    require(
        kind not in WITHOUT_ROUTING,
        f"{flag}, which SGLang 0.5.15 cannot return for {kind}: its routers do not know their layer; drop it",
    )
    chunk = " ".join(config.sglang_server_flags.get("--chunked-prefill-size", []))
    require(
        not chunk.startswith("-"),
        f"{flag}, for which it has a buffer of one chunk: --sglang-chunked-prefill-size must be positive, got {chunk}",
    )


def _check_staleness(config: Config) -> None:
    staleness = f"--max-staleness {config.max_staleness}"
    if config.max_staleness == 0:
        return
    require(not config.loss.supervised, f"{staleness} is of generated samples; drop it for {config.loss_type}")
    require(
        config.rollout_function_path in (RL_ROLLOUT, REPLAY_ROLLOUT),
        f"{staleness} needs the default rollout, which goes on across updates; drop it or --rollout-function-path",
    )
    require(
        config.use_tis or config.use_rollout_logprobs or config.debug_rollout_only,
        f"{staleness} trains on samples of older weights, which the loss has to know: add --use-tis (decoupled PPO) "
        "or --use-rollout-logprobs (PPO against the weights that sampled)",
    )


def _check_distillation(config: Config) -> None:
    url, weight = config.teacher_url, config.distill_coef
    require((weight > 0) == (url is not None), f"--teacher-url and --distill-coef go together, got {url} and {weight}")
    require(
        weight == 0 or config.rollout_temperature == 1,
        "--distill-coef compares with the teacher's log-probs, which are at temperature 1: --rollout-temperature must "
        f"be 1, got {config.rollout_temperature}",
    )
    require(
        weight == 0 or not config.loss.supervised,
        f"--distill-coef learns from generated samples; drop it for --loss-type {config.loss_type}",
    )


def _check_critic(config: Config) -> None:
    actor, *others = config.roles
    if not others:
        critics = names_where(lambda algorithm: algorithm.needs_critic)
        names = [field.name for field in dataclasses.fields(CriticArgs)]
        refuse_unused(config, names, f"the critic of --advantage-estimator {critics}")
    for role in others:
        for flag, own, actors in (
            ("--save", role.config.save, actor.config.save),
            ("--load", role.config.load, actor.config.load),
        ):
            require(
                own is None or own != actors, f"{role.flag(flag)} must be another folder than the actor's, got {own}"
            )
    check_groups(config)


def check_groups(config: Config) -> None:
    """Refuse (ConfigError) processes beside the actor's that the parallel sizes do not divide."""
    for name, group in config.trainer_groups[1:]:
        world, size = group.world_size, config.model_parallel_size
        require(
            world % size == 0,
            f"the {name}'s {world} processes (--{name}-num-nodes x --{name}-num-gpus-per-node) must be a multiple of "
            f"tensor x pipeline x context parallel size {size}; use {max(1, round(world / size)) * size}",
        )
        check_world_size(config, world, f"{world} processes of the {name}")


def _check_overlong(config: Config) -> None:
    buffer, limit = config.overlong_buffer_len, config.rollout_max_response_len
    require(
        buffer is None or buffer <= limit,
        f"--overlong-buffer-len must be at most --rollout-max-response-len {limit}, got {buffer}",
    )
    if buffer is None:
        refuse_unused(config, ("overlong_penalty_factor",), "--overlong-buffer-len")
    require(
        not config.loss.supervised or not (config.overlong_filtering or buffer),
        "--overlong-filtering and --overlong-buffer-len are of generated responses; drop them for --loss-type "
        f"{config.loss_type}",
    )
