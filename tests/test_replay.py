"""Batches of an earlier run, trained on again: what is read is what was written, to the last bit."""

from __future__ import annotations

import dataclasses
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from dist_utils import run_distributed
from trainer_utils import keep_batch, make_trainer, random_samples, tiny_config

from slime_retool.config import resolve
from slime_retool.config.groups import REPLAY_ROLLOUT
from slime_retool.config.validate import _check_replay
from slime_retool.errors import ConfigError, DataError
from slime_retool.rollout.replay import batch_path, read_batch
from slime_retool.types import STALENESS, RolloutBatch, TrainSample


def hard_samples() -> list[TrainSample]:
    """Numbers that are easily lost: denormals, fp32 neighbours, thirds, a loss mask of nothing, columns."""
    rng = random.Random(3)
    samples = random_samples(12, seed=7)
    for index, sample in enumerate(samples):
        bits = [rng.getrandbits(30) for _ in range(sample.length)]
        values = [struct.unpack("f", struct.pack("I", each))[0] for each in bits]
        samples[index] = dataclasses.replace(
            sample, rollout_log_probs=[-value for value in values], reward=1 / 3 + index, columns={"teacher": values}
        )
    samples.append(TrainSample(tokens=[1, 2], loss_mask=[0, 0]))  # as SFT has them: without log-probs
    return samples


def test_a_batch_is_read_as_it_was_written(tmp_path: Path):
    batch = RolloutBatch(hard_samples(), {"rollout/reward_mean": 1 / 3, "rollout/samples": 13.0})
    keep_batch(str(tmp_path), 3, batch)
    for folder in (tmp_path, tmp_path / "rollouts"):
        assert read_batch(str(folder), 3) == batch
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["trained_on_000003.jsonl"]


def test_a_rollout_that_is_not_there_or_damaged_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="--replay-rollouts: no file .*has none: .*--dump-rollouts"):
        read_batch(str(tmp_path), 0)
    for rollout_id in (2, 5):
        keep_batch(str(tmp_path), rollout_id, RolloutBatch(random_samples()))
    with pytest.raises(DataError, match="trained_on_000003.jsonl; the folder has rollouts 2 to 5"):
        read_batch(str(tmp_path), 3)
    path = batch_path(str(tmp_path), 5)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="trained_on_000005.jsonl cannot be read .*copy it again"):
        read_batch(str(tmp_path), 5)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        read_batch(str(tmp_path), 5)


def test_a_replay_starts_no_engine_and_writes_no_checkpoint(tmp_path: Path):
    given = tiny_config(replay_rollouts="earlier", save="save", save_interval=1, save_seconds=5.0, eval_interval=2)
    config = resolve(given)
    assert config.num_engines == 0 and config.rollout_function_path == REPLAY_ROLLOUT
    assert config.save is None and config.save_interval is None and config.eval_interval is None
    assert resolve(config) == config


def test_a_run_that_never_waits_is_replayed_with_its_flags(tmp_path: Path):
    from slime_retool.config.algorithm import check_algorithm

    flags = {"max_staleness": 1, "use_rollout_logprobs": True, "num_rollout": 2, "n_samples_per_prompt": 3}
    check_algorithm(resolve(tiny_config(replay_rollouts="earlier", **flags)))
    batch = RolloutBatch([dataclasses.replace(s, columns={STALENESS: [0.0] * s.length}) for s in random_samples()])
    keep_batch(str(tmp_path), 0, batch)
    assert read_batch(str(tmp_path), 0) == batch


@pytest.mark.parametrize("inside", ["", "rollouts"])
def test_a_replay_does_not_move_away_what_it_reads(inside: str, tmp_path: Path):
    (tmp_path / "rollouts").mkdir()
    replayed = tiny_config(replay_rollouts=str(tmp_path / inside), output_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="name another --output-dir"):
        _check_replay(replayed)
    for other in (tmp_path / "new", tmp_path.parent):
        _check_replay(dataclasses.replace(replayed, output_dir=str(other)))
    with pytest.raises(ConfigError, match="no such folder"):
        _check_replay(dataclasses.replace(replayed, replay_rollouts=str(tmp_path / "nowhere")))


def _train(rank: int, world_size: int, folder: str, replayed: bool) -> list[dict[str, float]]:
    config = tiny_config(
        use_rollout_logprobs=True, eps_clip=0.1, rollout_temperature=0.8, global_batch_size=3, clip_grad=1.0
    )
    trainer = make_trainer(rank, world_size, config)
    metrics = []
    for rollout_id in range(3):
        if replayed:
            batch = read_batch(folder, rollout_id)
        else:
            batch = RolloutBatch(random_samples(seed=rollout_id))
            keep_batch(folder, rollout_id, batch)
        metrics.append(trainer.train(batch, rollout_id))
    trainer.shutdown()
    return [{name: value for name, value in row.items() if name.startswith("train/")} for row in metrics]


def test_losses_of_a_replay_are_the_same_to_the_bit(tmp_path: Path):
    (first,) = run_distributed(_train, 1, str(tmp_path), False)
    (again,) = run_distributed(_train, 1, str(tmp_path), True)
    assert first == again and len({row["train/loss"] for row in first}) == 3


def test_a_dumped_batch_is_no_file_of_samples_for_the_viewer(tmp_path: Path):
    from slime_retool.commands.viewer.reading import sample_files

    keep_batch(str(tmp_path), 0, RolloutBatch(random_samples()))
    (tmp_path / "rollouts" / "rollout_000000.jsonl").write_text("")
    assert [path.name for path in sample_files(tmp_path)] == ["rollout_000000.jsonl"]


def test_old_batches_go_with_the_samples_of_their_rollout(tmp_path: Path):
    from slime_retool.rollout.transcripts import prune_dumps

    folder = tmp_path / "rollouts"
    for rollout_id in range(3):
        keep_batch(str(tmp_path), rollout_id, RolloutBatch(random_samples()))
        (folder / f"rollout_{rollout_id:06d}.jsonl").write_text("")
    prune_dumps(folder, 1, 2)
    assert sorted(path.name for path in folder.iterdir()) == ["rollout_000002.jsonl", "trained_on_000002.jsonl"]


def test_lines_of_a_batch_hold_all_fields_of_a_train_sample(tmp_path: Path):
    import json

    keep_batch(str(tmp_path), 0, RolloutBatch(random_samples(1)))
    row: dict[str, Any] = json.loads(batch_path(str(tmp_path), 0).read_text().splitlines()[1])
    assert row.keys() == {field.name for field in dataclasses.fields(TrainSample)}
