"""Megatron models of converted checkpoints against transformers, at several layouts, in gloo processes.

Each group of processes does everything that its size allows, because starting one costs seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bridge_models import DENSE_KINDS as KINDS
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

from megatron_bridge.checkpoint import model_state_dict, write_latest
from megatron_bridge.layout import merge_tp, to_hf
from megatron_bridge.names import global_name

TOLERANCE = 1e-4

LAYOUTS = {
    1: [dict(tp=1, pp=1)],
    2: [
        dict(tp=2, pp=1),
        dict(tp=2, pp=1, sequence_parallel=True),
        dict(tp=1, pp=2, first=1),
        dict(tp=1, pp=2, last=1),
    ],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return write_references(tmp_path_factory.mktemp("bridge"), KINDS)


def test_one_process(checkpoints):
    check_worlds(checkpoints, 1)


def test_two_processes(checkpoints):
    check_worlds(checkpoints, 2)


def check_worlds(root: Path, world_size: int) -> None:
    errors = run_distributed(check_layouts, world_size, str(root))[0]
    too_large = {case: error for case, error in errors.items() if not error < TOLERANCE}
    assert not too_large
    assert len(errors) == len(LAYOUTS[world_size]) * len(KINDS) * 2
    # what each layout saved goes back to the original weights
    saved = sorted(root.glob(f"*/saved-{world_size}-?"))
    assert len(saved) == len(LAYOUTS[world_size])
    for directory in saved:
        assert_converts_back(directory, directory.parent / "hf")


# --- in the processes -------------------------------------------------------------------------------------------


def check_layouts(rank: int, world_size: int, root: str) -> dict[str, float]:
    """Largest difference of the logits for every layout and kind, packed and (first sequence) alone."""
    from megatron.core import parallel_state

    errors: dict[str, float] = {}
    for number, layout in enumerate(LAYOUTS[world_size]):
        for kind in KINDS:
            directory = Path(root) / kind
            expected = torch.load(directory / "logits.pt")
            gpt, model = build_model(directory, **layout)
            load_model(gpt, directory / "td")
            case = f"{kind} {layout}"
            tokens = torch.cat(sequences())
            errors[case] = difference(logits(gpt, model, tokens, LENGTHS), expected)
            alone = LENGTHS[0] if not layout.get("sequence_parallel") else None
            if alone is None:
                # T must be a multiple of tp: pad with a sequence of its own
                got = logits(gpt, model, tokens[[*range(7), 0]], [7, 1])[:7]
            else:
                got = logits(gpt, model, tokens[:alone], None)
            errors[case + " alone"] = difference(got, expected[:7])
            check_weight_export(gpt, model, directory, layout["tp"])
            if kind == KINDS[number % len(KINDS)]:  # one for each layout
                saved = directory / f"saved-{world_size}-{number}"
                if number % 2 == 0:
                    save_model(gpt, saved / "iter_0000003")
                else:
                    save_with_optimizer(gpt, saved / "iter_0000003")
                if rank == 0:
                    write_latest(saved, 3)
            parallel_state.destroy_model_parallel()
    return errors


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return float((got - expected).abs().max())


def logits(gpt, model, tokens: torch.Tensor, lengths: list[int] | None) -> torch.Tensor:
    """[T, vocabulary], the same on every rank; `lengths` None runs one unpacked row."""
    from megatron.core import parallel_state

    from megatron_bridge.model import packed_seq_params

    tp = parallel_state.get_tensor_model_parallel_world_size()
    group = parallel_state.get_tensor_model_parallel_group()
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    packed = packed_seq_params(lengths) if lengths else None
    hidden_size = gpt.config.hidden_size
    with torch.no_grad():
        if not first:
            received = torch.empty(len(tokens), 1, hidden_size)
            dist.recv(received, src=0)
            gpt.set_input_tensor(received)
        positions = torch.arange(len(tokens))[None]
        out = gpt(tokens[None], positions, None, packed_seq_params=packed)
        if not last:
            dist.send(out.contiguous(), dst=1)
            out = torch.empty(len(tokens), model.vocab_size)
        else:
            shards = [torch.empty_like(out) for _ in range(tp)]
            dist.all_gather(shards, out.contiguous(), group=group)
            whole = torch.cat(shards, dim=-1)[0]
            assert (whole[:, model.vocab_size :] < -1e8).all()  # padding has no probability
            out = whole[:, : model.vocab_size].contiguous()
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(out, src=1)
    return out


def check_weight_export(gpt, model, directory: Path, tp: int) -> None:
    """Parameters gathered over tensor-parallel ranks, named and split as HF, equal the checkpoint's."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    original = hf_weights(directory / "hf")
    group, offset = parallel_state.get_tensor_model_parallel_group(), get_transformer_layer_offset(gpt.config)

    def gathered():
        for local_name, parameter in gpt.named_parameters():
            shards = [torch.empty_like(parameter.data) for _ in range(tp)]
            dist.all_gather(shards, parameter.data, group=group)
            name = global_name(local_name, model, offset)
            yield name, merge_tp(name, shards, model)

    exported = dict(pair for name, full in gathered() for pair in to_hf(name, full, model))
    assert all(torch.equal(value, original[name]) for name, value in exported.items())
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        assert exported.keys() == original.keys()


def save_with_optimizer(gpt, directory: Path) -> None:
    """A trainer's checkpoint: weights and Adam states of the same names under `optimizer.`."""
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    ddp = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=0.0), [ddp])
    state = model_state_dict(gpt)
    state["optimizer"] = optimizer.sharded_state_dict(state)
    dist_checkpointing.save(state, str(directory))
