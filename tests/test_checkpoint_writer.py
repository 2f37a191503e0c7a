"""Checkpoints that are written beside training: what they hold, and what is there when something dies meanwhile."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from dist_utils import run_distributed
from torch.overrides import TorchFunctionMode
from trainer_utils import make_trainer, random_samples, tiny_config, weights

from megatron_bridge.checkpoint import PART, damage, model_state_dict
from megatron_bridge.torch_dist_io import TorchDistReader
from slime_retool.errors import CheckpointError, SaveError
from slime_retool.run_folder import resume_point, saved_extra
from slime_retool.trainer import checkpoint_writer
from slime_retool.trainer.checkpoint_writer import CheckpointWriter
from slime_retool.trainer.host_copies import HostCopies
from slime_retool.trainer.optimizer import optimizer_step
from slime_retool.trainer.optimizer_state import OPTIMIZER_FORMAT, optimizer_state
from slime_retool.types import RolloutBatch

T = TypeVar("T")


def sft(root: str, **overrides: Any) -> Any:
    return tiny_config(loss_type="sft_loss", load=root, save=root, ref_load=None, **overrides)


def step(trainer: Any, rollout_id: int) -> None:
    trainer.train(RolloutBatch(random_samples(seed=rollout_id)), rollout_id)


@contextmanager
def held_disk() -> Any:
    """Nothing is written before the event is set."""
    go, real = threading.Event(), checkpoint_writer.direct_file_writer

    def held(directory: Path) -> Any:
        go.wait(60)
        return real(directory)

    with mock.patch.object(checkpoint_writer, "direct_file_writer", held):
        yield go


def _beside_training(rank: int, world_size: int, root: str) -> dict[str, Any]:
    trainer = make_trainer(rank, world_size, sft(root))
    step(trainer, 0)
    saved = {name: value.clone() for name, value in weights(trainer).items()}
    with held_disk() as go:
        trainer.save(0, {"seen": 1}, background=True)
        busy = trainer.finish_save(wait=False)
        step(trainer, 1)
        unfinished = resume_point(root)
        go.set()
        seconds = trainer.finish_save()
    straight = weights(trainer)
    trainer.shutdown()
    trainer = make_trainer(rank, world_size, sft(root))
    state = trainer.load()
    loaded = {name: value.clone() for name, value in weights(trainer).items()}
    step(trainer, 1)
    resumed = weights(trainer)
    trainer.shutdown()
    return {
        "busy": busy, "seconds": seconds, "unfinished": unfinished, "state": state, "saved": saved, "loaded": loaded,
        "straight": straight, "resumed": resumed, "damage": damage(Path(root) / "iter_0000000"),
    }  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_a_checkpoint_holds_the_state_at_its_save_however_long_writing_takes(processes: int, tmp_path: Path):
    results = run_distributed(_beside_training, processes, str(tmp_path))
    for result in results:
        assert result["busy"] is None and result["unfinished"] is None and result["seconds"] > 0
        assert result["state"] == (1, {"seen": 1}) and result["damage"] is None
    first = results[0]  # which has the weights
    for one, other in (("saved", "loaded"), ("straight", "resumed")):
        assert all(torch.equal(first[one][name], value) for name, value in first[other].items())
    assert any(not torch.equal(first["saved"][name], value) for name, value in first["resumed"].items())


def _killed(rank: int, world_size: int, root: str) -> None:
    """Killed when the tensors are on the disk and nothing else is."""
    trainer = make_trainer(rank, world_size, sft(root))
    step(trainer, 0)
    trainer.save(0, {})
    step(trainer, 1)
    with mock.patch.object(checkpoint_writer, "_write_rest", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
        trainer.save(1, {}, background=True)
        trainer.finish_save()


def _after_the_kill(rank: int, world_size: int, root: str) -> tuple[int, list[str]]:
    trainer = make_trainer(rank, world_size, sft(root))
    first, _ = trainer.load()
    step(trainer, first)
    trainer.save(first, {})
    trainer.shutdown()
    return first, sorted(path.name for path in Path(root).iterdir())


def test_kill_9_in_the_middle_of_a_write_leaves_the_checkpoint_before_in_force(tmp_path: Path):
    with pytest.raises(RuntimeError, match="exit code -9"):
        run_distributed(_killed, 1, str(tmp_path))
    latest = "latest_checkpointed_iteration.txt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000000", f"iter_0000001{PART}", latest]
    assert resume_point(str(tmp_path)) == 0
    (got,) = run_distributed(_after_the_kill, 1, str(tmp_path))
    assert got == (1, ["iter_0000000", "iter_0000001", latest]) and resume_point(str(tmp_path)) == 1


def _full_disk(rank: int, world_size: int, root: str) -> dict[str, Any]:
    trainer = make_trainer(rank, world_size, sft(root))
    step(trainer, 0)
    trainer.save(0, {})
    step(trainer, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    trainer.save(1, {}, background=True)
    try:
        trainer.finish_save()
        message = "saved"
    except SaveError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    found = resume_point(root)
    torch.distributed.barrier()
    trainer.save(2, {}, background=True)
    trainer.finish_save()
    trainer.shutdown()
    return {"message": message, "found": found, "after": resume_point(root)}


def test_a_write_that_fails_in_the_background_is_one_error_that_names_the_disk(tmp_path: Path):
    for result in run_distributed(_full_disk, 2, str(tmp_path)):
        assert re.match(r"the checkpoint of rollout 1 could not be written to .*GiB are free now", result["message"])
        assert (result["found"], result["after"]) == (0, 2)


class CudaNames(TorchFunctionMode):
    """Megatron's sharded optimizer asks whether parameters are called CUDA tensors, and needs nothing else of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_name = func is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if is_name else result


