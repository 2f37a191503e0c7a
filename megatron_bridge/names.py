"""Names of parameters in Hugging Face and in Megatron checkpoints, as data. Pure Python: no torch.

A Megatron parameter is named as in a torch_dist checkpoint: `decoder.layers.{layer}.` plus a name of the tables
below, with the layer's global number; an expert's parameter is `mlp.experts.experts.{expert}.` plus the rest, with the
expert's global number. Modules spell some names otherwise, `global_name` translates them: Transformer Engine holds the
two layer norms inside the linear layers that follow them, the local spec beside them (the checkpoint has the former's
names; the norm before a mixture of experts stands alone in both), and experts are numbered within their rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_bridge.model_config import ModelArgs, moe_layers

LAYER_PREFIX = "decoder.layers."
HF_LAYER_PREFIX = "model.layers."

COPY = "copy"
"""One tensor, as it is."""
QKV = "qkv"
"""Query, key and value, interleaved per key/value head."""
GATED = "gated"
"""Gate and up projection of the MLP, one after the other."""
VOCABULARY = "vocabulary"
"""Rows are vocabulary entries, padded in Megatron."""


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter, the HF tensors it holds, and how both are laid out.

    hf: {name: axes}, each axis named by its size: `hidden`, `query` and `kv` (all heads), `head` (one), `ffn` (of an
    expert in an expert), `shared` (of the shared expert), `experts`, `vocabulary`, `one`.
    tp_axis: the dimension that tensor parallelism splits (expert tensor parallelism in an expert), None for a
    replicated parameter. A GATED parameter's shard is [gate shard; up shard].
    """

    megatron: str
    hf: dict[str, str]
    kind: str = COPY
    tp_axis: int | None = None
    expert: int | None = None
    """Number of the expert that it belongs to."""

    def of_expert(self, expert: int) -> Parameter:
        """The parameter of one expert, from a table entry with the place-holder EXPERT in its names."""
        hf = {name.replace(EXPERT, str(expert)): axes for name, axes in self.hf.items()}
        return Parameter(self.megatron.replace(EXPERT, str(expert)), hf, self.kind, self.tp_axis, expert)


@dataclass(frozen=True)
class Mixture:
    """A family's mixture of experts: its parameters, and the flags that go with them."""

    layer: tuple[Parameter, ...]
    """Those of a layer beside the experts: norm, router, shared expert."""
    expert: tuple[Parameter, ...]
    """Those of one expert, with the place-holder EXPERT in their names."""
    score_function: str = "softmax"
    expert_bias: bool = False
    shared_expert: bool = False
    shared_expert_gate: bool = False


@dataclass(frozen=True)
class Family:
    """A model family: the parameters of its layers but for the MLP, and the flags that go with it."""

    model_type: str
    layer: tuple[Parameter, ...]
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    mixture: Mixture | None = None
    with_qk_norm: Family | None = None
    """What it is where config.json says use_qk_norm."""
    head_dim: int | None = None
    """Where config.json does not say; None: hidden size / heads."""
    rotary_percent: float | None = None
    """Where config.json does not say; None: 1, and config.json cannot say otherwise."""

    def layer_parameters(self, num_experts: int = 0) -> tuple[Parameter, ...]:
        """Parameters of one transformer layer; `num_experts` 0 is a layer with a dense MLP."""
        if not num_experts or self.mixture is None:
            return self.layer + DENSE_MLP
        experts = (entry.of_expert(expert) for expert in range(num_experts) for entry in self.mixture.expert)
        return (*self.layer, *self.mixture.layer, *experts)


EXPERT = "{expert}"
EXPERT_BIAS = "mlp.router.expert_bias"
"""What is added to an expert's score to choose experts, and not to weigh them: a buffer [experts], fp32. It is not
learned; DeepSeek-V3's training (https://arxiv.org/abs/2412.19437, section 2.1.2) moves it to balance the load."""

DENSE_MLP = (
    Parameter("mlp.linear_fc1.layer_norm_weight", {"post_attention_layernorm.weight": "hidden"}),
    Parameter(
        "mlp.linear_fc1.weight", {"mlp.gate_proj.weight": "ffn hidden", "mlp.up_proj.weight": "ffn hidden"}, GATED, 0
    ),
    Parameter("mlp.linear_fc2.weight", {"mlp.down_proj.weight": "hidden ffn"}, COPY, 1),
)
MOE_LAYER = (
    Parameter("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": "hidden"}),
    Parameter("mlp.router.weight", {"mlp.gate.weight": "experts hidden"}),
)
EXPERT_MLP = tuple(
    Parameter(
        f"mlp.experts.experts.{EXPERT}.{entry.megatron.removeprefix('mlp.')}",
        {name.replace("mlp.", f"mlp.experts.{EXPERT}."): axes for name, axes in entry.hf.items()},
        entry.kind,
        entry.tp_axis,
    )
    for entry in DENSE_MLP[1:]
)
"""The dense MLP's matrices, for each expert."""


