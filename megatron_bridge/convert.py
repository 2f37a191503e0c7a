"""Convert checkpoints: Hugging Face -> torch_dist and back, one parameter at a time, without a GPU."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_bridge.checkpoint import checkpoint_name, exists, is_part_of_root, write_latest
from megatron_bridge.hf_config import (
    check_against_hf,
    check_tokenizer,
    model_args_from_hf,
    read_hf_config,
    untrained_layers,
)
from megatron_bridge.layout import from_hf, hf_shapes, megatron_shape, to_hf
from megatron_bridge.lora_checkpoint import open_weights
from megatron_bridge.model_config import ModelArgs, check_pipeline, check_tensor_parallel, required
from megatron_bridge.names import (
    EMBEDDING,
    HF_LAYER_PREFIX,
    OUTPUT_LAYER,
    VOCABULARY,
    find_parameter,
    hf_names,
    megatron_names,
)
from megatron_bridge.read_ahead import ReadAhead
from megatron_bridge.safetensors_io import INDEX_FILE, SafetensorsCheckpoint, TensorEntry, rewrite_file
from megatron_bridge.torch_dist_io import TorchDistReader, write_torch_dist

(EMBEDDING_HF,), (OUTPUT_LAYER_HF,) = EMBEDDING.hf, OUTPUT_LAYER.hf
"""HF names of the embedding and the output layer; a checkpoint with tied embeddings may hold both or one."""
_HF_FILE = re.compile(r".+\.(safetensors|json|jinja|model)|(merges|vocab)\.txt|README\.md|LICENSE(\.\w+)?")
"""What lies in a Hugging Face checkpoint, or in a PEFT one."""
_FUSED_EXPERTS = re.compile(r"(.+\.experts)\.\d+\..+")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def convert_hf_to_torch_dist(
    model: ModelArgs,
    hf_checkpoint: str | Path,
    save: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    first: int | None = None,
    last: int | None = None,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Write a torch_dist checkpoint of the HF weights, in their own dtype. Returns its directory.

    A torch_dist checkpoint fits every layout. `tp` only sets the padding of the vocabulary, which loading adapts
    anyway; `pp`, `first` and `last` are checked, so that a layout that cannot be built is refused here already.
    The model flags are compared with config.json before anything else is read.
    Raises ValueError for what does not fit together, and for an existing non-empty `save` without `force`.
    """
    hf_config = read_hf_config(hf_checkpoint)
    check_against_hf(model, hf_config)
    check_tokenizer(hf_checkpoint)
    check_tensor_parallel(model, tp)
    check_pipeline(required(model, "num_layers"), pp, first=first, last=last)
    hf = SafetensorsCheckpoint(hf_checkpoint)
    names = megatron_names(model)
    _check_hf_tensors(hf, model, names, untrained_layers(hf_config))

    def hf_tensors(name: str) -> dict[str, Tensor]:
        return {hf_name: hf.read(hf_name) for hf_name in hf_names(name, model)}

    def dtype_of(name: str) -> torch.dtype:
        return hf.entries[hf_names(name, model)[0]].dtype

    shapes = {name: megatron_shape(name, model, tp) for name in names}
    with replace_directory(save, force=force, sources=[hf_checkpoint]) as out, ReadAhead(hf_tensors, names) as parts:
        with tqdm(total=len(names), desc="HF -> torch_dist", unit="tensor", disable=not progress or None) as bar:

            def value_of(name: str) -> Tensor:
                bar.update()
                return from_hf(name, parts.read(name), model, tp)

            common = {"checkpoint_version": 3.0, "iteration": 0}
            write_torch_dist(out / checkpoint_name(None), shapes, dtype_of, value_of, model=model, common=common)
        write_latest(out, None)
    return Path(save) / checkpoint_name(None)


