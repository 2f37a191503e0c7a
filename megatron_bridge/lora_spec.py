"""What a LoRA adapter is (https://arxiv.org/abs/2106.09685): its size, where it sits, its names. No torch.

An adapted linear layer computes W x + (alpha / rank) B A x with A [rank, in] and B [out, rank]. W is frozen.
A checkpoint of adapters holds, for each adapted layer, the keys `decoder.layers.<module>.lora_a` and `...lora_b`, and
beside them `lora.json`, which is this dataclass.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

LORA_FILE = "lora.json"
LORA_A, LORA_B = "lora_a", "lora_b"

TARGET_MODULES = {
    "linear_qkv": "self_attention.linear_qkv",
    "linear_proj": "self_attention.linear_proj",
    "linear_fc1": "mlp.linear_fc1",
    "linear_fc2": "mlp.linear_fc2",
}
"""Name of a target -> the module in a transformer layer."""


@dataclass(frozen=True)
class LoraSpec:
    """The adapters of a model."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of `TARGET_MODULES`."""
    base: str | None = None
    """Checkpoint (torch_dist) of the frozen weights."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapters(self, module: str) -> bool:
        """Whether this module of a layer (a value of `TARGET_MODULES`) has an adapter."""
        return module in {TARGET_MODULES[target] for target in self.targets}

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


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return name.rsplit(".", 1)[-1] in (LORA_A, LORA_B)