def _shared_expert(hf_prefix: str) -> tuple[Parameter, ...]:
    """The dense MLP's matrices, of the expert that every token goes through; split like a dense MLP."""
    return tuple(
        Parameter(
            entry.megatron.replace("mlp.", "mlp.shared_experts."),
            {name.replace("mlp.", hf_prefix): axes.replace("ffn", "shared") for name, axes in entry.hf.items()},
            entry.kind,
            entry.tp_axis,
        )
        for entry in DENSE_MLP[1:]
    )


EMBEDDING = Parameter(
    "embedding.word_embeddings.weight", {"model.embed_tokens.weight": "vocabulary hidden"}, VOCABULARY, 0
)
FINAL_NORM = Parameter("decoder.final_layernorm.weight", {"model.norm.weight": "hidden"})
OUTPUT_LAYER = Parameter("output_layer.weight", {"lm_head.weight": "vocabulary hidden"}, VOCABULARY, 0)
TOP = (EMBEDDING, FINAL_NORM, OUTPUT_LAYER)
"""Parameters outside the layers."""

LLAMA = Family(
    "llama",
    layer=(
        Parameter("self_attention.linear_qkv.layer_norm_weight", {"input_layernorm.weight": "hidden"}),
        Parameter(
            "self_attention.linear_qkv.weight",
            {
                "self_attn.q_proj.weight": "query hidden",
                "self_attn.k_proj.weight": "kv hidden",
                "self_attn.v_proj.weight": "kv hidden",
            },
            QKV,
            0,
        ),
        Parameter("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": "hidden query"}, COPY, 1),
    ),
)

QKV_BIAS = Parameter(
    "self_attention.linear_qkv.bias",
    {"self_attn.q_proj.bias": "query", "self_attn.k_proj.bias": "kv", "self_attn.v_proj.bias": "kv"},
    QKV,
    0,
)
HEAD_NORMS = (
    Parameter("self_attention.q_layernorm.weight", {"self_attn.q_norm.weight": "head"}),
    Parameter("self_attention.k_layernorm.weight", {"self_attn.k_norm.weight": "head"}),
)

QWEN2 = Family("qwen2", (*LLAMA.layer, QKV_BIAS), add_qkv_bias=True)

QWEN3 = Family("qwen3", LLAMA.layer + HEAD_NORMS, qk_layernorm=True, head_dim=128)

QWEN3_MOE = Family("qwen3_moe", QWEN3.layer, qk_layernorm=True, mixture=Mixture(MOE_LAYER, EXPERT_MLP))

QWEN2_MOE = Family(
    "qwen2_moe",
    QWEN2.layer,
    add_qkv_bias=True,
    mixture=Mixture(
        layer=(
            *MOE_LAYER,
            *_shared_expert("mlp.shared_expert."),
            Parameter("mlp.shared_experts.gate_weight", {"mlp.shared_expert_gate.weight": "one hidden"}),
        ),
        expert=EXPERT_MLP,
        shared_expert=True,
        shared_expert_gate=True,
    ),
)

_GLM4_MIXTURE = Mixture(
    layer=(
        *MOE_LAYER,
        Parameter(EXPERT_BIAS, {"mlp.gate.e_score_correction_bias": "experts"}),
        *_shared_expert("mlp.shared_experts."),
    ),
    expert=EXPERT_MLP,
    score_function="sigmoid",
    expert_bias=True,
    shared_expert=True,
)
GLM4_MOE = Family(
    "glm4_moe",
    QWEN2.layer,
    add_qkv_bias=True,
    mixture=_GLM4_MIXTURE,
    rotary_percent=0.5,
    with_qk_norm=Family(
        "glm4_moe", QWEN2.layer + HEAD_NORMS, add_qkv_bias=True, qk_layernorm=True, mixture=_GLM4_MIXTURE,
        rotary_percent=0.5,
    ),
)  # fmt: skip
"""GLM-4.5 to 4.7 (with norms of heads) and GLM-4.5-Air (without)."""

_OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "mlp.": "block_sparse_moe."}
"""Parts of names of tensors, and what they are in Mixtral's checkpoints."""


def _mixtrals(parameter: Parameter) -> Parameter:
    hf = {}
    for name, axes in parameter.hf.items():
        for part, other in _OF_MIXTRAL.items():
            name = name.replace(part, other)
        hf[name] = axes
    return replace(parameter, hf=hf)


MIXTRAL = Family(
    "mixtral", LLAMA.layer, mixture=Mixture(tuple(map(_mixtrals, MOE_LAYER)), tuple(map(_mixtrals, EXPERT_MLP)))
)

FAMILIES = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, QWEN2_MOE, GLM4_MOE, MIXTRAL)}

ATTENTION_NORM = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
MLP_NORM = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
"""Name in a locally specified layer, name in the checkpoint (of a layer with a dense MLP)."""

_LAYER_NAME = re.compile(re.escape(LAYER_PREFIX) + r"(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"mlp\.experts\.experts\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.(?:local_)?experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)")


