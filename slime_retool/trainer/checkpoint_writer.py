"""Checkpoints are copied to host memory, and written to the disk from there beside whatever comes next.

    staged = stage(root, rollout_id, module=..., optimizer=..., ...)   # collective: the trainer waits for this much
    writer.write([staged], background=True)
    writer.finish(wait=True)                                           # before the next one, and at the end

A folder is written under another name and renamed when it is complete, then `latest_checkpointed_iteration.txt` names
it: a run that is killed at any moment leaves the checkpoint before it in force. The ranks' threads agree over a gloo
group of their own, so that nothing waits for the trainer, nor the trainer for them.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.arithmetic import GIB
from megatron_bridge.checkpoint import OLD, PART, checkpoint_name, model_state_dict, write_digests, write_latest
from megatron_bridge.lora_spec import LoraSpec, is_adapter
from megatron_bridge.torch_dist_io import direct_file_writer, no_checksums, write_common
from slime_retool.background import in_background
from slime_retool.errors import SaveError
from slime_retool.run_folder import STATE_FILE, free_bytes
from slime_retool.trainer.checkpoint import RNG_FILE, TrainerState, take_out
from slime_retool.trainer.host_copies import HostCopies
from slime_retool.trainer.optimizer_state import optimizer_state

POLL_SECONDS = 0.1


@dataclass(slots=True)
class Staged:
    """This rank's share of a checkpoint of one model, which no optimizer step changes any more."""

    root: str
    state: TrainerState
    tensors: dict[str, Any]
    """As torch.distributed.checkpoint takes them; all on the host."""
    common: dict[str, Any]
    """What is no tensor of any rank's (parameter groups); rank 0 writes it."""
    random_state: Tensor
    lora: LoraSpec | None
    after: Path | None
    """Comes into force when this folder is there, which other processes write."""


