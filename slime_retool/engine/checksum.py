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

Tensor-parallel workers put their shares together: rows of these, columns of o_proj and down_proj. Where there are more
workers than K/V heads, neighbours hold copies of the same head.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

Gather = Callable[[Any], list[Any]]
"""A worker's tensor -> those of all tensor-parallel workers, in order."""
ROWS_OF_INPUT = ("o_proj", "down_proj")
"""Matrices that are split by columns (their input) over the workers."""

REPORT_LOADER = "slime_retool.engine.checksum.report"
"""What to pass as `--custom-weight-loader` and as `load_format`."""


def tensor_checksum(tensor: Any) -> str:
    """SHA-256 (hex) of a torch tensor's bytes in its own dtype."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(memoryview(flat.view(torch.uint8).numpy())).hexdigest()


def hf_weights(model: Any, workers: int = 1, gather: Gather = lambda tensor: [tensor]) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, whole tensor) of every parameter of a dense SGLang model that is split over `workers`."""
    import torch

    parents = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner_name, _, kind = name.rpartition(".")  # "model.layers.0.self_attn.qkv_proj", "weight"
        prefix, _, leaf = owner_name.rpartition(".")
        owner = parents[owner_name]
        if leaf == "qkv_proj":
            query, key_value = owner.q_proj_shard_size, owner.kv_proj_shard_size
            q, k, v = (gather(part) for part in parameter.data.split([query, key_value, key_value]))
            copies = owner.num_kv_head_replicas
            pieces = {"q_proj": q, "k_proj": k[::copies], "v_proj": v[::copies]}
        elif leaf == "gate_up_proj":
            gate, up = parameter.data.split([size // workers for size in owner.output_sizes])
            pieces = {"gate_proj": gather(gate), "up_proj": gather(up)}
        elif leaf in ("embed_tokens", "lm_head"):
            pieces = {leaf: [torch.cat(gather(parameter.data))[: owner.org_vocab_size]]}
        elif leaf in ROWS_OF_INPUT and kind == "weight":
            pieces = {leaf: [torch.cat(gather(parameter.data), dim=1)]}
        else:
            pieces = {leaf: [parameter.data]}
        for piece, shares in pieces.items():
            whole = shares[0] if len(shares) == 1 else torch.cat(shares)
            yield ".".join(part for part in (prefix, piece, kind) if part), whole


def _gather(tensor: Any, group: Any) -> list[Any]:
    """Shares of all workers of SGLang's tensor-parallel group."""
    import torch

    if group.world_size == 1:
        return [tensor]
    tensor = tensor.contiguous()
    shares = [torch.empty_like(tensor) for _ in range(group.world_size)]
    torch.distributed.all_gather(shares, tensor, group=group.device_group)
    return shares


def report(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """Write `{"checksums": {name: hex}}` or `{"error": text}` to the file named by the (empty) first tensor's name.

    Every worker is called, the first one writes. Never raises: an exception here would end the engine.
    """
    path = named_tensors[0][0]
    try:
        from sglang.srt.distributed import get_tp_group

        group = get_tp_group()
        leads = group.rank_in_group == 0
        weights = hf_weights(model, group.world_size, lambda tensor: _gather(tensor, group))
        answer = {"checksums": {name: tensor_checksum(tensor) if leads else "" for name, tensor in weights}}
        if not leads:
            return
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with open(path + ".part", "w") as file:
        json.dump(answer, file)
    os.replace(path + ".part", path)
