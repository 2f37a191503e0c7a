"""Experts on their way from trainers into SGLang: whole, in their places, and in bounded memory.

One real engine of a tiny Qwen3-MoE gets the weights of trainers of several layouts; shares of tensor- and
expert-parallel workers, which need GPUs, are played by modules of the same layout.
"""

from __future__ import annotations

import json
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dist_utils import in_threads, run_distributed
from sglang_utils import engine_config, make_tiny_checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_utils import make_trainer, random_samples, tiny_config

from slime_retool.engine.admin import EngineAdmin
from slime_retool.engine.bucket_loader import BUCKET_LOADER, load_weights
from slime_retool.engine.checksum import Gather, hf_weights
from slime_retool.engine.expert_weights import ExpertShard, Stack
from slime_retool.engine.server import EngineProcess
from slime_retool.trainer.weight_sync.buckets import buckets
from slime_retool.trainer.weight_sync.ipc import bucket_payload, export
from slime_retool.types import RolloutBatch, TrainSample

EXPERTS, INNER, HIDDEN = 8, 6, 5
PREFIX = "model.layers.0.mlp.experts"
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
ETP2 = {"expert_tensor_parallel_size": 2}
MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 16, "vocab_size": 259, "max_position_embeddings": 1024, "rotary_base": 10000,
    "num_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
PROMPT = list(range(40, 60))


# What a worker holds


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return {
        f"{PREFIX}.{expert}.{matrix}_proj.weight": torch.randn(shape, generator=generator)
        for expert in range(EXPERTS)
        for matrix, shape in shapes.items()
    }


def stacks(weights: dict[str, Tensor], *cuts: int) -> list[tuple[str, Tensor]]:
    """The experts in stacks that end at `cuts`."""
    out = []
    for first, end in zip((0, *cuts), (*cuts, EXPERTS), strict=True):
        gate, up, down = (
            torch.stack([weights[f"{PREFIX}.{expert}.{part}_proj.weight"] for expert in range(first, end)])
            for part in ("gate", "up", "down")
        )
        out += [(str(Stack(PREFIX, "gate_up_proj", first, end)), torch.cat([gate, up], dim=1))]
        out += [(str(Stack(PREFIX, "down_proj", first, end)), down)]
    return out


