"""LoRA adapters of experts: exact start, gradients in every layout, checkpoints, and what leaves them (HF, PEFT).

Groups of one, two and four processes do the work; tests look at what they returned.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bridge_models import hf_weights, init_parallel, sequences, tiny_model, write_references
from dist_utils import run_distributed
from safetensors.torch import load_file
from trainer_utils import assert_same_step, make_trainer, random_samples, tiny_config, weights

from megatron_bridge.convert import convert_torch_dist_to_hf
from megatron_bridge.hf_config import model_args_from_hf, read_hf_config
from megatron_bridge.lora import _adapt_experts, adapted_layers, adapter_shards, grouped_linear, initial_a
from megatron_bridge.lora_spec import LoraSpec, is_adapter
from megatron_bridge.peft_export import export_peft
from megatron_bridge.torch_dist_io import TorchDistReader
from slime_retool.types import RolloutBatch

RANK, ALPHA, SEED = 3, 6.0, 1234
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1}
EP2, ETP2 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 2}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"recompute": RECOMPUTE},
    2: {"ep2": EP2, "etp2": ETP2, "tp2": TP2, "cp2 ep2": {"context_parallel_size": 2, **EP2}},
    4: {"ep2 tp2": {**EP2, **TP2}, "ep2 etp2 tp2": {**EP2, **TP2, **ETP2}, "pp2 ep2": {**PP2, **EP2}},
}
KINDS = ("qwen3_moe", "qwen3_mixed")


def _config(root: str, kind: str = "qwen3_moe", **overrides: Any) -> Any:
    model = model_args_from_hf(read_hf_config(f"{root}/{kind}/hf"))
    values = {
        **vars(model), "lora_rank": RANK, "lora_alpha": ALPHA, "ref_load": f"{root}/{kind}/td", "seed": SEED,
        "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl", "rollout_temperature": 0.8,
    }  # fmt: skip
    return tiny_config(**{**values, **overrides})


def _batch(seed: int = 0) -> RolloutBatch:
    return RolloutBatch(random_samples(seed=seed, engine=False))


def _whole(trainer: Any, value_of: Any = lambda values: values) -> dict[str, torch.Tensor]:
    from slime_retool.trainer.adapter_gather import whole_adapters

    return {name: v.clone() for name, v in whole_adapters(trainer.module, trainer.config, value_of).items()}


def _randomize(trainer: Any) -> None:
    """Give B values that do not depend on the layout: with B = 0 nothing reaches A."""
    from megatron.core import parallel_state as mpu

    from megatron_bridge.names import global_name

    shards = iter(list(adapter_shards(trainer.module)))
    layers = trainer.module.decoder.layers
    offset = layers[0].layer_number - 1
    experts = trainer.config.num_experts // mpu.get_expert_model_parallel_world_size()
    for name, axis, values in shards:
        if not name.endswith("lora_b"):
            continue
        whole_name = global_name(name, trainer.config, offset, experts * mpu.get_expert_model_parallel_rank())
        ranks = (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
        if ".experts." in name:
            ranks = (mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size())
        shape = list(values.shape)
        if axis is not None:
            shape[axis] *= ranks[1]
        whole = initial_a(whole_name, 1, torch.Size(shape).numel(), 7).view(shape) * 4
        values.copy_(whole if axis is None else whole.chunk(ranks[1], dim=axis)[ranks[0]])
    trainer.actor.optimizer.reload_model_params()


def _gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """The gradients stand in the adapters' places while they are gathered."""
    adapters = [p for name, p in trainer.module.named_parameters() if is_adapter(name)]
    kept = [p.data for p in adapters]
    for p in adapters:
        p.data = p.main_grad
    found = _whole(trainer)
    for p, data in zip(adapters, kept, strict=True):
        p.data = data
    return found