def family_of(model: ModelArgs) -> Family:
    """The family whose layers have the model's biases, norms and experts. ValueError when there is none."""
    wanted = (model.add_qkv_bias, model.qk_layernorm, _mixture_flags(model))
    for family in FAMILIES.values():
        for variant in filter(None, (family, family.with_qk_norm)):
            mixture = variant.mixture
            flags = None
            if mixture is not None:
                flags = (
                    mixture.score_function, mixture.expert_bias, mixture.shared_expert, mixture.shared_expert_gate
                )  # fmt: skip
            if (variant.add_qkv_bias, variant.qk_layernorm, flags) == wanted:
                return variant
    if model.num_experts is not None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.mixture is not None)
        raise ValueError(
            "--num-experts with these biases, norms of heads, scores and shared expert belongs to no supported "
            f"family: take the flags of scripts/models/ or of `slime-retool convert flags` ({known})"
        )
    raise ValueError("--add-qkv-bias and --qk-layernorm together belong to no supported family: leave one out")


def _mixture_flags(model: ModelArgs) -> tuple[str, bool, bool, bool] | None:
    if model.num_experts is None:
        return None
    return (
        model.moe_router_score_function,
        model.moe_router_enable_expert_bias,
        model.moe_shared_expert_intermediate_size is not None,
        model.moe_shared_expert_gate,
    )


def split_name(name: str) -> tuple[int | None, str]:
    """`decoder.layers.3.mlp.linear_fc2.weight` -> (3, `mlp.linear_fc2.weight`).

    Names outside the layers give (None, name). Wrappers' `module.` prefixes are dropped.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    match = _LAYER_NAME.fullmatch(name)
    return (None, name) if match is None else (int(match.group(1)), match.group(2))


def split_expert(rest: str) -> tuple[int | None, str]:
    """`mlp.experts.experts.7.linear_fc1.weight` -> (7, `mlp.experts.experts.linear_fc1.weight`); else (None, rest)."""
    match = _EXPERT_NAME.fullmatch(rest)
    return (None, rest) if match is None else (int(match.group(1)), f"mlp.experts.experts.{match.group(2)}")


def global_name(name: str, model: ModelArgs, layer_offset: int = 0, expert_offset: int = 0) -> str:
    """A parameter's checkpoint name, from its name in the modules of one rank (or with such a rank's numbers).

    layer_offset: number of layers before this pipeline stage (Megatron's `get_transformer_layer_offset`).
    expert_offset: number of experts on the expert-parallel ranks before this one.
    """
    layer, rest = split_name(name)
    if layer is None:
        return rest
    layer += layer_offset
    if rest == ATTENTION_NORM[0]:
        rest = ATTENTION_NORM[1]
    elif rest == MLP_NORM[0] and not moe_layers(model)[layer]:
        rest = MLP_NORM[1]
    elif match := _LOCAL_EXPERT.fullmatch(rest):
        rest = f"mlp.experts.experts.{int(match.group(1)) + expert_offset}.{match.group(2)}"
    elif match := _GROUPED_EXPERT.fullmatch(rest):
        rest = f"mlp.experts.experts.{int(match.group(2)) + expert_offset}.{match.group(1)}"
    return f"{LAYER_PREFIX}{layer}.{rest}"


def find_parameter(name: str, model: ModelArgs) -> Parameter:
    """Table entry of a Megatron parameter, by its global name. ValueError for an unknown name."""
    layer, rest = split_name(name)
    expert, _ = split_expert(rest)
    family = family_of(model)
    entries: Iterable[Parameter]
    if layer is None:
        entries = TOP
    elif family.mixture is None:
        entries = family.layer_parameters()
    elif expert is not None and expert < (model.num_experts or 0):
        entries = (entry.of_expert(expert) for entry in family.mixture.expert)
    else:
        entries = family.layer_parameters() + family.mixture.layer
    for parameter in entries:
        if parameter.megatron == rest:
            return parameter
    raise ValueError(f"Megatron parameter {name} is unknown to the {family.model_type} name table")


def megatron_names(model: ModelArgs) -> list[str]:
    """Every parameter of the model, by its global name, in forward order. A tied output layer is left out."""
    family = family_of(model)
    layers = [
        f"{LAYER_PREFIX}{layer}.{parameter.megatron}"
        for layer, experts in enumerate(moe_layers(model))
        for parameter in family.layer_parameters((model.num_experts or 0) if experts else 0)
    ]
    output = [OUTPUT_LAYER.megatron] if model.untie_embeddings_and_output_weights else []
    return [EMBEDDING.megatron, *layers, FINAL_NORM.megatron, *output]


def hf_names(name: str, model: ModelArgs) -> list[str]:
    """Full names of the HF tensors that a Megatron parameter holds."""
    layer, _ = split_name(name)
    prefix = "" if layer is None else f"{HF_LAYER_PREFIX}{layer}."
    return [prefix + hf_name for hf_name in find_parameter(name, model).hf]
