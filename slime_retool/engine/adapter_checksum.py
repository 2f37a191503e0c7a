"""Checksums of an engine that serves LoRA adapters: its frozen weights, and the adapters that it was given.

`report` runs inside an SGLang scheduler, as `engine.checksum.report` does. SGLang keeps what it was given in host
memory, from where a batch that uses the adapter copies it to the device, and fuses projections as it does weights:

    qkv_proj.lora_A      [q's A; k's A; v's A]     qkv_proj.lora_B      rows [q | k | v]
    gate_up_proj.lora_A  [gate's A; up's A]        gate_up_proj.lora_B  rows [gate | up]

Every worker has all of it. The manager of the adapters is found among the process's objects: the model, which is all
that SGLang hands to a loader, does not know it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from slime_retool.engine.bucket_loader import BASE_LAYER
from slime_retool.engine.checksum import write_report

ADAPTERS_LOADER = "slime_retool.engine.adapter_checksum.report"
"""What to pass as `--custom-weight-loader` and as `load_format`."""


class Unwrapped:
    """A model whose layers take adapters, by the names and layers of one without."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        for name, module in self._model.named_modules():
            if BASE_LAYER not in name.split("."):
                yield name, module._modules.get(BASE_LAYER, module)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """A wrapper holds its layer's parameters too, under the plain name."""
        for name, parameter in self._model.named_parameters():
            yield name.replace(f".{BASE_LAYER}.", "."), parameter


def adapter_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """(PEFT's name, tensor) of the one adapter that the engine has; none where it was given none."""
    from sglang.srt.lora.lora_manager import LoRAManager

    (manager,) = (each for each in gc.get_objects() if isinstance(each, LoRAManager) and each.base_model is model)
    if not manager.loras:
        return
    (adapter,) = manager.loras.values()
    layers = dict(model.named_modules())
    for layer in adapter.layers:
        for name, tensor in layer.weights.items():
            yield from _taken_apart(name, tensor, layers)


def _taken_apart(name: str, tensor: Any, layers: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    owner, part = name.rsplit(".lora_", 1)
    prefix, _, leaf = owner.rpartition(".")
    pieces: tuple[str, ...]
    if leaf == "qkv_proj":
        pieces = ("q_proj", "k_proj", "v_proj")
        base = layers[owner.removeprefix("base_model.model.")].base_layer
        queries = base.total_num_heads * base.head_size
        others = (len(tensor) - queries) // 2
        sizes = [queries, others, others] if part.startswith("B") else [len(tensor) // 3] * 3
    elif leaf == "gate_up_proj":
        pieces, sizes = ("gate_proj", "up_proj"), [len(tensor) // 2] * 2
    else:
        pieces, sizes = (leaf,), [len(tensor)]
    for piece, values in zip(pieces, tensor.split(sizes), strict=True):
        yield f"{prefix}.{piece}.lora_{part}", values


def report(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """As `engine.checksum.report`, with the adapters under PEFT's names. Never raises."""
    write_report(named_tensors[0][0], Unwrapped(model), adapter_tensors(model))