def _measure(rank: int, world_size: int, config: Any) -> dict[str, Any]:
    """One step from random adapters."""
    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    out: dict[str, Any] = {"start": _whole(trainer), "fresh": trainer.log_probs(_batch().samples)}
    _randomize(trainer)
    out["adapters"] = _whole(trainer)
    base = {name: p.detach().clone() for name, p in trainer.module.named_parameters() if not is_adapter(name)}
    out["log_probs"], out["weights"] = trainer.log_probs(_batch().samples), weights(trainer)
    out["metrics"] = trainer.train(_batch(), 0)
    out["grads"], out["after"] = _gradients(trainer), _whole(trainer)
    now = dict(trainer.module.named_parameters())
    out["base is as before"] = all(torch.equal(value, now[name]) for name, value in base.items())
    trainer.shutdown()
    return out


def _processes(rank: int, world_size: int, root: str) -> dict[str, Any]:
    out = {name: _measure(rank, world_size, _config(root, **layout)) for name, layout in LAYOUTS[world_size].items()}
    if world_size == 1:
        trainer = make_trainer(rank, world_size, _config(root, lora_rank=None, lora_alpha=None))
        trainer.load()
        out["base"] = trainer.log_probs(_batch().samples)
        trainer.shutdown()
        out["one"] = _measure(rank, world_size, _config(root))
        for kind in KINDS:
            out[f"resume {kind}"] = _resume(rank, world_size, root, kind)
    if world_size == 2:
        # EP2 goes on from what one process saved, and the other way round.
        out["resume ep2"] = _resume(rank, world_size, root, "qwen3_moe", folder="ep2", **EP2)
        trainer = make_trainer(rank, world_size, _config(root, load=f"{root}/qwen3_moe/one", **EP2, **TP2))
        out["moved state"] = trainer.load()
        out["moved"] = _whole(trainer)
        trainer.shutdown()
    return out


def _resume(rank: int, world_size: int, root: str, kind: str, folder: str = "one", **layout: Any) -> dict[str, Any]:
    """Three steps in one go; and two, a save, a new trainer, one more."""
    place = f"{root}/{kind}/{folder}"
    config = _config(root, kind, load=place, save=place, **layout)
    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    _randomize(trainer)
    for step in range(2):
        trainer.train(_batch(step), step)
    trainer.save(1, {"epoch": 4})
    out = {"saved": weights(trainer), "adapters": _whole(trainer)}
    trainer.train(_batch(2), 2)
    out["straight"] = _whole(trainer)
    trainer.shutdown()
    trainer = make_trainer(rank, world_size, config)
    out["state"] = trainer.load()
    trainer.train(_batch(2), 2)
    out["resumed"] = _whole(trainer)
    trainer.shutdown()
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_references(tmp_path_factory.mktemp("lora-experts"), KINDS)


@pytest.fixture(scope="module")
def one(root: Path) -> dict[str, Any]:
    return run_distributed(_processes, 1, str(root))[0]


@pytest.fixture(scope="module")
def several(root: Path, one: dict[str, Any]) -> dict[str, Any]:
    return {k: v for size in (2, 4) for k, v in run_distributed(_processes, size, str(root))[0].items()}


def test_new_adapters_of_experts_leave_the_model_exactly_as_it_was(one: dict[str, Any]) -> None:
    assert torch.equal(one["one"]["fresh"], one["base"])


def test_every_expert_has_adapters_and_only_they_change(one: dict[str, Any]) -> None:
    got = one["one"]
    layers, experts = 3, 6
    assert len(got["after"]) == layers * 2 * (2 + 2 * experts) and got["base is as before"]
    trained = [name for name, value in got["after"].items() if not torch.equal(value, got["adapters"][name])]
    assert len(trained) > len(got["after"]) * 0.9  # an expert may have seen no learned token
    name = "2.mlp.experts.experts.4.linear_fc2"
    assert torch.equal(got["start"][f"decoder.layers.{name}.lora_a"], initial_a(name, RANK, 20, SEED))


