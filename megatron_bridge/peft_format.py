"""How PEFT (https://huggingface.co/docs/peft) and SGLang name and lay out LoRA adapters.

Both keep one adapter per Hugging Face layer, `base_model.model.<layer>.lora_A.weight` [r, in] and `...lora_B.weight`
[out, r]. Query, key and value, and gate and up projection, are one layer in Megatron: their A is shared, so each gets
it, and its own rows of B. Of experts there are two forms:

- each expert's projections are layers (`mlp.experts.7.gate_proj`), as in Hugging Face checkpoints, and for SGLang;
- transformers 5 holds the experts of a layer in two parameters, `mlp.experts.gate_up_proj` [experts, 2 F, H] and
  `mlp.experts.down_proj` [experts, H, F], which PEFT adapts as `target_parameters`. It wraps the module `mlp.experts`
  twice, first for gate_up_proj (`mlp.experts.base_layer.lora_A`), then for down_proj (`mlp.experts.lora_A`). A is
  [experts r, in], the ranks of one expert after the other; B is [out, r experts], where the expert runs fastest.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_bridge.layout import to_hf
from megatron_bridge.lora_spec import EXPERT_TARGETS, LoraSpec, hf_targets
from megatron_bridge.model_config import ModelArgs, moe_layers
from megatron_bridge.names import HF_LAYER_PREFIX

PEFT_PREFIX = "base_model.model."
FUSED_EXPERTS = {"linear_fc1": ("gate_up_proj", "base_layer."), "linear_fc2": ("down_proj", "")}
"""Target -> (parameter of transformers' experts, where PEFT's wrapper of it stands within them)."""


def layer_adapter(module: str, a: Tensor, b: Tensor, model: ModelArgs) -> dict[str, Tensor]:
    """Adapters of the Hugging Face layers that one Megatron layer is; shares the memory of A [r, in] and B [..., r].

    module: global name, `decoder.layers.3.mlp.experts.experts.7.linear_fc1`.
    """
    tensors = {}
    for weight_name, rows in to_hf(f"{module}.weight", b.flatten(0, -2), model):
        name = PEFT_PREFIX + weight_name.removesuffix(".weight")
        tensors[f"{name}.lora_A.weight"] = a
        tensors[f"{name}.lora_B.weight"] = rows
    return tensors


def fused_experts_adapter(layer: int, target: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """The adapter of all experts' `target` in one layer, for PEFT with transformers 5.

    A [experts, r, in], B [experts, ..., r].
    """
    name = f"{PEFT_PREFIX}{HF_LAYER_PREFIX}{layer}.mlp.experts.{FUSED_EXPERTS[target][1]}"
    rows = b.flatten(1, -2)  # [experts, out, r]
    return {
        f"{name}lora_A.weight": a.flatten(0, 1).contiguous(),
        f"{name}lora_B.weight": rows.permute(1, 2, 0).flatten(1).contiguous(),
    }


def adapter_config(spec: LoraSpec, model: ModelArgs, base: str) -> dict[str, Any]:
    """PEFT's `adapter_config.json`; `base`: folder of the Hugging Face model that the adapters belong to."""
    modules: list[str] = []
    parameters: list[str] = []
    mixtures = moe_layers(model)
    for target in spec.targets:
        if target not in EXPERT_TARGETS or not any(mixtures):
            modules += hf_targets([target], model)
            continue
        parameters.append(f"mlp.experts.{FUSED_EXPERTS[target][0]}")
        if not all(mixtures):
            # PEFT takes a module `gate_proj` of a model with experts for theirs; a dense layer's is another parameter.
            parameters += [f"mlp.{name}.weight" for name in hf_targets([target], model)]
    config = {
        **engine_config(spec, model),
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
        "target_modules": sorted(modules) or None,
    }
    return config | ({"target_parameters": sorted(parameters)} if parameters else {})


def engine_config(spec: LoraSpec, model: ModelArgs) -> dict[str, Any]:
    """What SGLang reads of the configuration of adapters, whose tensors are `layer_adapter`'s."""
    return {
        "peft_type": "LORA",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": sorted(hf_targets(spec.targets, model)),
    }
