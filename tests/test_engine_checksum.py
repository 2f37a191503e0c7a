"""Weights of tensor-parallel workers, split and padded as SGLang does it, come together under their own names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dist_utils import in_threads
from torch import Tensor

from slime_retool.engine.checksum import CHUNK, Gather, hf_weights, tensor_checksum

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB, PADDED = 8, 2, 4, 16, 24, 13, 16
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        f"{ATTENTION}.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{ATTENTION}.q_proj.bias": (HEADS * HEAD_DIM,),
        f"{ATTENTION}.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{ATTENTION}.k_proj.bias": (KV_HEADS * HEAD_DIM,),
        f"{ATTENTION}.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{ATTENTION}.v_proj.bias": (KV_HEADS * HEAD_DIM,),
        f"{ATTENTION}.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{MLP}.gate_proj.weight": (FFN, HIDDEN),
        f"{MLP}.up_proj.weight": (FFN, HIDDEN),
        f"{MLP}.down_proj.weight": (HIDDEN, FFN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def worker_model(weights: dict[str, Tensor], worker: int, workers: int) -> Any:
    """What worker `worker` of `workers` holds, under SGLang's names."""
    copies = max(1, workers // KV_HEADS)

    def rows(name: str, share: int = worker, shares: int = workers) -> Tensor:
        return weights[name].chunk(shares)[share]

    def key_value(name: str) -> Tensor:
        return rows(name, worker // copies, workers // copies)

    def padded(name: str) -> Tensor:
        return torch.cat([weights[name], torch.zeros(PADDED - VOCAB, HIDDEN)]).chunk(workers)[worker]

    parameters = {"model.embed_tokens.weight": padded("model.embed_tokens.weight")}
    for kind in ("weight", "bias"):
        names = [f"{ATTENTION}.{part}_proj.{kind}" for part in "qkv"]
        parameters[f"{ATTENTION}.qkv_proj.{kind}"] = torch.cat([rows(names[0]), *map(key_value, names[1:])])
    for name in (f"{ATTENTION}.o_proj.weight", f"{MLP}.down_proj.weight"):
        parameters[name] = weights[name].chunk(workers, dim=1)[worker]
    parameters[f"{MLP}.gate_up_proj.weight"] = torch.cat([rows(f"{MLP}.{part}_proj.weight") for part in ("gate", "up")])
    parameters["model.norm.weight"] = weights["model.norm.weight"]
    parameters["lm_head.weight"] = padded("lm_head.weight")
    owner = SimpleNamespace(
        q_proj_shard_size=HEADS * HEAD_DIM // workers, kv_proj_shard_size=KV_HEADS * HEAD_DIM * copies // workers,
        num_kv_head_replicas=copies, output_sizes=[FFN, FFN], org_vocab_size=VOCAB,
    )  # fmt: skip
    return SimpleNamespace(
        named_modules=lambda: [(name.rpartition(".")[0], owner) for name in parameters],
        named_parameters=lambda: [(name, torch.nn.Parameter(value)) for name, value in parameters.items()],
    )


@pytest.mark.parametrize("workers", [1, 2, 4])  # with four, two workers each hold a copy of a K/V head
def test_workers_shares_make_the_checkpoints_tensors(workers: int) -> None:
    weights = whole()

    def run(worker: int, gather: Gather) -> dict[str, Tensor]:
        return dict(hf_weights(worker_model(weights, worker, workers), workers, gather))

    for result in in_threads(workers, run):
        assert result.keys() == weights.keys()
        assert all(torch.equal(result[name], weights[name]) for name in weights)


def test_a_checksum_is_the_weighted_sum_of_the_bits_modulo_two_to_the_64():
    tensor = torch.tensor([1.0, -2.5, 0.0, 3e-3], dtype=torch.bfloat16)
    total = 0
    for index, bits in enumerate(tensor.view(torch.int16).tolist()):
        weight = index
        for factor, shift in ((0x9E3779B97F4A7C15, 32), (0xBF58476D1CE4E5B9, 29)):
            weight = weight * factor % 2**64
            signed = weight - 2**64 if weight >= 2**63 else weight
            weight = (signed ^ (signed >> shift)) % 2**64
        total = (total + bits * (weight | 1)) % 2**64
    assert tensor_checksum(tensor) == f"{total:016x}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checksum_changes_with_every_element_and_their_order(dtype: torch.dtype):
    tensor = torch.randn(300, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    same = tensor_checksum(tensor)
    assert same == tensor_checksum(tensor.clone()) == tensor_checksum(tensor.T.contiguous().T)
    others = {tensor_checksum(tensor.T), tensor_checksum(tensor.roll(1)), tensor_checksum(tensor.flip(0))}
    for index in (0, 69, 20_999):
        changed = tensor.clone().view(-1)
        changed[index] += changed[index].abs() * torch.finfo(dtype).eps
        others.add(tensor_checksum(changed))
    assert len(others) == 6 and same not in others


def test_a_checksum_of_several_chunks_knows_their_order():
    first, second = torch.zeros(CHUNK, dtype=torch.int8), torch.ones(3, dtype=torch.int8)
    assert tensor_checksum(torch.cat([first, second])) != tensor_checksum(torch.cat([second, first]))
    assert tensor_checksum(torch.cat([first, second])) != tensor_checksum(second)
