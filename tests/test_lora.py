"""LoRA adapters: exact start, gradients in every layout, checkpoints, and what leaves them (engines, HF, PEFT).

Two groups of processes do the work (`_one_process`, then `_two_processes`); tests look at what they returned.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_utils import run_distributed
from safetensors.torch import load_file, save_file
from test_trainer_distributed import grpo_by_hand, hf_model
from trainer_utils import assert_same_step, make_trainer, random_samples, tiny_config, weights

from megatron_bridge.checkpoint import checkpoint_name, write_latest
from megatron_bridge.convert import convert_hf_to_torch_dist, convert_torch_dist_to_hf
from megatron_bridge.layout import to_hf
from megatron_bridge.lora import adapted_layers, initial_a, merge_adapter
from megatron_bridge.lora_checkpoint import base_checkpoint, open_weights
from megatron_bridge.lora_spec import TARGET_MODULES, LoraSpec, is_adapter
from megatron_bridge.names import global_name
from megatron_bridge.peft_export import export_peft
from slime_retool.trainer.batch import TrainBatch
from slime_retool.types import RolloutBatch

RANK, ALPHA, TEMPERATURE, KL_COEF = 3, 4.0, 0.8, 0.3
KL = {"use_kl_loss": True, "kl_loss_coef": KL_COEF, "kl_loss_type": "low_var_kl", "rollout_temperature": TEMPERATURE}
TP2 = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": TP2,
    "tp2_sp": {**TP2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _config(root: str, **overrides: Any) -> Any:
    values = {"lora_rank": RANK, "lora_alpha": ALPHA, "ref_load": f"{root}/base", **KL}
    return tiny_config(**{**values, **overrides})


def _batch(seed: int = 0) -> RolloutBatch:
    return RolloutBatch(random_samples(seed=seed, engine=False))


def _adapters(trainer: Any, value_of: Any) -> dict[str, torch.Tensor]:
    """{global name: whole tensor} over all ranks, of the adapters or of what belongs to them."""
    from megatron.core import parallel_state as mpu

    offset = trainer.module.decoder.layers[0].layer_number - 1
    own = {
        global_name(f"{name.removesuffix('weight')}{part}", trainer.config, offset): (
            axis,
            value_of(layer._parameters[part]).clone(),
        )
        for name, layer in adapted_layers(trainer.module).items()
        for part, axis in layer.lora_axes.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        everyone, (mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_rank(with_context_parallel=True), own)
    )
    shards: dict[str, list[torch.Tensor]] = {}
    for _, dp_rank, part in sorted(everyone, key=lambda item: item[:2]):
        for name, (axis, value) in part.items() if dp_rank == 0 else ():
            shards.setdefault(name, []).append(value)
            if axis is None:
                assert torch.equal(shards[name][0], value), f"{name} differs between tensor-parallel ranks"
                shards[name] = [value]
    axes = {name: axis for *_, part in everyone for name, (axis, _) in part.items()}
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts, dim=axes[name]) for name, parts in shards.items()}


def _randomize(trainer: Any) -> None:
    """Give B values that do not depend on the layout: with B = 0 nothing reaches A."""
    from megatron.core import parallel_state as mpu

    offset = trainer.module.decoder.layers[0].layer_number - 1
    tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, layer in adapted_layers(trainer.module).items():
            b, axis = layer.lora_b, layer.lora_axes["lora_b"]
            shape = list(b.shape)
            if axis is not None:
                shape[axis] *= tp
            whole = (
                initial_a(global_name(name, trainer.config, offset), 1, torch.Size(shape).numel(), 7).view(shape) * 4
            )
            b.copy_(whole if axis is None else whole.chunk(tp, dim=axis)[rank])
    trainer.actor.optimizer.reload_model_params()


def _measure(rank: int, world_size: int, config: Any) -> dict[str, Any]:
    """One step from random adapters."""
    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    start = _adapters(trainer, torch.Tensor.detach)
    _randomize(trainer)
    out: dict[str, Any] = {"start": start, "adapters": _adapters(trainer, torch.Tensor.detach)}
    base = {name: p.detach().clone() for name, p in trainer.module.named_parameters() if not is_adapter(name)}
    out["log_probs"] = trainer.log_probs(_batch().samples)
    out["weights"] = weights(trainer)
    out["metrics"] = {k: v for k, v in trainer.train(_batch(), 0).items() if not k.startswith(("perf/", "memory/"))}
    out["grads"] = _adapters(trainer, lambda p: p.main_grad)
    out["after"] = _adapters(trainer, torch.Tensor.detach)
    now = dict(trainer.module.named_parameters())
    out["base is as before"] = all(torch.equal(value, now[name]) for name, value in base.items())
    trained = {id(p) for group in trainer.actor.optimizer.param_groups for p in group["params"]}
    out["trains only adapters"] = trained == {id(p) for name, p in now.items() if is_adapter(name)}
    trainer.shutdown()
    return out


def _one_process(rank: int, world_size: int, root: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    trainer = make_trainer(rank, world_size, _config(root, lora_rank=None, lora_alpha=None))
    trainer.load()
    out["base"] = {"log_probs": trainer.log_probs(_batch().samples), "weights": weights(trainer)}
    trainer.shutdown()
    trainer = make_trainer(rank, world_size, _config(root))
    trainer.load()
    out["fresh"] = {"log_probs": trainer.log_probs(_batch().samples), "weights": weights(trainer)}
    trainer.shutdown()
    out["dp1"] = _measure(rank, world_size, _config(root))
    out["recompute"] = _measure(rank, world_size, _config(root, **RECOMPUTE))
    out["two targets"] = _measure(rank, world_size, _config(root, lora_target_modules=["linear_proj", "linear_fc2"]))
    out["resume"] = _resume(rank, world_size, root)
    out["errors"] = _errors(rank, world_size, root)
    out["moving"] = _moving_base(rank, world_size, root)
    critic = {"use_kl_loss": False, "kl_loss_coef": 0.0, "advantage_estimator": "ppo"}
    trainer = make_trainer(rank, world_size, _config(root, **critic))
    trainer.load()
    trainer.train(_batch(), 0)
    out["critic"] = {name: p.requires_grad for name, p in trainer.critic.module.named_parameters()}
    trainer.shutdown()
    return out


def _resume(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Three steps in one go; and two, a save, a new trainer, one more."""
    config = _config(root, load=f"{root}/adapters", save=f"{root}/adapters", lora_target_modules=list(TARGET_MODULES))
    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    _randomize(trainer)
    for step in range(2):
        trainer.train(_batch(step), step)
    trainer.save(1, {"epoch": 4})
    out = {"saved": weights(trainer), "log_probs": trainer.log_probs(_batch().samples)}
    out["adapters"] = _adapters(trainer, torch.Tensor.detach)
    trainer.train(_batch(2), 2)
    out["straight"] = _adapters(trainer, torch.Tensor.detach)
    trainer.shutdown()
    trainer = make_trainer(rank, world_size, config)
    out["state"] = trainer.load()
    trainer.train(_batch(2), 2)
    out["resumed"] = _adapters(trainer, torch.Tensor.detach)
    trainer.shutdown()
    return out


