"""Loads a bucket of weights inside an SGLang scheduler, as its `--custom-weight-loader`.

SGLang calls `load_bucket` with the model and one named tensor: the bucket's bytes, under a name that is the JSON
`header` of what is in them. Weights of Hugging Face names go to the model's own `load_weights`, as always; stacks of
experts (`expert_weights`) are copied into place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from slime_retool.engine.expert_weights import ExpertShard, Stack, unreadable

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_LOADER = "slime_retool.engine.bucket_loader.load_bucket"
"""What to pass as `--custom-weight-loader` and as `load_format`."""
BASE_LAYER = "base_layer"
"""SGLang wraps a layer that takes LoRA adapters; this is the layer within."""


def header(names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: str) -> str:
    """What lies in a bucket, one tensor after the other; `dtype` is torch's name ("bfloat16")."""
    return json.dumps({"names": list(names), "shapes": [list(shape) for shape in shapes], "dtype": dtype})


def load_bucket(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Load one bucket; returns when the device has read it, so that its owner may fill the memory anew."""
    import torch

    ((text, data),) = named_tensors
    content = json.loads(text)
    dtype, shapes = getattr(torch, content["dtype"]), [torch.Size(shape) for shape in content["shapes"]]
    sizes = [shape.numel() * dtype.itemsize for shape in shapes]
    parts = data[: sum(sizes)].split(sizes)  # the bucket is the beginning of its buffer
    tensors = [part.view(dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)]
    load_weights(model, zip(content["names"], tensors, strict=True))
    if data.is_cuda:
        torch.cuda.current_stream(data.device).synchronize()


def load_weights(model: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """Load stacks of experts, and other weights under their Hugging Face names, into an SGLang model."""
    rest: list[tuple[str, Tensor]] = []
    shards: dict[str, ExpertShard | None] = {}
    for name, values in named:
        stack = Stack.parse(name)
        if stack is None:
            rest.append((name, values))
            continue
        if stack.prefix not in shards:
            layer = model.get_submodule(stack.prefix)
            layer = layer._modules.get(BASE_LAYER, layer)
            shards[stack.prefix] = None if unreadable(layer) else ExpertShard.of(layer)
        shard = shards[stack.prefix]
        if shard is None or not shard.load(stack, values):
            rest += stack.matrices(values)  # SGLang places them, or rounds them, by itself
    if rest:
        model.load_weights(rest)
