"""Compressed dumps: whatever reads a dump finds the same in both forms, and one form replaces the other."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from trainer_utils import keep_batch, random_samples
from viewer_runs import write_run

from slime_retool.cli import main
from slime_retool.commands.viewer.page import build_page
from slime_retool.commands.viewer.reading import read_samples
from slime_retool.dumps import dump_path, written_whole
from slime_retool.errors import DataError
from slime_retool.rollout.replay import read_batch
from slime_retool.rollout.transcripts import dump_samples, prune_dumps
from slime_retool.types import RolloutBatch, Sample


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def compress(run: Path) -> None:
    for path in (run / "rollouts").iterdir():
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()


def test_a_page_and_a_listing_of_compressed_dumps_are_those_of_plain_ones(tmp_path: Path, capsys):
    plain, small = (write_run(tmp_path / name / "run", steps=3) for name in ("plain", "small"))
    compress(small)
    assert any(name.startswith("trained_") for name in names(small / "rollouts"))
    pages = []
    for run in (plain, small):
        build_page([run], run.parent / "page")
        files = [path for path in sorted((run.parent / "page").rglob("*")) if path.is_file()]
        pages.append([(path.relative_to(run.parent), path.read_bytes()) for path in files])
    assert pages[0] == pages[1]
    assert main(["view", str(small / "rollouts" / "rollout_000002.jsonl.gz"), "--limit", "1"]) == 0
    assert "\nsample 32  label" in capsys.readouterr().out


def test_samples_are_read_as_they_were_written(tmp_path: Path):
    path = dump_path(tmp_path / "rollouts", "rollout", 7, compressed=True)
    texts = ["\ud800 half a pair", "\u2028\x00<script>", "plain"]
    dump_samples(path, ((Sample(prompt=text, response=text), {"rollout_id": 7}) for text in texts))
    read = [dumped for _, dumped in read_samples(path)]
    assert [dumped.sample.response for dumped in read] == texts and {dumped.rollout_id for dumped in read} == {7}


def test_a_batch_is_replayed_from_either_form_and_a_rollout_has_one(tmp_path: Path):
    batch = RolloutBatch(random_samples(), {"rollout/samples": 13.0})
    for compressed in (True, False, True):
        keep_batch(str(tmp_path), 3, batch, compressed=compressed)
        assert names(tmp_path / "rollouts") == [f"trained_on_000003.jsonl{'.gz' if compressed else ''}"]
        assert read_batch(str(tmp_path), 3) == batch
    with pytest.raises(DataError, match="the folder has rollouts 3 to 3"):
        read_batch(str(tmp_path), 4)


def test_what_fails_while_it_is_written_leaves_what_was_there(tmp_path: Path):
    path = dump_path(tmp_path, "rollout", 0, compressed=True)
    with written_whole(path) as file:
        file.write("old\n")
    with pytest.raises(ZeroDivisionError), written_whole(path) as file:
        file.write("new\n")
        raise ZeroDivisionError
    assert gzip.decompress(path.read_bytes()) == b"old\n"


def damaged(whole: bytes) -> list[bytes]:
    return [whole[:-20], whole[: len(whole) // 2], b"{}\n", whole[:40] + b"\xff" * 40 + whole[80:]]


def test_a_damaged_batch_is_named(tmp_path: Path):
    keep_batch(str(tmp_path), 0, RolloutBatch(random_samples()), compressed=True)
    (path,) = (tmp_path / "rollouts").iterdir()
    for content in (*damaged(path.read_bytes()), b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"trained_on_000000.jsonl.gz cannot be read .*copy it again"):
            read_batch(str(tmp_path), 0)


@pytest.mark.parametrize("kind", ["rollout", "trained"])
def test_a_damaged_file_of_samples_or_of_the_trainer_is_named(kind: str, tmp_path: Path):
    run = write_run(tmp_path / "run", steps=1)
    compress(run)
    path = run / "rollouts" / f"{kind}_000000.jsonl.gz"
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"rollout_000000.jsonl.gz cannot be read"):
            list(read_samples(run / "rollouts" / "rollout_000000.jsonl.gz"))


def test_old_dumps_are_deleted_in_both_forms(tmp_path: Path):
    for number in range(4):
        for kind in ("rollout", "trained", "trained_on"):
            with written_whole(dump_path(tmp_path, kind, number, compressed=number % 2 == 1)) as file:
                file.write("{}\n")
    prune_dumps(tmp_path, 2, 3)
    assert names(tmp_path) == [
        f"{kind}_00000{number}" for kind in ("rollout", "trained") for number in ("2.jsonl", "3.jsonl.gz")
    ] + ["trained_on_000002.jsonl", "trained_on_000003.jsonl.gz"]


def test_what_an_attempt_left_that_went_further_takes_no_place_of_the_newest(tmp_path: Path):
    for number in (1, 2, 7, 8):  # the run went back to 2
        dump_path(tmp_path, "rollout", number, compressed=False).write_text("")
    prune_dumps(tmp_path, 1, 2)
    prune_dumps(tmp_path, 1, 0)  # before which there is nothing
    assert names(tmp_path) == [f"rollout_00000{number}.jsonl" for number in (2, 7, 8)]


def test_metadata_whose_keys_json_cannot_hold_are_written_as_their_repr(tmp_path: Path):
    sample = Sample(prompt="q", index=0, metadata={("a", 1): {"b": (2, {3.5: 4})}, "c": 5})
    dump_samples(tmp_path / "a.jsonl", [(sample, {})])
    row = json.loads((tmp_path / "a.jsonl").read_text())
    assert row["metadata"] == {"('a', 1)": {"b": [2, {"3.5": 4}]}, "c": 5}
