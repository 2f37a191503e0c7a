"""Names of parameters in Hugging Face and in Megatron checkpoints, as data. Pure Python: no torch.

A Megatron parameter is named as in a torch_dist checkpoint: `decoder.layers.{layer}.` plus a name of the tables
below, with the layer's global number. Transformer Engine holds the two layer norms inside the linear layers that
follow them, the local spec beside them; the checkpoint always uses the former's names, `MODULE_ALIASES` maps
the latter's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_bridge.model_config import ModelArgs

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

    tp_axis: the dimension that tensor parallelism splits, None for a replicated parameter. A GATED parameter's
    shard is [gate shard; up shard].
    """

    megatron: str
    hf: tuple[str, ...]
    kind: str = COPY
    tp_axis: int | None = None


@dataclass(frozen=True)
class Family:
    """A model family: what it adds to the parameters of its parent, and the flags that go with it."""

    model_type: str
    parent: Family | None = None
    layer: tuple[Parameter, ...] = ()
    top: tuple[Parameter, ...] = ()
    add_qkv_bias: bool = False
    qk_layernorm: bool = False

    def layer_parameters(self) -> tuple[Parameter, ...]:
        """Parameters of one transformer layer."""
        return (self.parent.layer_parameters() if self.parent else ()) + self.layer

    def top_parameters(self) -> tuple[Parameter, ...]:
        """Parameters outside the layers."""
        return (self.parent.top_parameters() if self.parent else ()) + self.top


EMBEDDING = Parameter("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY, 0)
OUTPUT_LAYER = Parameter("output_layer.weight", ("lm_head.weight",), VOCABULARY, 0)

LLAMA = Family(
    "llama",
    layer=(
        Parameter("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
        Parameter(
            "self_attention.linear_qkv.weight",
            ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
            QKV,
            0,
        ),
        Parameter("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), COPY, 1),
        Parameter("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
        Parameter("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GATED, 0),
        Parameter("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), COPY, 1),
    ),
    top=(EMBEDDING, Parameter("decoder.final_layernorm.weight", ("model.norm.weight",)), OUTPUT_LAYER),
)

QWEN2 = Family(
    "qwen2",
    parent=LLAMA,
    layer=(
        Parameter(
            "self_attention.linear_qkv.bias",
            ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
            QKV,
            0,
        ),
    ),
    add_qkv_bias=True,
)

QWEN3 = Family(
    "qwen3",
    parent=LLAMA,
    layer=(
        Parameter("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
        Parameter("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
    ),
    qk_layernorm=True,
)

FAMILIES = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3)}

MODULE_ALIASES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Name in a locally specified layer -> name in the checkpoint."""

_LAYER_NAME = re.compile(re.escape(LAYER_PREFIX) + r"(\d+)\.(.+)")


def family_of(model: ModelArgs) -> Family:
    """The family whose layers have the model's biases and norms. ValueError when there is none."""
    for family in FAMILIES.values():
        if (family.add_qkv_bias, family.qk_layernorm) == (model.add_qkv_bias, model.qk_layernorm):
            return family
    raise ValueError("--add-qkv-bias and --qk-layernorm together belong to no supported family: leave one out")


def split_name(name: str) -> tuple[int | None, str]:
    """`decoder.layers.3.mlp.linear_fc2.weight` -> (3, `mlp.linear_fc2.weight`), with the checkpoint's spelling.

    Names outside the layers give (None, name). Wrappers' `module.` prefixes are dropped.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        return None, name
    rest = match.group(2)
    return int(match.group(1)), MODULE_ALIASES.get(rest, rest)


def global_name(name: str, layer_offset: int) -> str:
    """A parameter's name with the layer's global number, from its name in one pipeline stage.

    layer_offset: number of layers before this stage (Megatron's `get_transformer_layer_offset`).
    """
    layer, rest = split_name(name)
    return rest if layer is None else f"{LAYER_PREFIX}{layer + layer_offset}.{rest}"


def find_parameter(name: str, model: ModelArgs) -> tuple[int | None, Parameter]:
    """Global layer number and table entry of a Megatron parameter. ValueError for an unknown name."""
    layer, rest = split_name(name)
    family = family_of(model)
    for parameter in family.top_parameters() if layer is None else family.layer_parameters():
        if parameter.megatron == rest:
            return layer, parameter
    raise ValueError(f"Megatron parameter {name} is unknown to the {family.model_type} name table")


def megatron_names(model: ModelArgs) -> list[str]:
    """Every parameter of the model, by its global name, in forward order. A tied output layer is left out."""
    family = family_of(model)
    layers = [
        f"{LAYER_PREFIX}{layer}.{parameter.megatron}"
        for layer in range(model.num_layers or 0)
        for parameter in family.layer_parameters()
    ]
    embedding, final_norm, output = (parameter.megatron for parameter in family.top_parameters())
    return [embedding, *layers, final_norm, *([output] if model.untie_embeddings_and_output_weights else [])]


def hf_names(layer: int | None, parameter: Parameter) -> list[str]:
    """Full names of the HF tensors that a Megatron parameter holds."""
    prefix = "" if layer is None else f"{HF_LAYER_PREFIX}{layer}."
    return [prefix + name for name in parameter.hf]