def stage(
    root: str, state: TrainerState, *, module: Any, optimizer: Any | None, copies: HostCopies,
    lora: LoraSpec | None = None, after: Path | None = None,
) -> Staged:  # fmt: skip
    """Copy what a checkpoint holds to the host. Collective.

    Give no `optimizer` before its first step: Adam has no state then. With `lora` only the adapters are taken.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.torch import (
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )

    tensors = model_state_dict(module)
    if lora is not None:
        take_out(tensors, lambda name: not is_adapter(name))
    if optimizer is not None:
        tensors["optimizer"] = optimizer_state(optimizer, tensors["model"], copies.copy)
    sharded, common = save_preprocess(tensors)
    # Of what several ranks hold, one writes it.
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    for shards in flat.values():
        for shard in shards:
            if isinstance(shard, ShardedTensor):
                shard.data = copies.copy(shard.data)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Staged(
        root, state, mcore_to_pyt_state_dict(flat, False), copy.deepcopy(common), torch.get_rng_state(), lora, after
    )


class CheckpointWriter:
    """Writes what was staged, one save at a time. One in each process of a trainer group."""

    def __init__(self, *, pinned: bool, timeout: timedelta) -> None:
        """Collective. `timeout`: how long ranks wait for the slowest one's disk."""
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._timeout = timeout
        self.copies = HostCopies(pinned=pinned)
        self._running: Future[float] | None = None

    @property
    def busy(self) -> bool:
        """Whether a write is going on, or has ended and `finish` does not know yet."""
        return self._running is not None

    def write(self, saves: list[Staged], *, background: bool) -> None:
        """Write checkpoints, one after the other; with `background` from a thread. Collective.

        Raises SaveError when the disk does not take them; in the background `finish` does.
        """
        assert not self.busy, "`finish` comes first"
        if not background:
            self._write(saves)
            return
        # A run that ends at once does not wait for it.
        self._running = in_background(lambda: self._write(saves), "checkpoint-writer")

    def finish(self, *, wait: bool) -> float | None:
        """Seconds that the write of the background took; None while it goes on (unless `wait`), or where there is none.

        Raises what it failed with.
        """
        running = self._running
        if running is None or not (wait or running.done()):
            return None
        self._running = None
        return running.result()

    def close(self) -> None:
        """Leave the group."""
        assert not self.busy, "`finish` comes first"
        dist.destroy_process_group(self._group)

    def _write(self, saves: list[Staged]) -> float:
        begin = time.monotonic()
        for staged in saves:
            self._write_one(staged)
        return time.monotonic() - begin

    def _write_one(self, staged: Staged) -> None:
        root, first = Path(staged.root), dist.get_rank() == 0
        final = root / checkpoint_name(staged.state.rollout_id)
        part, old = final.with_name(final.name + PART), final.with_name(final.name + OLD)
        if first:
            for left_over in (*root.glob(f"iter_*{PART}"), *root.glob(f"iter_*{OLD}")):
                shutil.rmtree(left_over, ignore_errors=True)
            try:
                part.mkdir(parents=True)
            except OSError as error:
                raise _save_error(staged, part, str(error)) from error
        dist.barrier(self._group)
        self._write_tensors(staged, part)
        if first:
            try:
                _write_rest(staged, part)
            except OSError as error:
                raise _save_error(staged, part, str(error)) from error
            if staged.after is not None:
                self._wait_for(staged.after, staged)
            # Deleting takes its time, and `final` may be the checkpoint in force (of an earlier run into this folder).
            if final.exists():
                final.rename(old)
            part.rename(final)
            write_latest(root, staged.state.rollout_id)
            shutil.rmtree(old, ignore_errors=True)
        dist.barrier(self._group)

    def _write_tensors(self, staged: Staged, part: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
        from torch.distributed.checkpoint import CheckpointException

        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        try:
            with no_checksums():
                dcp.save(
                    staged.tensors, storage_writer=direct_file_writer(part), planner=planner, process_group=self._group
                )
        except (CheckpointException, OSError) as error:
            known = not isinstance(error, CheckpointException) or bool(error.failures)
            reason = str(error).strip().splitlines()[-1] if known else "an error of another rank"
            raise _save_error(staged, part, reason) from error

    def _wait_for(self, folder: Path, staged: Staged) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not folder.exists():
            if time.monotonic() > deadline:
                raise SaveError(
                    f"the checkpoint of rollout {staged.state.rollout_id} in {staged.root} has no counterpart {folder} "
                    f"after {self._timeout}; the checkpoints before it are whole: go on from them with --load"
                )
            time.sleep(POLL_SECONDS)


def retire(root: str, rollout_id: int) -> None:
    """Rename the checkpoint of that rollout, if there is one, to what the next write deletes. One process calls it.

    Raises SaveError where the folder cannot be renamed.
    """
    final = Path(root) / checkpoint_name(rollout_id)
    old = final.with_name(final.name + OLD)
    shutil.rmtree(old, ignore_errors=True)
    try:
        if final.exists():
            final.rename(old)
    except OSError as error:
        raise SaveError(f"{final}, which is to be written again, cannot be renamed ({error}): delete it") from error


def _write_rest(staged: Staged, part: Path) -> None:
    """What rank 0 writes beside tensors."""
    write_common(part, staged.common)
    torch.save(staged.random_state, part / RNG_FILE)
    (part / STATE_FILE).write_text(json.dumps(asdict(staged.state)))
    if staged.lora is not None:
        staged.lora.write(part)
    write_digests(part)


def _save_error(staged: Staged, part: Path, reason: str) -> SaveError:
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)  # on a full disk it would stand in the way of what makes room
    free = free_bytes(str(part.parent))  # not of `part`, which rank 0 may be deleting just then
    return SaveError(
        f"the checkpoint of rollout {staged.state.rollout_id} could not be written to {part.parent} ({reason}), where "
        f"{free / GIB:.1f} GiB are free now; the checkpoints before it are whole: make room and go on from them with "
        "--load"
    )
