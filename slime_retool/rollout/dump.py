"""Samples as JSON lines, for reading, replaying and the viewer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_retool.rollout.transcripts import ENCODING
from slime_retool.types import Sample


def dump_samples(path: Path, rows: Iterable[tuple[Sample, dict[str, Any]]]) -> None:
    """Write each sample's fields, and the further ones given with it, as one line.

    The file appears whole or not at all. What JSON cannot hold (from metadata, say) is written as its `repr`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w", **ENCODING) as file:
        for sample, further in rows:
            file.write(json.dumps({**asdict(sample), **further}, ensure_ascii=False, default=repr) + "\n")
    os.replace(part, path)
