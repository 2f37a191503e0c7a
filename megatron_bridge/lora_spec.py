"""What a LoRA adapter is (https://arxiv.org/abs/2106.09685): its size, where it sits, its names. No torch.

An adapted linear layer computes W x + (alpha / rank) B A x with A [rank, in] and B [out, rank]. W is frozen.
In a mixture of experts every expert has adapters of its own: those of its linear_fc1 and its linear_fc2.
A checkpoint of adapters holds, for each adapted layer, the keys `decoder.layers.<module>.lora_a` and `...lora_b` (of
experts `decoder.layers.mlp.experts.experts.<module>.lora_a`, stacked as their weights are), and beside them
`lora.json`, which is this dataclass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_bridge.model_config import ModelArgs
from megatron_bridge.names import LAYER_PREFIX, hf_names

LORA_FILE = "lora.json"
LORA_A, LORA_B = "lora_a", "lora_b"

TARGET_MODULES = {
    "linear_qkv": "self_attention.linear_qkv",
    "linear_proj": "self_attention.linear_proj",
    "linear_fc1": "mlp.linear_fc1",
    "linear_fc2": "mlp.linear_fc2",
}
"""Name of a target -> the module in a transformer layer."""
EXPERT_TARGETS = tuple(target for target, module in TARGET_MODULES.items() if module.startswith("mlp."))
"""Targets that are modules of every expert where a layer has experts."""

_OF_EXPERT = re.compile(r"mlp\.experts\.experts\.\d+\.")


@dataclass(frozen=True)
class LoraSpec:
    """The adapters of a model."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of `TARGET_MODULES`."""
    base: str | None = None
    """Checkpoint (torch_dist) of the frozen weights, `ROOT/iter_0000012` or `ROOT/release`; of older runs only ROOT."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, module: str) -> bool:
        """Whether this module of a layer has an adapter: a value of `TARGET_MODULES`, or an expert's module."""
        return _OF_EXPERT.sub("mlp.", module) in {TARGET_MODULES[target] for target in self.targets}

    def modules(self, num_experts: int = 0) -> list[str]:
        """The adapted modules of one layer, by their global names; `num_experts` 0 is a layer with a dense MLP."""
        names = []
        for target in self.targets:
            module = TARGET_MODULES[target]
            if target in EXPERT_TARGETS and num_experts:
                names += [expert_module(expert, target) for expert in range(num_experts)]
            else:
                names.append(module)
        return names

    def same_adapters(self, other: LoraSpec) -> bool:
        """Whether the tensors of one fit the other and mean the same; the base may lie elsewhere."""
        return (self.rank, self.alpha, set(self.targets)) == (other.rank, other.alpha, set(other.targets))

    def __str__(self) -> str:
        return f"rank {self.rank}, alpha {self.alpha:g}, on {' '.join(sorted(self.targets))}"

    def write(self, directory: str | Path) -> None:
        (Path(directory) / LORA_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, directory: str | Path) -> LoraSpec | None:
        """The adapters in a checkpoint's directory; None where it holds whole weights. ValueError when damaged."""
        path = Path(directory) / LORA_FILE
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text())
            return cls(**{**content, "targets": tuple(content["targets"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is damaged ({error}): use another checkpoint") from error


def expert_module(expert: int, target: str) -> str:
    """Global name of an expert's module within its layer."""
    return f"mlp.experts.experts.{expert}.{target}"


def hf_targets(targets: Iterable[str], model: ModelArgs) -> list[str]:
    """The Hugging Face layers that these targets are, by the last part of their names: `q_proj`, ..."""
    return [
        name.split(".")[-2]
        for target in targets
        for name in hf_names(f"{LAYER_PREFIX}0.{TARGET_MODULES[target]}.weight", model)
    ]


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return name.rsplit(".", 1)[-1] in (LORA_A, LORA_B)
