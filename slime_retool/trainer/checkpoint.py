"""A trainer's whole state in torch_dist, resumable in any TP/PP/DP layout: what is where, and loading it.

`trainer.checkpoint_writer` writes it.

    SAVE/latest_checkpointed_iteration.txt    written last, so it never names an incomplete checkpoint
    SAVE/iter_0000003/                        Megatron's files: weights, and keys `optimizer.*`
    SAVE/iter_0000003/trainer_state.json      rollout id, scheduler step, the caller's `extra`
    SAVE/iter_0000003/rng.pt                  torch's random state on rank 0
    SAVE/iter_0000003/lora.json               with LoRA, whose checkpoints hold adapters and not the frozen weights
    SAVE/iter_0000003/files.json              size and digest of each file, looked at before a run goes on from it

Models have no dropout, so training draws no random numbers after the weights were made; the random state is kept for
hooks that draw some.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.checkpoint import checkpoint_name, load_model_state, model_state_dict, resolve_checkpoint_dir
from megatron_bridge.lora_checkpoint import base_checkpoint
from megatron_bridge.lora_spec import LoraSpec, is_adapter
from megatron_bridge.torch_dist_io import TorchDistReader
from slime_retool.errors import CheckpointError
from slime_retool.run_folder import STATE_FILE
from slime_retool.trainer.optimizer_state import (
    KINDS,
    halves_master_weights,
    load_optimizer_state,
    optimizer_kind,
    state_to_load,
)

logger = logging.getLogger(__name__)
RNG_FILE = "rng.pt"
REASON_LENGTH = 200
"""Characters of what Megatron or torch said that an error repeats."""

T = TypeVar("T")


@dataclass(slots=True)
class TrainerState:
    """What a checkpoint holds beside tensors."""

    rollout_id: int
    scheduler_steps: int
    with_optimizer: bool
    extra: dict[str, Any]
    optimizer: str | None = None
    """Kind of the optimizer that is in it (`optimizer_state.KINDS`); an older checkpoint does not say."""


def load(
    root: str, *, module: Any, optimizer: Any, vocab_size: int, iteration: int | None = None,
    lora: LoraSpec | None = None,
) -> TrainerState:  # fmt: skip
    """Load the newest checkpoint under `root`, or that of rollout `iteration`, into model and optimizer. Collective.

    Options given to this run (learning rate, betas, ...) win over those of the run that saved. With `lora` only the
    adapters are loaded. Raises CheckpointError when it is incomplete, or of another model, other adapters or an
    optimizer that cannot go on from it.
    """
    directory = _directory(root, iteration)
    state_path = directory / STATE_FILE
    if not state_path.is_file():
        raise CheckpointError(
            f"{directory} has no {STATE_FILE}: it holds weights only and cannot be resumed; pass it as --ref-load"
        )
    try:
        state = TrainerState(**json.loads(state_path.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{state_path} is damaged ({error}); resume from an older checkpoint") from error
    _check_adapters(directory, lora)
    if state.with_optimizer:
        _check_optimizer(directory, state, optimizer)
    tensors = model_state_dict(module)
    reader = _reader(directory)
    _check_nothing_beyond(reader, tensors)
    kept: dict[str, Tensor] = {}
    if lora is None:
        _check_vocabulary(reader, vocab_size)
    else:
        kept = take_out(tensors, lambda name: not is_adapter(name))
    if state.with_optimizer:
        tensors["optimizer"] = state_to_load(optimizer, tensors["model"])
    loaded = _load_tensors(directory, tensors, module, kept)
    if state.with_optimizer:
        _loading(directory, lambda: load_optimizer_state(optimizer, loaded["optimizer"]))
    if (directory / RNG_FILE).is_file():
        torch.set_rng_state(_loading(directory, lambda: torch.load(directory / RNG_FILE, weights_only=True)))
    return state


def load_weights(root: str, *, module: Any, vocab_size: int, skip: Collection[str] = ()) -> None:
    """Load only the weights, from a converter's or a trainer's checkpoint. Collective; CheckpointError as in `load`.

    Parameters named in `skip` are left as they are.
    """
    directory = _directory(root)
    _check_adapters(directory, None)
    state, reader = model_state_dict(module), _reader(directory)
    _check_vocabulary(reader, vocab_size)
    _check_nothing_beyond(reader, state)
    _load_tensors(directory, state, module, take_out(state, lambda name: name in skip))


def base_of(lora: LoraSpec, root: str, load: str | None, iteration: int | None) -> str:
    """The checkpoint of the frozen weights in `root`: with `load` that one which the adapters there were trained on.

    iteration: as in `load`. Raises CheckpointError where there is none.
    """
    saved = None
    if load is not None:
        directory = _directory(load, iteration)
        saved = _loading(directory, lambda: LoraSpec.read(directory))
    try:
        return str(base_checkpoint(root, saved or replace(lora, base=None)))
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _load_tensors(directory: Path, tensors: dict[str, Any], module: Any, kept: dict[str, Tensor]) -> dict[str, Any]:
    """Read what the sharded state asks for; the model gets it and the `kept` parameters. Returns what was read."""
    from megatron.core import dist_checkpointing

    loaded = _loading(directory, lambda: dist_checkpointing.load(tensors, str(directory)))
    loaded["model"] |= kept
    load_model_state(module, loaded)
    return loaded


def rows_of(root: str, name: str) -> int | None:
    """First dimension of a parameter in the newest checkpoint under `root`; None where it has no such parameter."""
    reader = _reader(_directory(root))
    return reader.shape(name)[0] if reader.holds(name) else None


def take_out(state: dict[str, Any], chosen: Callable[[str], bool]) -> dict[str, Tensor]:
    """Remove parameters from a sharded state; returns their values, by name."""
    return {name: state["model"].pop(name).data for name in list(state["model"]) if chosen(name)}


def _check_adapters(directory: Path, lora: LoraSpec | None) -> None:
    """The checkpoint holds the adapters that the run wants, or whole weights where it wants none."""
    saved = _loading(directory, lambda: LoraSpec.read(directory))
    if saved is not None and lora is None:
        raise CheckpointError(
            f"{directory} holds LoRA adapters ({saved}), not whole weights: resume it with the same --lora flags as "
            "--load, or merge it first (`slime-retool convert to-hf`)"
        )
    if lora is not None and (saved is None or not saved.same_adapters(lora)):
        holds = "whole weights" if saved is None else f"adapters of {saved}"
        raise CheckpointError(
            f"{directory} holds {holds}, the --lora flags say {lora}: make them equal, or name another --load"
        )
    if lora is not None and saved is not None and saved.base not in (lora.base, os.path.dirname(lora.base or "")):
        logger.warning("the adapters in %s were trained on %s, and go on with %s", directory, saved.base, lora.base)


def _check_optimizer(directory: Path, state: TrainerState, optimizer: Any) -> None:
    """The checkpoint holds the state of an optimizer of this run's kind, with whole master weights."""
    own = optimizer_kind(optimizer)
    if state.optimizer not in (None, own):
        saved = KINDS.get(state.optimizer, state.optimizer)
        raise CheckpointError(
            f"{directory} holds Adam's state of a run with {saved}, this one has {KINDS[own]}: make them equal, or "
            "pass it as --ref-load, to go on from its weights with a new Adam"
        )
    flags = state.extra.get("flags", {})
    if flags.get("use_precision_aware_optimizer") and not flags.get("optimizer_cpu_offload"):
        raise CheckpointError(
            f"{directory} was saved with --use-precision-aware-optimizer and holds only halves of its master weights; "
            "pass it as --ref-load, to go on from its weights with a new Adam"
        )
    if halves_master_weights(optimizer):
        raise CheckpointError(
            f"{directory} holds master weights, of which --use-precision-aware-optimizer keeps halves that no "
            "checkpoint holds; leave it out"
        )