def _merged(root: Path, kind: str, adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' state dict of the base with W + alpha / rank B A in place of each adapted matrix, in float64."""
    state = {name: value.double() for name, value in tiny_model(kind).state_dict().items()}
    rows = _qkv_rows()
    for name, a in adapters.items():
        if not name.endswith("lora_a"):
            continue
        b = adapters[name.removesuffix("a") + "b"].flatten(0, -2)
        product = ALPHA / RANK * (b.double() @ a.double())
        _, _, layer, *path, target, _ = name.split(".")
        prefix = f"model.layers.{layer}."
        if target == "linear_qkv":
            for part, chosen in zip("qkv", rows, strict=True):
                state[f"{prefix}self_attn.{part}_proj.weight"] = (
                    state[f"{prefix}self_attn.{part}_proj.weight"] + product[chosen]
                )
        elif target == "linear_proj":
            state[f"{prefix}self_attn.o_proj.weight"] = state[f"{prefix}self_attn.o_proj.weight"] + product
        elif path[-1].isdigit():
            hf = f"{prefix}mlp.experts.{'gate_up_proj' if target == 'linear_fc1' else 'down_proj'}"
            place = torch.zeros(state[hf].shape[0], 1, 1, dtype=torch.float64)
            place[int(path[-1])] = 1
            state[hf] = state[hf] + place * product
        elif target == "linear_fc1":
            for part, chosen in zip(("gate", "up"), product.chunk(2), strict=True):
                state[f"{prefix}mlp.{part}_proj.weight"] = state[f"{prefix}mlp.{part}_proj.weight"] + chosen
        else:
            state[f"{prefix}mlp.down_proj.weight"] = state[f"{prefix}mlp.down_proj.weight"] + product
    return state


def _in_float64(kind: str) -> Any:
    """The base; torch's grouped product, which transformers takes for experts, is for fewer bits."""
    model: Any = tiny_model(kind).double()
    model.set_experts_implementation("eager")
    return model


def _qkv_rows() -> list[list[int]]:
    """Rows of query, key and value in Megatron's matrix: per key/value head (2) two query heads, key, value of 16."""
    heads = [[range(16 * (4 * g + part), 16 * (4 * g + part) + 16) for part in range(4)] for g in range(2)]
    return [[row for g in range(2) for p in parts for row in heads[g][p]] for parts in ((0, 1), (2,), (3,))]


def test_gradients_equal_float64_autograd_through_merged_weights(one: dict[str, Any], root: Path) -> None:
    """Policy gradient and KL to the base, whose log-probs come from the same model with its adapters off."""
    from test_trainer_distributed import grpo_by_hand

    got, samples = one["one"], _batch().samples
    model = _in_float64("qwen3_moe")
    leaves = {name: value.double().requires_grad_() for name, value in got["adapters"].items()}
    merged, base = _merged(root, "qwen3_moe", leaves), dict(model.state_dict())
    learning = sum(any(sample.loss_mask) for sample in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for sample, advantage in zip(samples, grpo_by_hand(samples), strict=True):
        ids = torch.tensor([list(sample.tokens)])
        log_p, ref = (
            torch.log_softmax(torch.func.functional_call(model, p, (ids,)).logits[0] / 0.8, -1) for p in (merged, base)
        )
        for t in range(1, sample.length):
            if sample.loss_mask[t]:
                new, old = log_p[t - 1, sample.tokens[t]], ref[t - 1, sample.tokens[t]]
                k3 = (torch.exp(old - new) - (old - new) - 1).clamp(max=10)
                term = -advantage * torch.exp(new - new.detach()) + 0.3 * k3
                loss = loss + term / sum(sample.loss_mask) / learning
    loss.backward()
    assert got["metrics"]["train/loss"] == pytest.approx(float(loss), rel=1e-5)
    for name, leaf in leaves.items():
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert torch.allclose(got["grads"][name].double(), grad, atol=1e-5, rtol=1e-4), name
    norm = torch.stack([leaf.grad.norm() for leaf in leaves.values() if leaf.grad is not None]).norm()
    assert got["metrics"]["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("name", [name for layouts in LAYOUTS.values() for name in layouts])
def test_adapters_of_experts_are_the_same_in_every_layout(
    one: dict[str, Any], several: dict[str, Any], name: str
) -> None:
    got, want = (one | several)[name], one["one"]
    assert got["base is as before"]
    assert_same_step(got, want)


@pytest.mark.parametrize("name", [*KINDS, "ep2"])
def test_a_resumed_run_goes_on_bit_by_bit(one: dict[str, Any], several: dict[str, Any], name: str) -> None:
    got = (one | several)[f"resume {name}"]
    assert got["state"] == (2, {"epoch": 4})
    for key, value in got["straight"].items():
        assert torch.equal(got["resumed"][key], value), key


def test_a_checkpoint_moves_between_layouts_bit_by_bit(one: dict[str, Any], several: dict[str, Any]) -> None:
    assert several["moved state"] == (2, {"epoch": 4})
    for key, value in one["resume qwen3_moe"]["adapters"].items():
        assert torch.equal(several["moved"][key], value), key


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_has_the_logits_of_the_merged_model(one: dict[str, Any], root: Path, kind: str) -> None:
    from transformers import Qwen3MoeForCausalLM

    convert_torch_dist_to_hf(root / kind / "one", root / kind / "merged", root / kind / "hf", progress=False)
    got = hf_weights(root / kind / "merged")
    for name, weight in one[f"resume {kind}"]["saved"].items():
        assert torch.equal(got[name], weight), name  # what engines had
    exported = Qwen3MoeForCausalLM.from_pretrained(root / kind / "merged").eval()
    reference = _in_float64(kind)
    reference.load_state_dict(_merged(root, kind, one[f"resume {kind}"]["adapters"]))
    tokens = sequences()[2][None]
    with torch.no_grad():
        want, base = reference(tokens).logits.float(), tiny_model(kind)(tokens).logits
        assert torch.allclose(exported(tokens).logits, want, atol=1e-4)
    assert float((want - base).abs().max()) > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_peft_files_hold_each_adapter_where_peft_looks_for_it(one: dict[str, Any], root: Path, kind: str) -> None:
    """PEFT's formula for stacked experts: W[e] + alpha / r B.view(out, r, E)[:, :, e] A.view(E, r, in)[e].

    Checked with PEFT 0.21.2 and transformers 5.12.1: the files load, and give these weights' logits.
    """
    out = root / kind / "peft"
    export_peft(root / kind / "one", out, root / kind / "hf")
    config = json.loads((out / "adapter_config.json").read_text())
    tensors = load_file(out / "adapter_model.safetensors")
    mixed = kind == "qwen3_mixed"
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    dense = ["mlp.down_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"] if mixed else []
    assert config["target_parameters"] == sorted(["mlp.experts.gate_up_proj", "mlp.experts.down_proj", *dense])
    state = {name: value.clone() for name, value in tiny_model(kind).state_dict().items()}
    for name, weight in state.items():
        if not name.startswith("model.layers.") or "norm" in name or name.endswith("mlp.gate.weight"):
            continue
        inner = {"gate_up_proj": "base_layer.", "down_proj": ""}
        owner, _, leaf = name.rpartition(".")
        prefix = f"base_model.model.{owner}.{inner[leaf] if leaf in inner else ''}"
        a, b = tensors.pop(f"{prefix}lora_A.weight"), tensors.pop(f"{prefix}lora_B.weight")
        if leaf in inner:
            experts = len(weight)
            delta = torch.einsum("ore,eri->eoi", b.view(len(b), -1, experts), a.view(experts, -1, a.shape[1]))
        else:
            delta = b @ a
        weight += config["lora_alpha"] / config["r"] * delta
    assert not tensors
    want = _merged(root, kind, one[f"resume {kind}"]["adapters"])
    for name, weight in state.items():
        assert torch.allclose(weight.double(), want[name], atol=1e-5), name


@pytest.mark.parametrize("width", [8, 5])
def test_a_grouped_product_is_each_experts_own(width: int) -> None:
    """Rows of 16 bytes take torch's grouped product, others a loop."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, width, generator=generator, requires_grad=True)
    weights = torch.randn(3, 12, width, generator=generator, requires_grad=True)
    counts = [4, 0, 5]
    got = grouped_linear(x, weights, counts)
    want = torch.cat([part @ w.T for part, w in zip(x.split(counts), weights, strict=True)])
    assert torch.allclose(got, want, atol=1e-5)
    for mine, other in zip(
        torch.autograd.grad(got.square().sum(), (x, weights)),
        torch.autograd.grad(want.square().sum(), (x, weights)),
        strict=True,
    ):
        assert torch.allclose(mine, other, atol=1e-4)


class _GroupedLayer(torch.nn.Module):
    """Stands in for Transformer Engine's layer of several experts: two of six rows each."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(gated_linear_unit=True)
        self.weight0, self.weight1 = (torch.nn.Parameter(torch.randn(6, 5)) for _ in range(2))

    def forward(self, x: torch.Tensor, tokens_per_expert: list[int]) -> tuple[torch.Tensor, None]:
        parts = zip(x.split(tokens_per_expert), (self.weight0, self.weight1), strict=True)
        return torch.cat([part @ weight.T for part, weight in parts]), None

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> dict[str, Any]:
        return {}


def _grouped(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Four experts on two ranks: what the adapted layer gives, and a checkpoint of its adapters."""
    from megatron.core import dist_checkpointing, parallel_state

    init_parallel(ep=2)
    torch.manual_seed(rank)
    mlp, experts = torch.nn.Module(), torch.nn.Module()
    mlp.experts = experts
    experts.linear_fc1, experts.num_local_experts = _GroupedLayer(), 2
    linear = experts.linear_fc1
    linear.requires_grad_(False)
    _adapt_experts(experts, 0, "linear_fc1", LoraSpec(RANK, ALPHA, ("linear_fc1",)), SEED)
    with torch.no_grad():
        linear.lora_b.normal_()
    x = torch.randn(7, 5, requires_grad=True)
    got, _ = linear(x, [3, 4])
    merged = {name: weight.merged_weight() for name, weight in adapted_layers(mlp).items()}
    want = torch.cat([part @ merged[f"experts.linear_fc1.weight{i}"].T for i, part in enumerate(x.split([3, 4]))])
    grad = torch.autograd.grad(got.square().sum(), (x, linear.lora_a, linear.lora_b))
    a, b = (p.detach().clone().requires_grad_() for p in (linear.lora_a, linear.lora_b))
    again = torch.cat(
        [
            part @ (weight + ALPHA / RANK * b[i].flatten(0, 1) @ a[i]).T
            for i, (part, weight) in enumerate(zip(x.split([3, 4]), (linear.weight0, linear.weight1), strict=True))
        ]
    )
    out = {"got": got, "want": want, "grad": grad, "by hand": torch.autograd.grad(again.square().sum(), (x, a, b))}
    out["shards"] = {name: value.clone() for name, _, value in adapter_shards(mlp)}
    # The only layer, as Megatron's block asks for it.
    prefix = "decoder.layers.mlp.experts.experts.linear_fc1."
    state = linear.sharded_state_dict(prefix, ((0, 0, 1),), {})
    Path(root).mkdir(exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, root)
    parallel_state.destroy_model_parallel()
    return out


def test_adapters_of_grouped_experts_are_those_of_single_ones(tmp_path: Path) -> None:
    """Outputs, gradients, beginnings and checkpoints, for the layers that Transformer Engine makes on GPUs."""
    results = run_distributed(_grouped, 2, str(tmp_path / "save"))
    reader = TorchDistReader(tmp_path / "save")
    for rank, result in enumerate(results):
        assert torch.allclose(result["got"], result["want"], atol=1e-5)
        for mine, other in zip(result["grad"], result["by hand"], strict=True):
            assert torch.allclose(mine, other, atol=1e-3, rtol=1e-4)
        for index in range(2):
            name = f"mlp.experts.experts.{2 * rank + index}.linear_fc1"
            local = f"experts.local_experts.{index}.linear_fc1"
            a, b = result["shards"][f"{local}.lora_a"], result["shards"][f"{local}.lora_b"]
            assert torch.equal(a, initial_a(f"0.{name}", RANK, 5, SEED)) and b.shape == (2, 3, RANK)
            assert torch.equal(reader.read(f"decoder.layers.0.{name}.lora_a"), a)
            assert torch.equal(reader.read(f"decoder.layers.0.{name}.lora_b"), b)
