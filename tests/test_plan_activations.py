"""What the plan counts as activations against the tensors that autograd keeps in a real model on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dist_utils import run_distributed
from trainer_utils import tiny_config

from megatron_bridge.arithmetic.parameters import widths
from slime_retool.commands.plan.activations import layer_bytes, layer_input_bytes
from slime_retool.config import Config

TOKENS = 64
SHAPE = dict(hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, num_query_groups=4, kv_channels=16)


def _config(layers: int, **fields: Any) -> Config:
    return tiny_config(**SHAPE, num_layers=layers, precision="fp32", **fields)


RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MIXTURE = dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, untie_embeddings_and_output_weights=True)
TP2 = dict(actor_num_gpus_per_node=2, tensor_model_parallel_size=2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, recomputing": RECOMPUTE,
    "one rank, experts": MIXTURE,
    "TP2": TP2,
    "TP2 with sequence parallelism": {**TP2, "sequence_parallel": True},
}


@pytest.fixture(scope="module")
def kept() -> dict[str, float]:
    """Bytes of a token that one more layer keeps, by layout."""
    ranks = {name: _config(1, **fields).world_size for name, fields in LAYOUTS.items()}
    found: dict[str, float] = {}
    for world in set(ranks.values()):
        names = [name for name in LAYOUTS if ranks[name] == world]
        found |= run_distributed(_of_layouts, world, names)[0]
    return found


def _of_layouts(rank: int, world_size: int, names: list[str]) -> dict[str, float]:
    found = {}
    for name in names:
        one, two = (_kept_by(_config(layers, **LAYOUTS[name]), rank, world_size) for layers in (1, 2))
        found[name] = (two - one) / TOKENS
    return found


def _kept_by(config: Config, rank: int, world_size: int) -> int:
    from megatron_bridge.model import packed_seq_params
    from slime_retool.trainer.core import Trainer

    trainer = Trainer(
        config, rank=rank, world_size=world_size, local_rank=rank, init_method="tcp://127.0.0.1:0"
    )  # fmt: skip
    parameters = {parameter.untyped_storage().data_ptr() for parameter in trainer.module.parameters()}
    kept: dict[int, torch.Tensor] = {}  # holds the tensors, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            kept.setdefault(address, tensor)
        return tensor

    tokens, positions = torch.arange(TOKENS)[None] % 60, torch.arange(TOKENS)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = trainer.module(
            tokens, positions, attention_mask=None, packed_seq_params=packed_seq_params([TOKENS])
        )  # fmt: skip
    assert output.requires_grad
    trainer.shutdown()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", [name for name, fields in LAYOUTS.items() if fields is not RECOMPUTE])
def test_a_layer_keeps_what_the_plan_counts(name, kept):
    """The CPU's modules are not fused; beyond what fused ones keep, these tensors stay:

    norms: the normalised input before the weight (2 h; q + k for those of the heads) and one number per row;
    attention: its output in its own order (q); SwiGLU: silu(gate) (f).
    The values (k) are no tensor of their own, but a part of the projection. Experts, of width e for n of E: silu(gate),
    the gated product and its inner part before it is weighted (3 n e), and what the router keeps of each token.
    """
    config = _config(1, **LAYOUTS[name])
    tp, w = config.tensor_model_parallel_size, widths(config)
    split = 4 * w.hidden / layer_input_bytes(config)  # how often the residual is divided
    inner, router = w.ffn, {0}
    if config.num_experts is not None:
        n = MIXTURE["moe_router_topk"]
        inner = 3 * n * MIXTURE["moe_ffn_hidden_size"]
        # Of each choice its number and place (int64) and its weight, twice (fp32); of each expert whether, and its
        # weight again (megatron-core 0.16), or of each choice two more numbers (0.19).
        router = {n * (8 + 8 + 4 + 4) + config.num_experts * (1 + 4), n * (8 + 8 + 4 + 4 + 8 + 8)}
    unfused = 2 * w.hidden / split + (w.queries + w.keys + w.queries + inner - w.keys) / tp
    rows = 2 / split + (w.heads + w.keys / 16) / tp
    assert kept[name] - layer_bytes(config) - 4 * (unfused + rows) in router


def test_full_recomputation_keeps_the_input_of_each_layer_alone(kept):
    assert kept["one rank, recomputing"] == layer_input_bytes(_config(1, **RECOMPUTE))
