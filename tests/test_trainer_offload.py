"""A trainer that leaves its device and comes back is the same trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist_utils import run_distributed
from trainer_utils import make_trainer, random_samples, tiny_config, weights

from slime_retool.trainer.offload import HostMemory, Offloadable

CPU = torch.device("cpu")


def test_host_pieces_hold_contents_one_after_the_other() -> None:
    pieces = list(HostMemory(pinned=False, slab_bytes=10).pieces([4, 9, 0, 20, 2]))
    assert [[len(part) for part in parts] for parts in pieces] == [[4], [6, 3], [], [7, 10, 3], [2]]
    starts = {part.data_ptr() for parts in pieces for part in parts}
    assert len(starts) == 7


@pytest.mark.parametrize("keep", [True, False])
def test_views_of_a_storage_are_right_again_after_it_came_back(keep: bool) -> None:
    base = torch.arange(12, dtype=torch.float32)
    views = [base[:5], base[5:].view(7, 1), torch.full((3,), 2.0, dtype=torch.bfloat16)]
    before = [view.clone() for view in views]
    part = Offloadable(lambda: views, HostMemory(pinned=False, slab_bytes=7) if keep else None, CPU)
    assert part.nbytes == 12 * 4 + 3 * 2
    part.offload()
    part.offload()
    assert part.nbytes == 0 and base.untyped_storage().nbytes() == 0
    part.reload()
    part.reload()
    assert part.nbytes == 12 * 4 + 3 * 2
    for view, old in zip(views, before, strict=True):
        assert torch.equal(view, old if keep else torch.zeros_like(old))


def _work(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Three steps with and without leaving between them, and a checkpoint of the third."""
    from slime_retool.trainer.offload import TrainerMemory
    from slime_retool.types import RolloutBatch

    out: dict[str, Any] = {}
    for name in ("stays", "leaves"):
        folders = {"save": f"{root}/{name}", "load": f"{root}/{name}"}
        critic = {
            "advantage_estimator": "ppo",
            "critic_save": f"{root}/{name}_critic",
            "critic_load": f"{root}/{name}_critic",
        }
        trainer = make_trainer(rank, world_size, tiny_config(seed=3, **folders, **critic))
        memory = TrainerMemory(trainer, slab_bytes=1000)
        losses = []
        for step in range(3):
            if name == "leaves":
                memory.reload()
            metrics = trainer.train(RolloutBatch(random_samples(seed=step)), step)
            losses.append((metrics["train/loss"], metrics["critic/loss"]))
            if step == 2:
                trainer.save(2, {})  # when the run saves: the trainer has its device
            if name == "leaves":
                memory.offload(keep_weights=True)
                out["kept for the update"] = memory.report()
                memory.offload()
                out["left behind"] = memory.report()
        memory.reload()
        assert losses[2][1] != losses[0][1]
        out[name] = (losses, weights(trainer))
        trainer.load()
        out[name + " loaded"] = (losses, weights(trainer))
        if name == "stays":
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
    trainer.shutdown()
    return out


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root: Path = tmp_path_factory.mktemp("offload")
    return run_distributed(_work, 1, str(root))[0]


def test_leaving_changes_no_loss_and_no_weight(result: dict[str, Any]) -> None:
    (losses, stays), (again, leaves) = result["stays"], result["leaves"]
    assert losses == again
    assert all(torch.equal(stays[name], leaves[name]) for name in stays)


def test_nothing_is_left_on_the_device(result: dict[str, Any]) -> None:
    assert result["left behind"] == {"weights": 0, "state": 0, "grads": 0}
    kept = result["kept for the update"]
    assert kept["weights"] > 0 and kept["state"] == kept["grads"] == 0


def test_a_checkpoint_of_a_trainer_that_was_away_holds_the_weights(result: dict[str, Any]) -> None:
    saved, expected = result["leaves loaded"][1], result["stays"][1]
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
