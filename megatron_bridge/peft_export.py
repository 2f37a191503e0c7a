"""LoRA adapters in the format of PEFT (https://huggingface.co/docs/peft).

PEFT keeps one adapter per Hugging Face layer. Query, key and value, and gate and up projection, are one layer in
Megatron: their A is shared, so each gets a copy of it, and its own rows of B.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megatron_bridge.checkpoint import resolve_checkpoint_dir
from megatron_bridge.convert import replace_directory
from megatron_bridge.hf_config import model_args_from_hf, read_hf_config
from megatron_bridge.layout import megatron_shape, to_hf
from megatron_bridge.lora_checkpoint import read_adapter
from megatron_bridge.lora_spec import LORA_A, LORA_B, LORA_FILE, TARGET_MODULES, LoraSpec
from megatron_bridge.model_config import ModelArgs, required
from megatron_bridge.names import LAYER_PREFIX
from megatron_bridge.torch_dist_io import TorchDistReader

PEFT_PREFIX = "base_model.model."


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
    modules = [TARGET_MODULES[target] for target in spec.targets]
    tensors: dict[str, Tensor] = {}
    for layer in range(required(model, "num_layers")):
        for module in modules:
            a, b = read_adapter(reader, layer, module)
            for weight_name, rows in to_hf(f"{LAYER_PREFIX}{layer}.{module}.weight", b.flatten(0, -2), model):
                name = PEFT_PREFIX + weight_name.removesuffix(".weight")
                tensors[f"{name}.lora_A.weight"] = a.clone()
                tensors[f"{name}.lora_B.weight"] = rows.contiguous().clone()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(origin_hf_dir).absolute()),
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),  # ....q_proj.lora_A.weight
    }
    with replace_directory(output_dir, force=force, sources=[input_dir, origin_hf_dir]) as out:
        (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})


def _check_adapters(reader: TorchDistReader, spec: LoraSpec, model: ModelArgs) -> None:
    """The adapters fit the model, or ValueError."""
    layers = required(model, "num_layers")
    for target in spec.targets:
        for layer in range(layers):
            module = f"{LAYER_PREFIX}{layer}.{TARGET_MODULES[target]}"
            rows, columns = megatron_shape(f"{module}.weight", model)
            a, b = reader.shape(f"{module}.{LORA_A}"), reader.shape(f"{module}.{LORA_B}")
            found = (a[1], math.prod(b[:-1]))
            if found != (columns, rows):
                raise ValueError(
                    f"{reader.directory}: the adapter of {module} has (inputs, outputs) {found}, config.json implies "
                    f"{(columns, rows)}: give the --origin-hf-dir that it was trained on"
                )
    deeper = f"{LAYER_PREFIX}{layers}.{TARGET_MODULES[spec.targets[0]]}.{LORA_A}"
    if reader.holds(deeper):
        raise ValueError(
            f"{reader.directory} has adapters of more than config.json's {layers} layers: give the --origin-hf-dir "
            "that they were trained on"
        )