def convert_torch_dist_to_hf(
    input_dir: str | Path,
    output_dir: str | Path,
    origin_hf_dir: str | Path,
    *,
    base_dir: str | Path | None = None,
    force: bool = False,
    progress: bool = True,
) -> None:
    """Write an HF checkpoint of the torch_dist weights, with the files, keys, shapes and dtypes of the original.

    Reads a converter's or a trainer's checkpoint (optimizer states are ignored) that any layout wrote. Layers beyond
    the model's, such as GLM-4.5's head for a second token, are the original's. LoRA adapters
    are merged into the weights of their base, which `base_dir` names where it is no longer where the run had it.
    Raises ValueError for weights that do not belong to the original's config.json, and for an existing non-empty
    `output_dir` without `force`.
    """
    origin = Path(origin_hf_dir)
    hf_config = read_hf_config(origin)
    model, untrained = model_args_from_hf(hf_config), untrained_layers(hf_config)
    hf = SafetensorsCheckpoint(origin)
    names = megatron_names(model)
    _check_hf_tensors(hf, model, names, untrained)
    reader = open_weights(input_dir, base_dir)
    _check_torch_dist(reader, model, names)
    sources = {hf_name: name for name in names for hf_name in hf_names(name, model)}
    sources.setdefault(OUTPUT_LAYER_HF, EMBEDDING.megatron)  # a tied checkpoint may hold the head as well

    # Neighbours in a file (query, key, value; gate, up) come from one Megatron tensor.
    @functools.lru_cache(maxsize=4)
    def hf_tensors(name: str) -> dict[str, Tensor]:
        return dict(to_hf(name, reader.read(name), model))

    read = [input_dir, origin_hf_dir, *([] if base_dir is None else [base_dir])]
    with replace_directory(output_dir, force=force, sources=read) as out:
        copy_beside_weights(origin, out)
        with tqdm(total=len(hf.entries), desc="torch_dist -> HF", unit="tensor", disable=not progress or None) as bar:

            def value_of(hf_name: str) -> Tensor:
                if _is_kept(hf_name, untrained):
                    return hf.read(hf_name)
                tensors = hf_tensors(sources[hf_name])
                value = tensors[hf_name if hf_name in tensors else EMBEDDING_HF]
                return value.to(hf.entries[hf_name].dtype).contiguous()

            with ReadAhead(value_of, list(hf.entries)) as values:

                def next_value(entry: TensorEntry) -> Tensor:
                    bar.update()
                    return values.read(entry.name)

                for file in hf.files:
                    rewrite_file(origin / file, out / file, next_value)
        index = out / INDEX_FILE
        if index.is_file():
            content = json.loads(index.read_text())
            content.setdefault("metadata", {})["total_size"] = sum(entry.size for entry in hf.entries.values())
            index.write_text(json.dumps(content, indent=2) + "\n")


