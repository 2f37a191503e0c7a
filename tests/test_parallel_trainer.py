"""The trainer with sequences and experts spread over ranks: gradients, log-probs and weights are those of one process.

Three groups of processes do all the work (one, two and four); tests look at what they returned.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from dist_utils import run_distributed
from trainer_utils import gradients, hf_moe_model, make_trainer, random_samples, sharpen, tiny_config, weights

from slime_retool.types import RolloutBatch

MOE: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
RL: dict[str, Any] = {
    "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl", "entropy_coef": 0.02,
    "rollout_temperature": 0.7, "use_rollout_logprobs": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"dense": {}, "deep": {"num_layers": 4}, "moe": MOE}
GSPO = {"advantage_estimator": "gspo"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
ETP2 = {"expert_tensor_parallel_size": 2}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "dense/cp2": CP2,
        "gspo/cp2": CP2,
        "moe/ep2": EP2,
        "moe/tp2": TP2,
        "moe/cp2 ep2": {**CP2, **EP2},
    },
    4: {
        "dense/cp4": {"context_parallel_size": 4},
        "dense/cp2 tp2": {**CP2, **TP2},
        "gspo/cp2 dp2": CP2,
        "moe/ep2 tp2": {**EP2, **TP2},
        "moe/ep2 tp2 etp2": {**EP2, **TP2, **ETP2},
        "moe/pp2 ep2": {**PP2, **EP2},
        "deep/pp4": {"pipeline_model_parallel_size": 4},
        "deep/pp2 tp2": {**PP2, **TP2},
    },
}
METRICS = ("loss", "pg_loss", "clip_fraction", "ppo_kl", "kl_loss", "entropy", "grad_norm")


def _config(root: str, kind: str, **overrides: Any) -> Any:
    model = MODELS.get(kind, {})
    folder = f"{root}/{kind if kind in MODELS else 'dense'}"
    loss = GSPO if kind == "gspo" else {}
    return tiny_config(**{**RL, **model, **loss, "ref_load": f"{folder}_ref", "load": folder, **overrides})


def _measure(rank: int, world_size: int, config: Any, *, rollouts: int = 1, save: str | None = None) -> dict[str, Any]:
    """Load with the optimizer's state, train; the last step's metrics and gradient, log-probs and weights."""
    trainer = make_trainer(rank, world_size, config)
    first, _ = trainer.load()
    batch = RolloutBatch(random_samples())
    log_probs = trainer.log_probs(batch.samples)
    metrics = [trainer.train(batch, first + i) for i in range(rollouts)]
    result = {
        "log_probs": log_probs, "metrics": metrics[-1], "grads": gradients(trainer), "weights": weights(trainer),
        "next": first,
    }  # fmt: skip
    if save is not None:
        trainer.actor.config = dataclasses.replace(trainer.config, save=save)
        trainer.save(first, {})
    trainer.shutdown()
    return result


def _one_process(rank: int, world_size: int, root: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for kind in MODELS:
        config = _config(root, kind, loss_type="sft_loss", save=f"{root}/{kind}_ref", load=None)
        trainer = make_trainer(rank, world_size, config)
        sharpen(trainer)
        trainer.save(0, {})
        trainer.actor.config = dataclasses.replace(config, save=f"{root}/{kind}")
        for step in range(2):
            trainer.train(RolloutBatch(random_samples(seed=step)), step)
        trainer.save(1, {})
        trainer.shutdown()
    for kind in (*MODELS, "gspo"):
        out[kind] = _measure(rank, world_size, _config(root, kind))
    out["moe twice"] = _measure(rank, world_size, _config(root, "moe"), rollouts=2)
    warm = _config(root, "moe", rollout_temperature=1.0)
    out["moe at 1.0"] = _measure(rank, world_size, warm)
    return out


def _several_processes(rank: int, world_size: int, root: str) -> dict[str, Any]:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    out: dict[str, Any] = {}
    for name, layout in LAYOUTS[world_size].items():
        save = f"{root}/moved" if name == "moe/ep2" else None
        # Every stage knows the shapes: none asks another, which would let the host wait for the card.
        with mock.patch.object(P2PCommunicator, "_communicate_shapes", side_effect=AssertionError("asked")):
            out[name] = _measure(rank, world_size, _config(root, name.split("/")[0], **layout), save=save)
    if world_size == 2:
        out["moved"] = _measure(rank, world_size, _config(root, "moe", **TP2, load=f"{root}/moved"))
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def one(root: str) -> dict[str, Any]:
    return run_distributed(_one_process, 1, root)[0]


@pytest.fixture(scope="module")
def several(root: str, one: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For each layout what every rank reported."""
    out: dict[str, list[dict[str, Any]]] = {}
    for world_size in LAYOUTS:
        ranks = run_distributed(_several_processes, world_size, root)
        out |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return out


@pytest.mark.parametrize("name", [name for layouts in LAYOUTS.values() for name in layouts])
def test_loss_and_gradient_are_those_of_one_process(
    one: dict[str, Any], several: dict[str, list[dict[str, Any]]], name: str
) -> None:
    want, ranks = one[name.split("/")[0]], several[name]
    got = ranks[0]
    assert got["grads"].keys() == want["grads"].keys()
    assert max(float(grad.abs().max()) for grad in want["grads"].values()) > 0.01
    for key, grad in want["grads"].items():
        assert torch.allclose(got["grads"][key], grad, atol=1e-5, rtol=0), key
    for metric in METRICS:
        key = f"train/{metric}"
        assert got["metrics"][key] == pytest.approx(want["metrics"][key], abs=1e-5, rel=1e-5), key
    assert torch.allclose(got["log_probs"], want["log_probs"], atol=1e-5, rtol=0)
    assert all(torch.equal(rank["log_probs"], got["log_probs"]) for rank in ranks)
    assert len({rank["metrics"]["train/grad_norm"] for rank in ranks}) == 1


@pytest.mark.parametrize("name", [name for layouts in LAYOUTS.values() for name in layouts])
def test_the_optimizer_state_of_one_process_moves_to_the_layout(
    one: dict[str, Any], several: dict[str, list[dict[str, Any]]], name: str
) -> None:
    """Adam's moments, loaded here, decide the step that gave these weights."""
    got, want = several[name][0], one[name.split("/")[0]]
    assert got["next"] == want["next"] == 2
    for key, value in want["weights"].items():
        assert torch.allclose(got["weights"][key], value, atol=2e-5), key


def test_a_run_goes_on_from_expert_parallel_to_tensor_parallel(
    one: dict[str, Any], several: dict[str, list[dict[str, Any]]]
) -> None:
    got, want = several["moved"][0], one["moe twice"]
    assert got["next"] == 3
    for key, value in want["weights"].items():
        assert torch.allclose(got["weights"][key], value, atol=5e-5), key


@pytest.mark.parametrize(("name", "temperature"), [("moe", 0.7), ("moe at 1.0", 1.0)])
def test_log_probs_equal_those_of_transformers(one: dict[str, Any], root: str, name: str, temperature: float) -> None:
    model, samples = hf_moe_model(_config(root, "moe"), f"{root}/moe"), random_samples()
    parts = one[name]["log_probs"].split([sample.length for sample in samples])
    for sample, got in zip(samples, parts, strict=True):
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.tensor([sample.tokens])).logits[0] / temperature, -1)
        wanted = [0.0] + [float(log_p[t - 1, sample.tokens[t]]) for t in range(1, sample.length)]
        learned = [value * mask for value, mask in zip(wanted, sample.loss_mask, strict=True)]
        assert got.tolist() == pytest.approx(learned, abs=1e-5)