def fused_moe(ep: int, ep_rank: int, tp: int, tp_rank: int, backend: str = "triton", **changes: Any) -> Any:
    """A module as SGLang makes it for one worker, with undefined values."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    class Method(UnquantizedFusedMoEMethod):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.use_triton_kernels = backend == "triton_kernel"
            self.use_flashinfer_cutlass = backend == "flashinfer_cutlass"
            self.use_flashinfer_trtllm_moe = backend == "flashinfer_trtllm"
            self._aiter_runner = None

    layer = torch.nn.Module()
    held, width = EXPERTS // ep, INNER // tp
    shapes = {"w13_weight": (held, 2 * width, HIDDEN), "w2_weight": (held, HIDDEN, width)}
    for name, (experts, rows, columns) in shapes.items():
        rows, columns = (columns, rows) if backend == "triton_kernel" else (rows, columns)
        layer.register_parameter(name, torch.nn.Parameter(torch.full((experts, rows, columns), torch.nan)))
    values = {
        "quant_method": Method(), "use_triton_kernels": backend == "triton_kernel", "num_local_experts": held,
        "num_experts": EXPERTS, "num_fused_shared_experts": 0, "moe_ep_rank": ep_rank, "moe_tp_rank": tp_rank,
        "moe_tp_size": tp, "layer_id": 0,
    }  # fmt: skip
    for name, value in (values | changes).items():
        setattr(layer, name, value)
    return layer


def model_of(layer: Any) -> Any:
    """A model with one layer of experts that keeps what goes through SGLang's own loader in `loaded`."""
    loaded: dict[str, Tensor] = {}
    return SimpleNamespace(
        get_submodule={PREFIX: layer}.__getitem__,
        named_modules=lambda: [(PREFIX, layer)],
        named_parameters=lambda: [(f"{PREFIX}.{name}", value) for name, value in layer.named_parameters()],
        load_weights=lambda named: loaded.update(named),
        loaded=loaded,
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("backend", ["triton", "triton_kernel", "flashinfer_cutlass"])
@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (1, 2), (2, 1), (2, 3)])
def test_stacks_are_loaded_into_workers_shares_which_make_the_experts_again(
    backend: str, ep: int, tp: int, shared: bool
) -> None:
    """Where a shared expert lies after them it stays as it is, and is read under its own name."""
    weights, workers = whole(), ep * tp
    parts = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}

    def run(worker: int, gather: Gather) -> dict[str, Tensor]:
        layer = fused_moe(ep, worker // tp, tp, worker % tp, backend, num_fused_shared_experts=int(shared))
        if shared:
            layer.num_local_experts, layer.num_experts = layer.num_local_experts + 1, EXPERTS + 1
            for name, parameter in list(layer.named_parameters()):
                more = torch.full_like(parameter[:1], 7.0)
                layer.register_parameter(name, torch.nn.Parameter(torch.cat([parameter, more])))
        model = model_of(layer)
        load_weights(model, stacks(weights, 1, 5))
        assert not model.loaded
        return dict(hf_weights(model, workers, gather))

    for result in in_threads(workers, run):
        for part, shape in parts.items() if shared else ():
            value = result.pop(f"model.layers.0.mlp.shared_experts.{part}_proj.weight")
            assert value.shape == shape and (value == 7.0).all()
        assert result.keys() == weights.keys()
        assert all(torch.equal(result[name], weights[name]) for name in weights)


def test_mixtrals_matrices_have_names_of_their_own() -> None:
    prefix = "model.layers.0.block_sparse_moe.experts"
    gate_up, down = torch.arange(8.0).view(1, 4, 2), torch.zeros(1, 2, 2)
    named = dict(Stack(prefix, "gate_up_proj", 5, 6).matrices(gate_up))
    named |= dict(Stack(prefix, "down_proj", 5, 6).matrices(down))
    assert list(named) == [f"{prefix}.5.{matrix}.weight" for matrix in ("w1", "w3", "w2")]
    assert torch.equal(named[f"{prefix}.5.w3.weight"], gate_up[0, 2:])


def test_experts_that_take_adapters_are_found_within_their_wrapper() -> None:
    weights, wrapper = whole(), torch.nn.Module()
    wrapper.base_layer = fused_moe(1, 0, 1, 0)
    load_weights(model_of(wrapper), stacks(weights))
    assert torch.equal(wrapper.base_layer.w2_weight[2], weights[f"{PREFIX}.2.down_proj.weight"])


def test_a_worker_holds_its_part_of_gate_over_its_part_of_up() -> None:
    """The layout that SGLang's kernels read: of worker 1 of 2, experts as they come, rows 3 to 5 of both."""
    weights, layer = whole(), fused_moe(1, 0, 2, 1)
    load_weights(model_of(layer), stacks(weights))
    third = {part: weights[f"{PREFIX}.3.{part}_proj.weight"] for part in ("gate", "up", "down")}
    assert torch.equal(layer.w13_weight[3], torch.cat([third["gate"][3:], third["up"][3:]]))
    assert torch.equal(layer.w2_weight[3], third["down"][:, 3:])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "flashinfer_trtllm"}, "shuffles them; use --sglang-moe-runner-backend triton"),
        ({"use_intel_amx_backend": True}, "pack them"),
        ({"num_fused_shared_experts": 2}, "--sglang-disable-shared-experts-fusion"),
        ({"quant_method": object()}, "object does not keep them"),
    ],
)
def test_experts_at_places_unknown_go_through_sglangs_own_loader_and_are_not_read(
    changes: dict[str, Any], reason: str
) -> None:
    weights, layer = whole(), fused_moe(1, 0, 1, 0, **changes)
    model = model_of(layer)
    load_weights(model, [*stacks(weights, 3), ("model.norm.weight", torch.ones(HIDDEN))])
    norm = model.loaded.pop("model.norm.weight")
    assert torch.equal(norm, torch.ones(HIDDEN)) and layer.w13_weight.isnan().all()
    assert model.loaded.keys() == weights.keys()
    assert all(torch.equal(model.loaded[name], weights[name]) for name in weights)
    with pytest.raises(ValueError, match=reason):
        ExpertShard.of(layer)


