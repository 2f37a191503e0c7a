"""Where a torch_dist checkpoint lies and how its keys are named: the agreement of trainer and converter.

    OUT/latest_checkpointed_iteration.txt     "release" (a converted checkpoint) or an iteration number
    OUT/release/  or  OUT/iter_0000012/       .metadata, *.distcp, common.pt, metadata.json (Megatron's format)
    OUT/iter_0000012/files.json               size and digest of each file; written by trainers

Keys of model weights carry no prefix: `embedding.word_embeddings.weight`, `decoder.final_layernorm.weight`,
`output_layer.weight` (untied models only), and one key for all layers, `decoder.layers.<name>`, whose first
dimension is the layer. This is what `dist_checkpointing.save({"model": model.sharded_state_dict()})` writes;
optimizer states have keys that begin with `optimizer.`. Layouts (TP, PP, uneven PP) do not show in a checkpoint.
The `_extra_state` objects of Megatron's linear layers (fp8 scales, empty otherwise) are left out on both sides, so
that a checkpoint does not depend on whether Transformer Engine was there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

LATEST_FILE = "latest_checkpointed_iteration.txt"
FILES = "files.json"
"""In the folder of a checkpoint: size and digest of each of its files."""
RELEASE = "release"
PART, OLD = ".part", ".old"
"""Ends of folders that are not complete, or about to be deleted; `*.part` and `*.old` of a killed run can go."""

_ITERATION = re.compile(r"iter_(\d{7,})")
_PIECE = 2**20
_PIECES = 64
"""A file of more than this many pieces is digested in so many of them, evenly spaced: reading tens of gigabytes again
would take longer than starting a run."""


def checkpoint_name(iteration: int | None) -> str:
    """`iter_0000012`, or `release` for None."""
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def is_checkpoint_name(name: str) -> bool:
    """Whether it is one that `checkpoint_name` gives."""
    return name == RELEASE or _ITERATION.fullmatch(name) is not None


def exists(root: str | Path) -> bool:
    """Whether `root` holds a finished checkpoint."""
    return (Path(root) / LATEST_FILE).is_file()


def is_checkpoint(path: str | Path) -> bool:
    """Whether `path` is itself the folder of one checkpoint (`iter_0000012`, `release`), and no root of several."""
    return (Path(path) / ".metadata").is_file()


def holds_checkpoints(root: str | Path) -> bool:
    """Whether `root` has a checkpoint, be it one that nothing points at."""
    return exists(root) or bool(_iterations(root))


def _iterations(root: str | Path) -> dict[int, Path]:
    """{number: folder} of what `root` holds under names of iterations."""
    found = ((path, _ITERATION.fullmatch(path.name)) for path in Path(root).glob("iter_*"))
    return {int(name[1]): path for path, name in found if name is not None}


def is_part_of_root(name: str) -> bool:
    """Whether a file or folder called `name` may lie in a folder of checkpoints."""
    kept = name.removesuffix(PART).removesuffix(OLD)
    return kept == LATEST_FILE or is_checkpoint_name(kept)


def what_it_is(path: str | Path) -> str:
    """For the end of a refusal: what lies at `path`, where a checkpoint of another kind was wanted, and what to do.

    "; it holds LoRA adapters, ..."; empty where nothing is known of it.
    """
    path = Path(path)
    if (path / "adapter_config.json").is_file():
        return "; it holds LoRA adapters in PEFT's format: give the model that they belong to, or merge them into it"
    if (path / "config.json").is_file():
        return "; it is a Hugging Face checkpoint: make one of it with `slime-retool convert to-megatron`"
    if exists(path):
        return "; it is a Megatron checkpoint: make one of it with `slime-retool convert to-hf`"
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)) and not path.parent.exists():
        return f"; if it names a model of the Hugging Face hub: hf download {path} --local-dir {path.name}"
    return ""


def latest_iteration(root: str | Path) -> int | None:
    """The newest complete checkpoint under `root`; None for a converted one ("release").

    Raises ValueError where there is none.
    """
    path = Path(root) / LATEST_FILE
    if not exists(root):
        raise ValueError(
            f"{path} does not exist: {root} is not a checkpoint directory, or nothing was saved yet{what_it_is(root)}"
        )
    text = path.read_text().strip()
    if text != RELEASE and not text.isdigit():
        raise ValueError(f"{path} holds {text!r}: expected {RELEASE!r} or an iteration number")
    return None if text == RELEASE else int(text)


def latest_rollout(root: str | Path | None) -> int | None:
    """The rollout of the newest checkpoint under `root`; None for a converted one, or where there is none.

    Raises ValueError where the file that names it is damaged.
    """
    return latest_iteration(root) if root is not None and exists(root) else None


def write_latest(root: str | Path, iteration: int | None) -> None:
    """Point `root` at a checkpoint that is complete (atomic). One process calls it, after all have saved."""
    path = Path(root) / LATEST_FILE
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        file.write(RELEASE if iteration is None else str(iteration))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write_digests(directory: Path) -> None:
    """Write `directory`/files.json, for `damage`. One process calls it, when all files are there."""
    digests = {path.name: _digest(path) for path in sorted(directory.iterdir()) if path.name != FILES}
    (directory / FILES).write_text(json.dumps(digests, indent=1))


def damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint's files, in words; None where they are as they were written.

    Of a checkpoint without files.json (a converted one, say) only what Megatron cannot do without is looked for.
    """
    needed = [".metadata", "metadata.json"]
    try:
        digests = json.loads((directory / FILES).read_text()) if (directory / FILES).exists() else {}
        for name in [*needed, *digests]:
            if not (directory / name).is_file():
                return f"{directory / name} is missing"
        for name, written in digests.items():
            found = _digest(directory / name)
            if found["size"] != written["size"]:
                return f"{directory / name} has {found['size']} bytes, {written['size']} were written"
            if found != written:
                return f"{directory / name} does not hold what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{directory} cannot be read ({error})"
    return None


