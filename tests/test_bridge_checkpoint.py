"""Which keys of a model's sharded state go into a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.checkpoint import checkpoint_name, load_model_state, model_state_dict, prune, write_latest

WEIGHTS = ("mlp.experts.linear_fc1.weight0", "mlp.experts.linear_fc1.weight1", "mlp.router.weight")
EXTRA = (
    "self_attention.linear_qkv._extra_state",
    # Transformer Engine's grouped experts: one for each expert, the first without a number.
    "mlp.experts.linear_fc1._extra_state",
    "mlp.experts.linear_fc1._extra_state1",
    "mlp.experts.linear_fc1._extra_state12",
)


class GroupedExperts:
    """A stand-in for a GPTModel on Transformer Engine, which needs a GPU."""

    def sharded_state_dict(self) -> dict[str, Any]:
        return dict.fromkeys((*WEIGHTS, *EXTRA), 0)

    def load_state_dict(self, state: dict[str, Any], strict: bool) -> tuple[list[str], list[str]]:
        assert not strict
        return [key for key in (*WEIGHTS, *EXTRA) if key not in state], [key for key in state if key not in WEIGHTS]


def test_no_extra_state_is_saved_or_asked_for_and_none_is_missed():
    state = model_state_dict(GroupedExperts())
    assert tuple(state["model"]) == WEIGHTS
    load_model_state(GroupedExperts(), state)


@pytest.mark.parametrize(
    ("newest", "keep", "left"),
    [(30, 2, [20, 30, 100]), (30, 1, [30, 100]), (30, 9, [0, 10, 20, 30, 100]), (100, 2, [30, 100])],
)
def test_the_oldest_checkpoints_are_deleted_and_none_that_is_newer_than_the_last(newest, keep, left, tmp_path: Path):
    for number in (0, 10, 20, 30, 100):
        (tmp_path / checkpoint_name(number)).mkdir()
        (tmp_path / checkpoint_name(number) / ".metadata").write_text("x")
    others = ["critic", "iter_0000005.part", "iter_x", "release"]
    for name in others:
        (tmp_path / name).mkdir()
    write_latest(tmp_path, newest)
    prune(tmp_path, keep)
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == sorted([*map(checkpoint_name, left), *others])


def test_a_deletion_that_is_killed_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path, monkeypatch):
    for number in (1, 2):
        (tmp_path / checkpoint_name(number)).mkdir()
    write_latest(tmp_path, 2)

    def killed(path: Path, **_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["iter_0000001.old", "iter_0000002"]
    monkeypatch.undo()
    write_latest(tmp_path, None)
    prune(tmp_path, 1)  # converted: there is nothing to count