def test_padded_experts_go_through_sglangs_own_loader() -> None:
    weights, layer = whole(), fused_moe(1, 0, 1, 0)
    layer.w13_weight = torch.nn.Parameter(torch.zeros(EXPERTS, 2 * 8, HIDDEN))
    layer.w2_weight = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN, 8))
    model = model_of(layer)
    load_weights(model, stacks(weights))
    assert model.loaded.keys() == weights.keys() and not layer.w2_weight.any()


# Gathering


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made within and still there."""

    def __init__(self) -> None:
        super().__init__()
        self.users: dict[int, int] = {}
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(tensor) for tensor in torch.utils._pytree.tree_leaves((args, kwargs or {}))}
        known = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and id(tensor) not in given:
                pointer, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
                if pointer not in self.users and pointer in known:
                    continue  # a view of what was there before
                if pointer not in self.users:
                    self.live += size
                    self.peak = max(self.peak, self.live)
                self.users[pointer] = self.users.get(pointer, 0) + 1
                weakref.finalize(tensor, self._gone, pointer, size)
        return out

    def _gone(self, pointer: int, size: int) -> None:
        self.users[pointer] -= 1
        if not self.users[pointer]:
            del self.users[pointer]
            self.live -= size


CHUNK, BUCKET = 100_000, 150_000


def _gathers(rank: int, world_size: int) -> dict[str, Any]:
    """With two expert-parallel ranks, of few and of many experts: their bytes, and the most that gathering held."""
    from slime_retool.trainer.gather import hf_named_tensors

    out: dict[str, Any] = {}
    buffers = [torch.empty(BUCKET, dtype=torch.uint8) for _ in range(2)]
    for experts in (8, 64):
        config = tiny_config(**{**MODEL, "num_experts": experts}, **EP2)
        trainer = make_trainer(rank, world_size, config)
        held = sum(p.nbytes for name, p in trainer.module.named_parameters() if ".experts." in name)
        for everywhere in (False, True):
            with LiveBytes() as memory:
                named = hf_named_tensors(
                    trainer.module, config, everywhere=everywhere, stacked=everywhere, chunk_bytes=CHUNK
                )
                for _ in buckets(named, buffers):
                    pass
            out[f"{experts}, everywhere: {everywhere}"] = (memory.peak, 2 * held)
        trainer.shutdown()
    return out


@pytest.fixture(scope="module")
def peaks() -> list[dict[str, Any]]:
    return run_distributed(_gathers, 2)


def test_gathering_holds_a_few_chunks_however_many_experts_there_are(peaks: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(peaks):
        for everywhere in (False, True):
            few, many = (of_rank[f"{experts}, everywhere: {everywhere}"] for experts in (8, 64))
            assert many[1] == 8 * few[1] > 25 * CHUNK
            # Stacks of its own, the same as bytes, what arrives, and the chunk before, which its reader still holds.
            assert all(CHUNK / 4 < peak < 4 * CHUNK for peak, _ in (few, many)), (rank, everywhere)


def test_a_rank_that_sends_to_rank_0_holds_nothing_of_others(peaks: list[dict[str, Any]]) -> None:
    """Its half of a chunk, at most three times: stacks, the same as bytes, and the stacks of the chunk before."""
    sent, received = (peaks[1][f"64, everywhere: {everywhere}"][0] for everywhere in (False, True))
    assert sent <= 1.5 * CHUNK < received


# A real engine


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root: Path = tmp_path_factory.mktemp("engine")
    config = engine_config(make_tiny_checkpoint(root / "hf", tie=False, experts=EXPERTS), root / "out")
    with EngineProcess(config) as engine:
        yield engine.url


def _updates(rank: int, world_size: int, url: str, root: str) -> list[dict[str, Any]]:
    """An update by each transport in each layout, with train steps between them; both sides' checksums, log-probs."""
    from slime_retool.trainer.weight_sync import WeightSync

    rounds: list[dict[str, Any]] = []
    for layout in (EP2, {**TP2, **ETP2}):
        config = tiny_config(
            **MODEL, **layout, lr=1e-2, max_tokens_per_gpu=64, output_dir=root, distributed_timeout_minutes=5.0,
            update_weight_buffer_size=70_000, check_weight_update_equal=True, hf_checkpoint=f"{root}/hf",
        )  # fmt: skip
        trainer = make_trainer(rank, world_size, config)
        for step, transport in enumerate(("ipc", "broadcast", "disk")):
            sync = WeightSync(trainer, [url], transport=transport)
            sync.update()
            mine = sync.weight_checksums()
            log_probs = trainer.log_probs([TrainSample(PROMPT, [0] + [1] * (len(PROMPT) - 1))]).tolist()[1:]
            if rank == 0:
                theirs = EngineAdmin(url).weight_checksums()
                rounds.append({"mine": mine, "theirs": theirs, "log_probs": (log_probs, _log_probs(url, PROMPT))})
            sync.close()
            trainer.train(RolloutBatch(random_samples(seed=step)), step)
        trainer.shutdown()
    return rounds