def copy_beside_weights(origin: Path, out: Path) -> None:
    """The files of an HF checkpoint that are not weights, into `out`."""
    for path in sorted(origin.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.suffix not in _WEIGHT_SUFFIXES:
            shutil.copyfile(path, out / path.name)


@contextlib.contextmanager
def replace_directory(path: str | Path, *, force: bool, sources: Sequence[str | Path]) -> Iterator[Path]:
    """A temporary sibling directory that becomes `path` when the block succeeds, and is removed when it fails.

    A link is followed. Raises ValueError when `path` is there and not empty, unless `force` and it holds a checkpoint
    and nothing else (it is then replaced, at the very end), when that would delete any of `sources`, which the block
    reads, and for a mount point, which nothing can replace.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{path} is a file: give a directory")
    if target.is_mount():
        raise ValueError(f"{path} is a mount point, which a finished directory cannot replace: give a folder inside it")
    occupied = target.is_dir() and any(target.iterdir())
    if occupied and not force:
        raise ValueError(f"{path} is not empty: choose another directory, or pass --force to replace it")
    for source in map(Path, sources):
        if target in (source.resolve(), *source.resolve().parents):
            raise ValueError(f"replacing {path} would delete {source}, which is read: choose another directory")
    if occupied:
        _check_replaceable(target, sources)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        yield part
        if occupied:
            old = target.with_name(f".{target.name}.{os.getpid()}.old")
            target.rename(old)
            part.rename(target)
            shutil.rmtree(old)
        else:
            part.replace(target)  # an empty directory may be replaced
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _check_replaceable(folder: Path, sources: Sequence[str | Path]) -> None:
    """`folder` holds a checkpoint and, but for copies of files beside the `sources`' weights, nothing else.

    Otherwise ValueError, which names what is there.
    """
    held = {path.name: path.is_file() and not path.is_symlink() for path in sorted(folder.iterdir())}
    found = ", ".join(list(held)[:3])
    if exists(folder):
        foreign = [name for name in held if not is_part_of_root(name)]
    elif ("config.json" in held or "adapter_config.json" in held) and any(folder.glob("*.safetensors")):
        copied = {path.name for source in map(Path, sources) if source.is_dir() for path in source.iterdir()}
        foreign = [name for name, file in held.items() if not file or not (_HF_FILE.fullmatch(name) or name in copied)]
    else:
        raise ValueError(
            f"{folder} holds no checkpoint (but {found}), and --force replaces nothing else: choose another directory"
        )
    if foreign:
        raise ValueError(
            f"{folder} holds more than a checkpoint ({', '.join(foreign[:3])}), which --force would delete: choose "
            "another directory"
        )


def _is_kept(hf_name: str, untrained: range) -> bool:
    """Whether a tensor is none of the model's, and stays as it is.

    Old checkpoints hold rotary frequencies, which are computed and not learned; some hold layers beyond the model's.
    """
    match = re.match(re.escape(HF_LAYER_PREFIX) + r"(\d+)\.", hf_name)
    return hf_name.endswith("rotary_emb.inv_freq") or (match is not None and int(match.group(1)) in untrained)


def _check_hf_tensors(hf: SafetensorsCheckpoint, model: ModelArgs, names: list[str], untrained: range) -> None:
    """Every expected tensor is there with its shape and nothing else is, or ValueError."""
    expected: dict[str, tuple[int, ...]] = {}
    for name in names:
        expected |= hf_shapes(name, model)
    for hf_name, shape in expected.items():
        if hf_name not in hf.entries and (fused := _FUSED_EXPERTS.sub(r"\1.gate_up_proj", hf_name)) in hf.entries:
            raise ValueError(
                f"{hf.directory} has the experts of a layer in one tensor ({fused}), which SGLang does not load for "
                "this model: save it with transformers' save_pretrained as it is, which writes one for each expert"
            )
        if hf_name not in hf.entries:
            raise ValueError(f"{hf.directory} has no tensor {hf_name}: the checkpoint is incomplete")
        if hf.entries[hf_name].shape != shape:
            found = hf.entries[hf_name].shape
            raise ValueError(f"{hf.directory}: {hf_name} has shape {list(found)}, config.json implies {list(shape)}")
    extra = [hf_name for hf_name in hf.entries if hf_name not in expected and not _is_kept(hf_name, untrained)]
    if OUTPUT_LAYER_HF in extra:
        # tie_word_embeddings is true here, else the head would be expected
        if not torch.equal(hf.read(OUTPUT_LAYER_HF), hf.read(EMBEDDING_HF)):
            raise ValueError(
                f"{hf.directory}: config.json ties the embeddings, but {OUTPUT_LAYER_HF} differs from {EMBEDDING_HF}: "
                "set tie_word_embeddings to false and add --untie-embeddings-and-output-weights"
            )
        extra.remove(OUTPUT_LAYER_HF)
    if extra:
        raise ValueError(f"{hf.directory} has tensors that no parameter takes: {', '.join(extra[:3])} ({len(extra)})")


def _check_torch_dist(reader: TorchDistReader, model: ModelArgs, names: list[str]) -> None:
    """The checkpoint holds this model, or ValueError."""
    if reader.num_layers() != model.num_layers:
        raise ValueError(
            f"{reader.directory} has {reader.num_layers()} layers, the original's config.json {model.num_layers}: "
            "give the --origin-hf-dir that it was made of"
        )
    if reader.holds(OUTPUT_LAYER.megatron) and not model.untie_embeddings_and_output_weights:
        raise ValueError(
            f"{reader.directory} has an output layer of its own, but the original's config.json ties the embeddings"
        )
    for name in names:
        found, wanted = reader.shape(name), megatron_shape(name, model)
        vocabulary = find_parameter(name, model).kind == VOCABULARY
        fits = found[0] >= required(model, "vocab_size") and found[1:] == wanted[1:] if vocabulary else found == wanted
        if not fits:
            raise ValueError(
                f"{reader.directory}: {name} has shape {list(found)}, the original's config.json implies "
                f"{list(wanted)}: give the --origin-hf-dir that it was made of"
            )
    reader.check_nothing_beyond(names)
