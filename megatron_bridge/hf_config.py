"""config.json of a Hugging Face checkpoint <-> model flags. Pure Python: no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megatron_bridge.checkpoint import what_it_is
from megatron_bridge.flags import changed, option_name
from megatron_bridge.model_config import ModelArgs, check_model, head_dim, moe_layers, query_groups
from megatron_bridge.names import FAMILIES, Family, Mixture

HfConfig = dict[str, Any]

_DELTA_NET = (
    "its gated delta net layers are missing: megatron-core 0.16's take no packed sequences, and "
    "flash-linear-attention, which 0.19's need, runs on no CPU"
)
MISSING = {
    "gpt_oss": (
        "its attention sinks are missing: megatron-core's attention that has them takes no packed sequences, and "
        "torch's varlen_attn and SGLang's attention on a CPU have none"
    ),
    "qwen3_next": _DELTA_NET,
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": _DELTA_NET,
    "glm4": "its norms after attention and MLP are missing in megatron-core's layers",
    "glm4_moe_lite": "its multi-head latent attention is missing in the bridge",
}
"""Of families that are asked for, what is missing to train them, and in which package (docs/models.md says more)."""


def read_hf_config(checkpoint_dir: str | Path) -> HfConfig:
    """config.json of a checkpoint directory. ValueError when it is missing or no JSON object."""
    path = Path(checkpoint_dir) / "config.json"
    if not path.is_file():
        hint = what_it_is(checkpoint_dir)
        raise ValueError(f"{path} does not exist: give the directory of a Hugging Face checkpoint{hint}")
    return _read_object(path)


def check_tokenizer(checkpoint_dir: str | Path) -> None:
    """Raise ValueError when a folder's tokenizer has ids that its model, by config.json beside it, does not have.

    Both are read as files, added tokens included; where one is missing there is nothing to compare.
    """
    folder = Path(checkpoint_dir)
    size = _read_object(folder / "config.json").get("vocab_size")
    whole, settings = _read_object(folder / "tokenizer.json"), _read_object(folder / "tokenizer_config.json")
    vocabulary = (whole.get("model") or {}).get("vocab") or {}
    ids = {len(vocabulary) - 1, *(token["id"] for token in whole.get("added_tokens") or [])}
    for named in (vocabulary, *(_read_object(folder / name) for name in ("vocab.json", "added_tokens.json"))):
        ids |= set(named.values()) if isinstance(named, dict) else set()
    ids |= {int(number) for number in settings.get("added_tokens_decoder") or {}}
    if isinstance(size, int) and max(ids) >= size:
        raise ValueError(
            f"the tokenizer in {folder} has {max(ids) + 1} ids, added tokens included, and the model's vocabulary "
            f"(vocab_size in config.json) {size}: ids from {size} on have no weights; enlarge its embeddings or "
            "use the checkpoint's own tokenizer"
        )


def _read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object, an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def model_args_from_hf(config: HfConfig) -> ModelArgs:
    """The flags that describe the checkpoint. ValueError for a model that this bridge does not implement."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        missing = MISSING.get(str(model_type))
        raise ValueError(
            f"model_type {model_type!r} is not supported: {missing + '; ' if missing else ''}"
            f"one of {', '.join(FAMILIES)} is"
        )
    family = FAMILIES[model_type]
    family = _with_or_without_qk_norm(config, family)
    _refuse_unsupported(config, family)
    rope = _rope_parameters(config)
    heads, hidden = _need(config, "num_attention_heads"), _need(config, "hidden_size")
    # transformers' own defaults where the key may be left out
    groups = config.get("num_key_value_heads") or heads
    kv_channels = config.get("head_dim") or family.head_dim or hidden // heads
    experts = {} if family.mixture is None else _expert_args(config, family, family.mixture)
    return ModelArgs(
        num_layers=_need(config, "num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=_need(config, "intermediate_size"),
        num_attention_heads=heads,
        group_query_attention=groups != heads,
        num_query_groups=groups if groups != heads else None,
        kv_channels=kv_channels,
        vocab_size=_need(config, "vocab_size"),
        max_position_embeddings=config.get("max_position_embeddings"),
        swiglu=True,
        disable_bias_linear=True,
        add_qkv_bias=family.add_qkv_bias,
        qk_layernorm=family.qk_layernorm,
        normalization="RMSNorm",
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        use_rotary_position_embeddings=True,
        rotary_base=_whole(rope["rope_theta"]),
        rotary_percent=1.0 if family.rotary_percent is None else _rotated_share(config) or family.rotary_percent,
        use_rope_scaling=rope["rope_type"] == "llama3",
        rope_scaling_factor=float(rope.get("factor", 8.0)),
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
        **experts,
    )


def _with_or_without_qk_norm(config: HfConfig, family: Family) -> Family:
    """The family whose layers have norms of query and key, or none, as config.json says. ValueError where none does."""
    found = config.get("use_qk_norm")
    if found is None or bool(found) == family.qk_layernorm:
        return family
    if found and family.with_qk_norm is not None:
        return family.with_qk_norm
    always = "always" if family.qk_layernorm else "never"
    raise ValueError(
        f"config.json's use_qk_norm {found!r} is not supported for model_type {family.model_type}, whose layers "
        f"{always} have norms of query and key: remove the key if it is not meant, or use another checkpoint"
    )


def described_by_hf(model: ModelArgs, config: HfConfig) -> ModelArgs:
    """`model`, or the one of config.json where no flag (but that of the padding) says anything about the model."""
    padding = "make_vocab_size_divisible_by"
    if changed(model, [field.name for field in fields(ModelArgs) if field.name != padding]):
        return model
    return replace(model_args_from_hf(config), make_vocab_size_divisible_by=model.make_vocab_size_divisible_by)


def _expert_args(config: HfConfig, family: Family, mixture: Mixture) -> dict[str, Any]:
    """The flags of a mixture of experts."""
    found = _EXPERTS[family.model_type](config)
    sparse = found.pop("sparse")
    return dict(
        moe_router_topk=_need(config, "num_experts_per_tok"),
        moe_router_score_function=mixture.score_function,
        moe_router_enable_expert_bias=mixture.expert_bias,
        moe_shared_expert_gate=mixture.shared_expert_gate,
        moe_layer_freq="1" if all(sparse) else "[" + ",".join(str(int(experts)) for experts in sparse) + "]",
        **found,
    )


def _qwen_experts(config: HfConfig) -> dict[str, Any]:
    """A layer has experts unless listed, or skipped by decoder_sparse_step."""
    if "num_experts" not in config and "num_local_experts" in config:
        config = {**config, "num_experts": config["num_local_experts"]}  # transformers 5 writes it so
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return dict(
        sparse=[(layer + 1) % step == 0 and layer not in dense for layer in range(_need(config, "num_hidden_layers"))],
        num_experts=_need(config, "num_experts"),
        moe_ffn_hidden_size=_need(config, "moe_intermediate_size"),
        moe_router_pre_softmax=not config.get("norm_topk_prob", False),
    )


def _qwen2_experts(config: HfConfig) -> dict[str, Any]:
    """Beside them one for all tokens."""
    shared = _need(config, "shared_expert_intermediate_size")
    return dict(**_qwen_experts(config), moe_shared_expert_intermediate_size=shared)


def _glm_experts(config: HfConfig) -> dict[str, Any]:
    """All layers but the first few have experts, and one for all tokens."""
    if "n_routed_experts" not in config and "num_local_experts" in config:
        config = {**config, "n_routed_experts": config["num_local_experts"]}
    first, layers = config.get("first_k_dense_replace", 1), _need(config, "num_hidden_layers")
    shared = config.get("n_shared_experts", 1) * _need(config, "moe_intermediate_size")
    return dict(
        sparse=[layer >= first for layer in range(layers)],
        num_experts=_need(config, "n_routed_experts"),
        moe_ffn_hidden_size=_need(config, "moe_intermediate_size"),
        moe_router_topk_scaling_factor=float(config.get("routed_scaling_factor", 1.0)),
        moe_shared_expert_intermediate_size=shared,
    )


def _mixtral_experts(config: HfConfig) -> dict[str, Any]:
    """All layers have experts, which are as wide as a dense MLP."""
    return dict(
        sparse=[True] * _need(config, "num_hidden_layers"),
        num_experts=_need(config, "num_local_experts"),
        moe_ffn_hidden_size=_need(config, "intermediate_size"),
    )


_EXPERTS: dict[str, Callable[[HfConfig], dict[str, Any]]] = {
    "qwen3_moe": _qwen_experts,
    "qwen2_moe": _qwen2_experts,
    "glm4_moe": _glm_experts,
    "mixtral": _mixtral_experts,
}


def untrained_layers(config: HfConfig) -> range:
    """Numbers of the layers that a checkpoint holds beyond the model's: heads that predict further tokens (MTP).

    The bridge neither trains nor serves them; they go through a conversion as they are.
    """
    layers = _need(config, "num_hidden_layers")
    return range(layers, layers + (config.get("num_nextn_predict_layers") or 0))


_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_NUMBERS = {
    "rotary_base": "rope_theta",
    "rotary_percent": "partial_rotary_factor",
    "norm_epsilon": "rms_norm_eps",
    "normalization": "normalisation",
    "num_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "width of an expert",
    "moe_router_score_function": "router's score function",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_shared_expert_intermediate_size": "shared expert's width",
}
"""Flags that are numbers or names -> config.json's keys."""


def check_against_hf(model: ModelArgs, config: HfConfig) -> None:
    """Compare every flag that describes the model with config.json.

    Raises ValueError that names each differing flag, its value, config.json's value and the fix.
    """
    wanted = model_args_from_hf(config)
    check_model(wanted)
    differences = _differing_numbers(model, wanted, _SIZES) or _differing_widths(model, wanted)
    numbers = dict(_NUMBERS)
    if model.max_position_embeddings is not None:
        numbers["max_position_embeddings"] = "max_position_embeddings"
    if model.use_rope_scaling and wanted.use_rope_scaling:
        numbers["rope_scaling_factor"] = "factor"
    differences += _differing_numbers(model, wanted, numbers)
    kind = f"has model_type {config['model_type']}"
    switches = {
        "swiglu": "has a gated MLP with SiLU",
        "disable_bias_linear": "has no biases in linear layers",
        "use_rotary_position_embeddings": "has rotary embeddings",
        "add_qkv_bias": kind,
        "qk_layernorm": kind,
        "use_rope_scaling": f"has rope_type {'llama3' if wanted.use_rope_scaling else 'default'}",
        "untie_embeddings_and_output_weights": (
            f"has tie_word_embeddings {str(not wanted.untie_embeddings_and_output_weights).lower()}"
        ),
        "moe_router_enable_expert_bias": kind,
        "moe_shared_expert_gate": kind,
        "moe_router_pre_softmax": f"has norm_topk_prob {str(not wanted.moe_router_pre_softmax).lower()}",
    }
    for name, what in switches.items():
        given, flag = model.__dict__[name], option_name(name)
        if given != wanted.__dict__[name]:
            state, fix = ("given", f"remove {flag}") if given else ("not given", f"add {flag}")
            differences.append(f"{flag} is {state}, but config.json {what} (fix: {fix})")
    if not differences and moe_layers(model) != moe_layers(wanted):
        differences += _differing_numbers(model, wanted, {"moe_layer_freq": "pattern of layers"})
    if differences:
        raise ValueError("; ".join(differences))
    check_model(model)


def _differing_numbers(model: ModelArgs, wanted: ModelArgs, keys: dict[str, str]) -> list[str]:
    return [
        _difference(option_name(name), model.__dict__[name], key, wanted.__dict__[name])
        for name, key in keys.items()
        if model.__dict__[name] != wanted.__dict__[name]
    ]


def _difference(flag: str, given: Any, key: str, value: Any) -> str:
    shown = "is missing" if given is None else given
    return f"{flag} {shown}, but config.json's {key} is {value} (fix: {flag} {value})"


def _differing_widths(model: ModelArgs, wanted: ModelArgs) -> list[str]:
    """What may be left out and then follows from the sizes."""
    found = []
    if head_dim(model) != head_dim(wanted):
        found.append(_difference("--kv-channels", head_dim(model), "head width", head_dim(wanted)))
    if model.num_query_groups is not None and not model.group_query_attention:
        given = f"--num-query-groups {model.num_query_groups}"
        found.append(f"{given} has no effect without --group-query-attention (fix: add it)")
    groups = query_groups(model) if model.num_query_groups or not model.group_query_attention else None
    if groups != query_groups(wanted):
        shown = "is missing" if groups is None else groups
        found.append(
            f"--num-query-groups {shown}, but config.json's num_key_value_heads is {query_groups(wanted)} "
            f"(fix: --group-query-attention --num-query-groups {query_groups(wanted)})"
        )
    return found


def _need(config: HfConfig, key: str) -> int:
    if not isinstance(config.get(key), int):
        raise ValueError(f"config.json has no whole number {key}: found {config.get(key)!r}")
    return config[key]


def _whole(value: float) -> int:
    if int(value) != value:
        raise ValueError(f"rope_theta {value} is not a whole number, which --rotary-base cannot hold")
    return int(value)


def _rope_parameters(config: HfConfig) -> dict[str, Any]:
    """rope_type, rope_theta and scaling values, from `rope_parameters` (transformers 5) or the older two keys."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] not in ("default", "llama3"):
        raise ValueError(
            f"config.json asks for rotary scaling {rope['rope_type']!r} ({rope}), which is not implemented: "
            "only unscaled and llama3 are; use a checkpoint without it"
        )
    if rope["rope_type"] == "llama3":
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for key, value in fixed.items():
            if rope.get(key, value) != value:
                raise ValueError(f"llama3 rotary scaling with {key} {rope[key]} is not implemented: only {value} is")
        if "factor" not in rope:
            raise ValueError("llama3 rotary scaling without a factor in config.json")
    return rope


def _rotated_share(config: HfConfig) -> float | None:
    """The share of each head that is rotated, where config.json says it."""
    return (config.get("rope_parameters") or {}).get("partial_rotary_factor", config.get("partial_rotary_factor"))


_GLM4_GROUPS = "Megatron scores groups of experts by other experts than the model does"
_ONLY: dict[str, dict[str, tuple[Any, Any, str]]] = {
    "qwen2_moe": {"qkv_bias": (True, True, "its layers have biases of query, key and value")},
    "glm4_moe": {
        "attention_bias": (False, True, "its layers have biases of query, key and value"),
        "norm_topk_prob": (True, True, "Megatron's sigmoid router divides the weights by their sum"),
        "n_group": (1, 1, _GLM4_GROUPS),
        "topk_group": (1, 1, _GLM4_GROUPS),
    },
    "mixtral": {"sliding_window": (None, None, "attention is over the whole sequence")},
}
"""Of a model_type, the value of a key where config.json leaves it out, the only one that is supported, and why."""


def _refuse_unsupported(config: HfConfig, family: Family) -> None:
    model_type = family.model_type
    only = _ONLY.get(model_type, {})
    for key, (default, wanted, reason) in only.items():
        if (found := config.get(key, default)) != wanted:
            raise ValueError(
                f"config.json's {key} {found!r} is not supported for {model_type}, only {wanted}: {reason}"
            )
    biases = f"{model_type} checkpoints with it have biases that the bridge has no place for"
    partial = any(kind != "full_attention" for kind in config.get("layer_types") or [])
    refused = {
        "hidden_act": (config.get("hidden_act", "silu") not in ("silu", "swish"), "only silu is"),
        "use_sliding_window": (config.get("use_sliding_window"), "only full attention is"),
        "layer_types": (partial, "only full_attention is"),
        "attention_bias": ("attention_bias" not in only and config.get("attention_bias"), biases),
        "mlp_bias": (config.get("mlp_bias"), "only MLPs without biases are"),
        "rope_interleaved": (config.get("rope_interleaved"), "only the half-split rotary layout is"),
        "attention_dropout": (config.get("attention_dropout"), "only models without dropout are"),
    }
    for key, (found, reason) in refused.items():
        if found:
            raise ValueError(f"config.json's {key} {config[key]!r} is not supported: {reason}")
    if family.rotary_percent is None and (rotated := _rotated_share(config)) not in (None, 1, 1.0):
        raise ValueError(f"config.json's partial_rotary_factor {rotated} is not supported: only 1.0 is")
    if config.get("quantization_config"):
        raise ValueError("config.json has a quantization_config: convert an unquantised checkpoint")
