"""A checkpoint's LoRA adapters as files of PEFT (see `peft_format`)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_bridge.checkpoint import resolve_checkpoint_dir
from megatron_bridge.convert import replace_directory
from megatron_bridge.hf_config import model_args_from_hf, read_hf_config
from megatron_bridge.layout import megatron_shape
from megatron_bridge.lora_checkpoint import read_adapter
from megatron_bridge.lora_spec import EXPERT_TARGETS, LORA_A, LORA_B, LORA_FILE, TARGET_MODULES, LoraSpec, expert_module
from megatron_bridge.model_config import ModelArgs, moe_layers
from megatron_bridge.names import LAYER_PREFIX
from megatron_bridge.peft_format import adapter_config, fused_experts_adapter, layer_adapter
from megatron_bridge.torch_dist_io import TorchDistReader


def export_peft(
    input_dir: str | Path, output_dir: str | Path, origin_hf_dir: str | Path, *, force: bool = False
) -> None:
    """Write a checkpoint's adapters as PEFT's `adapter_config.json` and `adapter_model.safetensors`.

    origin_hf_dir: the Hugging Face form of the base that they were trained on; PEFT loads it from there.
    ValueError for a checkpoint without adapters or of another model, and for a non-empty `output_dir` without `force`.
    """
    directory = resolve_checkpoint_dir(input_dir)
    spec = LoraSpec.read(directory)
    if spec is None:
        raise ValueError(f"{directory} has no {LORA_FILE}: it holds whole weights, and no adapter to export")
    model = model_args_from_hf(read_hf_config(origin_hf_dir))
    reader = TorchDistReader(directory)
    _check_adapters(reader, spec, model)
    tensors: dict[str, Tensor] = {}
    for layer, mixture in enumerate(moe_layers(model)):
        for target in spec.targets:
            if mixture and target in EXPERT_TARGETS:
                modules = [expert_module(expert, target) for expert in range(model.num_experts or 0)]
                adapters = [read_adapter(reader, layer, module) for module in modules]
                a, b = (torch.stack(parts) for parts in zip(*adapters, strict=True))
                tensors |= fused_experts_adapter(layer, target, a, b)
            else:
                a, b = read_adapter(reader, layer, TARGET_MODULES[target])
                named = layer_adapter(f"{LAYER_PREFIX}{layer}.{TARGET_MODULES[target]}", a, b, model)
                tensors |= {name: tensor.contiguous().clone() for name, tensor in named.items()}
    config = adapter_config(spec, model, str(Path(origin_hf_dir).absolute()))
    with replace_directory(output_dir, force=force, sources=[input_dir, origin_hf_dir]) as out:
        (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})


def _check_adapters(reader: TorchDistReader, spec: LoraSpec, model: ModelArgs) -> None:
    """The adapters fit the model, or ValueError."""
    modules = [
        f"{LAYER_PREFIX}{layer}.{name}"
        for layer, mixture in enumerate(moe_layers(model))
        for name in spec.modules((model.num_experts or 0) if mixture else 0)
    ]
    for module in modules:
        rows, columns = megatron_shape(f"{module}.weight", model)
        a, b = reader.shape(f"{module}.{LORA_A}"), reader.shape(f"{module}.{LORA_B}")
        found = (a[1], math.prod(b[:-1]))
        if found != (columns, rows):
            raise ValueError(
                f"{reader.directory}: the adapter of {module} has (inputs, outputs) {found}, config.json implies "
                f"{(columns, rows)}: give the --origin-hf-dir that it was trained on"
            )
    reader.check_nothing_beyond(f"{module}.{part}" for module in modules for part in (LORA_A, LORA_B))
