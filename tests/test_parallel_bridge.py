"""Models of mixture of experts, and sequences split over ranks, against transformers in gloo processes.

Each group of processes does everything that its size allows, because starting one costs seconds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bridge_models import (
    LENGTHS,
    assert_converts_back,
    build_model,
    hf_weights,
    load_model,
    save_model,
    sequences,
    write_references,
)
from dist_utils import run_distributed

from megatron_bridge.checkpoint import write_latest
from megatron_bridge.model_config import moe_layers
from megatron_bridge.names import ATTENTION_NORM, MLP_NORM, split_name
from megatron_bridge.zigzag import chunk_layout, padded_length, zigzag_rows

MOE = ("qwen3_moe", "qwen3_mixed", "glm4_moe", "glm4_air", "qwen2_moe", "mixtral")
KINDS = ("llama", *MOE)
TOLERANCE = 1e-5
TP2: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
EP2: dict[str, Any] = {"ep": 2}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [(kind, {}) for kind in MOE],
    2: [
        ("qwen3_moe", EP2),
        ("qwen3_mixed", {**TP2, **EP2}),
        ("qwen3_moe", {**TP2, "etp": 2}),
        ("qwen3_mixed", {"pp": 2, "first": 1}),
        ("qwen3_moe", {"cp": 2, **EP2}),
        ("llama", {"cp": 2}),
        ("glm4_moe", {**TP2, **EP2}),
        ("glm4_moe", {"pp": 2, "first": 1}),
        ("glm4_air", {"cp": 2, **EP2}),
        ("qwen2_moe", {**TP2, **EP2}),
        ("mixtral", {**TP2, "etp": 2}),
    ],
    4: [("qwen3_moe", {**TP2, **EP2, "etp": 2}), ("qwen3_mixed", {"pp": 2, "first": 1, **EP2})],
}
SAVED = [
    ("qwen3_moe", EP2),
    ("qwen3_mixed", {**TP2, **EP2}),
    ("qwen3_moe", {**TP2, "etp": 2}),
    ("glm4_moe", {**TP2, **EP2}),
    ("qwen2_moe", {**TP2, **EP2}),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return write_references(tmp_path_factory.mktemp("parallel"), KINDS)


@pytest.fixture(scope="module")
def errors(checkpoints: Path) -> dict[int, dict[str, float]]:
    """For each number of processes and layout the largest difference from transformers' logits."""
    return {size: run_distributed(check_layouts, size, str(checkpoints))[0] for size in LAYOUTS}


@pytest.mark.parametrize("world_size", list(LAYOUTS))
def test_logits_and_exported_weights_equal_transformers(errors, world_size):
    assert len(errors[world_size]) == len(LAYOUTS[world_size])
    assert {case: error for case, error in errors[world_size].items() if not error < TOLERANCE} == {}


@pytest.mark.parametrize("number", range(len(SAVED)))
def test_checkpoints_of_any_expert_layout_convert_back_bit_equal(checkpoints, errors, number):
    assert_converts_back(checkpoints / f"saved{number}", checkpoints / SAVED[number][0] / "hf")