def _log_probs(url: str, ids: list[int]) -> list[float]:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer = json.loads(reply.read())
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


@pytest.fixture(scope="module")
def rounds(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("sync")
    make_tiny_checkpoint(root / "hf", tie=False, experts=EXPERTS)
    return run_distributed(_updates, 2, engine_url, str(root))[0]


def test_an_engine_holds_every_expert_of_the_trainer_after_each_update(rounds: list[dict[str, Any]]) -> None:
    # Embedding, last norm, head; of a layer two norms, four projections, two norms of heads, router, three per expert.
    tensors = 3 + 2 * (2 + 4 + 2 + 1 + 3 * EXPERTS)
    for each in rounds:
        assert each["mine"] == each["theirs"] and len(each["mine"]) == tensors
    name = f"model.layers.1.mlp.experts.{EXPERTS - 1}.up_proj.weight"
    assert len({each["mine"][name] for each in rounds}) == len(rounds) == 6


def test_an_engine_computes_with_the_trainers_experts(rounds: list[dict[str, Any]]) -> None:
    for each in rounds:
        mine, theirs = each["log_probs"]
        assert theirs == pytest.approx(mine, abs=1e-4)


def test_one_changed_number_of_one_expert_is_noticed(engine_url: str, rounds: list[dict[str, Any]]) -> None:
    admin = EngineAdmin(engine_url, timeout=300)
    before = admin.weight_checksums()
    value = torch.zeros(1, 64, 32)
    memory = torch.empty(value.nbytes, dtype=torch.uint8)

    def put(number: float) -> dict[str, str]:
        value[0, 63, 31] = number
        bucket = next(buckets([("model.layers.1.mlp.experts.down_proj[3:4]", value)], [memory]))
        admin.update_weights_from_tensor([bucket_payload(export(memory), bucket)], load_format=BUCKET_LOADER)
        return admin.weight_checksums()

    first, second = put(1.0), put(1.0 + 2**-23)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert {key for key in before if before[key] != first[key]} == {name}
    assert {key for key in first if first[key] != second[key]} == {name}