def _digest(path: Path) -> dict[str, int]:
    size, crc = path.stat().st_size, 0
    every = max(1, size // _PIECE // (_PIECES - 1))
    with path.open("rb") as file:
        for start in range(0, size, every * _PIECE):
            # The last piece ends with the file.
            file.seek(start if start + every * _PIECE < size else max(start, size - _PIECE))
            crc = zlib.crc32(file.read(_PIECE), crc)
    return {"size": size, "crc32": crc}


def candidates(root: str | Path) -> list[int]:
    """Rollouts of the checkpoints under `root` that a run may go on from, the newest first; empty for a converted one.

    Raises ValueError as `latest_iteration`.
    """
    newest = latest_iteration(root)
    if newest is None:
        return []
    return [newest, *sorted((number for number in _iterations(root) if number < newest), reverse=True)]


def prune(root: str | Path, keep: int) -> None:
    """Delete the oldest of the complete checkpoints under `root`, up to the newest, until `keep` are left.

    Never the newest, nor one with a higher number than it: an earlier run's. One process calls it.
    """
    assert keep >= 1, keep
    newest = latest_iteration(root)
    if newest is None:
        return
    own = sorted((number, path) for number, path in _iterations(root).items() if number <= newest)
    for _, path in own[:-keep]:
        # A name that no load takes, should this end halfway; the next save deletes it.
        old = path.with_name(path.name + OLD)
        path.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def resolve_checkpoint_dir(path: str | Path) -> Path:
    """The directory with the data, from that directory itself or from the root that holds several.

    Raises ValueError where there is no torch_dist checkpoint.
    """
    path = Path(path)
    if is_checkpoint(path):
        return path
    directory = path / checkpoint_name(latest_iteration(path))
    if not is_checkpoint(directory):
        raise ValueError(f"{directory} is not a torch_dist checkpoint: it has no .metadata file")
    return directory


def is_extra_state(key: str) -> bool:
    """Whether a key is a layer's `_extra_state`; grouped experts number all but their first: `_extra_state3`."""
    return re.fullmatch(r"_extra_state\d*", key.rpartition(".")[2]) is not None


def is_weight(key: str) -> bool:
    """Whether a tensor under this key is a model's; several optimizers of a run number their keys.

    A head that predicts further tokens (`mtp.`) is not: it is neither trained nor used.
    """
    return re.match(r"(chained_\d+\.)?optimizer\.|mtp\.", key) is None and not is_extra_state(key)


def model_state_dict(module: Any) -> dict[str, Any]:
    """{"model": sharded state} of this rank's GPTModel, for `dist_checkpointing.save` and `load`."""
    return {"model": {key: value for key, value in module.sharded_state_dict().items() if not is_extra_state(key)}}


def load_model_state(module: Any, state: dict[str, Any]) -> None:
    """Put what `dist_checkpointing.load(model_state_dict(module), ...)` returned into the model.

    The padding of the vocabulary may differ: rows that the checkpoint does not have are zero.
    """
    missing, unexpected = module.load_state_dict(state["model"], strict=False)
    missing = [key for key in missing if not is_extra_state(key)]
    assert not missing and not unexpected, (missing, unexpected)