def sharded_trainer(rank: int, world_size: int, config: Any) -> Any:
    import megatron.core.distributed as distributed

    real = distributed.DistributedDataParallelConfig

    def sharded(**options: Any) -> Any:
        return real(**{**options, "use_distributed_optimizer": True})

    with CudaNames(), mock.patch.object(distributed, "DistributedDataParallelConfig", sharded):
        return make_trainer(rank, world_size, config)


def _sharded(rank: int, world_size: int, root: str) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

    out: dict[str, Any] = {}
    trainer = sharded_trainer(rank, world_size, sft(root))
    for rollout_id in range(2):
        step(trainer, rollout_id)
    optimizer, model = trainer.actor.optimizer, model_state_dict(trainer.module)["model"]
    theirs = optimizer.sharded_state_dict(model, metadata=dict(OPTIMIZER_FORMAT))
    ours = optimizer_state(optimizer, model, torch.clone)
    out["type"] = type(optimizer.chained_optimizers[0]).__name__
    out["same rest"] = {**theirs, "param_state": None} == {**ours, "param_state": None}
    out["equal"] = []
    for index, states in theirs["param_state"].items():
        for name, wanted in states.items():
            got = ours["param_state"][index][name]
            assert (got.key, got.replica_id) == (wanted.key, wanted.replica_id)
            if is_main_replica(wanted.replica_id):
                out["equal"].append(torch.equal(got.data, wanted.data))
    wanted = {
        shard.key: (shard.global_shape, shard.data.dtype)
        for states in theirs["param_state"].values()
        for shard in states.values()
        if isinstance(shard, ShardedTensor)
    }
    trainer.save(1, {})
    found = TorchDistReader(Path(root) / "iter_0000001").metadata.state_dict_metadata
    out["stored"] = [
        (tuple(found[key].size), found[key].properties.dtype) == (tuple(shape), dtype)
        for key, (shape, dtype) in wanted.items()
    ]
    trainer.shutdown()
    return out


@pytest.mark.parametrize("processes", [1, 2])
def test_the_state_of_a_sharded_optimizer_is_megatrons_own_to_the_bit(processes: int, tmp_path: Path):
    results = run_distributed(_sharded, processes, str(tmp_path))
    assert results[0]["type"] == "DistributedOptimizer" and results[0]["same rest"]
    assert len(results[0]["equal"]) > 40 and all(results[0]["equal"])
    assert len(results[0]["stored"]) > 20 and all(results[0]["stored"])


def straight_and_resumed(
    make: Callable[[], Any], take_step: Callable[[Any, int], Any], state: Callable[[Any], T]
) -> tuple[T, T]:
    """The state after three steps in one go; and after two, a save, a new trainer and one more."""
    trainer = make()
    for number in range(2):
        take_step(trainer, number)
    trainer.save(1, {})
    take_step(trainer, 2)
    straight = state(trainer)
    trainer.shutdown()
    trainer = make()
    trainer.load()
    take_step(trainer, 2)
    resumed = state(trainer)
    trainer.shutdown()
    return straight, resumed