def _directory(root: str, iteration: int | None = None) -> Path:
    """The newest checkpoint under `root`, or that of rollout `iteration`."""
    try:
        directory = resolve_checkpoint_dir(root if iteration is None else Path(root) / checkpoint_name(iteration))
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if not (directory / "metadata.json").is_file():
        raise CheckpointError(f"{directory} has no metadata.json: the checkpoint is incomplete; use another")
    return directory


def _reader(directory: Path) -> TorchDistReader:
    return _loading(directory, lambda: TorchDistReader(directory))


def _check_nothing_beyond(reader: TorchDistReader, state: dict[str, Any]) -> None:
    """Megatron leaves out what no rank asks for, be it biases of the model that was saved. Collective."""
    stages: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(stages, {tensor.key for tensor in state["model"].values()})
    beyond = sorted(reader.weights().keys() - set().union(*stages))
    if beyond:
        raise CheckpointError(
            f"{reader.directory} holds weights that this model has no place for: {', '.join(beyond[:3])} "
            f"({len(beyond)}); compare the model flags with those it was made with"
        )


def _check_vocabulary(reader: TorchDistReader, vocab_size: int) -> None:
    """Megatron lets the vocabulary's padding differ, and so would fill missing entries with zeros."""
    rows = _loading(reader.directory, lambda: reader.shape("embedding.word_embeddings.weight")[0])
    if rows < vocab_size:
        raise CheckpointError(
            f"{reader.directory} has {rows} vocabulary entries, padding included, --vocab-size says {vocab_size}; "
            "compare the model flags with those it was made with"
        )


def _loading(directory: Path, read: Callable[[], T]) -> T:
    """Run `read`; what Megatron and torch raise about another model or a missing file becomes a CheckpointError."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint import CheckpointException

    try:
        return read()
    except (
        CheckpointingException, CheckpointException, KeyError, ValueError, RuntimeError, OSError, EOFError,
        pickle.UnpicklingError, AttributeError,  # the last where megatron-core 0.16 finds no common.pt
    ) as error:  # fmt: skip
        reason = str(error).strip().splitlines() or [type(error).__name__]
        # Megatron may list every key there.
        short = reason[-1] if len(reason[-1]) <= REASON_LENGTH else f"{reason[-1][:REASON_LENGTH]} ..."
        raise CheckpointError(
            f"{directory} cannot be loaded: it is incomplete or of another model ({short}); "
            "compare the model flags with those it was made with"
        ) from error


def copy_weights(module: Any, *, pinned: bool) -> dict[str, Tensor]:
    """A copy of all parameters in host memory (page-locked with `pinned`, for fast copies to the GPU)."""
    copies = {}
    for name, parameter in module.named_parameters():
        copy = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu", pin_memory=pinned)
        copies[name] = copy.copy_(parameter.detach())
    return copies


@torch.no_grad()
def set_weights(module: Any, weights: dict[str, Tensor]) -> None:
    """Put copied parameters back, in place."""
    for name, parameter in module.named_parameters():
        parameter.copy_(weights[name], non_blocking=True)
    torch.cuda.synchronize()
