"""Rules about LoRA: what is adapted, and how adapters reach the engines."""

from __future__ import annotations

from megatron_bridge.lora_spec import EXPERT_TARGETS, TARGET_MODULES
from megatron_bridge.model_config import required
from slime_retool.config.config import Config
from slime_retool.config.groups import TRANSPORTS
from slime_retool.config.require import refuse_unused, require

SPECULATIVE, NGRAM = "--speculative-algorithm", "NGRAM"


def check_lora(config: Config) -> None:
    """ConfigError at the first rule that is broken."""
    if config.lora_rank is None:
        refuse_unused(config, ("lora_alpha", "lora_target_modules", "lora_weight_update"), "--lora-rank")
        return
    rank, targets = config.lora_rank, config.lora_target_modules
    widest = required(config, "hidden_size")
    require(
        rank <= widest,
        f"--lora-rank must be at most the hidden size {widest}, got {rank}; without the flag all weights train",
    )
    require(bool(targets), f"--lora-target-modules needs at least one of {' '.join(TARGET_MODULES)}")
    require(len(set(targets)) == len(targets), f"--lora-target-modules names one twice: {' '.join(targets)}")
    require(
        config.ref_load is not None or config.debug_rollout_only,
        "--lora-rank needs the frozen weights, which checkpoints of adapters leave out: add --ref-load DIR",
    )
    check_served_adapters(config)


def check_served_adapters(config: Config) -> None:
    """Engines that are to serve adapters beside the frozen weights can. ConfigError at the first broken rule."""
    if not config.serves_adapters:
        return
    flag, merged = "--lora-weight-update adapters", "use --lora-weight-update merged"
    require(
        not config.offloads_rollout or config.offload_rollout_cache,
        f"--no-offload-rollout-cache with {flag}, whose engines keep their weights, leaves them nothing to give back; "
        "use --no-offload-rollout",
    )
    of_experts = [target for target in config.lora_target_modules if target in EXPERT_TARGETS]
    attention = " ".join(target for target in TARGET_MODULES if target not in EXPERT_TARGETS)
    require(
        config.num_experts is None or not of_experts,
        f"{flag}: engines are not given adapters of experts ({' '.join(of_experts)}); {merged}, or "
        f"--lora-target-modules {attention}",
    )
    require(
        config.weight_transport in TRANSPORTS,
        f"{flag}: the Transport {config.weight_transport} sends whole weights; {merged}",
    )
    speculative = " ".join(config.sglang_server_flags.get(SPECULATIVE, []))
    require(
        speculative in ("", NGRAM),
        f"{flag}: SGLang speculates beside adapters with {NGRAM} only, got --sglang{SPECULATIVE[1:]} {speculative}; "
        f"{merged}",
    )
