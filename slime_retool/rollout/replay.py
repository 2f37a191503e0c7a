"""`--replay-rollouts`: the batches that an earlier run trained on are trained on again, without engines.

    OUTPUT_DIR/rollouts/trained_on_000003.jsonl   first line: rollout_id and metrics; then one `TrainSample` per line

With --dump-rollouts-compressed it is .jsonl.gz.

Numbers are written so that they are read back to the last bit, and so are the losses on the same device with the same
flags and first weights.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from dataclasses import fields
from pathlib import Path
from typing import Any

from slime_retool.dumps import DAMAGED, FOLDER, dump_path, dumps_in, find_dump, number_of, open_dump, written_whole
from slime_retool.errors import DataError
from slime_retool.protocols import DataSource
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.routing import pack_experts, unpack_experts
from slime_retool.types import RolloutBatch, TrainSample


def batch_path(folder: str, rollout_id: int) -> Path:
    """Where the batch of a rollout lies in a run's --output-dir, or in the folder `rollouts` of one."""
    inside = Path(folder) / FOLDER
    return find_dump(dump_path(inside if inside.is_dir() else Path(folder), "trained_on", rollout_id))


def dump_batch(path: Path, rollout_id: int, batch: RolloutBatch) -> None:
    """Write what the trainer is given. The file appears whole or not at all."""
    with written_whole(path) as file:
        file.write(json.dumps({"rollout_id": rollout_id, "metrics": batch.metrics}) + "\n")
        file.writelines(json.dumps(_row(sample)) + "\n" for sample in batch.samples)


async def generate_rollout(context: RolloutContext, data: DataSource, rollout_id: int) -> RolloutBatch:
    """The batch of the same rollout in --replay-rollouts. Raises DataError where it is not there, or damaged."""
    assert context.config.replay_rollouts is not None
    return await asyncio.to_thread(read_batch, context.config.replay_rollouts, rollout_id)


def read_batch(folder: str, rollout_id: int) -> RolloutBatch:
    """What `dump_batch` wrote. Raises DataError where it is not there, or damaged."""
    path = batch_path(folder, rollout_id)
    try:
        with open_dump(path) as file:
            metrics = json.loads(next(file))["metrics"]
            samples = [_sample(json.loads(line)) for line in file]
    except FileNotFoundError:
        found = sorted(int(number_of(other)) for other in dumps_in(path.parent, "trained_on_*"))
        there = f"has rollouts {found[0]} to {found[-1]}" if found else "has none"
        raise DataError(
            f"--replay-rollouts: no file {path}; the folder {there}: give the --output-dir of a run with "
            "--dump-rollouts, and a --num-rollout that it reached"
        ) from None
    except (OSError, *DAMAGED, ValueError, LookupError, TypeError, StopIteration) as error:
        raise DataError(f"--replay-rollouts: {path} cannot be read ({error}); copy it again") from error
    return RolloutBatch(samples, metrics)


def _row(sample: TrainSample) -> dict[str, Any]:
    row = {field.name: _plain(getattr(sample, field.name)) for field in fields(sample)}
    return row | {"routed_experts": pack_experts(sample.routed_experts)}


def _sample(row: dict[str, Any]) -> TrainSample:
    return TrainSample(**row | {"routed_experts": unpack_experts(row.get("routed_experts"))})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, array) else value