def _moving_base(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Adapters on a run's newest checkpoint, which then saves another one."""
    sft = tiny_config(loss_type="sft_loss", ref_load=f"{root}/base", save=f"{root}/moving", load=f"{root}/moving")
    config = _config(root, ref_load=f"{root}/moving", load=f"{root}/on_moving", save=f"{root}/on_moving")
    again = {"again": config, "named": dataclasses.replace(config, ref_load=f"{root}/moving/iter_0000004")}
    out = {}
    trainer = make_trainer(rank, world_size, sft)
    trainer.load()
    trainer.save(0, {})
    trainer.shutdown()
    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    trainer.train(_batch(), 0)
    trainer.save(0, {})
    out["before"] = _policy_and_reference(trainer)
    trainer.shutdown()
    trainer = make_trainer(rank, world_size, sft)
    trainer.load()
    trainer.train(_batch(1), 1)
    trainer.save(4, {})
    trainer.shutdown()
    for name, each in again.items():
        trainer = make_trainer(rank, world_size, each)
        trainer.load()
        out[name] = _policy_and_reference(trainer)
        out[f"{name}/base"] = trainer.actor.lora.base
        trainer.shutdown()
    return out


def _policy_and_reference(trainer: Any) -> torch.Tensor:
    batch = TrainBatch.from_samples(_batch(3).samples)
    return torch.stack([trainer.actor.log_probs(batch), trainer.actor.reference_log_probs(batch)])


def _errors(rank: int, world_size: int, root: str) -> dict[str, str]:
    """Messages of loads that must be refused."""
    cases = {
        "other rank": _config(root, load=f"{root}/adapters", lora_rank=2),
        "without flags": _config(root, load=f"{root}/adapters", lora_rank=None, lora_alpha=None),
        "adapters as base": _config(root, ref_load=f"{root}/adapters"),
    }
    messages = {}
    for name, config in cases.items():
        trainer = make_trainer(rank, world_size, config)
        with pytest.raises(ValueError) as error:
            trainer.load()
        messages[name] = str(error.value)
        trainer.shutdown()
    return messages


def _two_processes(rank: int, world_size: int, root: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        out[name] = _measure(rank, world_size, _config(root, **layout))
    trainer = make_trainer(rank, world_size, _config(root, load=f"{root}/adapters", **LAYOUTS["tp2_sp"]))
    out["state"] = trainer.load()
    out["log_probs"] = trainer.log_probs(_batch().samples)
    trainer.shutdown()
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf/: a random Hugging Face model; base/: the same in torch_dist; adapters/: what a run saved."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("lora")
    c = tiny_config()
    torch.manual_seed(3)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.ffn_hidden_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_query_groups, head_dim=c.kv_channels, rms_norm_eps=c.norm_epsilon,
            tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": float(c.rotary_base)},
            initializer_range=0.15, max_position_embeddings=64,
        )
    ).save_pretrained(path / "hf")  # fmt: skip
    convert_hf_to_torch_dist(c, path / "hf", path / "base", progress=False)
    return path


