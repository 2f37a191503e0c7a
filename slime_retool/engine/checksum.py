"""Checksums of weights under their Hugging Face names, computed alike in an engine and in the trainer.

The checksum of a tensor is the SHA-256 (hex) of its bytes: contiguous, row-major, little-endian, in the dtype
the engine holds. The trainer casts its tensor to that dtype and calls `tensor_checksum`.

`report` runs inside an SGLang scheduler, as its `--custom-weight-loader` (an extension point of SGLang: a
function of the model and a list of named tensors, called by `/update_weights_from_tensor`). It changes no
weight. SGLang fuses projections; `hf_weights` takes them apart again:

    qkv_proj       rows [q | k | v]            -> q_proj, k_proj, v_proj
    gate_up_proj   rows [gate | up]            -> gate_proj, up_proj
    embed_tokens, lm_head                      -> without the rows that pad the vocabulary
    a tied head is the embedding and is reported once, as `model.embed_tokens.weight`
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

REPORT_LOADER = "slime_retool.engine.checksum.report"
"""What to pass as `--custom-weight-loader` and as `load_format`."""


def tensor_checksum(tensor: Any) -> str:
    """SHA-256 (hex) of a torch tensor's bytes in its own dtype."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(memoryview(flat.view(torch.uint8).numpy())).hexdigest()


def hf_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, tensor) of every parameter of an SGLang model that is not sharded over devices."""
    parents = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner_name, _, kind = name.rpartition(".")  # "model.layers.0.self_attn.qkv_proj", "weight"
        prefix, _, leaf = owner_name.rpartition(".")
        owner = parents[owner_name]
        if leaf == "qkv_proj":
            query, key_value = owner.q_proj_shard_size, owner.kv_proj_shard_size
            parts = parameter.data.split([query, key_value, key_value])
            pieces = zip(("q_proj", "k_proj", "v_proj"), parts, strict=True)
        elif leaf == "gate_up_proj":
            pieces = zip(("gate_proj", "up_proj"), parameter.data.split(list(owner.output_sizes)), strict=True)
        elif leaf in ("embed_tokens", "lm_head"):
            pieces = iter([(leaf, parameter.data[: owner.org_vocab_size])])
        else:
            yield name, parameter.data
            continue
        for piece, tensor in pieces:
            yield ".".join(part for part in (prefix, piece, kind) if part), tensor


def report(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Write `{"checksums": {name: hex}}` or `{"error": text}` to the file named by the (empty) first tensor's name.

    Never raises: an exception here would end the engine.
    """
    path = named_tensors[0][0]
    try:
        answer = {"checksums": {name: tensor_checksum(tensor) for name, tensor in hf_weights(model)}}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with open(path + ".part", "w") as file:
        json.dump(answer, file)
    os.replace(path + ".part", path)
