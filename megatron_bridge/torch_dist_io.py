"""Write and read Megatron's torch_dist checkpoints tensor by tensor, in one process without torch.distributed.

Built on torch.distributed.checkpoint's file format, which is what `megatron.core.dist_checkpointing` uses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.utils.serialization import config as serialization_config

from megatron_bridge.checkpoint import is_weight
from megatron_bridge.direct_io import DirectWriter, read_tensor
from megatron_bridge.model_config import ModelArgs, alike_layers, required
from megatron_bridge.names import LAYER_PREFIX, split_expert, split_name
from megatron_bridge.tensor_archive import load_archive


@dataclass(frozen=True)
class Place:
    """Where a checkpoint holds a parameter: under `key`, at `index` of a stack of such parameters."""

    key: str
    index: tuple[int, ...] = ()


def places(name: str) -> tuple[Place, Place]:
    """The place of a parameter by its global name when all layers are alike, and when they are not.

    Experts of a layer always share a key, stacked in a dimension of their own. So do layers that are all alike, in a
    dimension before that; else each has its own keys.
    """
    layer, rest = split_name(name)
    if layer is None:
        return Place(rest), Place(rest)
    expert, rest = split_expert(rest)
    index = () if expert is None else (expert,)
    return Place(LAYER_PREFIX + rest, (layer, *index)), Place(f"{LAYER_PREFIX}{layer}.{rest}", index)


class _LazySavePlanner(SavePlanner):
    """Plans one chunk per parameter and asks for its value only when it is written."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], dtype_of: Callable[[str], torch.dtype], model: ModelArgs,
        value_of: Callable[[str], Tensor],
    ) -> None:  # fmt: skip
        self.value_of = value_of
        self.names: dict[MetadataIndex, str] = {}
        items = []
        alike = alike_layers(model)
        for name, shape in shapes.items():
            place = places(name)[0 if alike else 1]
            sizes = torch.Size((*[1] * len(place.index), *shape))
            offsets = torch.Size((*place.index, *[0] * len(shape)))
            index = MetadataIndex(place.key, offsets)
            self.names[index] = name
            layer, rest = split_name(name)
            stack = [required(model, "num_layers")] if alike and layer is not None else []
            if split_expert(rest)[0] is not None:
                stack.append(required(model, "num_experts"))
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=dtype_of(name)),
                size=torch.Size((*stack, *shape)),
            )
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None: ...

    def create_local_plan(self) -> SavePlan:
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.planner_data = {}
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        # The global plan adds chunk numbers to the indices; MetadataIndex ignores them in comparisons.
        name = self.names[write_item.index]
        assert write_item.tensor_data is not None
        return self.value_of(name).reshape(write_item.tensor_data.chunk.sizes)


def write_torch_dist(
    directory: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype_of: Callable[[str], torch.dtype],
    value_of: Callable[[str], Tensor],
    *,
    model: ModelArgs,
    common: dict[str, Any],
) -> None:
    """Write a checkpoint of full Megatron tensors, one after the other.

    shapes: full shape by global parameter name. `value_of(name)` gives the tensor when it is written.
    common: what Megatron keeps in common.pt.
    """
    directory.mkdir(parents=True, exist_ok=True)
    writer = direct_file_writer(directory)
    try:
        with warnings.catch_warnings(), no_checksums():
            planner = _LazySavePlanner(shapes, dtype_of, model, value_of)
            # It remarks that one process saves, which is what no_dist asks for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
    assert len(FileSystemReader(directory).read_metadata().storage_data) == len(shapes), "tensors were left out"
    write_common(directory, common)


def write_common(directory: Path, common: dict[str, Any]) -> None:
    """Write what belongs to no rank: Megatron's common.pt, and metadata.json, which says how all of it is stored."""
    torch.save(common, directory / "common.pt")
    backends = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (directory / "metadata.json").write_text(json.dumps(backends))


def direct_file_writer(directory: Path) -> FileSystemWriter:
    """Torch's writer of host tensors into one file of this process, past the page cache; done when the disk is."""
    # Not more than one thread: an exception in the writer's further threads is lost, and with it the tensors.
    # Copying ahead is for tensors on a GPU, which it would start; DirectWriter itself waits for the disk.
    writer = FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=0, sync_files=False)
    writer.fs = _DirectFileSystem()
    return writer


class _DirectFileSystem(FileSystem):
    """Writes past the page cache."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with DirectWriter(Path(path)) as stream:
            yield stream


def no_checksums() -> contextlib.AbstractContextManager[None]:
    """Leave out the CRC32 of each tensor's record: no reader of these files compares it, and it costs a pass."""
    return serialization_config.patch("save.compute_crc32", False)  # type: ignore[attr-defined]  # installed by torch