def test_zigzag_gives_every_row_to_one_rank_and_every_query_its_own_past():
    lengths = [16, 8, 24]
    whole = torch.arange(sum(lengths))
    starts = [begin for length, begin in zip(lengths, (0, 16, 24), strict=True) for _ in range(length)]
    for cp in (2, 4):
        gathered = torch.cat([zigzag_rows(lengths, cp, rank) for rank in range(cp)])
        assert torch.equal(gathered.sort().values, whole)
        for rank in range(cp):
            layout = chunk_layout(lengths, cp, rank)
            queries = zigzag_rows(lengths, cp, rank).split(layout.lengths_q)
            keys = gathered[layout.kv_rows].split(layout.lengths_k)
            for q, k in zip(queries, keys, strict=True):
                assert torch.equal(k, torch.arange(starts[int(q[0])], int(q[-1]) + 1))
    assert zigzag_rows([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert [padded_length(n, 2) for n in (1, 4, 5)] == [4, 4, 8] and padded_length(5, 1) == 5


# --- in the processes -------------------------------------------------------------------------------------------


def check_layouts(rank: int, world_size: int, root: str) -> dict[str, float]:
    """Largest difference of the logits for every layout; exported weights are compared on rank 0."""
    from megatron.core import parallel_state

    errors: dict[str, float] = {}
    for kind, layout in LAYOUTS[world_size]:
        directory = Path(root) / kind
        gpt, model = build_model(directory, **layout)
        load_model(gpt, directory / "td")
        errors[f"{kind} {layout}"] = largest_difference(gpt, model, torch.load(directory / "logits.pt"))
        check_weight_export(rank, gpt, model, directory)
        if model.num_experts is not None:
            check_weight_export(rank, NamedByTransformerEngine(gpt, model), model, directory)
        if (kind, layout) in SAVED:
            saved = Path(root) / f"saved{SAVED.index((kind, layout))}"
            save_model(gpt, saved / "iter_0000003")
            if rank == 0:
                write_latest(saved, 3)
            dist.barrier()
        parallel_state.destroy_model_parallel()
    return errors


def largest_difference(gpt: Any, model: Any, expected: torch.Tensor) -> float:
    """Over all ranks of the last stage and their own positions and columns of the vocabulary."""
    from megatron.core import parallel_state as mpu

    from megatron_bridge.model import packed_seq_params

    cp, cp_rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    tp, tp_rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    lengths = [padded_length(length, cp) for length in LENGTHS]
    lengths.append(padded_length(1, cp) * tp - sum(lengths) % tp)
    tokens, real = [], []
    for sequence, length in zip([*sequences(), torch.zeros(0, dtype=torch.int64)], lengths, strict=True):
        padding = length - len(sequence)
        tokens.append(torch.nn.functional.pad(sequence, (0, padding), value=3))
        real += [True] * len(sequence) + [False] * padding
    rows = zigzag_rows(lengths, cp, cp_rank) if cp > 1 else torch.arange(sum(lengths))
    mine = torch.cat(tokens)[rows][None]
    packed = packed_seq_params(lengths, cp=cp, cp_rank=cp_rank)
    hidden = (mine.shape[1] // (tp if gpt.config.sequence_parallel else 1), 1, gpt.config.hidden_size)
    group = mpu.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    with torch.no_grad():
        if not mpu.is_pipeline_first_stage():
            received = torch.empty(hidden)
            dist.recv(received, src=ranks[0])
            gpt.set_input_tensor(received)
        out = gpt(mine, torch.arange(mine.shape[1])[None], None, packed_seq_params=packed)
        if not mpu.is_pipeline_last_stage():
            dist.send(out.contiguous(), dst=ranks[1])
    worst = torch.zeros(())
    if mpu.is_pipeline_last_stage():
        wanted = torch.zeros(len(real), out.shape[-1] * tp)
        wanted[torch.tensor(real), : model.vocab_size] = expected
        columns = out.shape[-1] * tp_rank + torch.arange(out.shape[-1])
        kept, known = torch.tensor(real)[rows], columns < model.vocab_size
        got = out[0][kept][:, known] - wanted[rows][kept][:, columns[known]]
        worst = got.abs().max() if got.numel() else worst
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def check_weight_export(rank: int, gpt: Any, model: Any, directory: Path) -> None:
    """On rank 0, and then on every rank, exported weights are the checkpoint's, bit for bit; stacks of experts as well.

    Small chunks divide what a rank has into many.
    """
    from slime_retool.engine.expert_weights import Stack
    from slime_retool.trainer.gather import CHUNK_BYTES, hf_named_tensors

    original = hf_weights(directory / "hf")
    for everywhere, stacked, chunk in (
        (False, False, CHUNK_BYTES), (False, True, 20_000), (True, False, 1), (True, True, CHUNK_BYTES),
    ):  # fmt: skip
        options: Any = {"everywhere": everywhere, "stacked": stacked, "chunk_bytes": chunk}
        exported: dict[str, torch.Tensor] = {}
        for name, tensor in hf_named_tensors(gpt, model, **options):
            stack = Stack.parse(name)
            assert stacked or stack is None
            parts = [(name, tensor)] if stack is None else stack.matrices(tensor)
            exported |= {name: part.clone() for name, part in parts}
        wanted = original if everywhere or rank == 0 else {}
        assert exported.keys() == wanted.keys()
        assert all(torch.equal(exported[name], wanted[name]) for name in wanted)


class NamedByTransformerEngine:
    """A model whose parameters bear the names that Transformer Engine's grouped layers give them."""

    def __init__(self, gpt: Any, model: Any) -> None:
        self.decoder, self.named_buffers = gpt.decoder, gpt.named_buffers
        names = [(self._name(name, gpt, model), parameter) for name, parameter in gpt.named_parameters()]
        # It registers the first matrix of all experts, then the second; the local layers both of one expert.
        self._named = sorted(names, key=lambda named: "linear_fc2.weight" in named[0] and ".experts." in named[0])

    @staticmethod
    def _name(name: str, gpt: Any, model: Any) -> str:
        layer, rest = split_name(name)
        if layer is None:
            return name
        prefix = name.removesuffix(rest)
        if match := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", rest):
            return f"{prefix}mlp.experts.{match[2]}.weight{match[1]}"
        with_experts = moe_layers(model)[gpt.decoder.layers[layer].layer_number - 1]
        renamed = dict([ATTENTION_NORM] if with_experts else [ATTENTION_NORM, MLP_NORM])
        return prefix + renamed.get(rest, rest)

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return self._named

    def named_modules(self) -> list[Any]:
        return []