@pytest.fixture(scope="module")
def one(root: Path) -> dict[str, Any]:
    return run_distributed(_one_process, 1, str(root))[0]


@pytest.fixture(scope="module")
def two(root: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    return run_distributed(_two_processes, 2, str(root))


def test_new_adapters_leave_the_model_exactly_as_it_was(one: dict[str, Any]) -> None:
    assert torch.equal(one["fresh"]["log_probs"], one["base"]["log_probs"])
    for name, weight in one["base"]["weights"].items():
        assert torch.equal(one["fresh"]["weights"][name], weight), name


def test_only_adapters_change_in_a_step(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for got in (one["dp1"], *(ranks[name] for ranks in two for name in LAYOUTS)):
        assert got["base is as before"] and got["trains only adapters"]
        assert len(got["after"]) == 2 * 2 * 4  # layers, A and B, targets
        for name, value in got["after"].items():
            assert not torch.equal(value, got["adapters"][name]), name
    chosen = {name.split(".")[4] for name in one["two targets"]["after"]}
    assert chosen == {"linear_proj", "linear_fc2"}


def test_gradients_equal_float64_autograd_through_merged_weights(one: dict[str, Any]) -> None:
    """Policy gradient and KL to the base, whose log-probs come from the same model with its adapters off."""
    got, samples = one["dp1"], _batch().samples
    model, config = hf_model(one["base"]["weights"], tied=True), tiny_config()
    base = {name: p.detach() for name, p in model.named_parameters()}
    leaves = {name: value.double().requires_grad_() for name, value in got["adapters"].items()}
    merged = dict(base)
    for layer in range(config.num_layers):
        for path in TARGET_MODULES.values():
            name = f"decoder.layers.{layer}.{path}"
            product = leaves[f"{name}.lora_b"].flatten(0, -2) @ leaves[f"{name}.lora_a"] * (ALPHA / RANK)
            for hf_name, delta in to_hf(f"{name}.weight", product, config):
                merged[hf_name] = base[hf_name] + delta
    learning = sum(any(sample.loss_mask) for sample in samples)
    loss, kls = torch.zeros((), dtype=torch.float64), 0.0
    for sample, advantage in zip(samples, grpo_by_hand(samples), strict=True):
        ids = torch.tensor([list(sample.tokens)])
        log_p, ref = (
            torch.log_softmax(torch.func.functional_call(model, p, (ids,)).logits[0] / TEMPERATURE, -1)
            for p in (merged, base)
        )
        for t in range(1, sample.length):
            if sample.loss_mask[t]:
                new, old = log_p[t - 1, sample.tokens[t]], ref[t - 1, sample.tokens[t]]
                k3 = torch.exp(old - new) - (old - new) - 1
                term = -advantage * torch.exp(new - new.detach()) + KL_COEF * k3.clamp(max=10)
                loss = loss + term / sum(sample.loss_mask) / learning
                kls += float(k3.clamp(max=10)) / sum(sample.loss_mask) / learning
    loss.backward()
    assert got["metrics"]["train/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert got["metrics"]["train/kl_loss"] == pytest.approx(kls, rel=1e-4) and kls > 1e-3
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert set(grads) == set(got["grads"])
    for name, grad in grads.items():
        assert float(grad.abs().max()) > 1e-4, name
        assert torch.allclose(got["grads"][name].double(), grad, atol=1e-5, rtol=1e-4), name
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    assert got["metrics"]["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("name", [*LAYOUTS, "recompute"])
def test_adapters_are_the_same_in_every_layout(one: dict[str, Any], two: list[dict[str, Any]], name: str) -> None:
    got, want = one[name] if name == "recompute" else two[0][name], one["dp1"]
    assert_same_step(got, want)


def test_engines_get_merged_weights(one: dict[str, Any]) -> None:
    """The transformers model with them has the log-probs of the model with adapters."""
    got = one["dp1"]
    model = hf_model(got["weights"], tied=True)
    log_probs = got["log_probs"].split([sample.length for sample in _batch().samples])
    for sample, values in zip(_batch().samples, log_probs, strict=True):
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.tensor([list(sample.tokens)])).logits[0] / TEMPERATURE, -1)
        for t in range(1, sample.length):
            want = float(log_p[t - 1, sample.tokens[t]]) * sample.loss_mask[t]
            assert float(values[t]) == pytest.approx(want, abs=1e-5)
    assert float((got["log_probs"] - one["base"]["log_probs"]).abs().max()) > 0.05


def test_a_resumed_run_goes_on_bit_by_bit(one: dict[str, Any]) -> None:
    got = one["resume"]
    assert got["state"] == (2, {"epoch": 4})
    for name, value in got["straight"].items():
        assert torch.equal(got["resumed"][name], value), name


def test_a_checkpoint_resumes_in_another_layout(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    assert two[0]["state"] == (2, {"epoch": 4})
    assert torch.allclose(two[0]["log_probs"], one["resume"]["log_probs"], atol=1e-5)


def test_a_checkpoint_holds_adapters_and_no_base(one: dict[str, Any], root: Path) -> None:
    from megatron_bridge.torch_dist_io import TorchDistReader

    directory = root / "adapters" / "iter_0000001"
    stored = TorchDistReader(directory).metadata.state_dict_metadata
    keys = {key for key in stored if key.startswith(("decoder", "embedding", "output"))}
    assert keys == {
        f"decoder.layers.{path}.{part}" for path in TARGET_MODULES.values() for part in ("lora_a", "lora_b")
    }
    assert LoraSpec.read(directory) == LoraSpec(RANK, ALPHA, tuple(TARGET_MODULES), str(root / "base" / "release"))


def test_what_does_not_fit_is_refused(one: dict[str, Any]) -> None:
    errors = one["errors"]
    assert "holds adapters of rank 3, alpha 4" in errors["other rank"] and "rank 2" in errors["other rank"]
    assert "holds LoRA adapters" in errors["without flags"] and "holds LoRA adapters" in errors["adapters as base"]
    assert all("\n" not in message for message in errors.values())


def test_the_critic_of_an_adapted_actor_trains_all_its_weights(one: dict[str, Any]) -> None:
    assert all(one["critic"].values()) and not any(is_adapter(name) for name in one["critic"])


def test_export_is_the_merge_bit_for_bit_and_what_the_engines_had(one: dict[str, Any], root: Path) -> None:
    convert_torch_dist_to_hf(root / "adapters", root / "merged", root / "hf", progress=False)
    got, base = load_file(root / "merged" / "model.safetensors"), load_file(root / "hf" / "model.safetensors")
    adapters = one["resume"]["adapters"]
    rows = qkv_rows()
    for layer in range(2):
        for path, parts in PARTS.items():
            name = f"decoder.layers.{layer}.{path}"
            a, b = adapters[f"{name}.lora_a"], adapters[f"{name}.lora_b"]
            product = (b.reshape(-1, RANK) @ a) * (ALPHA / RANK)
            chosen = rows if len(parts) == 3 else product.split(len(product) // len(parts))
            for i, part in enumerate(parts):
                delta = product[chosen[i]] if len(parts) == 3 else chosen[i]
                hf_name = f"model.layers.{layer}.{part}.weight"
                assert torch.equal(got[hf_name], base[hf_name] + delta), hf_name
                assert not torch.equal(got[hf_name], base[hf_name]), hf_name
    assert set(got) == set(base)
    for hf_name, weight in one["resume"]["saved"].items():
        assert torch.equal(got[hf_name], weight), hf_name


PARTS = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}


def qkv_rows() -> list[list[int]]:
    """Rows of query, key and value in Megatron's fused matrix: per key/value head two query heads, key, value."""
    heads = [[range(8 * (4 * group + part), 8 * (4 * group + part) + 8) for part in range(4)] for group in range(2)]
    kinds = [[(g, p) for g in range(2) for p in parts] for parts in ((0, 1), (2,), (3,))]
    return [[row for g, p in kind for row in heads[g][p]] for kind in kinds]


def test_peft_files_merge_into_the_same_model(one: dict[str, Any], root: Path) -> None:
    """As PEFT does it: W + lora_alpha / r * lora_B lora_A for each module named in target_modules."""
    export_peft(root / "adapters", root / "peft", root / "hf")
    config = json.loads((root / "peft" / "adapter_config.json").read_text())
    tensors = load_file(root / "peft" / "adapter_model.safetensors")
    modules = {part.split(".")[-1] for parts in PARTS.values() for part in parts}
    assert set(config["target_modules"]) == modules
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "CAUSAL_LM", 3, 4)
    assert config["base_model_name_or_path"] == str(root / "hf")
    base = load_file(root / "hf" / "model.safetensors")
    for name, weight in base.items():
        want = one["resume"]["saved"][name]
        if name.split(".")[-2] in modules:
            prefix = "base_model.model." + name.removesuffix(".weight")
            a, b = tensors.pop(f"{prefix}.lora_A.weight"), tensors.pop(f"{prefix}.lora_B.weight")
            assert a.shape == (3, weight.shape[1]) and b.shape == (weight.shape[0], 3)
            weight = weight + config["lora_alpha"] / config["r"] * (b @ a)
        assert torch.allclose(weight, want, atol=1e-6), name
    assert not tensors


def test_converter_says_what_is_missing(one: dict[str, Any], root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds whole weights, and no adapter"):
        export_peft(root / "base", tmp_path / "out", root / "hf")
    with pytest.raises(ValueError, match="drop --base-dir"):
        convert_torch_dist_to_hf(root / "base", tmp_path / "out", root / "hf", base_dir=root / "base", progress=False)
    with pytest.raises(ValueError, match="give its place as --base-dir"):
        convert_torch_dist_to_hf(
            root / "adapters", tmp_path / "out", root / "hf", base_dir=tmp_path / "gone", progress=False
        )


def test_adapters_keep_to_their_base_when_a_newer_one_lies_beside_it(one: dict[str, Any], root: Path) -> None:
    got = one["moving"]
    assert torch.equal(got["again"], got["before"]) and got["again/base"] == f"{root}/moving/iter_0000000"
    assert not torch.equal(got["named"], got["before"]) and got["named/base"] == f"{root}/moving/iter_0000004"
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    bases = (None, root / "moving" / "iter_0000004")
    own, newer = (open_weights(root / "on_moving", base).read(name) for base in bases)
    assert torch.equal(open_weights(root / "on_moving", root / "moving").read(name), own)
    assert not torch.equal(own, newer)


@pytest.mark.parametrize(
    ("base", "held", "taken", "warning"),
    [
        ("elsewhere/iter_0000000", [0, 4], "iter_0000000", "newest in .*root is iter_0000004; .* base, iter_0000000"),
        ("elsewhere/iter_0000000", [4], "iter_0000004", "iter_0000000, which is gone .*: iter_0000004 is taken"),
        ("elsewhere/iter_0000004", [0, 4], "iter_0000004", None),
        ("elsewhere", [0, 4], "iter_0000004", None),  # as older runs wrote it
        (None, [0, 4], "iter_0000004", None),
    ],
)
def test_which_checkpoint_of_several_is_the_base(
    base: str | None, held: list[int], taken: str, warning: str | None, tmp_path: Path, caplog: Any
) -> None:
    root = tmp_path / "root"
    for iteration in held:
        (root / checkpoint_name(iteration)).mkdir(parents=True)
        (root / checkpoint_name(iteration) / ".metadata").touch()
    write_latest(root, held[-1])
    spec = LoraSpec(RANK, ALPHA, ("linear_qkv",), base)
    assert base_checkpoint(root, spec) == root / taken
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == (warning is not None) and all(re.search(str(warning), each) for each in said)
    assert base_checkpoint(root / checkpoint_name(held[0]), spec) == root / checkpoint_name(held[0])


def test_adapters_of_more_layers_than_the_base_are_refused(one: dict[str, Any], root: Path, tmp_path: Path) -> None:
    """Whose widths are the same: nothing else tells them apart."""
    c = dataclasses.replace(tiny_config(), num_layers=1)
    hf = tmp_path / "hf"
    hf.mkdir()
    content = json.loads((root / "hf" / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**content, "num_hidden_layers": 1, "layer_types": ["full_attention"]}))
    tensors = load_file(root / "hf" / "model.safetensors")
    first = {name: value for name, value in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(first, hf / "model.safetensors", metadata={"format": "pt"})
    convert_hf_to_torch_dist(c, hf, tmp_path / "base", progress=False)
    with pytest.raises(ValueError, match=r"adapters.* no place for: decoder.layers.*lora_a"):
        convert_torch_dist_to_hf(root / "adapters", tmp_path / "out", hf, base_dir=tmp_path / "base", progress=False)
    with pytest.raises(ValueError, match=r"adapters.* no place for: decoder.layers.*lora_a"):
        export_peft(root / "adapters", tmp_path / "peft", hf)


def test_a_merge_in_bf16_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 5, generator=generator).bfloat16()
    a, b = torch.randn(2, 5, generator=generator).bfloat16(), torch.randn(2, 3, 2, generator=generator).bfloat16()
    exact = weight.double() + 0.5 * b.reshape(6, 2).double() @ a.double()
    merged = merge_adapter(weight, a, b, 0.5)
    assert merged.dtype == torch.bfloat16 and torch.equal(merged, exact.bfloat16())