class TorchDistReader:
    """Reads full parameters out of a checkpoint directory, whatever layout wrote it. ValueError for a damaged one.

    Handles stacked layers and, for checkpoints saved with Megatron's `non_homogeneous_layers`, one key per layer.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            self.metadata: Metadata = FileSystemReader(self.directory).read_metadata()
        except (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError) as error:
            path = self.directory / ".metadata"
            raise ValueError(f"{path} is damaged or incomplete: copy the checkpoint again ({error})") from None
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        """For each key that was read, its chunks by the numbers of the parameters that they hold something of."""

    def find(self, name: str) -> tuple[TensorStorageMetadata, Place]:
        """Metadata and place of a parameter. ValueError when the checkpoint lacks it."""
        for place in places(name):
            stored = self.metadata.state_dict_metadata.get(place.key)
            if isinstance(stored, TensorStorageMetadata):
                if any(i >= size for i, size in zip(place.index, stored.size, strict=False)):
                    break
                return stored, place
        raise ValueError(f"{self.directory} has no tensor {name}: it belongs to another model")

    def holds(self, name: str) -> bool:
        """Whether there is a parameter of this global name."""
        try:
            self.find(name)
        except ValueError:
            return False
        return True

    def weights(self) -> dict[str, TensorStorageMetadata]:
        """What the checkpoint holds of a model, by key."""
        found = self.metadata.state_dict_metadata.items()
        return {key: stored for key, stored in found if isinstance(stored, TensorStorageMetadata) and is_weight(key)}

    def check_nothing_beyond(self, names: Iterable[str]) -> None:
        """Raise ValueError when the checkpoint holds weights beside these parameters, or lacks one of them."""
        stacks: dict[str, tuple[int, ...]] = {}
        for name in names:
            place = self.find(name)[1]
            sizes = tuple(number + 1 for number in place.index)
            stacks[place.key] = max(sizes, stacks.get(place.key, sizes))
        beyond = [
            key
            for key, stored in self.weights().items()
            if key not in stacks or tuple(stored.size[: len(stacks[key])]) != stacks[key]
        ]
        if beyond:
            raise ValueError(
                f"{self.directory} holds weights that the original's config.json has no place for: "
                f"{', '.join(beyond[:3])} ({len(beyond)}): give the --origin-hf-dir that it was made of"
            )

    def num_layers(self) -> int:
        """Number of layers that the checkpoint holds."""
        for key, stored in self.metadata.state_dict_metadata.items():
            if key == f"{LAYER_PREFIX}self_attention.linear_qkv.weight" and isinstance(stored, TensorStorageMetadata):
                return stored.size[0]
        return len({split_name(key)[0] for key in self.metadata.state_dict_metadata} - {None})

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of one parameter (vocabulary padding included)."""
        stored, place = self.find(name)
        return tuple(stored.size[len(place.index) :])

    def read(self, name: str) -> Tensor:
        """One full parameter."""
        stored, place = self.find(name)
        shape = stored.size[len(place.index) :]
        offsets, sizes = (*place.index, *[0] * len(shape)), (*[1] * len(place.index), *shape)
        wanted = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        own = dataclasses.replace(stored, chunks=self._chunks_at(place, stored))
        items = create_read_items_for_chunk_list(place.key, own, [wanted])
        found = sum(math.prod(item.lengths) for item in items)
        if found != math.prod(sizes):
            raise ValueError(f"{self.directory}: {name} is incomplete ({found} of {math.prod(sizes)} values)")
        if len(items) == 1:
            return self._read_item(items[0]).reshape(shape)
        target = torch.empty(sizes, dtype=stored.properties.dtype)
        for item in items:
            target[_slices(item.dest_offsets, item.lengths)] = self._read_item(item)
        return target.reshape(shape)

    def _chunks_at(self, place: Place, stored: TensorStorageMetadata) -> list[ChunkStorageMetadata]:
        """The chunks with something of one parameter.

        Torch looks through all chunks that it is given, which of a stack of 12,000 experts would take it 0.03 s each.
        """
        if place.key not in self._chunks:
            chunks = self._chunks[place.key] = {}
            for chunk in stored.chunks:
                ranges = [range(start, start + n) for start, n in zip(chunk.offsets, chunk.sizes, strict=True)]
                for index in itertools.product(*ranges[: len(place.index)]):
                    chunks.setdefault(index, []).append(chunk)
        return self._chunks[place.key].get(place.index, [])

    def _read_item(self, item: ReadItem) -> Tensor:
        """The part of one stored tensor that the item asks for."""
        info = self.metadata.storage_data[item.storage_index]
        path = self.directory / info.relative_path
        if info.transform_descriptors:
            raise ValueError(f"{path} was written with {info.transform_descriptors}: save it without extensions")
        try:
            archive = read_tensor(path, info.offset, torch.uint8, (info.length,))
            return load_archive(archive)[_slices(item.storage_offsets, item.lengths)]
        except (EOFError, ValueError) as error:
            raise ValueError(f"{path} is incomplete: copy it again ({error})") from None


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
