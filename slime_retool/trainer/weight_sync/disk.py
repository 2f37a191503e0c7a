"""Engines that no group and no GPU is shared with read a safetensors folder.

It is written to --update-weight-disk-dir, which the engines must see under the same path; without it to memory
(/dev/shm) where the weights fit, else to --output-dir: both need engines on this host.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.arithmetic.parameters import total_parameters
from slime_retool.engine.admin import every_engine
from slime_retool.trainer.weight_sync.buckets import buckets
from slime_retool.trainer.weight_sync.transport import FromRankZero, Peers


class DiskTransport(FromRankZero):
    """`Transport` through files."""

    def _send(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        with tempfile.TemporaryDirectory(
            prefix="slime-retool-weights-", dir=self._root(), ignore_cleanup_errors=True
        ) as folder:
            os.chmod(folder, 0o755)  # engines may run as another user
            write_checkpoint(self._peers, tensors, Path(folder))
            every_engine(self._peers.engines, lambda engine: engine.update_weights_from_disk(folder))

    def _root(self) -> str:
        config = self._peers.trainer.config
        if config.update_weight_disk_dir is not None:
            root = config.update_weight_disk_dir
        else:
            needed = total_parameters(config) * self._peers.trainer.actor.dtype.itemsize
            memory = Path("/dev/shm")
            fits = memory.is_dir() and shutil.disk_usage(memory).free > 2 * needed
            root = str(memory) if fits else config.output_dir
        Path(root).mkdir(parents=True, exist_ok=True)
        return root


def write_checkpoint(peers: Peers, tensors: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write (Hugging Face name, full tensor) and config.json into `folder`, as engines read them."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    # Files are written from host memory, so that is where the buckets are.
    buffer = torch.empty(peers.bucket_bytes, dtype=torch.uint8)
    for number, bucket in enumerate(buckets(tensors, [buffer])):
        file = f"model-{number:05d}.safetensors"
        save_file(dict(bucket.tensors()), folder / file, metadata={"format": "pt"})
        weight_map |= {name: file for name in bucket.names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if (hf_checkpoint := peers.trainer.config.hf_checkpoint) is not None:
        shutil.copy(Path(hf_checkpoint) / "config.json", folder)
