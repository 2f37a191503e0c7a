"""What the trainer computed for the samples of a rollout, beside what --dump-rollouts wrote of them."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from slime_retool.dumps import written_whole
from slime_retool.trainer.batch import TrainBatch


def dump_trained(path: Path, batch: TrainBatch, log_probs: Tensor | None, advantages: Tensor) -> None:
    """Write a line for each sample that was trained on.

    `log_probs` [N] are those under the weights before the update, None where the run has them of some samples only
    (--use-rollout-logprobs with several optimizer steps); `advantages` [N] are as the loss reads them, importance
    weights included. A line holds `index` (`Sample.index`) and the values from the first learned token to the end.
    """
    lengths = batch.lengths.tolist()
    columns = {"advantages": advantages} | ({"log_probs": log_probs} if log_probs is not None else {})
    parts = {name: column.float().cpu().split(lengths) for name, column in columns.items()}
    with written_whole(path) as file:
        for place, (index, mask) in enumerate(zip(batch.indices, batch.mask.split(lengths), strict=True)):
            learned = mask.nonzero()
            first = int(learned[0]) if len(learned) else len(mask)
            values = {name: [round(v, 6) for v in column[place][first:].tolist()] for name, column in parts.items()}
            file.write(json.dumps({"index": index, **values}) + "\n")
