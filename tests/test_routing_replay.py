"""Routing replay in the trainer: in every layout, layers with experts repeat given choices as transformers would.

Three groups of processes do all the work (one, two and four); tests look at what they returned. The model has experts
in its first and its last layer of three.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from dist_utils import run_distributed
from trainer_utils import (
    gradients,
    hf_moe_model,
    make_trainer,
    random_routed_experts,
    random_samples,
    sharpen,
    tiny_config,
)

from megatron_bridge.model import build_gpt_model
from megatron_bridge.routing_replay import RoutingReplay
from megatron_bridge.transformer_config import transformer_config
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.experts import ExpertsPart, check_experts
from slime_retool.trainer.packing import pack, packing_multiple
from slime_retool.types import RolloutBatch, RoutedExperts, TrainSample

MOE: dict[str, Any] = {
    "num_layers": 3, "num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_layer_freq": "[1,0,1]",
    "untie_embeddings_and_output_weights": True, "use_rollout_routing_replay": True, "rollout_temperature": 0.7,
    "use_kl_loss": True, "kl_loss_coef": 0.3, "use_rollout_logprobs": True,
}  # fmt: skip
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
ETP2 = {"expert_tensor_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ALONE = {"use_dynamic_batch_size": False, "micro_batch_size": 1}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"recompute full": FULL, "recompute moe": SELECTIVE, "one sequence each": ALONE},
    2: {"tp2": TP2, "pp2": PP2, "pp2 recompute full": {**PP2, **FULL}, "ep2": EP2, "cp2": CP2, "dp2": {}},
    4: {
        "tp2 ep2": {**TP2, **EP2},
        "tp2 ep2 etp2": {**TP2, **EP2, **ETP2},
        "pp2 cp2 recompute moe": {**PP2, **CP2, **SELECTIVE},
    },
}
SCORES: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "softmax of all": {"moe_router_pre_softmax": True},
    "sigmoid": {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 3, "moe_router_group_topk": 2,
    },
}  # fmt: skip
LOSSES = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
METRICS = ("train/loss", "train/pg_loss", "train/kl_loss", "train/grad_norm", "mismatch/experts_replayed",
           "mismatch/experts_differ", "mismatch/abs_diff")  # fmt: skip


def _config(root: str, **overrides: Any) -> Any:
    return tiny_config(**{**MOE, "ref_load": f"{root}/weights", **overrides})


def _samples(config: Any) -> list[TrainSample]:
    """With the experts of a random router; one sample has none."""
    return [
        sample if sample.index == 2 else replace(sample, routed_experts=random_routed_experts(config, sample.length, i))
        for i, sample in enumerate(random_samples())
    ]


def _train(rank: int, world_size: int, config: Any, samples: list[TrainSample]) -> dict[str, Any]:
    """One step from the first weights: log-probs, metrics and gradient."""
    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    out = {"log_probs": trainer.log_probs(samples)}
    out["metrics"] = trainer.train(RolloutBatch(samples), 0)
    out["grads"] = gradients(trainer)
    trainer.shutdown()
    return out


def _layouts(rank: int, world_size: int, root: str) -> dict[str, Any]:
    out = {}
    for name, layout in LAYOUTS[world_size].items():
        config = _config(root, **layout)
        out[name] = _train(rank, world_size, config, _samples(config))
    return out


def _one_process(rank: int, world_size: int, root: str) -> dict[str, Any]:
    config = _config(root)
    trainer = make_trainer(rank, world_size, replace(config, save=f"{root}/weights"))
    sharpen(trainer)
    trainer.save(0, {})
    trainer.shutdown()
    samples = _samples(config)
    bare = random_samples()
    out = {"replay": _train(rank, world_size, config, samples), "no replay": _train(rank, world_size, config, bare)}
    for kind in ("post", "pre"):
        # One optimizer step whose loss is easily computed elsewhere.
        simple = {"loss_type": "sft_loss", "calculate_per_token_loss": True, "moe_router_pre_softmax": kind == "pre"}
        out[kind] = _train(rank, world_size, _config(root, **simple), samples)
    out["formulas"] = {name: _route(score) for name, score in SCORES.items()}
    out["own"] = _train(rank, world_size, config, _with_own_choice(rank, world_size, config, bare))
    return out | _layouts(rank, world_size, root)


def _route(score: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What one router makes of random logits with given experts, its own, and none; and how gradients go on."""
    from bridge_models import init_parallel
    from megatron.core import parallel_state

    init_parallel()
    model = tiny_config(**MOE)
    config = transformer_config(model, **{**LOSSES, **score})
    gpt = build_gpt_model(model, config)
    router, replay = gpt.decoder.layers[2].mlp.router, RoutingReplay(gpt, model)
    torch.manual_seed(3)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.randn(6) * 0.3)
    values = torch.randn(40, 1, 6)
    given = torch.rand(40, 2, 6).topk(2).indices.to(torch.int16)
    given[::4] = -1

    def run(experts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = values.clone().requires_grad_()
        with replay.repeating(experts):
            probs, chosen = router.routing(logits)
        (probs * torch.arange(6.0)).sum().backward()
        assert logits.grad is not None
        return probs.detach(), chosen, logits.grad

    own = run(None)
    ids = own[0].topk(2).indices.to(torch.uint8)[:, None].repeat(1, 2, 1)
    out = {
        "values": values[:, 0],
        "given": given[:, 1],
        "own": own,
        "replay": run(given),
        "counts": replay.take_counts("cpu"),
    }
    out |= {"repeated": run(ids), "counts of own": replay.take_counts("cpu")}
    parallel_state.destroy_model_parallel()
    return out


def _with_own_choice(rank: int, world_size: int, config: Any, samples: list[TrainSample]) -> list[TrainSample]:
    """The samples with what the trainer itself chooses, as its routers' outputs say."""
    from megatron.core.transformer.moe.router import TopKRouter

    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    outputs: list[Any] = []
    for module in trainer.module.modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    chosen = []
    for sample in samples:
        outputs.clear()
        trainer.log_probs([sample])
        # Megatron's order is that of the weights.
        each = [probs.topk(config.moe_router_topk, dim=1).indices[: sample.length] for probs, _ in outputs]
        ids = torch.stack(each, dim=1)
        experts = RoutedExperts(array("B", ids.flatten().tolist()), *ids.shape[1:])
        chosen.append(replace(sample, routed_experts=experts))
    trainer.shutdown()
    return chosen


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def one(root: str) -> dict[str, Any]:
    return run_distributed(_one_process, 1, root)[0]


@pytest.fixture(scope="module")
def several(root: str, one: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For each layout what every rank reported."""
    out = {name: [one[name]] for name in LAYOUTS[1]}
    for world_size in (2, 4):
        ranks = run_distributed(_layouts, world_size, root)
        out |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return out


@pytest.mark.parametrize("name", [name for layouts in LAYOUTS.values() for name in layouts])
def test_loss_and_gradient_are_the_same_in_every_layout(
    one: dict[str, Any], several: dict[str, list[dict[str, Any]]], name: str
) -> None:
    want, ranks = one["replay"], several[name]
    got = ranks[0]
    assert got["grads"].keys() == want["grads"].keys()
    for key, grad in want["grads"].items():
        assert torch.allclose(got["grads"][key], grad, atol=1e-5, rtol=0), key
    for key in METRICS:
        assert got["metrics"][key] == pytest.approx(want["metrics"][key], abs=1e-5, rel=1e-5), key
    assert torch.allclose(got["log_probs"], want["log_probs"], atol=1e-5, rtol=0)
    assert all(
        rank["metrics"]["mismatch/experts_differ"] == got["metrics"]["mismatch/experts_differ"] for rank in ranks
    )


@pytest.mark.parametrize("kind", ["post", "pre"])
def test_log_probs_loss_and_gradient_are_those_of_transformers_with_the_same_experts(
    one: dict[str, Any], root: str, kind: str
) -> None:
    config = _config(root, moe_router_pre_softmax=kind == "pre")
    model = hf_moe_model(config, f"{root}/weights")
    samples = _samples(config)
    totals, log_probs = [], []
    for sample in samples:
        _give(model, sample.routed_experts)
        log_p = torch.log_softmax(model(torch.tensor([sample.tokens])).logits[0], -1)
        each = log_p[:-1].gather(1, torch.tensor(sample.tokens)[1:, None].long())[:, 0]
        each = each * torch.tensor(sample.loss_mask)[1:]
        totals.append(each.sum())
        log_probs += [0.0, *each.tolist()]
    loss = -torch.stack(totals).sum() / sum(sample.num_loss_tokens for sample in samples)
    loss.backward()
    got = one[kind]
    assert got["metrics"]["train/loss"] == pytest.approx(float(loss.detach()), abs=1e-6, rel=1e-6)
    assert got["log_probs"].tolist() == pytest.approx(log_probs, abs=1e-6, rel=1e-6)
    wanted = dict(_by_expert((name, parameter.grad) for name, parameter in model.named_parameters()))
    assert got["grads"].keys() == wanted.keys()
    assert (
        sum(name.endswith("mlp.gate.weight") and float(grad.abs().max()) > 1e-2 for name, grad in wanted.items()) == 2
    )
    for name, grad in wanted.items():
        assert torch.allclose(got["grads"][name].double(), grad, atol=1e-6, rtol=0), name


def _by_expert(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Under the names of checkpoints: one tensor for each expert's projection."""
    for name, tensor in named:
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            yield name, tensor
            continue
        stem, fused = name.rsplit(".", 1)
        for expert, part in enumerate(tensor):
            pieces = {"down": part} if fused == "down_proj" else dict(zip(("gate", "up"), part.chunk(2), strict=True))
            for projection, piece in pieces.items():
                yield f"{stem}.{expert}.{projection}_proj.weight", piece


def _give(model: Any, routed: RoutedExperts | None) -> None:
    """Override the gates of transformers' model: weights of given experts from the gate's own logits."""
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    for place, gate in enumerate(gates):
        gate.forward = lambda hidden, gate=gate, place=place: _gate(gate, hidden, routed, place)


def _gate(gate: Any, hidden: torch.Tensor, routed: RoutedExperts | None, place: int) -> Any:
    logits = hidden @ gate.weight.T
    probs = logits.softmax(-1)
    experts = probs.topk(gate.top_k).indices
    if routed is not None:
        for t in range(len(routed) - 1):  # whatever the last token does, nothing reads it
            start = (t * routed.layers + place) * routed.top_k
            chosen = routed.ids[start : start + routed.top_k].tolist()
            if chosen[0] != routed.mark:
                experts[t] = torch.tensor(chosen)
    scores = probs.gather(1, experts)
    if gate.norm_topk_prob:
        scores = scores / scores.sum(-1, keepdim=True)
    return logits, scores, experts


@pytest.mark.parametrize("name", SCORES)
def test_given_experts_are_weighed_by_megatrons_formula(one: dict[str, Any], name: str) -> None:
    got, score = one["formulas"][name], SCORES[name]
    logits, given = got["values"].double(), got["given"].long()
    routed = given[:, 0] >= 0
    chosen = logits[routed].gather(1, given[routed])
    if name == "softmax of all":
        weights = chosen.exp() / logits[routed].exp().sum(1, keepdim=True)
    else:
        each = chosen.exp() if name.startswith("softmax") else 1 / (1 + (-chosen).exp())
        weights = each / each.sum(1, keepdim=True) * score.get("moe_router_topk_scaling_factor", 1.0)
    probs, places, _ = got["replay"]
    assert torch.equal(
        places[routed], torch.zeros(places[routed].shape, dtype=torch.bool).scatter(1, given[routed], True)
    )
    assert torch.allclose(probs[routed].gather(1, given[routed]).double(), weights, atol=1e-6)
    assert torch.equal(probs[~routed], got["own"][0][~routed])
    differ = (places != got["own"][1]).any(1)
    assert got["counts"].tolist() == [int(routed.sum()), int(differ.sum())] and 0 < differ.sum() < routed.sum()


@pytest.mark.parametrize("name", SCORES)
def test_a_routers_own_choice_gives_the_same_gradient_and_router_losses(one: dict[str, Any], name: str) -> None:
    """Auxiliary and z-loss go through the gradient of the logits."""
    got = one["formulas"][name]
    for repeated, own in zip(got["repeated"], got["own"], strict=True):
        assert torch.equal(repeated, own)
    assert got["counts of own"].tolist() == [40, 0]


def test_random_experts_move_the_log_probs(one: dict[str, Any]) -> None:
    """Else the layouts would be equal without any replay."""
    assert (one["replay"]["log_probs"] - one["no replay"]["log_probs"]).abs().max() > 0.1


def test_what_is_not_given_is_routed_as_without_replay(one: dict[str, Any]) -> None:
    """The third sample has no experts."""
    lengths = [sample.length for sample in random_samples()]
    parts = [one[run]["log_probs"].split(lengths) for run in ("replay", "no replay")]
    same = [torch.equal(*pair) for pair in zip(*parts, strict=True)]
    assert same[2] and not all(same)
    assert one["no replay"]["metrics"]["mismatch/experts_replayed"] == 0.0


def test_the_reference_model_chooses_its_own_experts(one: dict[str, Any]) -> None:
    """It has the policy's weights here: what is between them is the experts alone."""
    metrics = {run: one[run]["metrics"]["train/kl_loss"] for run in ("replay", "no replay", "own")}
    assert abs(metrics["replay"]) > 1e-3 and metrics["no replay"] == metrics["own"] == 0.0


def test_the_trainers_own_choice_changes_nothing(one: dict[str, Any]) -> None:
    got, want = one["own"], one["no replay"]
    assert torch.equal(got["log_probs"], want["log_probs"])
    assert all(torch.equal(got["grads"][name], grad) for name, grad in want["grads"].items())
    assert got["metrics"]["mismatch/experts_replayed"] == 1.0
    assert got["metrics"]["mismatch/experts_differ"] == 0.0


def test_shares_count_every_choice_once(one: dict[str, Any], root: str) -> None:
    """Of all tokens but each sample's last; which of them differ is the trainer's own choice's business."""
    samples = _samples(_config(root))
    routed = [sample.routed_experts[:-1].num_routed if sample.routed_experts else 0 for sample in samples]  # type: ignore
    metrics = one["replay"]["metrics"]
    assert metrics["mismatch/experts_replayed"] == pytest.approx(sum(routed) / sum(s.length - 1 for s in samples))
    # 2 of 6 experts at random: one choice of 15 is the router's.
    assert 0.8 < metrics["mismatch/experts_differ"] < 1.0


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_rank_gets_the_choices_of_its_layers_and_tokens(cp: int, tp: int) -> None:
    """Ids that say themselves whose they are: sample, token, layer and place."""
    lengths, top_k, layers = [5, 9, 3, 4], 2, 4
    samples = []
    for index, length in enumerate(lengths):
        ids = [
            1000 * index + 100 * layer + 10 * token + k
            for token in range(length) for layer in range(layers) for k in range(top_k)
        ]  # fmt: skip
        routed = RoutedExperts(array("H", ids), layers, top_k) if index != 2 else None
        samples.append(TrainSample([1] * length, [0] * length, index=index, routed_experts=routed))
    batch, chosen = TrainBatch.from_samples(samples), [1, 2, 0]
    multiple = packing_multiple(tp=tp, cp=cp, sequence_parallel=tp > 1)
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            part = ExpertsPart(slice(1, 3), tp=tp, tp_rank=tp_rank)
            packed = pack(batch, chosen, multiple=multiple, cp=cp, cp_rank=cp_rank, experts=part)
            assert packed.experts is not None and packed.experts.dtype == torch.int16
            size = packed.tokens.numel() // tp
            seen = slice(size * tp_rank, size * (tp_rank + 1))
            places = zip(packed.sample_of[seen].tolist(), packed.position_ids[0, seen].tolist(), strict=True)
            wanted = []
            for place, position in places:
                sample = chosen[place] if place < len(chosen) else None
                if sample is None or sample == 2 or position >= lengths[sample] - 1:
                    wanted.append([[-1, -1], [-1, -1]])
                else:
                    base = 1000 * sample + 10 * position
                    wanted.append([[base + 100 * layer + k for k in range(top_k)] for layer in (1, 2)])
            assert packed.experts.tolist() == wanted
    assert pack(batch, [2], multiple=multiple, cp=cp, experts=ExpertsPart(slice(1, 3))).experts is None
    assert pack(batch, [], multiple=multiple, cp=cp, experts=ExpertsPart(slice(1, 3))).experts is None


def _one_sample(ids: list[int], *, layers: int = 2, top_k: int = 2, code: str = "B") -> TrainBatch:
    routed = RoutedExperts(array(code, ids), layers, top_k)
    return TrainBatch.from_samples([TrainSample([1] * len(routed), [0] * len(routed), index=7, routed_experts=routed)])


def test_experts_that_the_model_does_not_have_are_refused() -> None:
    model = tiny_config(**MOE)
    good = [0, 5, 1, 2] + [255] * 4 + [3, 4, 5, 0] + [255] * 4
    check_experts(_one_sample(good), model)
    with pytest.raises(ValueError, match=r"sample 7 has the experts of 1 layers, top 2, .* has 2 layers with experts"):
        check_experts(_one_sample(good, layers=1), model)
    with pytest.raises(ValueError, match=r"top 1, .* top 2"):
        check_experts(_one_sample(good, top_k=1), model)
    with pytest.raises(ValueError, match=r"in 16 bits, .* in 8 bits"):
        check_experts(_one_sample(good, code="H"), model)
    with pytest.raises(ValueError, match=r"sample 7 has expert 6, but the model has 6 \(from 0\)"):
        check_experts(_one_sample([*good[:9], 6, *good[10:]]), model)
    with pytest.raises(ValueError, match=r"sample 7 has expert 255"):
        check_experts(_one_sample([*good[:9], 255, *good[10:]]), model)
    check_experts(TrainBatch.from_samples(random_samples()), model)