def _sharded_resume(rank: int, world_size: int, root: str, experts: bool) -> dict[str, Any]:
    options = {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_topk": 2} if experts else {}

    def state(trainer: Any) -> tuple[dict[str, torch.Tensor], int, set[float]]:
        parts = trainer.actor.optimizer.chained_optimizers
        steps = {float(state["step"]) for part in parts for state in part.optimizer.state.values()}
        return weights(trainer), len(parts), steps

    straight, resumed = straight_and_resumed(
        lambda: sharded_trainer(rank, world_size, sft(root, **options)), step, state
    )
    return {
        "parts": straight[1], "steps": resumed[2],
        "equal": [torch.equal(straight[0][name], value) for name, value in resumed[0].items()],
    }  # fmt: skip


@pytest.mark.parametrize(("processes", "experts"), [(1, False), (2, False), (2, True)])
def test_a_sharded_optimizer_of_torchs_adam_goes_on_as_if_it_had_not_stopped(processes, experts, tmp_path: Path):
    results = run_distributed(_sharded_resume, processes, str(tmp_path), experts)
    assert [(result["parts"], result["steps"]) for result in results] == [(1 + experts, {3.0})] * processes
    assert len(results[0]["equal"]) > 20 and all(results[0]["equal"])


def _other_options(rank: int, world_size: int, root: str, sharded: bool) -> tuple[bool, list[dict[str, float]]]:
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
    import megatron.core.optimizer.optimizer as plain_optimizer

    make = sharded_trainer if sharded else make_trainer
    trainer = make(rank, world_size, sft(root))
    step(trainer, 0)
    trainer.save(0, {})
    saved = weights(trainer)
    trainer.shutdown()
    # By which megatron-core 0.19 looks for a parameter group; 0.16 does by the last four.
    keys = ("max_lr", "min_lr", "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    with (
        mock.patch.object(distrib_optimizer, "param_group_identifier_keys", keys),
        mock.patch.object(plain_optimizer, "param_group_identifier_keys", keys),
    ):
        trainer = make(rank, world_size, sft(root, lr=5e-3, min_lr=1e-3, weight_decay=0.1, adam_beta1=0.5))
        trainer.load()
    loaded = weights(trainer)
    groups = trainer.actor.optimizer.param_groups
    trainer.shutdown()
    chosen = [{"lr": group["max_lr"], "min_lr": group["min_lr"], "beta1": group["betas"][0]} for group in groups]
    return all(torch.equal(saved[name], value) for name, value in loaded.items()), chosen


@pytest.mark.parametrize("sharded", [False, True])
def test_the_options_of_a_resumed_run_are_its_own_whatever_megatron_knows_groups_by(sharded: bool, tmp_path: Path):
    ((equal, groups),) = run_distributed(_other_options, 1, str(tmp_path), sharded)
    assert equal and groups == [{"lr": 5e-3, "min_lr": 1e-3, "beta1": 0.5}] * 2


def random_step(trainer: Any, seed: int) -> None:
    """An optimizer step with random gradients, where the CPU has no backward pass."""
    torch.manual_seed(seed)
    for parameter in trainer.module.parameters():
        parameter.main_grad.normal_()
    assert optimizer_step(trainer.actor.optimizer, trainer.actor.scheduler, 1.0)[1]
    trainer.actor._has_stepped = True


@contextmanager
def bf16_policy() -> Any:
    """Policies of the CPU have bf16 weights, as on a GPU."""
    from slime_retool.trainer import core

    class Bf16Actor(core.Actor):
        def __init__(self, config: Any, timeline: Any, *, dtype: torch.dtype) -> None:
            super().__init__(config, timeline, dtype=torch.bfloat16)

    with mock.patch.object(core, "Actor", Bf16Actor):
        yield


class GpuTensors(TorchFunctionMode):
    """Tensors say that they are on a GPU, but for what was put into page-locked memory and what was made of that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        pinned = func == torch.Tensor.pin_memory
        on_host = pinned or (bool(args) and isinstance(args[0], torch.Tensor) and "on_host" in args[0].__dict__)
        if func == torch.Tensor.is_cuda.__get__:
            return not on_host
        result = args[0] if pinned else func(*args, **kwargs)
        if on_host and func in (torch.Tensor.pin_memory, torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float):
            result.on_host = True
        return result


def _on_the_host(rank: int, world_size: int, root: str, transformer_engine: bool) -> dict[str, Any]:
    from megatron_bridge.cpu_compat import install_cpu_compat

    install_cpu_compat()
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    def trainer_with_offload() -> Any:
        return sharded_trainer(rank, world_size, sft(root, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5))

    def state(trainer: Any) -> list[torch.Tensor]:
        (part,) = trainer.actor.optimizer.chained_optimizers
        assert all(group["cpu_optimizer_cls"] is torch.optim.AdamW for group in part.optimizer.param_groups)
        states = [states for sub in part.optimizer.sub_optimizers for states in sub.state.values()]
        tensors = [states[name] for states in states for name in sorted(states)]
        return [tensor.detach().clone() for tensor in (*tensors, *trainer.module.parameters())]

    with (
        GpuTensors(),
        bf16_policy(),
        # Half of the states is on the "GPU", where Transformer Engine's Adam would be.
        mock.patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", transformer_engine),
        mock.patch.object(distrib_optimizer, "USING_TE_OPTIMIZER", transformer_engine),
        mock.patch.object(optimizer_config, "is_te_min_version", lambda version: transformer_engine),
    ):
        straight, resumed = straight_and_resumed(trainer_with_offload, random_step, state)
    assert len(straight) == len(resumed)
    return {"states": len(straight), "equal": all(map(torch.equal, straight, resumed))}


@pytest.mark.parametrize("transformer_engine", [False, True])
def test_an_optimizer_on_the_host_goes_on_as_if_it_had_not_stopped(transformer_engine: bool, tmp_path: Path):
    for result in run_distributed(_on_the_host, 2, str(tmp_path), transformer_engine):
        assert result["states"] > 40 and result["equal"]


def _kinds(rank: int, world_size: int, root: str) -> dict[tuple[str, str], str]:
    def plain(rank: int, world_size: int, config: Any) -> Any:
        with CudaNames():
            return make_trainer(rank, world_size, config)

    def bf16(rank: int, world_size: int, config: Any) -> Any:
        with bf16_policy():
            return plain(rank, world_size, config)

    def found(name: str) -> str:
        trainer = kinds[name](rank, world_size, sft(root))
        try:
            return f"loaded {trainer.load()}"
        except CheckpointError as error:
            return str(error)
        finally:
            trainer.shutdown()

    kinds = {"sharded": sharded_trainer, "bf16": bf16, "fp32": plain}
    out = {}
    for saved, make in kinds.items():
        trainer = make(rank, world_size, sft(root))
        random_step(trainer, 0)
        trainer.save(0, {})
        trainer.shutdown()
        out |= {(saved, name): found(name) for name in kinds}
        state = Path(root) / "iter_0000000" / "trainer_state.json"
        state.write_text(json.dumps({k: v for k, v in json.loads(state.read_text()).items() if k != "optimizer"}))
        out |= {(f"old {saved}", name): found(name) for name in (saved, "bf16" if saved == "sharded" else "sharded")}
    return out


def test_another_kind_of_optimizer_is_refused_by_its_flags(tmp_path: Path):
    (found,) = run_distributed(_kinds, 1, str(tmp_path))
    flags = {
        "sharded": "--use-distributed-optimizer on GPUs",
        "bf16": "--no-use-distributed-optimizer and --precision bf16",
        "fp32": "--no-use-distributed-optimizer (or a CPU) and --precision fp32",
    }
    for (saved, wanted), message in found.items():
        if wanted == saved.removeprefix("old "):
            assert message == "loaded (1, {})"
        elif saved in flags:
            assert f"a run with {flags[saved]}, this one has {flags[wanted]}: make them equal, or" in message
        else:  # by what Megatron says, which has no flag, in one line that can be read
            assert "incomplete or of another model" in message and len(message) < 400 + len(str(tmp_path))


def _halves(rank: int, world_size: int, root: str) -> tuple[str, str]:
    def refusal() -> str:
        with pytest.raises(CheckpointError) as error:
            trainer.load()
        return str(error.value)

    trainer = make_trainer(rank, world_size, sft(root))
    step(trainer, 0)
    trainer.save(0, {"flags": {"use_precision_aware_optimizer": True}})
    saved = refusal()
    trainer.save(1, {"flags": {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}})
    assert trainer.load()[0] == 2
    for part in trainer.actor.optimizer.chained_optimizers:
        part.config.use_precision_aware_optimizer = True
    wanted = refusal()
    trainer.shutdown()
    return saved, wanted


def test_halves_of_master_weights_are_not_loaded(tmp_path: Path):
    ((saved, wanted),) = run_distributed(_halves, 1, str(tmp_path))
    assert re.search(r"iter_0000000 was saved with --use-precision-aware-optimizer .*; pass it as --ref-load", saved)
    assert re.search(r"iter_0000001 holds master weights, of which .* keeps halves .*; leave it out", wanted)


def _counterpart(rank: int, world_size: int, root: str) -> dict[str, Any]:
    folders = {"critic_save": f"{root}/critic", "advantage_estimator": "ppo", "critic_num_nodes": 1}
    config = tiny_config(load=f"{root}/actor", save=f"{root}/actor", **folders)
    critic = make_trainer(rank, world_size, config, roles="critic")
    critic.save(0, {})
    critic.shutdown()
    late = Path(root) / "critic" / "iter_0000000"
    late.rename(late.with_name("late"))
    actor = make_trainer(rank, world_size, config, roles="actor")
    actor.save(0, {}, background=True)
    with pytest.raises(TimeoutError):
        actor.writer._running.result(timeout=2)
    alone = resume_point(f"{root}/actor")
    late.with_name("late").rename(late)
    actor.finish_save()
    actor.shutdown()
    return {"alone": alone, "both": resume_point(f"{root}/actor", [f"{root}/critic"])}


def test_an_actors_checkpoint_comes_into_force_after_the_critics(tmp_path: Path):
    assert run_distributed(_counterpart, 1, str(tmp_path)) == [{"alone": None, "both": 0}]


def _again(rank: int, world_size: int, root: str) -> dict[str, Any]:
    folders = {"critic_save": f"{root}/critic", "advantage_estimator": "ppo", "critic_num_nodes": 1}
    config = tiny_config(load=f"{root}/actor", save=f"{root}/actor", **folders)
    critic, folder = make_trainer(rank, world_size, config, roles="critic"), Path(root) / "critic" / "iter_0000001"
    critic.save(1, {"before the restart": True})
    with held_disk() as go:
        critic.save(1, {"before the restart": False}, background=True)
        there = folder.exists()  # the actor's save begins here
        go.set()
        critic.finish_save()
    critic.shutdown()
    left = sorted(path.name for path in folder.parent.glob("iter_*"))
    return {"there": there, "left": left, "saved": saved_extra(f"{root}/critic", 1)}


def test_an_actor_does_not_wait_for_a_critics_checkpoint_from_before_a_restart(tmp_path: Path):
    """The restart was made between the critic's save of a rollout and the actor's."""
    (got,) = run_distributed(_again, 1, str(tmp_path))
    assert got == {"there": False, "left": ["iter_0000001"], "saved": {"before the restart": False}}


def _three(rank: int, world_size: int, root: str) -> None:
    trainer = make_trainer(rank, world_size, sft(root))
    for rollout_id in range(3):
        trainer.save(rollout_id, {})
    trainer.shutdown()


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    """Checkpoints of rollouts 0, 1 and 2."""
    root = tmp_path_factory.mktemp("three")
    run_distributed(_three, 1, str(root))
    return root


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink], ids=["cut", "flipped", "deleted"])
@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json", "trainer_state.json", "*.distcp"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(harm, name, three: Path, tmp_path: Path, caplog):
    root = tmp_path / "run"
    copy_tree(three, root)
    assert resume_point(str(root)) == 2 and not caplog.text
    harm(next((root / "iter_0000002").glob(name)))
    assert resume_point(str(root)) == 1
    assert "iter_0000002" in caplog.text and "going on from the checkpoint of rollout 1" in caplog.text


def test_a_checkpoint_is_whole_only_with_the_critics_of_the_same_rollout(three: Path, tmp_path: Path, caplog):
    actor, critic = tmp_path / "actor", tmp_path / "critic"
    copy_tree(three, actor)
    assert resume_point(str(actor), [str(critic)]) == 2  # a new critic
    copy_tree(three, critic)
    assert resume_point(str(actor), [str(critic)]) == 2
    cut(critic / "iter_0000002" / "common.pt")
    other = tmp_path / "another_runs_critic"
    copy_tree(three, other)
    assert resume_point(str(actor), [str(critic), str(other)]) == 1


def test_without_a_whole_checkpoint_the_run_is_refused(three: Path, tmp_path: Path):
    root = tmp_path / "run"
    copy_tree(three, root)
    for path in root.glob("iter_*/common.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint in .*run is whole: .*iter_0000002.*iter_0000000"):
        resume_point(str(root))


def test_no_checkpoint_and_a_converted_one_are_nothing_to_go_on_from(tmp_path: Path):
    assert resume_point(None) is None and resume_point(str(tmp_path)) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert resume_point(str(tmp_path)) is None


@pytest.mark.parametrize("size", [0, 1, 2**20, 64 * 2**20, 200 * 2**20 + 17])
def test_a_digest_reads_the_ends_of_a_file_of_any_size(size: int, tmp_path: Path):
    from megatron_bridge.checkpoint import write_digests

    for name in (".metadata", "metadata.json"):
        (tmp_path / name).touch()
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.truncate(size)
    write_digests(tmp_path)
    assert damage(tmp_path) is None
    for place in {0, size - 1} if size else ():
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert damage(tmp_path) == f"{path} does not hold what was written"
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\0")
    assert damage(tmp_path) is None


def copy_tree(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


def test_copies_have_storages_of_their_own_size_and_reuse_their_memory():
    copies = HostCopies(pinned=False, slab_bytes=256)
    tensors = [
        torch.arange(7), torch.randn(3, 5).t(), torch.randn(200), torch.ones(2, dtype=torch.bfloat16),
        torch.empty(0, 4),
    ]  # fmt: skip
    got = [copies.copy(tensor) for tensor in tensors]
    for copy, tensor in zip(got, tensors, strict=True):
        assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype
        assert copy.untyped_storage().nbytes() == tensor.nbytes
    assert all(copies.copy(copy) is copy for copy in got)
    second_half = got[2].chunk(2)[1]
    assert copies.copy(second_half) is second_half
    tensors[0].add_(1)
    assert got[0].tolist() == list(range(7))
    places = [copy.data_ptr() for copy in got[:4]]
    copies.clear()
    assert [copies.copy(tensor).data_ptr() for tensor in tensors[:4]] == places


def test_reserved_memory_is_filled_before_more_is_taken():
    """Also where tensors that are larger than a piece of memory come between: what was reserved for others stays."""
    tensors = [torch.ones(count) for count in (40, 100, 40, 20, 90, 64, 4)]
    copies = HostCopies(pinned=False, slab_bytes=256)
    copies.reserve([tensor.nbytes for tensor in tensors])
    copies.reserve([1000])  # once is enough
    for _ in range(2):
        copies.clear()
        slabs = [slab.data_ptr() for slab in (*copies._slabs, *copies._large)]
        assert len(copies._slabs) == 5 and [len(slab) for slab in copies._large] == [400, 360]
        assert all(torch.equal(copies.copy(tensor), tensor) for tensor in tensors)
        assert [slab.data_ptr() for slab in (*copies._slabs, *copies._large)] == slabs


def test_a_rank_reserves_about_what_it_writes(tmp_path: Path):
    assert run_distributed(_reserved, 2, str(tmp_path)) == [pytest.approx(1.0, abs=0.1), 0]


def _reserved(rank: int, world_size: int, root: str) -> float:
    trainer = make_trainer(rank, world_size, sft(root))
    step(trainer, 0)
    trainer.writer.copies.clear()
    trainer.actor.stage(0, {}, trainer.writer.copies)
    used, reserved = trainer.writer.copies._used, sum(trainer.actor.sizes_to_save)
    trainer.shutdown()
    return reserved / used if used else reserved


def test_a_writer_takes_one_save_at_a_time(tmp_path: Path):
    run_distributed(_one_at_a_time, 1, str(tmp_path))


def _one_at_a_time(rank: int, world_size: int, root: str) -> None:
    trainer = make_trainer(rank, world_size, sft(root))
    writer: CheckpointWriter = trainer.writer
    with held_disk() as go:
        trainer.save(0, {}, background=True)
        with pytest.raises(AssertionError, match="finish"):
            writer.write([], background=True)
        go.set()
        trainer.finish_save()
    assert trainer.finish_save() is None and not writer.busy
    trainer.shutdown()
