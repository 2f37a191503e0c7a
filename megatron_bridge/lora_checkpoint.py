"""Checkpoints of LoRA adapters, read as the whole weights that they make with their base."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from megatron_bridge.checkpoint import is_checkpoint, is_checkpoint_name, resolve_checkpoint_dir
from megatron_bridge.lora import merge_adapter
from megatron_bridge.lora_spec import LORA_A, LORA_B, LoraSpec
from megatron_bridge.names import LAYER_PREFIX, split_name
from megatron_bridge.torch_dist_io import TorchDistReader

logger = logging.getLogger(__name__)


class MergedReader(TorchDistReader):
    """Reads a base checkpoint with adapters merged into its weights."""

    def __init__(self, base: Path, adapters: TorchDistReader, spec: LoraSpec) -> None:
        super().__init__(base)
        self._adapters, self._spec = adapters, spec

    def read(self, name: str) -> Tensor:
        """One full parameter, in the base's dtype."""
        weight = super().read(name)
        adapted = self._adapted(name)
        if adapted is None:
            return weight
        a, b = read_adapter(self._adapters, *adapted)
        if a.shape[1] != weight.shape[1] or b.flatten(0, -2).shape[0] != weight.shape[0]:
            raise ValueError(
                f"{self._adapters.directory}: the adapter of {name} does not fit the base {self.directory}: give the "
                "--base-dir that it was trained on"
            )
        return merge_adapter(weight, a, b, self._spec.scale)

    def check_nothing_beyond(self, names: Iterable[str]) -> None:
        """Also looks at the adapters."""
        names = list(names)
        super().check_nothing_beyond(names)
        self._adapters.check_nothing_beyond(
            f"{name.removesuffix('weight')}{part}"
            for name in names
            if self._adapted(name) is not None
            for part in (LORA_A, LORA_B)
        )

    def _adapted(self, name: str) -> tuple[int, str] | None:
        """Layer and module of a weight that has an adapter."""
        layer, rest = split_name(name)
        module, _, kind = rest.rpartition(".")
        return (layer, module) if layer is not None and kind == "weight" and self._spec.adapts(module) else None


def open_weights(input_dir: str | Path, base_dir: str | Path | None) -> TorchDistReader:
    """The whole weights of a checkpoint: its own, or those of its adapters' base with the adapters merged in.

    base_dir: where the base is now, if it is no longer where the run had it. ValueError where it is not found, or is
    given for a checkpoint without adapters.
    """
    directory = resolve_checkpoint_dir(input_dir)
    spec = LoraSpec.read(directory)
    reader = TorchDistReader(directory)
    if spec is None:
        if base_dir is not None:
            raise ValueError(f"{directory} holds whole weights, no adapters: drop --base-dir")
        return reader
    base = base_dir or spec.base
    if base is None or not Path(base).is_dir():
        raise ValueError(f"{directory} holds LoRA adapters of {base}, which is not there: give its place as --base-dir")
    return MergedReader(base_checkpoint(base, spec), reader, spec)


def base_checkpoint(base: str | Path, spec: LoraSpec) -> Path:
    """The frozen weights: `base` if it is a checkpoint, else that one under it that the adapters were trained on.

    Where the adapters do not name it, or it is gone, the newest. Warns where that is another one than the newest.
    Raises ValueError where there is no checkpoint.
    """
    newest = resolve_checkpoint_dir(base)
    name = newest.name if spec.base is None else Path(spec.base).name
    if is_checkpoint(base) or not is_checkpoint_name(name) or name == newest.name:
        return newest
    named = Path(base) / name
    if is_checkpoint(named):
        logger.warning("the newest in %s is %s; the adapters go on with their base, %s", base, newest.name, name)
        return named
    logger.warning("the adapters were trained on %s, which is gone from %s: %s is taken", name, base, newest.name)
    return newest


def read_adapter(reader: TorchDistReader, layer: int, module: str) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [..., r] of one layer's module."""
    return tuple(reader.read(f"{LAYER_PREFIX}{layer}.{module}.{part}") for part in (LORA_A, LORA_B))  # type: ignore[return-value]
